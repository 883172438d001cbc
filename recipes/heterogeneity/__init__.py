"""Table 2 of the paper: clients whose data have only some of the labels."""

from recipes.heterogeneity.check import check
from recipes.heterogeneity.config import PRESETS, plan
from recipes.heterogeneity.figure import draw
from recipes.heterogeneity.report import report
from recipes.heterogeneity.run import condense, require_data, run
from recipes.recipe import Recipe

__all__ = ["RECIPE"]

RECIPE = Recipe(
    title="Table 2: federated learning from clients with one, two or three labels",
    presets=PRESETS,
    plan=plan,
    run=run,
    check=check,
    draw=draw,
    options=("device", "data"),
    require_data=require_data,
    condense=condense,
    report=report,
)
