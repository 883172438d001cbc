"""Appendix A.5 of the paper: PPO and A2C on MuJoCo, with SISA and MISA in place of Adam."""

import argparse
import dataclasses

from recipes.recipe import Recipe
from recipes.rl.config import ALGORITHMS, EXTRA, OPTIMIZERS, PRESETS, TASKS, Config, plan
from recipes.rl.results import check, condense, draw, report
from recipes.rl.run import PACKAGES, missing_requirement, run

__all__ = ["RECIPE"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options that choose a part of a preset."""
    several = {"action": "append", "help": "may be given several times; default: the preset's"}
    parser.add_argument("--task", choices=list(TASKS), **several)
    parser.add_argument(
        "--algorithm", choices=list(ALGORITHMS), help="default: the preset's, or the paper's"
    )
    parser.add_argument("--optimizer", choices=(*OPTIMIZERS, *EXTRA), **several)
    parser.add_argument("--epochs", type=int, help="of the preset's number of steps each")
    parser.add_argument("--seeds", type=int, help="runs per task and optimizer")


def configure(config: Config, args: argparse.Namespace) -> Config:
    """Return the preset, changed by these options."""
    changes = {
        "tasks": tuple(dict.fromkeys(args.task or ())),
        "algorithm": args.algorithm,
        "optimizers": tuple(dict.fromkeys(args.optimizer or ())),
        "epochs": args.epochs,
        "seeds": args.seeds,
    }
    return dataclasses.replace(
        config, **{name: value for name, value in changes.items() if value not in (None, ())}
    )


RECIPE = Recipe(
    title="Appendix A.5: reinforcement learning on MuJoCo with PPO and A2C",
    presets=PRESETS,
    plan=plan,
    run=run,
    check=check,
    draw=draw,
    options=("checkpoints",),
    missing_requirement=missing_requirement,
    condense=condense,
    report=report,
    length=lambda settings: settings.epochs + 1,
    add_arguments=add_arguments,
    configure=configure,
    packages=PACKAGES,
)
