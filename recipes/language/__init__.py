"""Language models: GPT-2 on token shards; so far a pilot with 124M parameters on books."""

from recipes.language.check import check
from recipes.language.config import PRESETS, plan
from recipes.language.figure import draw
from recipes.language.report import report
from recipes.language.results import condense
from recipes.language.run import missing_requirement, require_data, run
from recipes.recipe import Recipe

__all__ = ["RECIPE"]

RECIPE = Recipe(
    title="GPT-2 from scratch, beside AdamW, Muon and SOAP",
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
)
