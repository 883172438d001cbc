"""Tables: addresses and sizes of tensors, by which one launch of a kernel steps many parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpisa.kernels import newton_schulz

__all__ = ["BLOCK", "KIND", "SIZE", "Kind", "Launch", "Matrices", "Row", "build", "refresh"]

# Elements that one program of a kernel handles; the fastest of those tried on an H200.
BLOCK = 1024


class Kind(NamedTuple):
    """The properties that the tensors of one launch share."""

    device: torch.device
    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    fresh: bool


# Addresses of parameter, gradient, dual, the preconditioner's state, pending sum, step counter,
# sigma and level, 0 for those that a kernel does not need; number of elements; the fields of
# `Kind`. A plain tuple, because each step makes and compares one per parameter.
Row = tuple[Any, ...]
ADDRESSES = slice(0, 8)
SIZE = 8
KIND = slice(9, None)


class Matrices(NamedTuple):
    """Rows and columns of the matrices to orthogonalise, and bytes of a number in the products."""

    shapes: Sequence[tuple[int, int]]
    itemsize: int


@dataclass
class Launch:
    """The parameters of one kind, and the tensors that describe them to the kernels.

    Attributes:
        kind: the properties that the parameters share.
        order: the indexes of their rows in the plan.
        members: the indexes of their members in the job; a member may have several rows.
        blocks: the number of blocks, which is that of programs.
        table: a row of addresses, size and first block for each.
        tensor_of: the row of each block.
        first_block: the first block of each row and, at the end, the number of blocks.
        nonfinite: a flag per row, set where a gradient is not finite.
        seen: host memory for a copy of the flags.
        steps: the step counters of the parameters, or one tensor of which they are the entries.
        aligned: True if all addresses are multiples of 16.
        chunks: for matrices, the batches that are orthogonalised together.
        tall: for matrices, a flag per row: more rows than columns.
    """

    kind: Kind
    order: list[int]
    members: list[int]
    blocks: int
    table: Tensor
    tensor_of: Tensor
    first_block: Tensor
    nonfinite: Tensor
    seen: Tensor
    aligned: bool
    steps: list[Tensor] = field(default_factory=list)
    chunks: list[newton_schulz.Chunk] = field(default_factory=list)
    tall: Tensor | None = None

    @cached_property
    def of_blocks(self) -> tuple[Tensor, Tensor]:
        """Memory for two numbers per block, which a step overwrites."""
        return self._memory(self.blocks)

    @cached_property
    def of_rows(self) -> tuple[Tensor, Tensor]:
        """Memory for two numbers per row, which a step overwrites."""
        return self._memory(len(self.order))

    def _memory(self, count: int) -> tuple[Tensor, Tensor]:
        one, other = torch.empty(2, count, dtype=torch.float32, device=self.kind.device)
        return one, other


def build(rows: Sequence[Row], matrices: Matrices | None, captured: list[Tensor]) -> list[Launch]:
    """Return the launches for `rows`; `matrices` are put in the order of their chunks.

    While a CUDA graph is captured, the host memory that it will copy from at every replay is
    added to `captured`, which must live as long as the graph.
    """
    kinds: dict[Kind, list[int]] = {}
    for number, row in enumerate(rows):
        kinds.setdefault(Kind(*row[KIND]), []).append(number)
    launches = []
    for kind, order in kinds.items():
        chunks: list[newton_schulz.Chunk] = []
        if matrices is not None:
            shapes = [matrices.shapes[number] for number in order]
            chunks = newton_schulz.chunks(shapes, matrices.itemsize)
            order = [order[index] for chunk in chunks for index in chunk.indexes]
        launches.append(_launch(kind, order, rows, chunks, matrices, captured))
    return launches


def refresh(launch: Launch, rows: Sequence[Row]) -> None:
    """Write new addresses of tensors of the same sizes into the table."""
    values = _table_values(launch.order, rows)
    launch.aligned = _aligned(values)
    launch.table.copy_(_pinned(values, torch.int64, launch.kind.device), non_blocking=True)


def _launch(
    kind: Kind,
    order: list[int],
    rows: Sequence[Row],
    chunks: list[newton_schulz.Chunk],
    matrices: Matrices | None,
    captured: list[Tensor],
) -> Launch:
    # Not on the default device, which may be a GPU.
    cpu = torch.device("cpu")
    counts = torch.tensor([-(-rows[number][SIZE] // BLOCK) for number in order], device=cpu)
    first_block = torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def send(values: object, dtype: torch.dtype) -> Tensor:
        host = _pinned(values, dtype, kind.device)
        if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            captured.append(host)
        return host.to(kind.device, non_blocking=True)

    values = _table_values(order, rows)
    tall = None
    if matrices is not None:
        shapes = [matrices.shapes[number] for number in order]
        tall = send([rows > cols for rows, cols in shapes], torch.int32)
    return Launch(
        kind=kind,
        order=order,
        members=order,
        blocks=int(first_block[-1]),
        table=send(values, torch.int64),
        tensor_of=send(torch.arange(len(order), device=cpu).repeat_interleave(counts), torch.int32),
        first_block=send(first_block, torch.int32),
        nonfinite=torch.zeros(len(order), dtype=torch.int32, device=kind.device),
        seen=_pinned([0] * len(order), torch.int32, kind.device),
        aligned=_aligned(values),
        chunks=chunks,
        tall=tall,
    )


def _table_values(order: Sequence[int], rows: Sequence[Row]) -> list[list[int]]:
    """Return the table, with the columns of `kernels/triton/memory.py`."""
    values = []
    block = 0
    for number in order:
        row = rows[number]
        values.append([*row[ADDRESSES], row[SIZE], block])
        block += -(-row[SIZE] // BLOCK)
    return values


def _aligned(values: Sequence[Sequence[int]]) -> bool:
    """Return whether the addresses of all large tensors allow 16-byte accesses."""
    return all(address % 16 == 0 for row in values for address in row[:5])


def _pinned(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    host = torch.as_tensor(values, dtype=dtype, device="cpu")
    return host.pin_memory() if device.type == "cuda" else host
