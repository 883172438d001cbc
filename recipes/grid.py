"""Grids of settings for the commands that tune, and settings as text."""

import argparse
from collections.abc import Mapping, Sequence

__all__ = ["Value", "format_value", "parse_grid", "run_label"]

Value = float | str
"""Of a setting: a number, or the name of a choice."""


def parse_grid(words: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """Parse words such as `name=1,2,3`."""
    grid = {}
    for word in words:
        name, _, values = word.partition("=")
        try:
            grid[name] = tuple(parse_value(value) for value in values.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"--grid must look like sigma=1,2,5, got {word!r}"
            ) from None
    return grid


def parse_value(word: str) -> Value:
    try:
        return float(word)
    except ValueError:
        if word.isidentifier():
            return word
        raise


def format_value(value: object) -> str:
    """Return a value as it stands in tables."""
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def run_label(settings: Mapping[str, object]) -> str:
    """Return settings as they stand in names of runs."""
    return "_".join(
        f"{name}{'_' if isinstance(value, str) else ''}{format_value(value)}"
        for name, value in settings.items()
    )
