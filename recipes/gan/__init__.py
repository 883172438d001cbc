"""Generative adversarial networks: WGAN and WGAN-GP on CIFAR-10."""

from recipes.gan.config import PRESETS, plan
from recipes.gan.results import check, condense, draw, report
from recipes.gan.run import missing_requirement, require_data, run
from recipes.recipe import Recipe
from recipes.training import add_precision_option, with_precision

__all__ = ["RECIPE"]

RECIPE = Recipe(
    title="WGAN and WGAN-GP on CIFAR-10, Figure 3 and Table 4",
    presets=PRESETS,
    plan=plan,
    run=run,
    check=check,
    draw=draw,
    options=("device", "data", "compile", "checkpoints", "samples", "inception"),
    require_data=require_data,
    missing_requirement=missing_requirement,
    condense=condense,
    report=report,
    length=lambda settings: settings.epochs,
    add_arguments=add_precision_option,
    configure=with_precision,
)
