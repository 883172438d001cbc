"""Markdown tables and lines of the reports."""

import statistics
from collections.abc import Iterable, Sequence

from recipes.recipe import Check, Results

__all__ = ["checks_table", "count_runs", "markdown", "mean_sd", "provenance"]


def markdown(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def checks_table(checks: Iterable[Check], stated_by: str = "the paper") -> str:
    """Return the checks as a Markdown table.

    Args:
        checks: the checks.
        stated_by: head of the column of statements.
    """
    rows = [f"| panel | {stated_by} | here | holds |", "|---|---|---|---|"]
    rows += [
        f"| {check.panel} | {check.paper} | {check.here} | {'yes' if check.holds else '**no**'} |"
        for check in checks
    ]
    return "\n".join(rows)


def mean_sd(values: Iterable[float], digits: int = 2) -> str:
    """Return mean and standard deviation as text: of one value the mean, of none a dash."""
    numbers = list(values)
    if not numbers:
        return "-"
    mean = f"{statistics.fmean(numbers):.{digits}f}"
    return f"{mean} ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else mean


def count_runs(results: Results) -> str:
    """Return the number of runs as text, such as "3 of 4 runs"."""
    done, missing = len(results["runs"]), len(results.get("missing", []))
    return f"{done} of {done + missing} runs" if missing else f"{done} runs"


def provenance(results: Results, remark: str = "") -> str:
    """Return the line on how many runs there were, how long they took, and on what."""
    runs = list(results["runs"].values())
    devices = dict.fromkeys(run["hardware"]["gpu"] or run["hardware"]["cpu"] for run in runs)
    versions = dict.fromkeys(run["versions"]["torch"] for run in runs)
    minutes = sum(run["seconds"] for run in runs) / 60
    return (
        f"{count_runs(results)}, {minutes:.0f} minutes if added up{remark}; "
        f"{', '.join(devices)}, torch {', '.join(versions)}."
    )
