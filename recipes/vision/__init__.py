"""Image classification: CIFAR-10 and ImageNet."""

from recipes.recipe import Recipe
from recipes.vision.config import PRESETS, plan
from recipes.vision.results import check, condense, draw, report
from recipes.vision.run import lacks, ready, run

__all__ = ["RECIPE"]

RECIPE = Recipe(
    title="Image classification on CIFAR-10 and ImageNet, Figures 1 and 5 and Table 3",
    presets=PRESETS,
    plan=plan,
    run=run,
    check=check,
    draw=draw,
    takes=("device", "data", "compile", "checkpoints"),
    ready=ready,
    lacks=lacks,
    depends=lambda config: {},  # the settings of a run say all
    condense=condense,
    report=report,
    partial=True,
    length=lambda settings: settings.epochs,
)
