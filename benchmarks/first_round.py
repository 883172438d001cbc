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

Every run is saved when it is finished, and not repeated by the same command.
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
JUDGED = [("mnist", 10), ("mnist", 3), ("adult", 10), ("cifar10", 10)]  # data, and how many train
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
RESULTS = {"last", "mean", "sigma"}
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


def train(settings: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """Train once; return the last accuracy, the mean over the curve, and sigma at the end."""
    task, seed = settings["task"], settings["seed"]
    (x, y), validation = data(task, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classes = int(y.max()) + 1
        model = NETWORKS[task]() if task in NETWORKS else build(task, x.shape[1:], classes, seed)
    simulation = Simulation(
        model,
        [(x[part], y[part]) for part in SPLITS[settings["split"]](y, seed).indices],
        algorithm(model, **settings["options"]),
        participation=settings["cohort"] / CLIENTS,
        seed=seed,
    )
    try:
        rows = simulation.run(ROUNDS, evaluate=accuracy(*validation), every=EVERY, progress=False)
    except FloatingPointError:
        return {"last": 0.0, "mean": 0.0, "sigma": None}
    curve = [row["accuracy"] for row in rows]
    return {"last": curve[-1], "mean": mean(curve), "sigma": simulation.server.numbers["sigma"]}


def plan() -> list[dict[str, Any]]:
    """Return what there is to run: the trials on digits, then the comparison on other data."""
    trials = product(NETWORKS, SPLITS, AROUND + EXPLICIT, range(DIGITS_SEEDS))
    runs = [
        {"task": task, "split": split, "options": options, "seed": seed, "cohort": CLIENTS}
        for task, split, options, seed in trials
    ]
    for (task, cohort), (name, options), seed in product(JUDGED, FOUND.items(), range(SEEDS)):
        if options is None:
            options = dict(choice(task, 1, "sisa").options)
        settings = {"task": task, "split": "one label", "options": options, "seed": seed}
        runs.append({**settings, "cohort": cohort, "name": name})
    return runs


def table(result: dict[str, Any]) -> str:
    """Return the comparison on other data as Markdown, means and ranges over seeds."""
    found = {
        (case, name): [
            run["last"]
            for run in result["runs"]
            if (run["task"], run["cohort"]) == case and run.get("name") == name
        ]
        for case, name in product(JUDGED, FOUND)
    }
    cases = [case for case in JUDGED if all(len(found[case, n]) == SEEDS for n in FOUND)]
    heads = [NAMES[task] + (f", {n} of ten" if n < CLIENTS else "") for task, n in cases]
    lines = [f"| SISA | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for name in FOUND:
        last = [found[case, name] for case in cases]
        cells = [f"{mean(cell):.1f} ({min(cell):.1f} to {max(cell):.1f})" for cell in last]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def digits_table(result: dict[str, Any]) -> str:
    """Return the trials on digits as Markdown: the rule, its neighbours, and pairs."""

    def last(options: dict[str, Any], task: str, split: str) -> float:
        key = (options, task, split)
        same = [r for r in result["runs"] if (r["options"], r["task"], r["split"]) == key]
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
    if args.show and not args.show.is_file():
        parser.error(f"--show must be a file that this command wrote, got {args.show}")
    torch.set_num_threads(1)
    file = args.show or args.out
    result = {
        "versions": environment.versions(),
        "hardware": environment.hardware("cpu"),
        "rounds": ROUNDS,
        "batch_size": BATCH_SIZE,
        "runs": [],
    }
    if file.exists():
        result = json.loads(file.read_text(encoding="utf-8"))
    done = [{key: run[key] for key in run.keys() - RESULTS} for run in result["runs"]]
    for settings in [] if args.show else plan():
        if settings not in done:
            result["runs"].append({**settings, **train(settings, args.data)})
            args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(digits_table(result), table(result), sep="\n\n")


if __name__ == "__main__":
    main()
