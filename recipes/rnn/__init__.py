"""Word language models: LSTMs on Penn Treebank."""

from recipes.recipe import Recipe
from recipes.rnn.config import PRESETS, plan
from recipes.rnn.results import check, condense, draw, report
from recipes.rnn.run import missing_requirement, require_data, run

__all__ = ["RECIPE"]

RECIPE = Recipe(
    title="LSTM language models on Penn Treebank, Table 8",
    presets=PRESETS,
    plan=plan,
    run=run,
    check=check,
    draw=draw,
    options=("device", "data", "checkpoints"),
    require_data=require_data,
    missing_requirement=missing_requirement,
    condense=condense,
    report=report,
    length=lambda settings: settings.epochs,
)
