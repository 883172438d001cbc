"""Federated SISA whose sigma and rho are None, beside settings that were found by trials.

    python -m benchmarks.first_round --data DIR --out docs/results/first_round.json
    python -m benchmarks.first_round --show docs/results/first_round.json

Ten clients, 200 rounds, a gradient of 32 samples a client and round, a learning rate that falls
linearly, validation data. The constants of the rule were chosen on scikit-learn's digits (two
networks; one label per client, and Dirichlet 0.3), in view of what trials had found for MNIST; the
part of the first gradients that enters the duals was reduced when training on Adult failed with all
of them. Here `lr` divides both sigma and rho, and rho is given as a multiple of the default. Beside
them are pairs of sigma and rho. The rule is then judged with one label per client, on MNIST, Adult,
and CIFAR-10, which had no part in the choice, beside what the trials of `recipes/heterogeneity` and
`recipes/budgets` have found, with everybody in every round and with three of ten.
"""

import argparse
import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import nn

from benchmarks import environment
from benchmarks.digits import CLIENTS, digits
from recipes import datasets
from recipes.heterogeneity.config import choice
from recipes.heterogeneity.models import build, mlp
from torchpisa.data import Parts
from torchpisa.federated import SISA, LinearDecay, Minibatches, Simulation, accuracy
from torchpisa.federated.partition import by_label, dirichlet

ROUNDS, BATCH_SIZE, EVERY = 200, 32, 20
DIGITS_SEEDS, SEEDS = 2, 3
Pair = tuple[torch.Tensor, torch.Tensor]


def cnn() -> nn.Module:
    """Build a network with two convolutions for images of 8 x 8."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "digits, MLP": lambda: mlp(64, 10, (64, 32)),
    "digits, CNN": cnn,
}
JUDGED = [("mnist", 10), ("mnist", 3), ("cifar10", 10), ("adult", 10)]  # data, and how many train
NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "adult": "Adult"}
SPLITS: dict[str, Callable[[torch.Tensor, int], Parts]] = {
    "one label": lambda labels, seed: by_label(labels, CLIENTS, 1, seed=seed),
    "Dirichlet 0.3": lambda labels, seed: dirichlet(labels, CLIENTS, 0.3, seed=seed),
}
EXPLICIT = [
    {"sigma": sigma, "rho": rho}
    for sigma, rho in product((0.3, 1.0, 3.0, 10.0), (30.0, 100.0, 300.0))
]
AROUND = [{"lr": lr, "rho_factor": factor} for lr, factor in product((0.5, 1.0, 2.0), (0.3, 1, 3))]
CENTRE = {"lr": 1.0, "rho_factor": 1}
FOUND: dict[str, dict[str, Any] | None] = {
    "`sigma=None, rho=None`": {"sigma": None, "rho": None},
    "sigma 5, rho 1: the defaults": {},
    "sigma 3, rho 300: the best of 6 trials at equal costs": {"sigma": 3.0, "rho": 300.0},
    "the best of the trials for Table 2, for each data set": None,
}


@cache
def data(name: str, folder: str | None) -> tuple[Pair, Pair]:
    """Return training and validation data."""
    if name.startswith("digits"):
        (x, y), _ = digits()
        held_out = torch.arange(len(y)) % 5 == 2
        return (x[~held_out], y[~held_out]), (x[held_out], y[held_out])
    loaded = datasets.load(name, folder, hold_out=True)
    assert loaded.validation is not None
    return loaded.train, loaded.validation


def algorithm(
    model: nn.Module, lr: float = 1.0, rho_factor: float | None = None, **settings: Any
) -> SISA:
    """Return SISA with these settings, or with multiples of what it takes by itself."""
    decay = LinearDecay(ROUNDS)
    if rho_factor is not None:
        server = SISA(rho=None).start(dict(model.named_parameters()))
        default = float(SISA(rho=None).broadcast(server).numbers["rho"])
        settings = {"sigma": None, "rho": rho_factor * default}
    return SISA(
        **settings,
        lr=lambda iteration: lr * decay(iteration),
        local=Minibatches(1, BATCH_SIZE),
    )


def run(
    name: str, split: str, options: dict[str, Any], seed: int, folder: str | None, cohort: int = 10
) -> dict[str, Any]:
    """Run one training, and return the accuracy and the mean over the curve."""
    (x, y), validation = data(name, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classes = int(y.max()) + 1
        model = NETWORKS[name]() if name in NETWORKS else build(name, x.shape[1:], classes, seed)
    simulation = Simulation(
        model,
        [(x[part], y[part]) for part in SPLITS[split](y, seed).indices],
        algorithm(model, **options),
        participation=cohort / CLIENTS,
        seed=seed,
    )
    result = {"task": name, "split": split, "options": options, "seed": seed, "cohort": cohort}
    try:
        rows = simulation.run(ROUNDS, evaluate=accuracy(*validation), every=EVERY, progress=False)
    except FloatingPointError:
        return {**result, "last": 0.0, "mean": 0.0, "sigma": None}
    curve = [row["accuracy"] for row in rows]
    sigma = simulation.server.numbers["sigma"]
    return {**result, "last": curve[-1], "mean": mean(curve), "sigma": sigma}


def choose() -> list[dict[str, Any]]:
    """Run the trials on digits."""
    tasks = product(NETWORKS, SPLITS, AROUND + EXPLICIT, range(DIGITS_SEEDS))
    return [run(*task, None) for task in tasks]


def judge(folder: str | None) -> list[dict[str, Any]]:
    """Run the comparison on other data."""
    runs = []
    for (task, cohort), name, seed in product(JUDGED, FOUND, range(SEEDS)):
        options = FOUND[name]
        if options is None:
            options = dict(choice(task, 1, "sisa").options)
        runs.append({**run(task, "one label", options, seed, folder, cohort), "name": name})
    return runs


def table(result: dict[str, Any]) -> str:
    """Return the comparison on other data as Markdown, means and ranges over seeds."""
    heads = [NAMES[task] + (f", {n} of ten" if n < CLIENTS else "") for task, n in JUDGED]
    lines = [f"| SISA | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for name in FOUND:
        cells = []
        for case in JUDGED:
            same = [r for r in result["judged"] if (r["task"], r["cohort"]) == case]
            last = [run["last"] for run in same if run["name"] == name]
            cells.append(f"{mean(last):.1f} ({min(last):.1f} to {max(last):.1f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def digits_table(result: dict[str, Any]) -> str:
    """Return the trials on digits as Markdown: the rule, its neighbours, and pairs."""

    def last(options: dict[str, Any], task: str, split: str) -> float:
        key = (options, task, split)
        same = [r for r in result["digits"] if (r["options"], r["task"], r["split"]) == key]
        return mean(run["last"] for run in same)

    def row(name: str, trials: list[dict[str, Any]], choose: Callable[[list[float]], float]) -> str:
        cells = [f"{choose([last(options, *case) for options in trials]):.1f}" for case in cases]
        return f"| {name} | {' | '.join(cells)} |"

    cases = list(product(NETWORKS, SPLITS))
    heads = [f"{task.removeprefix('digits, ')}, {split}" for task, split in cases]
    lines = [f"| SISA on digits | {' | '.join(heads)} |", "|---|" + "---|" * len(cases)]
    around = [options for options in AROUND if options != CENTRE]
    lines.append(row("`sigma=None, rho=None`", [CENTRE], min))
    lines.append(row(f"the worst of its {len(around)} neighbours", around, min))
    for name, choose in (("best", max), ("median", median), ("worst", min)):
        lines.append(row(f"the {name} of {len(EXPLICIT)} pairs", EXPLICIT, choose))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of the data; default TORCHPISA_DATA")
    parser.add_argument("--out", default="docs/results/first_round.json", type=Path)
    parser.add_argument("--show", type=Path, help="a saved file: print its tables")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.show:
        result = json.loads(args.show.read_text(encoding="utf-8"))
    else:
        header = {"versions": environment.versions(), "hardware": environment.hardware("cpu")}
        work = {"rounds": ROUNDS, "batch_size": BATCH_SIZE}
        result = {**header, **work, "digits": choose(), "judged": judge(args.data)}
        args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(digits_table(result), table(result), sep="\n\n")


if __name__ == "__main__":
    main()
