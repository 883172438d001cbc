"""Choose an algorithm's settings for a data set on its validation split, by trying a grid.

    python -m recipes.heterogeneity.tune --dataset mnist --algorithm sisa --grid sigma=2,5 rho=1,10

Every trial goes into the JSON file that is written, so that the choice can be made again from it.
The test data are not looked at. Trials that are finished in the log are not run again.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.heterogeneity.config import ALGORITHMS, CHOICES, Choice, Config, Settings, settings
from recipes.heterogeneity.run import condense, ready, run
from recipes.work import Runs, compact

__all__ = ["GRIDS", "main", "trials"]

Grid = Mapping[str, Sequence[float]]

_LR = (0.01, 0.03, 0.1, 0.3)
_LOCAL = {"lr": _LR, "epochs": (1, 5)}
# Eight trials for everybody; more with --grid, and the file says how many there were.
GRIDS: dict[str, Grid] = {
    "fedavg": _LOCAL,
    "fedprox": {"lr": _LR, "epochs": (1,), "mu": (0.01, 0.1)},
    "fednova": _LOCAL,
    "scaffold": _LOCAL,
    "fedsgd": {"lr": (0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)},
    "sisa": {"sigma": (2.0, 3.0, 5.0, 10.0), "rho": (1.0, 100.0)},
}
WORK = ("epochs", "batch_size", "rounds")  # fields of a `Choice`; the rest are options


def trials(
    dataset: str, labels: int, algorithm: str, grid: Grid, config: Config
) -> dict[str, Settings]:
    """All combinations of a grid, for every seed, by name; the rest is as in config.py."""
    chosen, plan = CHOICES[dataset][algorithm], {}
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        work = {name: int(point.pop(name)) for name in WORK if name in point}
        trial = dataclasses.replace(chosen, options={**chosen.options, **point}, **work)
        for seed in range(config.seed, config.seed + config.seeds):
            made = settings(dataset, labels, algorithm, trial, config, seed=seed, validation=True)
            plan[f"{made.name}_{label(trial)}_rounds{made.rounds}"] = made
    return plan


def label(trial: Choice) -> str:
    parts = {**trial.options, "epochs": trial.epochs, "batch": trial.batch_size}
    return "_".join(f"{name}{value:g}" for name, value in parts.items())


def choose(done: list[dict[str, Any]], by: str) -> dict[str, Any]:
    """The settings with the best accuracy, on average over the seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for trial in done:
        groups.setdefault(json.dumps(what(trial)), []).append(trial)
    means = {key: statistics.fmean(t[by] for t in group) for key, group in groups.items()}
    winner = max(means, key=lambda key: means[key])
    return {**json.loads(winner), "accuracy": round(means[winner], 2)}


def what(trial: dict[str, Any]) -> dict[str, Any]:
    """What of a trial is chosen."""
    return {name: trial["settings"][name] for name in ("options", *WORK)}


def parse_grid(words: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """`name=1,2,3`, several times."""
    grid = {}
    for word in words:
        name, _, values = word.partition("=")
        try:
            grid[name] = tuple(float(value) for value in values.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"--grid must look like sigma=1,2,5, got {word!r}"
            ) from None
    return grid


def main(argv: Sequence[str] | None = None) -> None:
    from recipes.__main__ import add_resources, resources

    parser = argparse.ArgumentParser(
        "python -m recipes.heterogeneity.tune", description="Choose settings on validation data"
    )
    parser.add_argument("--dataset", choices=list(CHOICES), required=True)
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), required=True)
    parser.add_argument("--labels", type=int, default=1, help="per client; default 1")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="rounds between evaluations")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--grid", nargs="+", default=[], metavar="NAME=A,B", help="in its place")
    parser.add_argument("--by", choices=["best", "last"], default="best", help="round that counts")
    parser.add_argument("--out", type=Path, default=Path("runs/tune"), help="folder")
    takes = ("device", "data")
    add_resources(parser, takes)
    args = parser.parse_args(argv)
    options = resources(parser, args, takes)
    try:
        grid: Grid = parse_grid(args.grid) or GRIDS[args.algorithm]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    config = Config((), args.rounds, args.every, args.seeds, args.seed)
    plan = trials(args.dataset, args.labels, args.algorithm, grid, config)
    runs = Runs(run, config, plan, args.out / "logs", options, {}, args.jobs)
    try:
        ready(list(plan.values()), **options)
    except FileNotFoundError as missing:
        parser.error(str(missing))
    runs.do(list(plan))
    done = []
    for name in plan:
        log = runs.log(name)
        assert log is not None
        done.append({key: compact(value) for key, value in condense(log).items()})
    chosen = choose(done, args.by)
    path = args.out / f"{args.dataset}_{args.labels}label_{args.algorithm}.json"
    head = {"dataset": args.dataset, "labels": args.labels, "algorithm": args.algorithm}
    head |= {"by": args.by, "grid": grid, "count": len(plan), "chosen": chosen}
    path.write_text(json.dumps({**head, "trials": done}) + "\n", encoding="utf-8")
    print(f"{len(plan)} trials, chosen by the {args.by} round: {json.dumps(chosen)}\n{path}")


if __name__ == "__main__":
    main()
