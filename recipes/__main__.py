"""Run a recipe: `python -m recipes NAME --help`; without a name, list them.

Writes NAME.json (configuration, versions, hardware, checks, curves), NAME.svg and a log per run.
Runs that are finished in the log are not run again, so a command that was interrupted goes on
where it was, and one that was not only checks and draws once more.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment
from recipes import logs
from recipes.least_squares import RECIPE as LEAST_SQUARES
from recipes.recipe import Line, Recipe, Results

__all__ = ["RECIPES", "carry_out", "main"]

RECIPES = {"least_squares": LEAST_SQUARES}


def carry_out(recipe: Recipe, config: Any, folder: Path) -> Results:
    """Do the runs that are not in the logs in `folder`, and check them all."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = recipe.plan(config)
    # Through JSON, so that it compares equal to what a log holds.
    shared = json.loads(json.dumps(dataclasses.asdict(config)))
    results: Results = {"config": shared, "checks": [], "runs": {}}
    for number, (name, settings) in enumerate(plan.items(), start=1):
        path, where = folder / f"{name}.jsonl", f"{number}/{len(plan)} {name}"
        key = {"config": shared, "settings": json.loads(json.dumps(dataclasses.asdict(settings)))}
        run = logs.read(path, **key)
        outcome = "in the log"
        if run is None:
            computer = {
                "versions": environment.versions(),
                "hardware": environment.hardware("cpu"),
            }
            logs.record(path, {**key, **computer}, recipe.run(config, settings), Progress(where))
            run = logs.read(path, **key)
            assert run is not None
            outcome = f"{run['seconds']:.1f} s"
        say(f"{where}: {outcome}")
        del run["config"]
        results["runs"][name] = {key: compact(value) for key, value in run.items()}
    results["checks"] = [dataclasses.asdict(check) for check in recipe.check(results)]
    return results


class Progress:
    """One line on a terminal, rewritten all the time; nothing elsewhere."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, line: Line) -> None:
        if sys.stdout.isatty():
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in line.items())
            say(f"{self.where}: {numbers}", end="\r")


def say(text: str, end: str = "\n") -> None:
    """Print in place of the last progress line, if there is one."""
    print(f"\x1b[2K{text}" if sys.stdout.isatty() else text, end=end, flush=True)


def compact(value: Any) -> Any:
    """Four digits are enough in a column of floats."""
    if not isinstance(value, list):
        return value
    return [float(f"{entry:.4g}") if isinstance(entry, float) else entry for entry in value]


def conclude(recipe: Recipe, results: Results, picture: Path) -> None:
    """Print the checks and draw; end with an error if the paper's statements do not hold."""
    checks = recipe.check(results)
    for check in checks:
        verdict = "holds" if check.holds else "FAILS"
        print(f"{check.panel}  {verdict}  {check.paper}\n          here: {check.here}")
    recipe.draw(results, picture)
    print(picture)
    failed = sum(not check.holds for check in checks)
    if failed:
        sys.exit(f"{failed} of {len(checks)} statements do not hold")


def main(argv: Sequence[str] | None = None) -> None:
    name, *options = (sys.argv[1:] if argv is None else argv) or [""]
    if name not in RECIPES:
        width = max(map(len, RECIPES))
        listing = "\n".join(f"  {key:{width}}  {recipe.title}" for key, recipe in RECIPES.items())
        print(f"usage: python -m recipes NAME ...\n\n{listing}")
        asked = name in ("", "-h", "--help")
        sys.exit(0 if asked else f"\nNAME must be one of these, got {name!r}")
    recipe = RECIPES[name]
    parser = argparse.ArgumentParser(f"python -m recipes {name}", description=recipe.title)
    presets = list(recipe.presets)
    parser.add_argument("--preset", choices=presets, default=presets[0])
    parser.add_argument("--seed", type=int, help="default: the preset's")
    parser.add_argument("--out", type=Path, help="folder; default: runs/PRESET")
    parser.add_argument(
        "--show", type=Path, metavar="FILE.json", help="saved results: check and draw them only"
    )
    args = parser.parse_args(options)
    if args.seed is not None and args.seed < 0:
        parser.error(f"--seed must be >= 0, got {args.seed}")
    if args.show and not args.show.is_file():
        parser.error(f"--show must be a file that a recipe wrote, got {args.show}")
    if importlib.util.find_spec("matplotlib") is None:  # before the runs, not after them
        sys.exit("The pictures need matplotlib: pip install 'torchpisa[demo]'")
    if args.show:
        results = json.loads(args.show.read_text(encoding="utf-8"))
        conclude(recipe, results, args.show.with_suffix(".svg"))
        return
    config = recipe.presets[args.preset]
    if args.seed is not None:
        config = dataclasses.replace(config, seed=args.seed)
    folder = args.out or Path("runs") / args.preset
    results = {"recipe": name, "preset": args.preset, **carry_out(recipe, config, folder / name)}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(path)
    conclude(recipe, results, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
