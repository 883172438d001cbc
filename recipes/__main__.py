"""Run a recipe: `python -m recipes NAME --help`; without a name, list them.

Writes NAME.json (configuration, versions, hardware, checks, curves), NAME.svg, for some recipes
NAME.md, and a log per run. Runs that are finished in the log are not run again, so a command that
was interrupted goes on where it was, and one that was not only checks and draws once more.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from recipes import ranks
from recipes.budgets import RECIPE as BUDGETS
from recipes.datasets import CorruptFileError, data_folder
from recipes.execution import Runs, print_line, rounded
from recipes.gan import RECIPE as GAN
from recipes.heterogeneity import RECIPE as HETEROGENEITY
from recipes.language import RECIPE as LANGUAGE
from recipes.least_squares import RECIPE as LEAST_SQUARES
from recipes.recipe import Recipe, Results, read_results
from recipes.rl import RECIPE as RL
from recipes.rnn import RECIPE as RNN
from recipes.vision import RECIPE as VISION

__all__ = ["RECIPES", "add_resource_options", "main", "read_resource_options"]
__all__ += ["run_command", "run_recipe"]

RECIPES = {
    "least_squares": LEAST_SQUARES,
    "heterogeneity": HETEROGENEITY,
    "budgets": BUDGETS,
    "language": LANGUAGE,
    "vision": VISION,
    "gan": GAN,
    "rnn": RNN,
    "rl": RL,
}


def run_recipe(
    recipe: Recipe,
    config: Any,
    folder: Path,
    *,
    options: dict[str, Any] | None = None,
    jobs: int = 1,
    only: Sequence[str] = (),
    time_limit: float | None = None,
    tensorboard: bool = False,
    train: bool = True,
    known: Sequence[Results] = (),
) -> Results:
    """Do the runs that are not in the logs yet, check all, and return the results.

    Args:
        recipe: the recipe.
        config: a preset of the recipe, or a changed one.
        folder: the folder of the logs.
        options: values of the recipe's options by name.
        jobs: processes that do runs at the same time.
        only: patterns of the runs to start; all if there are none. Finished runs of other names
            count all the same.
        time_limit: seconds after which no run is started and those under way stop.
        train: False starts no runs: the results are those of the logs.
        tensorboard: write TensorBoard's files too, to the folder `tensorboard` beside `folder`.
        known: saved results. The runs that they have with the same settings count as done.
    """
    runs = Runs(
        run=recipe.run,
        config=config,
        plan=recipe.plan(config),
        folder=folder,
        options=dict(options or {}),
        run_key=recipe.run_key(config),
        jobs=jobs,
        length=recipe.length,
        deadline=None if time_limit is None else time.time() + time_limit,
        tensorboard=folder.parent / "tensorboard" if tensorboard else None,
        packages=recipe.packages,
    )
    known_runs = find_known(runs, known)
    chosen = [n for n in runs.plan if not only or any(fnmatch(n, pattern) for pattern in only)]
    chosen = [name for name in chosen if name not in known_runs] if train else []
    for name in list(chosen):
        reason = recipe.missing_requirement(runs.plan[name])
        if reason is not None and runs.log(name) is None:
            print_line(f"{name}: left out, {reason}")
            chosen.remove(name)
    to_do = [runs.plan[name] for name in chosen if runs.log(name) is None]
    recipe.require_data(to_do, **runs.options)
    runs.run_missing(chosen)
    shared = json.loads(json.dumps(dataclasses.asdict(config)))
    results: Results = {"config": shared, "checks": [], "runs": {}, "missing": []}
    for name in runs.plan:
        run = runs.log(name)
        if run is None and name in known_runs:
            results["runs"][name] = known_runs[name]
            continue
        if run is None:
            results["missing"].append(name)
            continue
        del run["config"]
        condensed = recipe.condense(run)
        results["runs"][name] = {key: rounded(value) for key, value in condensed.items()}
    if has_enough_runs(recipe, results):
        results["checks"] = [dataclasses.asdict(check) for check in recipe.check(results)]
    return results


def find_known(runs: Runs, known: Sequence[Results]) -> dict[str, Any]:
    """Return the saved runs, as they were saved, that a plan has with the same settings.

    Of a run that several files have, the last one's counts.
    """
    found = {}
    for results in known:
        config = {entry: results.get("config", {}).get(entry) for entry in runs.run_key}
        for name, run in results["runs"].items():
            if name not in runs.plan:
                continue
            if {"config": config, "settings": run["settings"]} == runs.key(name):
                found[name] = run
            else:
                print_line(f"{name}: the saved run has other settings and does not count")
    return found


def has_enough_runs(recipe: Recipe, results: Results) -> bool:
    """Return True if there are enough runs to check and draw."""
    return bool(results["runs"]) if recipe.partial else not results.get("missing")


def report_results(recipe: Recipe, results: Results, path: Path) -> None:
    """Print the checks, draw and report; exit with an error if a statement does not hold."""
    missing = len(results.get("missing", []))
    if missing:
        print(f"{missing} of {missing + len(results['runs'])} runs are still to be done")
    if not has_enough_runs(recipe, results):
        return
    checks = recipe.check(results)
    for check in checks:
        verdict = "holds" if check.holds else "FAILS"
        print(f"{check.panel}  {verdict}  {check.paper}\n          here: {check.here}")
    picture = path.with_suffix(".svg")
    recipe.draw(results, picture)
    print(picture)
    if recipe.report is not None:
        page = path.with_suffix(".md")
        page.write_text(recipe.report(results), encoding="utf-8")
        print(page)
    failed = sum(not check.holds for check in checks)
    if failed:
        sys.exit(f"{failed} of {len(checks)} statements do not hold")


def add_resource_options(parser: argparse.ArgumentParser, option_names: Sequence[str]) -> None:
    """Add options about devices, folders and processes."""
    if "device" in option_names:
        best = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument(
            "--device", type=existing_device, default=best, help="default here: %(default)s"
        )
    if "data" in option_names:
        parser.add_argument(
            "--data",
            type=Path,
            metavar="DIR",
            help="folder of the data; default: that of TORCHPISA_DATA, or else data",
        )
    if "compile" in option_names:
        parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    if "checkpoints" in option_names:
        parser.add_argument(
            "--checkpoints",
            type=folder_path,
            metavar="DIR",
            help="folder to save unfinished runs in and to resume them from; default: none",
        )
    if "save_weights" in option_names:
        parser.add_argument(
            "--save-weights",
            type=folder_path,
            metavar="DIR",
            help="folder for the weights of runs; default: none",
        )
    if "samples" in option_names:
        parser.add_argument(
            "--samples",
            type=folder_path,
            metavar="DIR",
            help="folder for pictures; default: none",
        )
    if "inception" in option_names:
        parser.add_argument(
            "--inception",
            type=Path,
            metavar="FILE",
            help="weights of Inception, to use its features; default: the preset's network",
        )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at the same time; default: 1"
    )


def existing_device(word: str) -> str:
    """Parse a device, which this machine must have."""
    try:
        device = torch.device(word)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"must be a device of torch, got {word!r}") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise argparse.ArgumentTypeError(
            f"must be a device of this machine, which has {count} GPUs, got {word!r}"
        )
    return word


def folder_path(word: str) -> Path:
    """Parse a folder, which need not be there yet."""
    path = Path(word)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, got the file {word!r}")
    return path


def positive_seconds(word: str) -> float:
    """Parse a time limit, which must be positive."""
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {word!r}")
    return value


def read_resource_options(
    parser: argparse.ArgumentParser, args: argparse.Namespace, option_names: Sequence[str]
) -> dict[str, Any]:
    """Return the checked values of `add_resource_options`, as keyword arguments of a run."""
    if args.jobs < 1:
        parser.error(f"--jobs must be >= 1, got {args.jobs}")
    options = {name: getattr(args, name) for name in option_names}
    if "data" in options:
        options["data"] = str(data_folder(options["data"]))
    return options


def make_parser(name: str, recipe: Recipe) -> argparse.ArgumentParser:
    others = f"Other commands: {', '.join(recipe.commands)}." if recipe.commands else None
    parser = argparse.ArgumentParser(
        f"python -m recipes {name}", description=recipe.title, epilog=others
    )
    presets = list(recipe.presets)
    parser.add_argument(
        "--preset", choices=presets, default=presets[0], help="which runs; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the first; default: the preset's")
    parser.add_argument(
        "--out",
        type=folder_path,
        metavar="DIR",
        help="folder for logs and results; default: runs/PRESET",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="do only the runs whose names match, such as '*_sisa_*'; may be repeated",
    )
    recipe.add_arguments(parser)
    add_resource_options(parser, recipe.options)
    parser.add_argument(
        "--time-limit",
        type=positive_seconds,
        metavar="SECONDS",
        help="start no run after this; those under way stop at their next line",
    )
    parser.add_argument(
        "--tensorboard", action="store_true", help="TensorBoard's files beside the logs"
    )
    parser.add_argument(
        "--runs-only", action="store_true", help="do the runs; neither check nor draw them"
    )
    parser.add_argument(
        "--no-runs", action="store_true", help="do no runs: results of those in the logs"
    )
    parser.add_argument(
        "--known",
        action="append",
        default=[],
        type=Path,
        metavar="FILE.json",
        help="saved results, as of another machine: their runs count as done; may be repeated",
    )
    parser.add_argument("--list", action="store_true", help="list the runs and their state only")
    parser.add_argument(
        "--show", type=Path, metavar="FILE.json", help="saved results: check and draw them only"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    name, *words = (sys.argv[1:] if argv is None else argv) or [""]
    if name not in RECIPES:
        width = max(map(len, RECIPES))
        listing = "\n".join(f"  {key:{width}}  {recipe.title}" for key, recipe in RECIPES.items())
        print(f"usage: python -m recipes NAME ...\n\n{listing}")
        wants_list = name in ("", "-h", "--help")
        sys.exit(0 if wants_list else f"\nNAME must be one of these, got {name!r}")
    try:
        run_command(name, RECIPES[name], words)
    except (OSError, CorruptFileError) as error:  # its message says it all
        sys.exit(str(error))


def run_command(name: str, recipe: Recipe, words: Sequence[str]) -> None:
    """Do what a command asks for: run a recipe, list its runs, show results, or another command.

    Args:
        name: the name of the recipe, as typed. Files have it with `_` for a space.
        recipe: the recipe.
        words: the words of the command line after the name.
    """
    if words and words[0] in recipe.commands:
        recipe.commands[words[0]](words[1:])
        return
    parser = make_parser(name, recipe)
    args = parser.parse_args(words)
    stem = name.replace(" ", "_")
    options = read_resource_options(parser, args, recipe.options)
    if args.seed is not None and args.seed < 0:
        parser.error(f"--seed must be >= 0, got {args.seed}")
    try:
        shown = None if args.show is None else read_results("--show", args.show, stem)
        known = [read_results("--known", file, stem) for file in args.known]
    except ValueError as error:
        parser.error(str(error))
    config = recipe.presets[args.preset]
    if args.seed is not None:
        config = dataclasses.replace(config, seed=args.seed)
    try:
        config = recipe.configure(config, args)
    except ValueError as error:
        parser.error(str(error))
    plan, folder = recipe.plan(config), args.out or Path("runs") / args.preset
    for pattern in args.only:
        if not any(fnmatch(run, pattern) for run in plan):
            parser.error(f"--only must match a run (--list names them), got {pattern!r}")
    if args.list:
        runs = Runs(recipe.run, config, plan, folder / stem, run_key=recipe.run_key(config))
        known_runs = find_known(runs, known)
        for run in plan:
            print(f"{'done' if run in known_runs or runs.log(run) else 'to do'}  {run}")
        return
    # Checked before the runs, which may take hours.
    if not args.runs_only and importlib.util.find_spec("matplotlib") is None:
        sys.exit("The pictures need matplotlib: pip install 'torchpisa[demo]'")
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        sys.exit("--tensorboard needs tensorboard: pip install 'torchpisa[recipes]'")
    if shown is not None:
        report_results(recipe, shown, args.show)
        return
    if ranks.by_torchrun() and not recipe.ranks:
        sys.exit(f"{name} runs in one process: start it without torchrun")
    if ranks.by_torchrun() and args.jobs > 1:
        parser.error(f"--jobs must be 1 under torchrun, got {args.jobs}")
    with ranks.group(options.get("device", "cpu")) as device:
        done = run_recipe(
            recipe,
            config,
            folder / stem,
            options={**options, "device": device} if "device" in options else options,
            jobs=args.jobs,
            only=args.only,
            time_limit=args.time_limit,
            tensorboard=args.tensorboard,
            train=not args.no_runs,
            known=known,
        )
        first = ranks.rank() == 0
    if not first:
        return
    results = {"recipe": stem, "preset": args.preset, **done}
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(path)
    if not args.runs_only:
        report_results(recipe, results, path)


if __name__ == "__main__":
    main()
