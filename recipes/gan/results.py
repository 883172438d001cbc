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
from recipes.gan.config import KINDS
from recipes.recipe import Check, Results
from recipes.tables import markdown, mean_sd

__all__ = ["TABLE", "check", "condense", "draw", "report"]

TABLE = {
    "wgan": {
        "sisa": (85.07, 5.49),
        "adam": (95.06, 2.97),
        "rmsprop": (102.39, 7.05),
        "adabelief": (92.37, 11.13),
    },
    "wgan_gp": {
        "sisa": (53.34, 3.87),
        "adam": (71.38, 5.04),
        "rmsprop": (121.62, 22.79),
        "adabelief": (65.71, 3.36),
    },
}
"""The paper's distances on Inception's features after 100 epochs: mean and deviation of 5 runs."""

CURVES = ("epoch", "critic_loss", "generator_loss")


def condense(log: dict[str, Any]) -> Run:
    """Return the last distance, the seconds of an epoch and the curves."""
    column = next(name for name in log if name.startswith("fid_"))
    last = log[column][-1]
    return {
        **run_facts(log),
        "features": column.removeprefix("fid_"),
        "last": None if last is None else round(last, 3),
        **epoch_costs(log),
        "digits": bool(log["fallback"][-1]),
        "fid": log[column],
        **{name: log[name] for name in CURVES},
    }


def panels(results: Results) -> dict[tuple[str, str], dict[str, list[Run]]]:
    """Return runs by kind and feature network, and by optimizer."""
    return group_runs(results, lambda run: (run["settings"]["kind"], run["features"]))


def check(results: Results) -> list[Check]:
    """Compare the distances with the paper, where SISA's is the lowest.

    On a part of the images, check that the models learn.
    """
    if results["config"]["limit"]:
        return curves.check_column_falls(results, "fid", "distance")
    checks: list[Check] = []
    for (kind, features), runs in panels(results).items():
        others = ("adam", "rmsprop", "adabelief")
        checks += check_sisa_is_lowest(KINDS[kind], runs, "last", others, f", {features}")
    return checks


def draw(results: Results, path: Path) -> None:
    """Draw the distance over epochs, a panel per kind."""
    row = [
        Panel(KINDS[kind], f"FID, {features}", runs, "epoch", "fid")
        for (kind, features), runs in panels(results).items()
    ]
    curves.draw([row], path, "gan", "epoch")


def report(results: Results) -> str:
    """Return all tables."""
    parts = []
    for (kind, features), runs in panels(results).items():
        first = next(iter(runs.values()))[0]
        settings = first["settings"]
        data = "digits" if first["digits"] else "CIFAR-10"
        parts += [
            f"**{KINDS[kind]}**, {data} at {settings['pixels']} x {settings['pixels']} pixels, "
            f"{settings['epochs']} epochs: distance of {settings['last_images']:,} pictures on the "
            f"features of {features}",
            distances(kind, features, runs),
        ]
        if not first["digits"]:
            texts = {name: f"{mean:.2f} ± {sd:.2f}" for name, (mean, sd) in TABLE[kind].items()}
            parts += list_not_run(texts, runs)
    return compose_report(results, parts, check(results))


def distances(kind: str, features: str, by_optimizer: dict[str, list[Run]]) -> str:
    lines, seconds = [], epoch_times(by_optimizer)
    for label, runs in by_optimizer.items():
        paper = None if runs[0]["digits"] else TABLE[kind].get(label)
        lines.append(
            [
                *(display_name(label), describe_settings(runs[0]["settings"]), len(runs)),
                mean_sd(run["last"] for run in runs if run["last"] is not None),
                "-" if paper is None else f"{paper[0]:.2f} ± {paper[1]:.2f}",
                seconds[label],
            ]
        )
    heads = ["", "settings", "seeds", f"FID ({features})", "paper, 100 epochs (Inception)"]
    return markdown([*heads, "seconds per epoch, shared"], lines)
