"""Results: condensed runs, chosen trials, statements, picture and tables."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recipes import curves
from recipes.curves import Panel, Run, compose_report, describe_settings, group_runs, run_facts
from recipes.language.finetune.config import PUBLISHED, ROW
from recipes.language.finetune.similarity import PREFIX
from recipes.optimizers import TITLES
from recipes.recipe import Check, Results
from recipes.tables import markdown

__all__ = ["TABLE", "check", "choose", "condense", "draw", "report"]

EPOCHS = (2, 5, 15)
TABLE = {
    ("124m", "adamw"): {"test_loss": (5.20, 3.45, 2.30), "similarity": (82.16, 84.30, 84.73)},
    ("124m", "sisa"): {"test_loss": (3.69, 2.73, 2.17), "similarity": (83.15, 84.36, 84.82)},
    ("335m", "adamw"): {"test_loss": (3.62, 2.73, 1.95), "similarity": (83.17, 84.50, 84.19)},
    ("335m", "sisa"): {"test_loss": (2.31, 2.04, 1.93), "similarity": (84.76, 85.24, 84.84)},
}
"""The paper's test losses and BERTScores in percent, after 2, 5 and 15 epochs."""

CURVES = ("epoch", "loss", "validation_loss", "test_loss", "elapsed")
PAPER_SETTINGS = {PUBLISHED.label: "published setting", ROW: "the paper's row"}
WORDS = {"test_loss": ("test loss", "below"), "similarity": ("similarity", "above")}


def condense(log: dict[str, Any]) -> Run:
    """Return the curves, and BERTScore with the name of its model."""
    metric = next((name for name in log if name.startswith(PREFIX)), None)
    return {
        **run_facts(log),
        "state_bytes": log["state_bytes"][-1],
        "peak_bytes": log["peak_bytes"][-1],
        "similarity_model": None if metric is None else metric.removeprefix(PREFIX),
        "similarity": [None] * len(log["epoch"]) if metric is None else log[metric],
        **{name: log[name] for name in CURVES},
    }


def value_at(runs: Sequence[Run], column: str, epoch: int) -> float | None:
    """Return the mean over seeds of a column after an epoch; None if one of them has no value."""
    values = [dict(zip(run["epoch"], run[column], strict=True)).get(epoch) for run in runs]
    return None if None in values else statistics.fmean(values)


def choose(runs: Mapping[str, Sequence[Run]]) -> dict[str, str]:
    """Return the label of every optimizer's trial with the lowest last validation loss."""
    chosen: dict[str, tuple[float, str]] = {}
    for label, group in runs.items():
        settings = group[0]["settings"]
        loss = value_at(group, "validation_loss", settings["epochs"])
        name = settings["choice"]["name"]
        candidate = math.inf if loss is None else loss, label
        if name not in chosen or candidate < chosen[name]:
            chosen[name] = candidate
    return {name: label for name, (_, label) in chosen.items()}


class Row(NamedTuple):
    """A row of the table: its title, the runs, and whether they have the paper's setting."""

    title: str
    runs: list[Run]
    of_paper: bool = False


def rows(runs: Mapping[str, list[Run]]) -> list[Row]:
    """Return the paper's two settings and every optimizer's chosen trial."""
    names = {label: group[0]["settings"]["choice"]["name"] for label, group in runs.items()}
    rows = []
    for name, chosen in choose(runs).items():
        tried = list(names.values()).count(name)
        best = f", best of {tried}" if tried > 1 else ""
        for label, words in PAPER_SETTINGS.items():
            if names.get(label) == name:
                title = f"{TITLES[name]}, {words}{best if label == chosen else ''}"
                rows.append(Row(title, runs[label], of_paper=True))
        if chosen not in PAPER_SETTINGS:
            rows.append(Row(f"{TITLES[name]}{best}", runs[chosen]))
    return rows


def by_model(results: Results) -> dict[str, dict[str, list[Run]]]:
    return group_runs(results, lambda run: run["settings"]["model"])


# Statements


def check(results: Results) -> list[Check]:
    """Compare SISA with AdamW as the paper does; on a part of the data, check that models learn."""
    if results["config"]["limit"]:
        return curves.check_column_falls(results, "test_loss", "test loss")
    checks: list[Check] = []
    for model, runs in by_model(results).items():
        for column in WORDS:
            checks += check_paper(model, runs, column)
            checks += check_chosen(model, runs, column)
    return checks


def check_paper(model: str, runs: Mapping[str, Sequence[Run]], column: str) -> Iterator[Check]:
    """Compare the paper's row with AdamW's published setting."""
    if ROW in runs and PUBLISHED.label in runs:
        for epoch, sisa, adamw in zip(
            EPOCHS, TABLE[model, "sisa"][column], TABLE[model, "adamw"][column], strict=True
        ):
            said = f"SISA's row {sisa:.2f}, AdamW's published setting {adamw:.2f}"
            yield from compare(
                model, column, epoch, runs[ROW], runs[PUBLISHED.label], said, sisa < adamw
            )


def check_chosen(model: str, runs: Mapping[str, Sequence[Run]], column: str) -> Iterator[Check]:
    """Compare the chosen trials of SISA and of MISA with AdamW's."""
    chosen = choose(runs)
    other = chosen.get("adamw")
    _, better = WORDS[column]
    for name in ("sisa", "misa"):
        label = chosen.get(name)
        if label and other and {label, other} != PAPER_SETTINGS.keys():
            for epoch in EPOCHS:
                yield from compare(
                    *(model, column, epoch, runs[label], runs[other]),
                    f"(not in the paper) chosen trials: {label} {better} {other}",
                    column == "test_loss",
                )


def compare(
    model: str,
    column: str,
    epoch: int,
    runs: Sequence[Run],
    others: Sequence[Run],
    statement: str,
    lower: bool,
) -> Iterator[Check]:
    """Check that runs are below, or above, others after an epoch, if all have a value there."""
    ours, theirs = (value_at(group, column, epoch) for group in (runs, others))
    if ours is None or theirs is None:
        return
    words, _ = WORDS[column]
    scale, digits = (1, 3) if column == "test_loss" else (100, 2)
    yield Check(
        f"{model}, {words}, epoch {epoch}",
        statement,
        f"{scale * ours:.{digits}f} and {scale * theirs:.{digits}f}",
        ours < theirs if lower else ours > theirs,
    )


# Picture and tables


def draw(results: Results, path: Path) -> None:
    """Draw training and test loss by epoch, a row per model."""
    panels = []
    for model, runs in by_model(results).items():
        shown = {row.title: row.runs for row in rows(runs)}
        panels.append(
            [
                Panel(f"GPT-2 {model}", "training loss", shown, "epoch", "loss"),
                Panel(f"GPT-2 {model}", "test loss", shown, "epoch", "test_loss"),
            ]
        )
    curves.draw(panels, path, "language_finetune", "epoch")


def report(results: Results) -> str:
    """Return all tables."""
    config = results["config"]
    train, validation, test = config["sizes"]
    parts = []
    for model, runs in by_model(results).items():
        some = next(iter(runs.values()))[0]
        start = value_at([some], "test_loss", 0)
        weights = config["weights"].get(model)
        began = f"weights {weights}" if weights else "random weights"
        parts += [
            f"**GPT-2 {model}**, {began}, test loss {start:.3f} before fine-tuning. "
            f"{train} recipes to train on, {test} to report on; the best trial is the one with the "
            f"lowest loss on {validation} others after {config['epochs']} epochs.",
            table(model, runs),
            "**All trials**:",
            all_trials(runs, config["epochs"], missing_trials(results, model)),
        ]
    return compose_report(results, parts, check(results))


def table(model: str, runs: dict[str, list[Run]]) -> str:
    lines = []
    some = next(iter(runs.values()))[0]
    epochs = [epoch for epoch in EPOCHS if epoch in some["epoch"]]
    for title, group, of_paper in rows(runs):
        name = group[0]["settings"]["choice"]["name"]
        paper = TABLE.get((model, name), {}) if of_paper else {}
        lines.append(
            [
                title,
                describe_settings(group[0]["settings"]),
                triple([value_at(group, "loss", epoch) for epoch in epochs], 2),
                f"**{triple([value_at(group, 'test_loss', epoch) for epoch in epochs], 2)}**",
                triple(paper.get("test_loss", ()), 2),
                triple([percent(value_at(group, "similarity", epoch)) for epoch in epochs], 2),
                triple(paper.get("similarity", ()), 2),
            ]
        )
    after = ", ".join(map(str, epochs))
    models = (run["similarity_model"] for group in runs.values() for run in group)
    metric = next(filter(None, models), "not scored")
    return markdown(
        [
            *("", "settings", f"training loss after {after} epochs", "test loss", "paper"),
            *(f"BERTScore, {metric}, %", "paper (RoBERTa-large)"),
        ],
        lines,
    )


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def triple(values: Sequence[float | None], digits: int) -> str:
    words = ["-" if value is None else f"{value:.{digits}f}" for value in values]
    return ", ".join(words) or "-"


def missing_trials(results: Results, model: str) -> list[str]:
    """Return the names of a model's runs that were not done."""
    return [name for name in results["missing"] if name.startswith(f"{model}_")]


def all_trials(runs: Mapping[str, list[Run]], epochs: int, missing: Sequence[str]) -> str:
    lines = []
    for label, group in runs.items():
        losses = [value_at(group, f"{part}_loss", epochs) for part in ("validation", "test")]
        seconds = statistics.median(run["elapsed"][-1] for run in group) / epochs
        lines.append(
            [
                *(label, describe_settings(group[0]["settings"]), len(group)),
                *("diverged" if loss is None else f"{loss:.3f}" for loss in losses),
                f"{seconds:.2f}",
            ]
        )
    lines += [[name, "", "", "not done", "", ""] for name in missing]
    heads = ["trial", "settings", "seeds", "validation loss", "test loss"]
    return markdown([*heads, "seconds per epoch, shared"], lines)
