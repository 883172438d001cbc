"""Language models: GPT-2 at three sizes on files of tokens, with the optimizers of the paper."""

from pathlib import Path

from recipes.language import check, choose, figure, finetune, memory, prepare, report, sizes, stages
from recipes.language.config import PRESETS, add_arguments, configure, plan
from recipes.language.results import condense
from recipes.language.run import missing_requirement, require_data, run
from recipes.recipe import Check, Recipe, Results

__all__ = ["RECIPE"]


def compared(results: Results) -> str:
    """Return what the results compare: "trials", "changes", "sizes" or "stages"."""
    if stages.compares_stages(results):
        return "stages"
    kind: str = results["config"].get("compares", "trials")
    return kind


def check_results(results: Results) -> list[Check]:
    """Check the statements about what was compared; trials of changes are for choosing only."""
    modules = {"trials": check.check, "stages": stages.check, "sizes": sizes.check}
    kind = compared(results)
    return modules[kind](results) if kind in modules else []


def draw_results(results: Results, path: Path) -> None:
    """Draw the picture of what was compared."""
    modules = {"stages": stages.draw, "sizes": sizes.draw}
    modules.get(compared(results), figure.draw)(results, path)


def report_results(results: Results) -> str:
    """Return the tables of what was compared."""
    modules = {"stages": stages.report, "changes": choose.report, "sizes": sizes.report}
    return modules.get(compared(results), report.report)(results)


RECIPE = Recipe(
    title="GPT-2 from scratch, 124M to 1.5B parameters",
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
    add_arguments=add_arguments,
    configure=configure,
    ranks=True,
    commands={
        "prepare": prepare.main,
        "choose": choose.main,
        "memory": memory.main,
        "finetune": finetune.main,
    },
)
