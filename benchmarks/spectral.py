"""MISA, SISA and NSISA on images sorted by label or mixed: training loss at equal rounds.

    python -m benchmarks.spectral sorted --out docs/results/spectral_sorted.json
    python -m benchmarks.spectral mixed --out docs/results/spectral_mixed.json
    python -m benchmarks.spectral mnist --data DIR --out docs/results/spectral_mnist.json
    python -m benchmarks.spectral sorted --show docs/results/spectral_sorted.json

Sorted: digits, ten batches with one label each, full gradients, 300 rounds. MNIST: the same for
10,000 of its images. Mixed: digits, one batch, 64 samples drawn from all of them, 300 rounds. Every
optimizer gets the same number of trials, pairs of sigma and rho with one seed; the pair with the
least training loss then runs with three other seeds. What is not a matrix has SISA's defaults in
NSISA and MISA. A pair on the edge of its grid says that the grid was too small. The defaults of
MISA were chosen from it.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchpisa
from benchmarks import environment
from benchmarks.tasks import load_digits_split
from recipes import datasets
from torchpisa.data import permutation

ROUNDS, BATCH_SIZE, SEEDS, POINTS = 300, 64, (1, 2, 3), 10
IMAGES = 10_000  # of MNIST


class Contestant(NamedTuple):
    """An optimizer with settings, and the grids of its sigma and rho."""

    make: type[torch.optim.Optimizer]
    settings: dict[str, Any]
    sigmas: tuple[float, ...]
    rhos: tuple[float, ...]


def contestants(
    sisa: tuple[Any, Any], nsisa: tuple[Any, Any], misa: tuple[Any, Any], local: tuple[Any, Any]
) -> dict[str, Contestant]:
    """All of them, with grids of sigma and rho each."""
    own = {"at": "local"}
    return {
        "SISA": Contestant(torchpisa.SISA, {}, *sisa),
        "NSISA": Contestant(torchpisa.NSISA, {}, *nsisa),
        "MISA": Contestant(torchpisa.MISA, {}, *misa),
        "MISA, local": Contestant(torchpisa.MISA, own, *local),
        "MISA, local, average 0.9": Contestant(torchpisa.MISA, {**own, "average": 0.9}, *local),
    }


CONTESTANTS = {
    "sorted": contestants(
        sisa=((0.2, 0.35, 0.5, 1.0), (10.0, 30.0, 100.0, 300.0)),
        nsisa=((0.6, 2.5, 10.0, 40.0), (1.0, 10.0, 100.0, 1e3)),
        misa=((0.01, 0.03, 0.1, 0.3), (3.0, 10.0, 30.0, 100.0)),
        local=((0.015, 0.03, 0.06, 0.125), (0.3, 1.0, 3.0, 10.0)),
    ),
    "mnist": contestants(
        sisa=((0.5, 1.0, 2.0, 4.0), (30.0, 100.0, 300.0, 1e3)),
        nsisa=((0.6, 2.5, 10.0, 40.0), (1.0, 10.0, 100.0, 1e3)),
        misa=((0.01, 0.03, 0.1, 0.3), (3.0, 10.0, 30.0, 100.0)),
        local=((0.03, 0.06, 0.125, 0.25), (0.3, 1.0, 3.0, 10.0)),
    ),
    "mixed": contestants(
        sisa=((0.05, 0.1, 0.2, 0.5), (30.0, 100.0, 300.0, 1e3)),
        nsisa=((10.0, 20.0, 40.0, 80.0), (1.0, 10.0, 100.0, 1e3)),
        misa=((0.01, 0.03, 0.1, 0.3), (10.0, 20.0, 30.0, 50.0)),
        local=((0.05, 0.1, 0.2, 0.4), (1.0, 3.0, 10.0, 30.0)),
    ),
}


class Trial(NamedTuple):
    """One run."""

    name: str
    sigma: float
    rho: float
    seed: int


def network(inputs: int = 64) -> nn.Module:
    """MLP with 32 hidden units."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 10))


@cache
def load(data: str, folder: str | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Training and test data as rows of pixels; of MNIST some of the training data."""
    if data != "mnist":
        return load_digits_split()
    found = datasets.load("mnist", folder, hold_out=False)
    x, y = found.train
    kept = permutation(len(y), "benchmarks.spectral")[:IMAGES]
    return {
        "train": (x[kept].flatten(1), y[kept]),
        "test": (found.test[0].flatten(1), found.test[1]),
    }


def train(
    trial: Trial, data: str = "sorted", rounds: int = ROUNDS, folder: str | None = None
) -> dict[str, Any]:
    """Training loss on the way, accuracy on test data at the end."""
    torch.set_num_threads(1)
    splits = load(data, folder)
    x, y = splits["train"]
    owned = [(y == label).nonzero().flatten() for label in range(10)]
    if data == "mixed":
        owned = [torch.arange(len(y))]
    generator = torch.Generator().manual_seed(trial.seed)
    who = CONTESTANTS[data][trial.name]
    torch.manual_seed(trial.seed)
    model = network(x.shape[1])
    opt = who.make(
        model.parameters(),
        sigma=trial.sigma,
        rho=trial.rho,
        batches=len(owned),
        weights=[len(index) for index in owned],
        nonfinite="skip",
        **who.settings,
    )
    losses = []
    for number in range(1, rounds + 1):
        for part in owned:
            index = part
            if data == "mixed":
                index = part[torch.randint(len(part), (BATCH_SIZE,), generator=generator)]
            opt.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            opt.step()
        if number % max(1, rounds // POINTS) == 0:
            with torch.no_grad():
                losses.append(float(F.cross_entropy(model(x), y)))
    x, y = splits["test"]
    with torch.no_grad():
        accuracy = float((model(x).argmax(1) == y).double().mean())
    return {**trial._asdict(), "loss": losses, "test": accuracy}


def search(data: str) -> list[Trial]:
    """All pairs of all optimizers, with the seed that no result is reported of."""
    return [
        Trial(name, sigma, rho, 0)
        for name, who in CONTESTANTS[data].items()
        for sigma, rho in product(who.sigmas, who.rhos)
    ]


def best(runs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The run of the search that ended with the least loss."""
    own = [run for run in runs if run["name"] == name and run["seed"] == 0]
    return min(own, key=lambda run: run["loss"][-1] if isfinite(run["loss"][-1]) else float("inf"))


def table(runs: list[dict[str, Any]], data: str) -> str:
    """The chosen pairs, means over the seeds that they were not chosen by, as Markdown."""
    rows = [
        "| | trials | sigma | rho | training loss | least of the seeds | test |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, who in CONTESTANTS[data].items():
        chosen = best(runs, name)
        own = [run for run in runs if run["name"] == name and run["seed"] in SEEDS]
        losses = [run["loss"][-1] for run in own]
        spread = f"{mean(losses):.2g} +- {stdev(losses):.1g} | {min(losses):.2g}"
        accuracy = 100 * mean(run["test"] for run in own)
        trials = len(who.sigmas) * len(who.rhos)
        pair = f"{chosen['sigma']:g} | {chosen['rho']:g}"
        rows.append(f"| {name} | {trials} | {pair} | {spread} | {accuracy:.1f} % |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=CONTESTANTS)
    parser.add_argument("--data", dest="folder", help="folder of MNIST; default TORCHPISA_DATA")
    parser.add_argument("--out", type=Path, help="default: docs/results/spectral_DATA.json")
    parser.add_argument("--show", type=Path, help="a saved file: print its table")
    parser.add_argument("--processes", default=2, type=int)
    args = parser.parse_args()
    if args.show:
        print(table(json.loads(args.show.read_text())["runs"], args.data))
        return
    if args.data == "mnist":
        try:
            datasets.locate("mnist", args.folder)
        except FileNotFoundError as missing:
            parser.error(str(missing))
    work = partial(train, data=args.data, folder=args.folder)
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(work, search(args.data)))
        finals = [
            Trial(name, chosen["sigma"], chosen["rho"], seed)
            for name in CONTESTANTS[args.data]
            for chosen in [best(runs, name)]
            for seed in SEEDS
        ]
        runs += pool.map(work, finals)
    header = {
        "device": environment.device_name("cpu"),
        "versions": environment.versions("scikit-learn"),
        "rounds": ROUNDS,
    }
    lines = ",\n".join(json.dumps(run) for run in runs)
    out = args.out or Path(f"docs/results/spectral_{args.data}.json")
    out.write_text(f'{json.dumps(header)[:-1]}, "runs": [\n{lines}\n]}}\n')
    print(table(runs, args.data))


if __name__ == "__main__":
    main()
