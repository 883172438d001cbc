"""What every recipe provides."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Check", "Line", "Recipe", "Results", "table"]

Line = dict[str, float]
"""What a run logs at one moment, by name."""

Results = dict[str, Any]
"""What is saved of all runs: config, checks and, under `"runs"`, the logged columns of each."""


@dataclass(frozen=True)
class Check:
    """A statement of the paper, and what was seen of it."""

    panel: str
    paper: str
    here: str
    holds: bool


@dataclass(frozen=True)
class Recipe:
    """An experiment of the paper.

    Attributes:
        title: what it is, in a line.
        presets: frozen configurations (dataclasses with a `seed`) by name; the first is the
            default.
        plan: the runs of a configuration: name -> settings, a dataclass.
        run: does one run and yields what to log.
        check: holds the results against the paper's statements.
        draw: draws the results into a file.
    """

    title: str
    presets: Mapping[str, Any]
    plan: Callable[[Any], Mapping[str, Any]]
    run: Callable[[Any, Any], Iterator[Line]]
    check: Callable[[Results], list[Check]]
    draw: Callable[[Results, Path], None]


def table(checks: list[Check]) -> str:
    """The checks as Markdown."""
    rows = ["| panel | the paper | here | holds |", "|---|---|---|---|"]
    rows += [
        f"| {check.panel} | {check.paper} | {check.here} | {'yes' if check.holds else '**no**'} |"
        for check in checks
    ]
    return "\n".join(rows)
