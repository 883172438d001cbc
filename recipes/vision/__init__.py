"""Image classification: CIFAR-10 and ImageNet."""

from recipes.recipe import Recipe
from recipes.training import add_precision_option, with_precision
from recipes.vision.config import PRESETS, plan
from recipes.vision.results import check, condense, draw, report
from recipes.vision.run import missing_requirement, require_data, run

__all__ = ["RECIPE"]

RECIPE = Recipe(
    title="Image classification on CIFAR-10 and ImageNet, Figures 1 and 5 and Table 3",
    presets=PRESETS,
    plan=plan,
    run=run,
    check=check,
    draw=draw,
    options=("device", "data", "compile", "checkpoints"),
    require_data=require_data,
    missing_requirement=missing_requirement,
    condense=condense,
    report=report,
    length=lambda settings: settings.epochs,
    add_arguments=add_precision_option,
    configure=with_precision,
)
