"""Table 2 at equal costs: equal rounds, equal sample gradients, equal bytes."""

from recipes.budgets.config import PRESETS, plan
from recipes.budgets.results import check, condense, draw, main, report
from recipes.budgets.run import run
from recipes.heterogeneity.run import require_data
from recipes.recipe import Recipe

__all__ = ["RECIPE"]

RECIPE = Recipe(
    title="Table 2 at equal costs, with rivals: rounds, sample gradients, bytes",
    presets=PRESETS,
    plan=plan,
    run=run,
    check=check,
    draw=draw,
    options=("device", "data"),
    require_data=require_data,
    condense=condense,
    report=report,
    length=lambda settings: 1 + -(-settings.rounds // settings.every),
    commands={"choose": main},
)
