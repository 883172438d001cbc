"""Choose settings on the validation split, by trying a grid.

    python -m recipes.heterogeneity.tune --dataset mnist --algorithm sisa --grid sigma=2,5 rho=1,10

Every trial goes into `tuning.json`, beside those of earlier commands with the same `--out`, and
what is best of all of them is chosen. A copy of that file in this folder is where the recipe has
its settings from. The test data are not looked at. Trials that are finished in the log are not run
again.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes import grid as grids
from recipes.datasets import CorruptFileError
from recipes.execution import Runs
from recipes.grid import Value, parse_grid
from recipes.heterogeneity.config import ALGORITHMS, CHOICES, Choice, Config, Settings, settings
from recipes.heterogeneity.run import algorithm, condense, require_data, run

__all__ = ["GRIDS", "main", "trials"]

Grid = Mapping[str, Sequence[Value]]

_LR = (0.03, 0.1, 0.3)
_SERVER_LR = (0.001, 0.01, 0.1)
# Nine trials for everybody. More with --grid; the file says how many there were.
GRIDS: dict[str, Grid] = {
    "fedavg": {"lr": _LR, "momentum": (0.0, 0.5, 0.9)},
    "fedprox": {"lr": _LR, "mu": (0.001, 0.01, 0.1)},
    "fednova": {"lr": _LR, "momentum": (0.0, 0.5, 0.9)},
    "scaffold": {"lr": (0.003, 0.03, 0.3), "server_lr": (1.0, 2.0, 5.0)},
    "fedsgd": {"lr": (0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 3.0)},
    "sisa": {"sigma": (1.0, 2.0, 5.0), "rho": (10.0, 100.0, 1000.0)},
    "misa": {"sigma": (0.03, 0.1, 0.3), "rho": (10.0, 30.0, 100.0)},
    "scaffold_warm": {"lr": (0.003, 0.03, 0.3), "server_lr": (1.0, 2.0, 5.0)},
    "fedavgm": {"lr": _LR, "server_momentum": (0.5, 0.9, 0.97)},
    "fedadagrad": {"lr": _LR, "server_lr": _SERVER_LR},
    "fedadam": {"lr": _LR, "server_lr": _SERVER_LR},
    "fedyogi": {"lr": _LR, "server_lr": _SERVER_LR},
    "feddyn": {"lr": _LR, "alpha": (0.01, 0.1, 1.0)},
    "fedpd": {"lr": _LR, "eta": (1.0, 10.0, 100.0)},
    "fedadmm": {"lr": _LR, "rho": (0.01, 0.1, 1.0)},
    "fedadmm_adaptive": {"lr": _LR, "rho": (0.01, 0.1, 1.0)},
    "fedmuon": {"lr": (0.0003, 0.001, 0.003), "alpha": (0.03, 0.1, 0.3)},
    "server_muon": {"server_lr": (0.005, 0.02, 0.08), "vector_lr": (0.001, 0.01, 0.1)},
}
WORK = ("epochs", "batch_size", "rounds")  # fields of a `Choice`; the rest are options


def trials(
    dataset: str, labels: int, algorithm: str, grid: Grid, config: Config, samples: int = 0
) -> dict[str, Settings]:
    """Return all combinations of a grid for every seed, by name; the rest is as in config.py."""
    chosen, plan = CHOICES[dataset][algorithm], {}
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        work = {name: point.pop(name) for name in WORK if name in point}
        work |= {name: int(work[name]) for name in WORK[1:] if name in work}
        trial = dataclasses.replace(chosen, options={**chosen.options, **point}, **work)
        for seed in range(config.seed, config.seed + config.seeds):
            run_settings = settings(
                *(dataset, labels, algorithm, trial, config),
                **{"seed": seed, "validation": True, "samples": samples},
            )
            plan[f"{run_settings.name}_{label(trial)}_rounds{run_settings.rounds}"] = run_settings
    return plan


def label(trial: Choice) -> str:
    return grids.run_label({**trial.options, "epochs": trial.epochs, "batch": trial.batch_size})


def choose(trials: Sequence[dict[str, Any]], by: str) -> dict[str, Any]:
    """Return the settings with the best accuracy, on average over the seeds.

    Trials on part of the data count only where there are none on all of it.
    """
    complete = [trial for trial in trials if not trial["settings"]["samples"]]
    groups: dict[str, list[dict[str, Any]]] = {}
    for trial in complete or trials:
        setting = {name: trial[name] for name in ("options", *WORK)}
        groups.setdefault(json.dumps(setting), []).append(trial)
    means = {key: statistics.fmean(t[by] for t in group) for key, group in groups.items()}
    winner = max(means, key=lambda key: means[key])
    return {**json.loads(winner), "accuracy": round(means[winner], 2)}


def main(argv: Sequence[str] | None = None) -> None:
    from recipes.__main__ import add_resource_options, read_resource_options

    parser = argparse.ArgumentParser(
        "python -m recipes.heterogeneity.tune", description="Choose settings on validation data"
    )
    parser.add_argument("--dataset", choices=list(CHOICES), nargs="+", required=True)
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), nargs="+", required=True)
    parser.add_argument("--labels", type=int, nargs="+", default=[1], help="default 1")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="rounds between evaluations")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--samples", type=int, default=0, help="to train on; default all")
    parser.add_argument("--grid", nargs="+", default=[], metavar="NAME=A,B", help="in its place")
    parser.add_argument("--by", choices=["last", "best"], default="last", help="round that counts")
    parser.add_argument("--out", type=Path, default=Path("runs/tune"), help="folder")
    option_names = ("device", "data")
    add_resource_options(parser, option_names)
    args = parser.parse_args(argv)
    options = read_resource_options(parser, args, option_names)
    try:
        grid = parse_grid(args.grid)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    config = Config((), args.rounds, args.every, args.seeds, args.seed)
    try:
        plans = {
            cell: trials(*cell, grid or GRIDS[cell[2]], config, args.samples)
            for cell in itertools.product(args.dataset, args.labels, args.algorithm)
        }
        plan = dict(itertools.chain.from_iterable(plan.items() for plan in plans.values()))
        for run_settings in plan.values():
            algorithm(run_settings)  # raises for a wrong setting, before anything runs
    except (TypeError, ValueError) as error:
        parser.error(f"--grid: {error}")
    runs = Runs(run, config, plan, args.out / "logs", options, {}, args.jobs)
    try:
        require_data(list(plan.values()), **options)
    except (FileNotFoundError, CorruptFileError) as error:
        parser.error(str(error))
    runs.run_missing(list(plan))
    path = args.out / "tuning.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    entries = {entry_cell(entry): entry for entry in before}
    for cell, trial_plan in plans.items():
        old = entries[cell]["trials"] if cell in entries else []
        entries[cell] = summarise(cell, old, [runs.log(trial) for trial in trial_plan], args.by)
        print(f"{', '.join(map(str, cell))}: {json.dumps(entries[cell]['chosen'])}")
    path.write_text(json.dumps(list(entries.values())) + "\n", encoding="utf-8")
    print(path)


def entry_cell(entry: dict[str, Any]) -> tuple[str, int, str]:
    return entry["dataset"], entry["labels"], entry["algorithm"]


def summarise(
    cell: tuple[str, int, str],
    old: Sequence[dict[str, Any]],
    logs: Sequence[dict[str, Any] | None],
    by: str,
) -> dict[str, Any]:
    """Return the chosen settings, the number of trials and all of them, earlier ones included."""
    trials = {json.dumps(trial["settings"]): trial for trial in old}
    for log in logs:
        assert log is not None
        done = condense(log)
        summary = {name: done["settings"][name] for name in ("options", *WORK)}
        names = ("best", "last", "versions", "hardware", "settings")
        summary |= {name: done[name] for name in names}
        trials[json.dumps(done["settings"])] = summary
    dataset, labels, algorithm = cell
    return {
        **{"dataset": dataset, "labels": labels, "algorithm": algorithm, "by": by},
        "count": len(trials),
        "chosen": choose(list(trials.values()), by),
        "trials": list(trials.values()),
    }


if __name__ == "__main__":
    main()
