"""Language models: GPT-2 on token shards; so far a pilot with 124M parameters on books."""

from recipes.language.check import check
from recipes.language.config import PRESETS, plan
from recipes.language.figure import draw
from recipes.language.report import report
from recipes.language.results import condense
from recipes.language.run import lacks, ready, run
from recipes.recipe import Recipe

__all__ = ["RECIPE"]

RECIPE = Recipe(
    title="GPT-2 from scratch, beside AdamW, Muon and SOAP",
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
)
