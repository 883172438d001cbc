"""Language models: GPT-2 on token shards; so far a pilot with 124M parameters on books."""

from pathlib import Path

from recipes.language import check, figure, memory, report, stages
from recipes.language.config import PRESETS, plan
from recipes.language.results import condense
from recipes.language.run import missing_requirement, require_data, run
from recipes.recipe import Check, Recipe, Results

__all__ = ["RECIPE"]


def check_results(results: Results) -> list[Check]:
    """Check the statements of a comparison of trials, or of stages."""
    return (stages if stages.compares_stages(results) else check).check(results)


def draw_results(results: Results, path: Path) -> None:
    """Draw the picture of a comparison of trials, or of stages."""
    (stages if stages.compares_stages(results) else figure).draw(results, path)


def report_results(results: Results) -> str:
    """Return the tables of a comparison of trials, or of stages."""
    return (stages if stages.compares_stages(results) else report).report(results)


RECIPE = Recipe(
    title="GPT-2 from scratch, beside AdamW, Muon and SOAP",
    presets=PRESETS,
    plan=plan,
    run=run,
    check=check_results,
    draw=draw_results,
    options=("device", "data", "compile", "checkpoints", "save_weights"),
    require_data=require_data,
    missing_requirement=missing_requirement,
    condense=condense,
    report=report_results,
    commands={"memory": memory.main},
)
