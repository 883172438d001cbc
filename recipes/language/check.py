"""What is expected of the runs, held against them. A statement about missing runs is not made."""

import math
from collections.abc import Iterator
from typing import Any

from recipes.language import reference
from recipes.language.model import SIZES
from recipes.language.results import best, by_optimizer, loss_at, muon, title
from recipes.recipe import Check, Results

__all__ = ["check"]

OURS = ("nsisa", "misa")  # that are meant to do what Muon does
LEARNS = 0.6  # of the loss of a guess: what shows that the preset `quick` works


def check(results: Results) -> list[Check]:
    """All statements about what there is."""
    runs = list(results["runs"].values())
    if results["config"]["model"] != "gpt2":
        return list(learns(results, runs))
    return [*pilot(runs), *beside_muon(results)]


def learns(results: Results, runs: list[dict[str, Any]]) -> Iterator[Check]:
    goal = LEARNS * math.log(SIZES[results["config"]["model"]].vocabulary)
    for own in by_optimizer(results).values():
        chosen = best(own)
        yield Check(title(chosen), f"ends below {goal:.2f}", said(chosen), below(chosen, goal))


def pilot(runs: list[dict[str, Any]]) -> Iterator[Check]:
    """The pilot's losses are reached again."""
    for each in reference.PILOT:
        matching = [run for run in runs if each.matches(run["settings"])]
        if matching:
            chosen = best(matching)
            half = f" ({each.half:.3f} half-way)" if each.half else ""
            goal = f"{each.loss:.3f}{half}, or at most {reference.TOLERANCE} above"
            yield Check(
                title(chosen),
                f"(pilot) {each.title}: {goal}",
                f"{said(chosen)} ({halves(chosen)} half-way), {chosen['settings']['label']}",
                below(chosen, each.loss + reference.TOLERANCE),
            )


def beside_muon(results: Results) -> Iterator[Check]:
    """At equal tokens at or below Muon's loss, with its state, at most 1.3 x its time."""
    for (name, batches), own in by_optimizer(results).items():
        chosen, against = best(own), muon(results, batches)
        if name not in OURS or batches > 1 or against is None or against["last"] is None:
            continue
        yield Check(
            title(chosen),
            f"at or below Muon's {against['last']:.3f} at equal tokens",
            f"{said(chosen)}; half-way {halves(chosen)}, Muon {halves(against)}",
            below(chosen, against["last"]),
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
                f"a step of the optimizer takes at most {reference.STEP_TIME} x Muon's",
                f"{ratio:.2f} x ({chosen['optimizer_ms']} and {against['optimizer_ms']} ms)",
                ratio <= reference.STEP_TIME,
            )


def same_machine(*runs: dict[str, Any]) -> bool:
    """Times compare on one kind of GPU only."""
    kinds = {run["hardware"]["gpu"] for run in runs}
    return len(kinds) == 1 and None not in kinds and all(run["optimizer_ms"] for run in runs)


def halves(run: dict[str, Any]) -> str:
    loss = loss_at(run, run["settings"]["steps"] // 2)
    return "-" if loss is None else f"{loss:.3f}"


def said(run: dict[str, Any]) -> str:
    return "diverged" if run["last"] is None else f"{run['last']:.3f}"


def below(run: dict[str, Any], goal: float) -> bool:
    return run["last"] is not None and run["last"] <= goal
