"""Generative adversarial networks: WGAN and WGAN-GP on CIFAR-10."""

from recipes.gan.config import PRESETS, plan
from recipes.gan.results import check, condense, draw, report
from recipes.gan.run import lacks, ready, run
from recipes.recipe import Recipe

__all__ = ["RECIPE"]

RECIPE = Recipe(
    title="WGAN and WGAN-GP on CIFAR-10, Figure 3 and Table 4",
    presets=PRESETS,
    plan=plan,
    run=run,
    check=check,
    draw=draw,
    takes=("device", "data", "checkpoints", "samples", "inception"),
    ready=ready,
    lacks=lacks,
    depends=lambda config: {},  # the settings of a run say all
    condense=condense,
    report=report,
    partial=True,
    length=lambda settings: settings.epochs,
)
