"""Try a grid of settings of an optimizer, with everything else as in a preset.

    python -m recipes.language.tune --preset pilot --optimizer misa \\
        --grid sigma=0.005,0.01 dual_decay=0.9,0.95 warm_down=0.28,0.5 --data DIR

Names are options of the optimizer, or `warm_up`, `warm_down` and `rest_lr`. Every trial goes into
the JSON file that is written, with their number; another grid adds to it. Trials that are finished
in the log are not run again.
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.datasets import CorruptFileError
from recipes.execution import Runs
from recipes.grid import Value, parse_grid, run_label
from recipes.language import model, optimizers
from recipes.language.config import PRESETS, Config, Settings, Trial, plan
from recipes.language.optimizers import NAMES, Choice, choose
from recipes.language.results import best, condense
from recipes.language.run import require_data, run

__all__ = ["main", "trials"]

FIELDS = ("warm_up", "warm_down", "rest_lr")  # of a `Choice`; the rest are options


def trials(
    base: Choice, grid: Mapping[str, Sequence[Value]], config: Config, batches: int = 1
) -> dict[str, Settings]:
    """Return all combinations of a grid, by name."""
    trials = []
    for values in itertools.product(*grid.values()):
        point: dict[str, Any] = dict(zip(grid, values, strict=True))
        name = f"{base.name}_{run_label(point)}"
        name += f"_rest_{base.rest}" if base.rest != "adamw" else ""
        name += f"_steps{config.steps}"
        fields: dict[str, Any] = {key: point.pop(key) for key in FIELDS if key in point}
        if "warm_up" in fields:
            fields["warm_up"] = int(fields["warm_up"])
        # Options that count things are whole numbers.
        point = {
            key: int(v) if type(base.options.get(key)) is int else v for key, v in point.items()
        }
        choice = dataclasses.replace(base, options={**base.options, **point}, **fields)
        trials.append(Trial(choice, name, batches))
    return plan(dataclasses.replace(config, trials=tuple(trials)))


def main(argv: Sequence[str] | None = None) -> None:
    from recipes.__main__ import add_resource_options, read_resource_options

    parser = argparse.ArgumentParser(
        "python -m recipes.language.tune", description="Try a grid of settings"
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="quick")
    parser.add_argument("--optimizer", choices=NAMES, required=True)
    parser.add_argument("--batches", type=int, default=1, help="m; default 1")
    parser.add_argument("--rest", choices=["adamw", "own"], default="adamw")
    parser.add_argument("--steps", type=int, help="default: the preset's")
    parser.add_argument("--grid", nargs="+", default=[], metavar="NAME=A,B")
    parser.add_argument("--out", type=Path, default=Path("runs/tune_language"), help="folder")
    option_names = ("device", "data", "compile", "checkpoints")
    add_resource_options(parser, option_names)
    args = parser.parse_args(argv)
    options = read_resource_options(parser, args, option_names)
    try:
        grid = parse_grid(args.grid)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    config = PRESETS[args.preset]
    if args.steps is not None:
        config = dataclasses.replace(config, steps=args.steps)
    base = choose(args.optimizer, rest=args.rest)
    reason = optimizers.missing_requirement(base)
    if reason is not None:
        parser.error(reason)
    try:
        settings = trials(base, grid, config, args.batches)
        for trial in settings.values():  # raises for a wrong setting, before anything runs
            optimizers.build(trial.choice, model.build(model.SIZES["tiny"], 0), trial.batches)
    except (TypeError, ValueError) as error:
        parser.error(f"--grid: {error}")
    runs = Runs(run, config, settings, args.out / "logs", options, {}, args.jobs)
    try:
        require_data(list(settings.values()), **options)
    except (FileNotFoundError, CorruptFileError) as error:
        parser.error(str(error))
    runs.run_missing(list(settings))
    path = args.out / f"{args.preset}_{args.optimizer}_m{args.batches}.json"
    before = json.loads(path.read_text(encoding="utf-8"))["trials"] if path.is_file() else {}
    summary = summarise({name: runs.log(name) for name in settings}, before)
    print(f"best of {summary['count']}: {summary['best']}")
    path.write_text(json.dumps(summary) + "\n", encoding="utf-8")
    print(path)


def summarise(
    logs: Mapping[str, dict[str, Any] | None], before: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the best trial, the number of trials and all of them, those `before` included."""
    new = {name: condense(log) for name, log in logs.items() if log is not None}
    done = {**before, **new}
    for name, trial in done.items():
        print(f"{trial['last'] if trial['last'] is not None else 'diverged':>9}  {name}")
    winner = best(list(done.values()))
    chosen = next(name for name, run in done.items() if run is winner)
    return {"count": len(done), "best": chosen, "trials": done}


if __name__ == "__main__":
    main()
