"""Word language models: LSTMs on Penn Treebank."""

from recipes.recipe import Recipe
from recipes.rnn.config import PRESETS, plan
from recipes.rnn.results import check, condense, draw, report
from recipes.rnn.run import lacks, ready, run

__all__ = ["RECIPE"]

RECIPE = Recipe(
    title="LSTM language models on Penn Treebank, Table 8",
    presets=PRESETS,
    plan=plan,
    run=run,
    check=check,
    draw=draw,
    takes=("device", "data", "checkpoints"),
    ready=ready,
    lacks=lacks,
    depends=lambda config: {},  # the settings of a run say all
    condense=condense,
    report=report,
    partial=True,
    length=lambda settings: settings.epochs,
)
