"""The interface of a recipe."""

import dataclasses
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Check", "Line", "Recipe", "Results", "read_results", "shared_settings"]

Line = dict[str, float | None]
"""One line of a run's log: numbers by name, None for one that is not finite."""

Results = dict[str, Any]
"""The saved results of all runs: config, checks and, under `"runs"`, the columns of each log."""


@dataclass(frozen=True)
class Check:
    """A statement of the paper, our result, and whether the statement holds."""

    panel: str
    paper: str
    here: str
    holds: bool


@dataclass(frozen=True)
class Recipe:
    """An experiment of the paper.

    Attributes:
        title: one line about it.
        presets: frozen configurations (dataclasses with a `seed`) by name; the first is the
            default.
        plan: returns the runs of a configuration by name, each with its settings, a dataclass.
        run: does one run and yields the lines of its log. With `--jobs` it must be a function of a
            module.
        check: compares the results with the paper's statements.
        draw: draws the results into a file.
        options: those of `device`, `data`, `compile`, `checkpoints`, `save_weights`, `samples` and
            `inception` that `run` takes by keyword.
        require_data: raises FileNotFoundError, before anything is run, if data for these settings
            is missing; takes the options too.
        missing_requirement: returns why a run cannot be done on this machine, such as a library
            that is not installed, or None. Such a run is left out and counts as missing.
        run_key: returns what runs depend on besides their settings, from a configuration. A
            finished run is run again when this or its settings change.
        condense: returns what is saved of a run, from its log; by default everything.
        report: returns the results as Markdown, if there is more to them than the checks.
        partial: whether checks, picture and report can do with a part of the runs.
        length: returns the number of lines that a run logs, from its settings, to estimate the time
            that is left; None if it is not known.
        packages: packages, besides torch and torchpisa, whose versions the results depend on.
        add_arguments: adds options of the recipe to its command.
        configure: returns a preset, changed by these options.
        ranks: whether `run` trains with all processes that torchrun has started.
        commands: other commands by name, each called with the words that follow it:
            `python -m recipes RECIPE NAME ...`.
    """

    title: str
    presets: Mapping[str, Any]
    plan: Callable[[Any], Mapping[str, Any]]
    run: Callable[..., Iterator[Line]]
    check: Callable[[Results], list[Check]]
    draw: Callable[[Results, Path], None]
    options: tuple[str, ...] = ()
    require_data: Callable[..., None] = lambda settings, **options: None
    missing_requirement: Callable[[Any], str | None] = lambda settings: None
    run_key: Callable[[Any], dict[str, Any]] = lambda config: {}
    condense: Callable[[dict[str, Any]], dict[str, Any]] = dict
    report: Callable[[Results], str] | None = None
    partial: bool = True
    length: Callable[[Any], int] | None = None
    packages: tuple[str, ...] = ()
    add_arguments: Callable[[ArgumentParser], None] = lambda parser: None
    configure: Callable[[Any, Namespace], Any] = lambda config, args: config
    ranks: bool = False
    commands: Mapping[str, Callable[[Sequence[str]], None]] = field(default_factory=dict)


def shared_settings(config: Any, settings: type[Any]) -> dict[str, Any]:
    """Return the fields that a configuration shares with the settings of its runs."""
    names = {entry.name for entry in dataclasses.fields(config)}
    fields = (entry.name for entry in dataclasses.fields(settings))
    return {name: getattr(config, name) for name in fields if name in names}


def read_results(option: str, file: Path, stem: str) -> Results:
    """Return the results that a recipe has saved.

    Args:
        option: the option that names the file, for errors.
        file: the file.
        stem: the name of the recipe, as files have it.

    Raises:
        ValueError: it is not such a file, or that of another recipe.
    """
    problem = f"{option} must be a file that the recipe {stem} wrote, got {file}"
    try:
        results: Results = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{problem}: {error}") from None
    if not isinstance(results, dict) or not isinstance(results.get("runs"), dict):
        raise ValueError(f"{problem}, which has no runs")
    if results.get("recipe", stem) != stem:
        raise ValueError(f"{problem}, which is of {results['recipe']}")
    if not isinstance(results.get("config"), dict):
        raise ValueError(f"{problem}, which has no config")
    return results
