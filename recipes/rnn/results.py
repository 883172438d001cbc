"""Results: condensed runs, statements, picture and tables."""

from pathlib import Path
from typing import Any

from recipes import curves
from recipes.curves import (
    Panel,
    Run,
    check_sisa_is_lowest,
    compose_report,
    describe_settings,
    display_name,
    epoch_costs,
    epoch_times,
    group_runs,
    list_not_run,
    run_facts,
)
from recipes.recipe import Check, Results
from recipes.tables import markdown, mean_sd

__all__ = ["TABLE", "check", "condense", "draw", "report"]

_NAMES = (
    "sisa",
    "sgd",
    "adabound",
    "adam",
    "radam",
    "msvag",
    "adamw",
    "adabelief",
    "yogi",
    "padam",
)
_ROWS = {
    1: (84.27, 85.70, 84.73, 85.90, 86.50, 84.85, 88.39, 84.47, 86.37, 94.46),
    2: (66.23, 67.32, 67.43, 67.30, 72.30, 68.82, 72.80, 66.70, 71.64, 89.77),
    3: (61.06, 63.91, 63.72, 65.02, 70.00, 64.32, 69.90, 61.20, 67.69, 95.10),
}
TABLE = {layers: dict(zip(_NAMES, row, strict=True)) for layers, row in _ROWS.items()}
"""The paper's test perplexities, after 200 epochs."""

CURVES = ("epoch", "perplexity", "valid_perplexity", "test_perplexity")


def condense(log: dict[str, Any]) -> Run:
    """Return perplexities of the epoch with the best validation, its seconds and the curves."""
    numbers = [(value, at) for at, value in enumerate(log["valid_perplexity"]) if value is not None]
    valid, best = min(numbers, default=(None, 0))
    test = log["test_perplexity"][best]
    return {
        **run_facts(log),
        "valid": None if valid is None else round(valid, 3),
        "test": None if test is None else round(test, 3),
        "best_epoch": log["epoch"][best],
        **epoch_costs(log),
        "documentation": bool(log["fallback"][-1]),
        **{name: log[name] for name in CURVES},
    }


def panels(results: Results) -> dict[tuple[int, int], dict[str, list[Run]]]:
    """Return runs by layers and epochs, and by optimizer."""
    return group_runs(results, lambda run: (run["settings"]["layers"], run["settings"]["epochs"]))


def check(results: Results) -> list[Check]:
    """Compare the perplexities with the paper, where SISA's is the lowest.

    On a part of the text, check that the models learn.
    """
    if results["config"]["limit"]:
        return curves.check_column_falls(results, "perplexity", "training perplexity")
    checks: list[Check] = []
    for (layers, epochs), runs in panels(results).items():
        others, remark = ("adam", "adabelief", "sgd"), f" after {epochs} epochs"
        checks += check_sisa_is_lowest(count_layers(layers), runs, "test", others, remark)
    return checks


def count_layers(layers: int) -> str:
    return f"{layers} layer{'s' if layers > 1 else ''}"


def draw(results: Results, path: Path) -> None:
    """Draw training and validation perplexity, a row per number of layers and length."""
    rows = []
    for (layers, epochs), runs in panels(results).items():
        head = f"{count_layers(layers)}, {epochs} epochs"
        rows.append(
            [
                Panel(head, "training perplexity", runs, "epoch", "perplexity", log=True),
                Panel(head, "validation perplexity", runs, "epoch", "valid_perplexity", log=True),
            ]
        )
    curves.draw(rows, path, "rnn", "epoch")


def report(results: Results) -> str:
    """Return all tables."""
    parts = []
    for (layers, epochs), runs in panels(results).items():
        first = next(iter(runs.values()))[0]
        text = "Python's documentation" if first["documentation"] else "Penn Treebank"
        head = f"**{count_layers(layers)}**, {text}, {epochs} epochs"
        if not first["settings"]["train_recurrent"]:
            head += ", recurrent matrices as they were drawn"
        parts += [head, perplexities(layers, runs)]
        if not first["documentation"]:
            texts = {name: f"{value:.2f}" for name, value in TABLE[layers].items()}
            parts += list_not_run(texts, runs)
    return compose_report(results, parts, check(results))


def perplexities(layers: int, by_optimizer: dict[str, list[Run]]) -> str:
    lines, seconds = [], epoch_times(by_optimizer)
    for label, runs in by_optimizer.items():
        paper = None if runs[0]["documentation"] else TABLE[layers].get(label)
        lines.append(
            [
                *(display_name(label), describe_settings(runs[0]["settings"]), len(runs)),
                mean_sd(run["valid"] for run in runs if run["valid"] is not None),
                mean_sd(run["test"] for run in runs if run["test"] is not None),
                "-" if paper is None else f"{paper:.2f}",
                seconds[label],
            ]
        )
    heads = ["", "settings", "seeds", "validation perplexity", "test perplexity"]
    return markdown([*heads, "paper, 200 epochs", "seconds per epoch, shared"], lines)
