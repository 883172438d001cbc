"""What every recipe provides."""

import dataclasses
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Check", "Line", "Recipe", "Results", "table"]

Line = dict[str, float | None]
"""What a run logs at one moment, by name; None for a number that is not finite."""

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
        run: does one run and yields what to log. For `--jobs` a function of a module.
        check: holds the results against the paper's statements.
        draw: draws the results into a file.
        takes: which of the options `device`, `data`, `compile`, `checkpoints`, `samples` and
            `inception` there are, for `run` to take by keyword.
        ready: raises FileNotFoundError, before anything is run, if data for these settings is
            missing; takes the options too.
        lacks: why a run cannot be done on this machine, such as a library that is not installed, or
            None. It is left out then and counts as missing.
        depends: what of a configuration the runs depend on. A finished run is run again when this
            or its settings change; all of it, unless said otherwise.
        condense: what is saved of a run, from what was logged; everything, unless said otherwise.
        report: the results as Markdown, if there is more to them than the checks.
        partial: whether checks, picture and report can do with a part of the runs.
        length: lines that a run logs, from its settings, for an estimate of the time that is left;
            None where nobody knows.
        packages: whose versions the results depend on, besides torch and torchpisa.
        arguments: adds options of the recipe's own to its command.
        configure: returns a preset with these options, from the command's arguments, in place.
    """

    title: str
    presets: Mapping[str, Any]
    plan: Callable[[Any], Mapping[str, Any]]
    run: Callable[..., Iterator[Line]]
    check: Callable[[Results], list[Check]]
    draw: Callable[[Results, Path], None]
    takes: tuple[str, ...] = ()
    ready: Callable[..., None] = lambda settings, **options: None
    lacks: Callable[[Any], str | None] = lambda settings: None
    depends: Callable[[Any], dict[str, Any]] = dataclasses.asdict
    condense: Callable[[dict[str, Any]], dict[str, Any]] = dict
    report: Callable[[Results], str] | None = None
    partial: bool = False
    length: Callable[[Any], int] | None = None
    packages: tuple[str, ...] = ()
    arguments: Callable[[ArgumentParser], None] = lambda parser: None
    configure: Callable[[Any, Namespace], Any] = lambda config, args: config


def table(checks: list[Check], stated: str = "the paper") -> str:
    """The checks as Markdown.

    Args:
        checks: the checks.
        stated: who or what says what is checked.
    """
    rows = [f"| panel | {stated} | here | holds |", "|---|---|---|---|"]
    rows += [
        f"| {check.panel} | {check.paper} | {check.here} | {'yes' if check.holds else '**no**'} |"
        for check in checks
    ]
    return "\n".join(rows)
