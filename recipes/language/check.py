"""Expectations, compared with the runs; nothing is said about missing runs."""

import math
from collections.abc import Iterator
from typing import Any

from recipes.language.model import sizes_of
from recipes.language.results import best, by_optimizer, loss_at, muon, title
from recipes.recipe import Check, Results

__all__ = ["check"]

MUON_LIKE = ("nsisa", "misa")  # optimizers that are meant to replace Muon
QUICK_SHARE = 0.6  # of the loss of a guess, below which the preset `quick` must end
STEP_TIME = 1.3  # times Muon's, what a step of ours may take at 124M on an H200


def check(results: Results) -> list[Check]:
    """Check all statements for which there are runs."""
    if results["config"]["model"] != "gpt2":
        return list(check_learning(results))
    return list(check_beside_muon(results))


def check_learning(results: Results) -> Iterator[Check]:
    goal = QUICK_SHARE * math.log(sizes_of(results["config"]["model"]).vocabulary)
    for trials in by_optimizer(results).values():
        best_run = best(trials)
        yield Check(
            title(best_run),
            f"ends below {goal:.2f}",
            format_loss(best_run),
            ends_below(best_run, goal),
        )


def check_beside_muon(results: Results) -> Iterator[Check]:
    """Check loss, state and time of the best trial beside those of Muon's best trial."""
    for (name, batches), trials in by_optimizer(results).items():
        chosen, against = best(trials), muon(results, batches)
        if name not in MUON_LIKE or batches > 1 or against is None or against["last"] is None:
            continue
        yield Check(
            title(chosen),
            f"best trial at or below Muon's best, {against['last']:.3f}, at equal tokens",
            f"{format_loss(chosen)} ({chosen['settings']['label']}; Muon's is "
            f"{against['settings']['label']})",
            ends_below(chosen, against["last"]),
        )
        if name == "misa":
            yield Check(
                title(chosen),
                "at most 1 % more state than Muon",
                f"{chosen['state_bytes']:,} bytes, Muon {against['state_bytes']:,}",
                chosen["state_bytes"] <= 1.01 * against["state_bytes"],
            )
        if same_machine(chosen, against):
            ratio = chosen["optimizer_ms"] / against["optimizer_ms"]
            yield Check(
                title(chosen),
                f"a step of the optimizer takes at most {STEP_TIME} x Muon's",
                f"{ratio:.2f} x ({chosen['optimizer_ms']} and {against['optimizer_ms']} ms)",
                ratio <= STEP_TIME,
            )


def same_machine(*runs: dict[str, Any]) -> bool:
    """Return True if the runs were on one kind of GPU, so that their times compare."""
    kinds = {run["hardware"]["gpu"] for run in runs}
    return len(kinds) == 1 and None not in kinds and all(run["optimizer_ms"] for run in runs)


def format_half_way(run: dict[str, Any]) -> str:
    loss = loss_at(run, run["settings"]["steps"] // 2)
    return "-" if loss is None else f"{loss:.3f}"


def format_loss(run: dict[str, Any]) -> str:
    return "diverged" if run["last"] is None else f"{run['last']:.3f}"


def ends_below(run: dict[str, Any], goal: float) -> bool:
    return run["last"] is not None and run["last"] <= goal
