"""The paper's study of sigma and gamma on least squares, Appendix A.2."""

import dataclasses

from recipes.least_squares.check import check
from recipes.least_squares.config import PRESETS, plan
from recipes.least_squares.figure import draw
from recipes.least_squares.run import run
from recipes.recipe import Recipe

__all__ = ["RECIPE"]

RECIPE = Recipe(
    title="Appendix A.2: what sigma and gamma do on least squares, four panels",
    presets=PRESETS,
    plan=plan,
    run=run,
    check=check,
    draw=draw,
    run_key=dataclasses.asdict,
    partial=False,
)
