"""Put runs from several machines into one file of results.

python -m recipes.merge docs/results/vision.json runs/short/vision.json ...

The first file gets the runs of the others, all of one recipe and preset; a run that several have is
the last one's. Its statements, picture and report are made anew.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from recipes.__main__ import RECIPES, report_results
from recipes.recipe import Recipe, Results

__all__ = ["main", "merge"]


def merge(recipe: Recipe, files: Sequence[Results]) -> Results:
    """Return the results of all files together.

    Args:
        recipe: of all of them.
        files: what the recipe saved.

    Raises:
        ValueError: a file is of another recipe or preset, or a run's settings are not the preset's.
    """
    first = files[0]
    for name in ("recipe", "preset"):
        for other in files[1:]:
            if other[name] != first[name]:
                raise ValueError(f"{name} must be {first[name]!r}, got {other[name]!r}")
    config = dataclasses.replace(recipe.presets[first["preset"]], seed=first["config"]["seed"])
    plan = recipe.plan(config)
    found = {name: run for results in files for name, run in results["runs"].items()}
    for name, run in found.items():
        if name not in plan:
            raise ValueError(f"runs must be among the preset's, got {name!r}")
        if run["settings"] != json.loads(json.dumps(dataclasses.asdict(plan[name]))):
            raise ValueError(f"settings of {name} must be the preset's, got {run['settings']}")
    merged: Results = {
        **{"recipe": first["recipe"], "preset": first["preset"]},
        "config": json.loads(json.dumps(dataclasses.asdict(config))),
        "checks": [],
        "runs": {name: found[name] for name in plan if name in found},
        "missing": [name for name in plan if name not in found],
    }
    merged["checks"] = [dataclasses.asdict(check) for check in recipe.check(merged)]
    return merged


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m recipes.merge", description=__doc__)
    parser.add_argument("into", type=Path, metavar="INTO.json", help="saved results; is changed")
    parser.add_argument("others", type=Path, metavar="FILE.json", nargs="*", help="the others")
    args = parser.parse_args(argv)
    files = []
    for path in (args.into, *args.others):
        if not path.is_file():
            parser.error(f"files must be there, got {path}")
        files.append(json.loads(path.read_text(encoding="utf-8")))
    name = files[0].get("recipe")
    if name not in RECIPES:
        parser.error(f"INTO.json must be of one of {', '.join(RECIPES)}, got {name!r}")
    try:
        merged = merge(RECIPES[name], files)
    except ValueError as error:
        parser.error(str(error))
    args.into.write_text(json.dumps(merged) + "\n", encoding="utf-8")
    print(f"{args.into}: {len(merged['runs'])} runs, {len(merged['missing'])} missing")
    report_results(RECIPES[name], merged, args.into)


if __name__ == "__main__":
    main()
