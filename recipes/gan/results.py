"""What is kept of a run, statements, picture and tables."""

import statistics
from pathlib import Path
from typing import Any

from recipes import curves
from recipes.curves import Panel, Run, describe, group, markdown, mean_sd, title
from recipes.gan.config import KINDS
from recipes.recipe import Check, Results, table

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
    """The last distance, seconds of an epoch, and the curves."""
    times = [b - a for a, b in zip(log["elapsed"], log["elapsed"][1:], strict=False)]
    column = next(name for name in log if name.startswith("fid_"))
    last = log[column][-1]
    return {
        **{name: log[name] for name in ("settings", "versions", "hardware", "seconds")},
        "diverged": bool(log["diverged"][-1]),
        "features": column.removeprefix("fid_"),
        "last": None if last is None else round(last, 3),
        "epoch_seconds": round(statistics.median(times or log["elapsed"]), 3),
        "state_bytes": log["state_bytes"][-1],
        "digits": bool(log["fallback"][-1]),
        "fid": log[column],
        **{name: log[name] for name in CURVES},
    }


def panels(results: Results) -> dict[tuple[str, str], dict[str, list[Run]]]:
    """Runs by kind and feature network, and by optimizer."""
    return group(results, lambda run: (run["settings"]["kind"], run["features"]))


def mean(runs: list[Run]) -> float:
    """Of the last distances; infinite if a run diverged."""
    values = [run["last"] for run in runs]
    return float("inf") if None in values else statistics.fmean(values)


def check(results: Results) -> list[Check]:
    """Hold the distances against what the paper says of them: SISA's is the lowest. Of a part of
    the images, that the models learn."""
    if results["config"]["limit"]:
        return curves.learns(results, "fid", "distance")
    checks = []
    for (kind, features), found in panels(results).items():
        for other in ("adam", "rmsprop", "adabelief"):
            if "sisa" in found and other in found:
                here = f"{mean(found['sisa']):.2f} and {mean(found[other]):.2f}, {features}"
                holds = mean(found["sisa"]) < mean(found[other])
                checks.append(Check(KINDS[kind], f"SISA is below {title(other)}", here, holds))
    return checks


def draw(results: Results, path: Path) -> None:
    """The distance over epochs, a panel per kind."""
    row = [
        Panel(KINDS[kind], f"FID, {features}", found, "epoch", "fid")
        for (kind, features), found in panels(results).items()
    ]
    curves.draw([row], path, "gan", "epoch")


def report(results: Results) -> str:
    """All tables."""
    parts = []
    for (kind, features), found in panels(results).items():
        first = next(iter(found.values()))[0]
        settings = first["settings"]
        data = "digits" if first["digits"] else "CIFAR-10"
        parts += [
            f"**{KINDS[kind]}**, {data} at {settings['pixels']} x {settings['pixels']} pixels, "
            f"{settings['epochs']} epochs: distance of {settings['last_images']:,} pictures on the "
            f"features of {features}",
            distances(kind, features, found),
        ]
    statements = check(results)
    if statements:
        stated = "expected" if results["config"]["limit"] else "the paper"
        parts += ["**Statements**:", table(statements, stated)]
    return "\n\n".join([*parts, curves.made_with(results)]) + "\n"


def distances(kind: str, features: str, found: dict[str, list[Run]]) -> str:
    lines = []
    for label, runs in found.items():
        paper = None if runs[0]["digits"] else TABLE[kind].get(label)
        lines.append(
            [
                *(title(label), describe(runs[0]["settings"]), len(runs)),
                mean_sd(run["last"] for run in runs if run["last"] is not None),
                "-" if paper is None else f"{paper[0]:.2f} ± {paper[1]:.2f}",
                f"{statistics.median(run['epoch_seconds'] for run in runs):.2f}",
            ]
        )
    heads = ["", "settings", "seeds", f"FID ({features})", "paper, 100 epochs (Inception)"]
    return markdown([*heads, "seconds per epoch, shared"], lines)
