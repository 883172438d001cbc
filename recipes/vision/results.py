"""Results: condensed runs, statements, picture and tables."""

from pathlib import Path
from typing import Any

from recipes import curves
from recipes.curves import (
    Panel,
    Run,
    compose_report,
    describe_settings,
    display_name,
    epoch_costs,
    epoch_times,
    group_runs,
    list_not_run,
    mean_or_inf,
    run_facts,
)
from recipes.recipe import Check, Results
from recipes.tables import markdown, mean_sd
from recipes.vision.config import MODELS
from recipes.vision.paper import EPOCHS, TABLE

__all__ = ["check", "condense", "draw", "report"]

CURVES = ("epoch", "loss", "accuracy", "test_loss", "test_accuracy")
PAPER_EPOCHS = 200
SISA_ROWS = ("sisa", "sisa_steps", "sisa_script", "sisa_test")
ENOUGH = 91.0  # percent for SISA on VGG-11 at the paper's length, where the paper has 91.25


def condense(log: dict[str, Any]) -> Run:
    """Return last and best test accuracy in percent, the seconds of an epoch and the curves."""
    return {
        **run_facts(log),
        "last": round(100 * log["test_accuracy"][-1], 2),
        "best": round(100 * max(log["test_accuracy"]), 2),
        **epoch_costs(log),
        "digits": bool(log["fallback"][-1]),
        **{name: log[name] for name in CURVES},
    }


def panels(results: Results) -> dict[tuple[str, int], dict[str, list[Run]]]:
    """Return runs by model and epochs, and by optimizer."""
    return group_runs(results, lambda run: (run["settings"]["model"], run["settings"]["epochs"]))


def check(results: Results) -> list[Check]:
    """Compare the accuracies with the paper's.

    On a part of the data, check that the models learn.
    """
    if results["config"]["limit"]:
        return curves.check_column_falls(results, "loss", "training loss")
    checks = []
    for (model, epochs), runs in panels(results).items():
        name = MODELS[model]
        means = {label: mean_or_inf(group, "last") for label, group in runs.items()}
        variants = [label for label in SISA_ROWS if label in means]
        if not variants:
            continue
        table = TABLE.get(model, {})
        paper_sisa = table.get("sisa", table.get("sisa_test"))
        best = max(variants, key=means.__getitem__)
        value = means[best]
        if (model, epochs) == ("vgg11", PAPER_EPOCHS):
            here = f"{display_name(best)} {value:.2f}"
            checks.append(Check(name, "SISA 91.25 %", here, value >= ENOUGH))
        for other in ("adam", "sgd"):
            if other in means and other in table:
                above = paper_sisa > table[other]
                paper = f"SISA is {'above' if above else 'below'} {display_name(other)}"
                here = f"{value:.2f} and {means[other]:.2f} after {epochs} epochs"
                checks.append(Check(name, paper, here, (value > means[other]) == above))
    return checks


def draw(results: Results, path: Path) -> None:
    """Draw training loss and test accuracy, a row per model and length."""
    rows = [
        [
            Panel(
                *(f"{MODELS[model]}, {epochs} epochs", "training loss", runs, "epoch", "loss"),
                log=True,
            ),
            Panel(
                *(f"{MODELS[model]}, {epochs} epochs", "test accuracy, %", runs),
                *("epoch", "test_accuracy", 100.0),
                percent=True,
            ),
        ]
        for (model, epochs), runs in panels(results).items()
    ]
    curves.draw(rows, path, "vision", "epoch")


def report(results: Results) -> str:
    """Return all tables."""
    parts = []
    data = "ImageNet" if results["config"]["dataset"] == "imagenet" else "CIFAR-10"
    found = panels(results)
    for (model, epochs), runs in found.items():
        digits = next(iter(runs.values()))[0]["digits"]
        table = {} if digits else TABLE.get(model, {})
        head = f"**{MODELS[model]}**, {'digits' if digits else data}, {epochs} epochs"
        parts += [head, accuracies(model, table, runs)]
        parts += list_not_run({name: f"{value:.2f}" for name, value in table.items()}, runs)
    planned = dict.fromkeys(task["model"] for task in results["config"]["tasks"])
    for model in planned if not results["config"]["limit"] else ():
        if model in TABLE and not any(model == done for done, _ in found):
            texts = {name: f"{value:.2f}" for name, value in TABLE[model].items()}
            parts += [f"**{MODELS[model]}**", *list_not_run(texts, ())]
    return compose_report(results, parts, check(results))


def accuracies(model: str, table: dict[str, float], by_optimizer: dict[str, list[Run]]) -> str:
    lines, seconds = [], epoch_times(by_optimizer)
    for label, runs in by_optimizer.items():
        paper = table.get(label.removesuffix("_steps"))
        lines.append(
            [
                *(display_name(label), describe_settings(runs[0]["settings"]), len(runs)),
                mean_sd(run["last"] for run in runs),
                mean_sd(run["best"] for run in runs),
                "-" if paper is None else f"{paper:.2f}",
                mean_sd((run["loss"][-1] for run in runs if run["loss"][-1] is not None), 4),
                seconds[label],
            ]
        )
    heads = ["", "settings", "seeds", "test accuracy, %", "best epoch's"]
    heads += [f"paper, {EPOCHS[model]} epochs"] if model in EPOCHS else ["paper"]
    return markdown([*heads, "training loss", "seconds per epoch, shared"], lines)
