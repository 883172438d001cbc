"""A progress bar on the terminal, drawn by rich if that is installed."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]

SHOWN = ("loss", "accuracy")


@contextmanager
def progress_bar(
    rounds: int, done: int, wanted: bool
) -> Iterator[Callable[[dict[str, float]], None]]:
    """Yield a function that shows a row of a run; it does nothing without a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield lambda row: None
        return
    if importlib.util.find_spec("rich") is None:
        yield lambda row: print(f"\r\x1b[2K{_line(row, rounds)}", end="", file=sys.stderr)
        print(file=sys.stderr)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=rounds, completed=done)

        def show(row: dict[str, float]) -> None:
            bar.update(task, completed=row["round"], description=_numbers(row))

        yield show


def _line(row: dict[str, float], rounds: int) -> str:
    return f"{row['round']:.0f}/{rounds} {_numbers(row)}"


def _numbers(row: dict[str, float]) -> str:
    return "  ".join(f"{name} {row[name]:.4g}" for name in SHOWN if name in row)
