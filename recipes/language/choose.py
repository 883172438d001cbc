"""Choose the setting of every optimizer from the trials of the preset `trials`.

    python -m recipes language choose runs/trials/language.json

writes `chosen.json`, which the preset `nano` reads. The trial with the lowest loss on the tokens to
choose on wins. A change counts only if every optimizer had it, so that all had as many trials.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.language.config import BASES, CHANGES, CHOSEN, label, label_prefix
from recipes.language.optimizers import TITLES
from recipes.recipe import Results, read_results
from recipes.tables import markdown, provenance

__all__ = ["choose", "main", "report"]


def choose(results: Results) -> dict[str, dict[str, Any]]:
    """Return the best change of every optimizer, with the losses of all that were compared."""
    losses = {
        change: {name: loss_of(results, f"{name}_{change}") for name in BASES} for change in CHANGES
    }
    done = {
        change: row
        for change, row in losses.items()
        if all(entry is not None for entry in row.values())
    }
    if "base" not in done:
        raise ValueError("trials must have the base of every optimizer, got none of some")
    chosen = {}
    for name in BASES:
        compared = {change: row[name] for change, row in done.items()}
        best = min(compared, key=lambda change: compared[change])
        chosen[name] = {"changes": [] if best == "base" else [best], "losses": compared}
    return chosen


def loss_of(results: Results, trial: str) -> float | None:
    """Return the loss that a trial ended with, infinite if it diverged, None if it was not run."""
    config = results["config"]
    model = config["trials"][0]["model"]  # where it is not the preset's
    prefix = "" if model is None else label_prefix(model)
    run = results["runs"].get(label(prefix + trial, 1, config["seed"]))
    if run is None:
        return None
    return float("inf") if run["last"] is None else run["last"]


def report(results: Results) -> str:
    """Return the losses of all trials as a table."""
    lines = []
    changes = [c for c in CHANGES if any(loss_of(results, f"{name}_{c}") for name in BASES)]
    for name in BASES:
        losses = {change: loss_of(results, f"{name}_{change}") for change in changes}
        known = [loss for loss in losses.values() if loss is not None]
        cells = [
            "-" if loss is None else f"**{loss:.3f}**" if loss == min(known) else f"{loss:.3f}"
            for loss in losses.values()
        ]
        if known:
            lines.append([TITLES[name], *cells])
    config = results["config"]
    text = (
        f"Loss after {config['steps']} steps of {config['sequences']} sequences, on the validation "
        "tokens to choose on. Every optimizer has a base and one change each, which "
        "`recipes/language/config.py` has under `CHANGES`; what ends lowest, in bold, goes on."
    )
    table = markdown(["", *(change.replace("_", "-") for change in changes)], lines)
    return f"{text}\n\n{table}\n\n{provenance(results)}\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m recipes language choose", description="Choose settings from trials"
    )
    parser.add_argument("trials", type=Path, help="results of the preset trials, a JSON file")
    parser.add_argument("--out", type=Path, default=CHOSEN, help="default: chosen.json here")
    args = parser.parse_args(argv)
    try:
        results = read_results("trials", args.trials, "language")
    except ValueError as error:
        parser.error(str(error))
    if results["config"].get("compares") != "changes":
        parser.error(f"trials must be results of the preset trials, got {args.trials}")
    chosen = choose(results)
    args.out.write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")
    for name, entry in chosen.items():
        losses = ", ".join(f"{change} {loss:.3f}" for change, loss in entry["losses"].items())
        print(f"{name}: {' '.join(entry['changes']) or 'base'} ({losses})")
