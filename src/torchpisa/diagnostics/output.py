"""Rows of numbers, and the files that they are written to."""

import csv
import math
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

from torchpisa.optim.report import Range

__all__ = ["COLUMNS", "CsvFile", "Row", "RowContext", "TensorBoardWriter", "make_row"]

Row = dict[str, float]

COLUMNS = (
    "iteration",
    "primal_residual",
    "primal_relative",
    "dual_residual",
    "dual_relative",
    "weight_norm",
    "dual_norm",
    "spread",
    *(f"{name}_{end}" for name in ("step", "first_step", "momentum") for end in Range._fields),
    "sigma_share",
    "absent",
)


class RowContext(NamedTuple):
    """The part of a measurement that the host knows.

    Attributes:
        iteration: rounds done.
        nodes: batches on all ranks together.
        ranks: ranks of the process group.
        shards: processes that hold parts of one replica.
        dual_kept: whether no dual_decay is 0, so that the duals tell what a round did.
        sizes: elements by parameter group.
    """

    iteration: int
    nodes: int
    ranks: int
    shards: int
    dual_kept: bool
    sizes: Sequence[int]


def make_row(values: Sequence[float], context: RowContext) -> Row:
    """Return the row for a vector of `measure`, without the entries that are not defined."""
    primal, w, dual, duals, spread, dominated, counted, absent, *rest = values
    ranges, totals_and_lrs = rest[:6], rest[6:]
    weight_norm, dual_norm = math.sqrt(w / context.ranks), math.sqrt(duals)
    row: Row = {"iteration": context.iteration}
    if context.dual_kept:
        row["primal_residual"] = math.sqrt(primal)
        row["primal_relative"] = _ratio(math.sqrt(primal), weight_norm)
    row["dual_residual"] = math.sqrt(dual)
    row["dual_relative"] = _ratio(math.sqrt(dual), dual_norm)
    row["weight_norm"] = weight_norm
    row["dual_norm"] = dual_norm
    if context.nodes > 1:
        row["spread"] = _ratio(math.sqrt(spread), dual_norm)
    count = len(context.sizes)
    totals, lrs = totals_and_lrs[:count], totals_and_lrs[count:]
    steps = [lr / total for lr, total in zip(lrs, totals, strict=True)]
    row |= _range("step", *_over_groups(steps, context.sizes))
    if counted:
        for number, name in enumerate(("first_step", "momentum")):
            row |= _range(name, *ranges[number::2])
        row["sigma_share"] = dominated / counted
    row["absent"] = round(absent / context.shards)
    return row


def _ratio(value: float, norm: float) -> float:
    if norm:
        return value / norm
    return math.inf if value else 0.0


def _range(name: str, *ends: float) -> Row:
    return {f"{name}_{end}": value for end, value in zip(Range._fields, ends, strict=True)}


def _over_groups(values: Sequence[float], sizes: Sequence[int]) -> Range:
    """Return the range of a value by parameter group, weighted by the groups' sizes."""
    pairs = sorted((value, size) for value, size in zip(values, sizes, strict=True) if size)
    reached = accumulate(size for _, size in pairs)
    half = sum(sizes) / 2
    median = next(value for (value, _), sum_ in zip(pairs, reached, strict=True) if sum_ >= half)
    return Range(pairs[0][0], median, pairs[-1][0])


class CsvFile:
    """A CSV file that rows are appended to.

    It is opened for every row, so that a killed process leaves all of its rows and nothing has to
    be closed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"csv must be a path, got {path!r}")
        self._path = Path(path).absolute()
        if self._path.is_dir() or not self._path.parent.is_dir():
            raise ValueError(f"csv must be a file in a folder that exists, got {str(path)!r}")
        header = (",".join(COLUMNS) + "\n").encode()
        content = self._path.read_bytes() if self._path.exists() else b""
        # A killed process may have left the beginning of a line.
        complete = content[: content.rfind(b"\n") + 1]
        if not (complete or content).startswith(header[: len(complete or content)]):
            first = content.partition(b"\n")[0].decode(errors="replace")
            raise ValueError(
                "csv must be a new file or one that Diagnostics has begun, got "
                f"{str(path)!r}, which begins with {first[:80]!r}"
            )
        if complete != content or not complete:
            self._path.write_bytes(complete or header)

    def write(self, row: Row) -> None:
        """Append a row."""
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)


class ScalarWriter(Protocol):
    """A writer for TensorBoard, such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Write one number."""


class TensorBoardWriter:
    """A writer that receives every number of a row."""

    def __init__(self, writer: ScalarWriter) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise ValueError(
                "tensorboard must be a writer with add_scalar(tag, value, step), such as "
                f"torch.utils.tensorboard.SummaryWriter(), got {writer!r}"
            )
        self._writer = writer

    def write(self, row: Row) -> None:
        """Write a row, under the tags `torchpisa/...`."""
        for name, value in row.items():
            if name != "iteration":
                self._writer.add_scalar(f"torchpisa/{name}", value, int(row["iteration"]))
