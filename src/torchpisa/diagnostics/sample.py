"""Which coordinates are looked at: short runs at even distances, some of every tensor.

Runs, because memory is read in lines; at even distances, because that is one view per tensor, and
one call copies from many views; always the same, so that rows can be compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpisa.distributed import dtensor
from torchpisa.kernels import foreach
from torchpisa.kernels.job import real
from torchpisa.optim.pisa import PISA
from torchpisa.preconditioners import Preconditioner
from torchpisa.state_keys import state_key

__all__ = ["Layout", "Piece", "Section", "pieces"]

# Coordinates of the weights, and the same times the batches, each of which has its own dual.
_COORDINATES = 2**16
_NUMBERS = 2**18
# Two or four lines of a cache.
_RUN = 32


class Piece(NamedTuple):
    """What is looked at of a tensor of `size` numbers: runs of them, as they lie in memory."""

    size: int
    runs: int
    length: int
    start: int
    distance: int

    @property
    def whole(self) -> bool:
        """Whether that is everything."""
        return self.length == self.size

    @property
    def taken(self) -> int:
        """Numbers that are looked at."""
        return self.runs * self.length

    def of(self, tensor: Tensor) -> Tensor:
        """A view of them: one row per run, or flat if it is everything."""
        gap = 1
        if not tensor.is_contiguous():
            tensor = _flat(tensor)
            gap = tensor.stride(0)
        if self.whole:
            return tensor.reshape(-1)
        start = tensor.storage_offset() + gap * self.start
        return tensor.as_strided((self.runs, self.length), (gap * self.distance, gap), start)


def pieces(sizes: Sequence[int], coordinates: int) -> list[Piece]:
    """About so many coordinates of tensors of these sizes: by size, but one run at least."""
    total = sum(sizes)
    if total <= coordinates:
        return [Piece(size, 1, size, 0, 0) for size in sizes]
    length = max(1, min(_RUN, coordinates // len(sizes)))
    return [_piece(size, max(1, size * coordinates // (total * length)), length) for size in sizes]


def _piece(size: int, runs: int, length: int) -> Piece:
    if size <= runs * length:
        return Piece(size, 1, size, 0, 0)
    # A distance with a divisor in common with the rows' length would visit some columns only.
    widest = size // runs
    distance = next((d for d in range(widest, length, -1) if math.gcd(d, size) == 1), widest)
    start = (size - (runs - 1) * distance - length) // 2
    return Piece(size, runs, length, start, distance)


def _flat(tensor: Tensor) -> Tensor:
    """All numbers of `tensor` in the order of memory."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)


@dataclass(frozen=True)
class Section:
    """Parameters whose samples are computed with together; those seen whole come first.

    Attributes:
        params: the parameters.
        pieces: what is looked at of each, as far as it is held here.
        preconditioner: theirs.
        dual_decay: theirs.
        follows: whether their sigma follows their gradients.
        tensor_of: which of them each coordinate belongs to.
        part_of: which of the optimizer's parts.
        scale: how many coordinates of the model each stands for.
    """

    params: list[Tensor]
    pieces: list[Piece]
    preconditioner: Preconditioner
    dual_decay: float
    follows: bool
    tensor_of: Tensor
    part_of: Tensor
    scale: Tensor

    def gather(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """Samples of tensors that are laid out like the parameters, one row for each sequence."""
        parts = []
        for whole in (True, False):
            own = [piece for piece in self.pieces if piece.whole is whole]
            views = [
                piece.of(real(dtensor.local(tensor)))
                for row in rows
                for piece, tensor in zip(self.pieces, row, strict=True)
                if piece.whole is whole
            ]
            if own:
                count = sum(piece.taken for piece in own)
                parts.append(torch.cat(views).reshape(len(rows), count))
        sample = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return sample.to(self.scale.dtype)


class Layout:
    """The sample of all parameters that have state.

    Attributes:
        sections: the parameters, by what they have in common.
        home: the device where sections come together.
        shards: processes that hold parts of them.
        sizes: elements by part of the optimizer.
    """

    def __init__(self, optimizer: PISA) -> None:
        self._key, entries = _key(optimizer)
        sizes = [real(dtensor.local(param)).numel() for param, _ in entries]
        budget = min(_COORDINATES, max(1, _NUMBERS // optimizer.batches))
        found: dict[Any, list[tuple[Tensor, int, Piece]]] = {}
        for (param, number), (_, *kind), piece in zip(
            entries, self._key, pieces(sizes, budget), strict=True
        ):
            found.setdefault(tuple(kind[1:]), []).append((param, number, piece))
        parts = dtensor.groups([param for param, _ in entries])
        self.shards = math.prod(group.size() for group in parts)
        self.sections = [_section(optimizer, own, self.shards) for own in found.values()]
        devices = [section.scale.device for section in self.sections]
        on_host = torch.device("cpu")
        self.home = next((device for device in devices if device != on_host), on_host)
        self.sizes = [0] * len(optimizer.parts())
        for param, number in entries:
            self.sizes[number] += param.numel()

    def fits(self, optimizer: PISA) -> bool:
        """Whether it is still the sample: no parameter is new, has moved or changed its rule."""
        return self._key == _key(optimizer)[0]


def _key(optimizer: PISA) -> tuple[list[Any], list[tuple[Tensor, int]]]:
    """What a layout depends on, and the parameters with the numbers of their groups."""
    key = []
    entries = []
    for number, part in enumerate(optimizer.parts()):
        rule: Any = part.preconditioner
        if not foreach.knows(rule):
            rule = id(rule)  # which the group keeps alive
        for param in part.params:
            dual = optimizer.state.get(param, {}).get(state_key("dual", 0))
            if dual is not None:
                settings = part.group["dual_decay"], part.follows
                kind = dual.device, param.dtype, dual.dtype, rule, *settings
                key.append((id(param), number, *kind))
                entries.append((param, number))
    return key, entries


def _section(optimizer: PISA, own: list[tuple[Tensor, int, Piece]], over: int) -> Section:
    own = sorted(own, key=lambda entry: not entry[2].whole)
    part = optimizer.parts()[own[0][1]]
    counts = torch.tensor([piece.taken for _, _, piece in own])
    device = dtensor.local(optimizer.state[own[0][0]][state_key("dual", 0)]).device
    shares = [piece.size / max(1, piece.taken) / _copies(param, over) for param, _, piece in own]
    # Not all devices have more than float32.
    wide = torch.float32 if device.type == "mps" else torch.float64
    return Section(
        params=[param for param, _, _ in own],
        pieces=[piece for _, _, piece in own],
        preconditioner=part.preconditioner,
        dual_decay=float(part.group["dual_decay"]),
        follows=part.follows,
        tensor_of=torch.arange(len(own)).repeat_interleave(counts).to(device),
        part_of=torch.tensor([n for _, n, _ in own]).repeat_interleave(counts).to(device),
        scale=torch.tensor(shares, dtype=wide).repeat_interleave(counts).to(device),
    )


def _copies(param: Tensor, over: int) -> float:
    """How many of the `over` processes that hold parts of the model hold the same of `param`."""
    if not dtensor.is_sharded(param):
        return over
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    pairs = zip(mesh.shape, placements, strict=True)
    same: int = math.prod(size for size, placement in pairs if placement.is_replicate())
    processes: int = math.prod(mesh.shape)
    return same * over / processes
