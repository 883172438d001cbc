"""Condensed runs, and runs by optimizer."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from recipes.grid import format_value
from recipes.language.model import count_parameters
from recipes.language.optimizers import BETAS, TITLES, WARM_DOWN
from recipes.recipe import Results

__all__ = ["best", "by_optimizer", "condense", "describe", "loss_at", "muon", "title"]

CURVES = ("step", "tokens", "loss", "val_loss")


def condense(log: dict[str, Any]) -> dict[str, Any]:
    """Return the last loss, times, state and the curves.

    Times are medians over the lines of the log after the first two: the first steps compile, and
    build the state.
    """
    settled = slice(min(3, len(log["step"]) - 1), None)
    times = [value for value in log["optimizer_ms"][settled] if value is not None]
    return {
        **{name: log[name] for name in ("settings", "versions", "hardware", "seconds")},
        "parameters": count_parameters(log["settings"]["model"]),
        "diverged": bool(log["diverged"][-1]),
        "last": None if log["diverged"][-1] else round(log["val_loss"][-1], 4),
        "test": last_test_loss(log),
        "optimizer_ms": round(statistics.median(times), 3) if times else None,
        "step_ms": round(step_ms(log), 2),
        "state_bytes": log["state_bytes"][-1],
        "peak_bytes": log.get("peak_bytes", [None])[-1],
        "elapsed": log["elapsed"][-1],
        **{name: log[name] for name in CURVES},
    }


def last_test_loss(log: dict[str, Any]) -> float | None:
    """Return the loss on the tokens to report on; None if it diverged or was not computed."""
    value = log.get("test_loss", [None])[-1]
    return None if log["diverged"][-1] or value is None else round(value, 4)


def step_ms(log: dict[str, Any]) -> float:
    """Return the milliseconds of a whole step."""
    first = min(2, len(log["step"]) - 2)
    steps = log["step"][-1] - log["step"][first]
    return 1000 * (log["elapsed"][-1] - log["elapsed"][first]) / max(1, steps)


def loss_at(run: dict[str, Any], step: int) -> float | None:
    """Return the validation loss after a step, or None without a validation."""
    return dict(zip(run["step"], run["val_loss"], strict=True)).get(step)


def by_optimizer(results: Results) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return runs by optimizer and number of batches, in the order of the plan."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in results["runs"].values():
        settings = run["settings"]
        groups.setdefault((settings["choice"]["name"], settings["batches"]), []).append(run)
    return groups


def best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the lowest last loss."""
    return min(runs, key=lambda run: math.inf if run["last"] is None else run["last"])


def muon(results: Results, batches: int) -> dict[str, Any] | None:
    """Return Muon's best run, which others are compared with.

    That with the same number of batches, or else any: with more batches Muon averages over the same
    data, so only rounding differs.
    """
    groups = by_optimizer(results)
    runs = groups.get(("muon", batches)) or groups.get(("muon", 1))
    return best(runs) if runs else None


def title(run: dict[str, Any]) -> str:
    """Return a title such as "NSISA, m = 4"."""
    settings = run["settings"]
    m = settings["batches"]
    return TITLES[settings["choice"]["name"]] + (f", m = {m}" if m > 1 else "")


def describe(settings: dict[str, Any]) -> str:
    """Return numerical options, switches, schedule and the optimizer of the rest as text."""
    choice = settings["choice"]
    words = []
    for name, value in choice["options"].items():
        if isinstance(value, bool):
            words += [name] if value else []
        elif isinstance(value, Mapping):
            numbers = [f"{k} {format_value(v)}" for k, v in value.items() if k != "stage"]
            words.append(f"{value['stage']} ({', '.join(numbers)})")
        elif isinstance(value, int | float | str) and not (name == "weight_decay" and not value):
            words.append(f"{name} {format_value(value)}")
    betas = choice["options"].get("betas")
    if betas and tuple(betas) != BETAS:
        words.append(f"betas {betas[0]:g} and {betas[1]:g}")
    if choice["name"] not in ("adamw", "sisa", "adam_mini"):
        rests = {"adamw": f"AdamW {choice['rest_lr']:g}", "misa": "MISA", "own": "its own rule"}
        spared = " without decay" if choice.get("rest_decay") == 0 else ""
        words.append(f"rest by {rests[choice['rest']]}{spared}")
    if choice["warm_up"]:
        words.append(f"warm-up {choice['warm_up']}")
    if choice["warm_down"] != WARM_DOWN:
        words.append(f"warm-down {choice['warm_down']:g}")
    return ", ".join(words)
