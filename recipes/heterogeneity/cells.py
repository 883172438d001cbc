"""Results by cell of the table and by algorithm, over seeds."""

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from recipes.heterogeneity.config import ALGORITHMS, DATASETS
from recipes.recipe import Results

__all__ = ["Cell", "Spread", "Summary", "cell_title", "cells"]

Cell = tuple[str, int]
"""Data set and labels per client."""


class Spread(NamedTuple):
    """Mean and, for several seeds, standard deviation."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        several = len(values) > 1
        return cls(statistics.fmean(values), statistics.stdev(values) if several else None)

    def __str__(self) -> str:
        tail = "" if self.deviation is None else f" ± {self.deviation:.2f}"
        return f"{self.mean:.2f}{tail}"


@dataclass(frozen=True)
class Summary:
    """The runs of an algorithm in a cell, one per seed, as `condense` returned them."""

    runs: tuple[dict[str, Any], ...]

    def spread(self, column: str) -> Spread:
        """Return mean and deviation of a number that every run has, such as `best` or `last`."""
        return Spread.of([run[column] for run in self.runs])

    @property
    def best(self) -> Spread:
        """Return the accuracy in the best round."""
        return self.spread("best")

    @property
    def last(self) -> Spread:
        """Return the accuracy in the last round."""
        return self.spread("last")

    @property
    def samples_per_round(self) -> float:
        """Return the gradients of single samples in a round, of all clients together."""
        return statistics.fmean(run["samples"] / run["round"][-1] for run in self.runs)

    def rounds_within(self, samples: float) -> int:
        """Return the last saved round that costs at most this many sample gradients."""
        run = max(self.runs, key=lambda run: len(run["round"]))
        total, end = run["samples"], run["round"][-1]
        return max(number for number in run["round"] if number * total <= samples * end)

    def accuracy_at(self, number: int) -> Spread:
        """Return the accuracy after a round, or after the last one saved before it."""
        return Spread.of([latest(run, number) for run in self.runs])

    @property
    def reached(self) -> list[int]:
        """Return the rounds up to the paper's accuracy of SISA, for the seeds that reach it."""
        return [run["reached"] for run in self.runs if run["reached"] is not None]

    def curve(self) -> tuple[list[int], list[float]]:
        """Return the mean accuracy by round; a run that diverged stays where it ended."""
        rounds = max((run["round"] for run in self.runs), key=len)
        return rounds, [self.accuracy_at(number).mean for number in rounds]


def latest(run: dict[str, Any], number: int) -> float:
    """Return the accuracy in the last saved round up to `number`."""
    # Curves of unequal lengths were thinned to other rounds.
    return run["accuracy"][max(0, bisect_right(run["round"], number) - 1)]


def cells(results: Results) -> dict[Cell, dict[str, Summary]]:
    """Return the runs by cell and by algorithm, in the order of the plan."""
    table: dict[Cell, dict[str, list[dict[str, Any]]]] = {}
    for cell in results["config"]["cells"]:
        table[tuple(cell)] = {name: [] for name in ALGORITHMS}
    for run in results["runs"].values():
        settings = run["settings"]
        table[settings["dataset"], settings["labels"]][settings["algorithm"]].append(run)
    return {
        cell: {name: Summary(tuple(runs)) for name, runs in row.items() if runs}
        for cell, row in table.items()
        if any(row.values())
    }


def cell_title(cell: Cell) -> str:
    """Return a title such as "MNIST, 1 label"."""
    dataset, labels = cell
    return f"{DATASETS[dataset]}, {labels} label{'s' if labels > 1 else ''}"
