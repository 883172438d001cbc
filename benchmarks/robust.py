"""Robust selection of updates: what one malicious client of ten costs, with and without it.

    python -m benchmarks.robust digits --out docs/results/robust_digits.json
    python -m benchmarks.robust mnist --data DIR --out docs/results/robust_mnist.json
    python -m benchmarks.robust --show docs/results/robust_mnist.json

Ten clients, spread in different ways, 40 rounds, one gradient of all local data per round, in a
`Simulation`. One client

- scales its update by 10,
- flips its sign, times 3,
- trains on labels that are moved by one,
- repeats its first update in every round,
- claims to hold half of all samples, and trains on moved labels,

in every round. Where the malicious client is rejected, its data are missing: `honest nine` is a
training without it.

`digits` is scikit-learn's, with a linear model: the settings of the rules were chosen on it, with
one seed. `mnist` judges them, with three: 1,000 images for training, 2,000 for the test, 16
hidden units. The seed decides the images, who has which, and the initial weights. DIR holds MNIST's
four files as published. The reference has 100 images that no client has.
"""

import argparse
import gzip
import json
import time
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import environment
from benchmarks.attacks import LIES, corrupt
from benchmarks.digits import CLIENTS, digits
from torchpisa.federated import (
    MISA,
    SISA,
    FedAvg,
    FullGradient,
    Reference,
    RobustSelection,
    Simulation,
    accuracy,
)
from torchpisa.federated.algorithms.base import Algorithm
from torchpisa.federated.partition import by_label, dirichlet, iid

Pair = tuple[Tensor, Tensor]

ROUNDS, LIAR, REFERENCE = 40, 1, 100
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "digits": {
        "SISA": SISA(sigma=0.3, rho=10.0),
        "MISA": MISA(sigma=0.1, rho=10.0, momentum=0.95, match_rms=False),
        "FedAvg": FedAvg(lr=2.0, local=FullGradient()),
    },
    "mnist": {
        "SISA": SISA(sigma=0.3, rho=100.0),
        "MISA": MISA(),
        "FedAvg": FedAvg(lr=1.0, local=FullGradient()),
    },
}
SEEDS = {"digits": (0,), "mnist": (0, 1, 2)}
SPREADS = {"digits": ("iid", "dirichlet 0.3", "one label"), "mnist": ("dirichlet 0.3", "one label")}
STORIES = ("honest", "honest nine", "scaling", "sign flip", "label flip", "replay", "counts")
ATTACKS = STORIES[2:]
RULES = ("plain sum", "robust", "with a reference")


@lru_cache(maxsize=1)
def images(name: str, seed: int, folder: Path | None) -> tuple[Pair, Pair, Pair]:
    """Return data for training, for the test, and the reference."""
    if name == "digits":
        (x, y), test = digits()
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        known, rest = order[:REFERENCE], order[REFERENCE:].sort().values
        return (x[rest], y[rest]), test, (x[known], y[known])
    assert folder is not None
    x, y = (_idx(folder / f"train-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    a, b = (_idx(folder / f"t10k-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    x, a = x.flatten(1).float() / 255, a.flatten(1).float() / 255
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    known, rest = order[:REFERENCE], order[REFERENCE : REFERENCE + 1000]
    y, b = y.long(), b.long()
    return (x[rest], y[rest]), (a[:2000], b[:2000]), (x[known], y[known])


def _idx(file: Path) -> Tensor:
    content = gzip.decompress(file.read_bytes())
    dims = content[3]
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims)]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * dims).view(shape)


def network(name: str, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "digits":
            return nn.Linear(64, 10)
        return nn.Sequential(nn.Linear(784, 16), nn.Tanh(), nn.Linear(16, 10))


def split(spread: str, labels: Tensor, seed: int) -> list[Tensor]:
    parts = {
        "iid": lambda: iid(len(labels), CLIENTS, seed=seed),
        "dirichlet 0.3": lambda: dirichlet(labels, CLIENTS, 0.3, seed=seed),
        "one label": lambda: by_label(labels, CLIENTS, 1, seed=seed),
    }
    return list(parts[spread]().indices)


def run(
    name: str,
    spread: str,
    algorithm: str,
    story: str,
    rule: str,
    seed: int = 0,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Run one training."""
    torch.set_num_threads(1)
    (inputs, targets), test, known = images(name, seed, folder)
    data = [(inputs[part], targets[part]) for part in split(spread, targets, seed)]
    if story in ("label flip", "counts"):
        x, y = data[LIAR]
        data[LIAR] = x, (y + 1) % 10
    if story == "counts":  # copies of its samples give the same gradient and a larger number
        x, y = data[LIAR]
        copies = round((len(targets) - len(y)) / len(y))
        data[LIAR] = torch.cat([x] * copies), torch.cat([y] * copies)
    if story == "honest nine":
        del data[LIAR]
    model = network(name, seed)
    robust = {
        "plain sum": None,
        "robust": RobustSelection(),
        "with a reference": RobustSelection(reference=Reference(model, *known)),
    }[rule]
    simulation = Simulation(model, data, ALGORITHMS[name][algorithm], seed=seed, robust=robust)
    if story in LIES:
        corrupt(simulation, LIAR, LIES[story])
    liar = 0
    for _ in range(ROUNDS):
        simulation.round()
        liar += LIAR in simulation.rejected and story in ATTACKS
    return {
        "spread": spread,
        "algorithm": algorithm,
        "story": story,
        "rule": rule,
        "seed": seed,
        "honest_rejected": simulation._rejections - liar,
        "liar_rejected": liar,
        "accuracy": round(accuracy(*test)(simulation.model)["accuracy"], 2),
    }


def means(result: dict[str, Any]) -> dict[tuple[str, str, str, str], float]:
    """Return the mean accuracy over the seeds, by spread, algorithm, rule and story."""
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for r in result["runs"]:
        key = r["spread"], r["algorithm"], r["rule"], r["story"]
        groups.setdefault(key, []).append(r["accuracy"])
    return {key: mean(values) for key, values in groups.items()}


def show(result: dict[str, Any]) -> str:
    """Return the table in docs/robust.md."""
    lines = ["| data | | " + " | ".join(STORIES) + " |", "|---|---|" + "---|" * len(STORIES)]
    found = means(result)
    for spread, rule in product(SPREADS[result["data"]], RULES):
        cells = []
        for story in STORIES:
            keys = [(spread, name, rule, story) for name in ALGORITHMS[result["data"]]]
            cells.append(" / ".join(f"{found[key]:.1f}" if key in found else "" for key in keys))
        cells = [cell if cell.strip(" /") else "" for cell in cells]
        lines.append(f"| {spread} | {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def costs(result: dict[str, Any], rule: str, beside: str) -> dict[tuple[str, str, str], float]:
    """Return the points that an attack costs under a rule beside an honest training."""
    found = means(result)
    return {
        (spread, name, story): found[spread, name, "plain sum", beside] - accuracy
        for (spread, name, used, story), accuracy in found.items()
        if used == rule and story in ATTACKS
    }


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.robust", description=__doc__)
    parser.add_argument("name", choices=("digits", "mnist"), nargs="?", default="digits")
    parser.add_argument("--data", type=Path, help="folder with MNIST")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--show", type=Path, help="JSON file to print as a table")
    args = parser.parse_args()
    if args.show:
        print(show(json.loads(args.show.read_text())))
        return
    start = time.process_time()
    result: dict[str, Any] = {
        "script": "benchmarks/robust.py",
        "data": args.name,
        "setting": {"clients": CLIENTS, "rounds": ROUNDS, "local": "one full gradient"},
        "algorithms": {name: a.fingerprint for name, a in ALGORITHMS[args.name].items()},
        "robust": repr(RobustSelection()),
        "versions": environment.versions("scikit-learn"),
        "hardware": environment.hardware("cpu"),
        "runs": [],
    }
    for seed in SEEDS[args.name]:
        for job in product(SPREADS[args.name], ALGORITHMS[args.name], STORIES, RULES):
            if job[2] != "honest nine" or job[3] == "plain sum":
                result["runs"].append(run(args.name, *job, seed, args.data))
        result["cpu_seconds"] = round(time.process_time() - start)
        if args.out is not None:
            args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(show(result))


if __name__ == "__main__":
    main()
