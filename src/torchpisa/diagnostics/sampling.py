"""Sample coordinates to measure: short runs at even distances in every tensor.

Runs, because memory is read in cache lines. At even distances, because a tensor then needs one
view, and one call copies many views. Always the same ones, so that rows can be compared.
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

__all__ = ["SampleLayout", "SampleSection", "SampledRuns", "sampled_runs"]

_MAX_COORDINATES = 2**16
_MAX_DUALS = 2**18  # coordinates times batches, each of which has a dual
_RUN = 32  # elements, two or four lines of a cache


class SampledRuns(NamedTuple):
    """The sampled runs of a tensor with `size` elements, in the order of memory."""

    size: int
    runs: int
    length: int
    start: int
    distance: int

    @property
    def complete(self) -> bool:
        """Return True if the sample is the whole tensor."""
        return self.length == self.size

    @property
    def samples(self) -> int:
        """Return the number of sampled elements."""
        return self.runs * self.length

    def view_of(self, tensor: Tensor) -> Tensor:
        """Return a view of the sample: one row per run, or flat if it is the whole tensor."""
        gap = 1
        if not tensor.is_contiguous():
            tensor = _flat(tensor)
            gap = tensor.stride(0)
        if self.complete:
            return tensor.reshape(-1)
        start = tensor.storage_offset() + gap * self.start
        return tensor.as_strided((self.runs, self.length), (gap * self.distance, gap), start)


def sampled_runs(sizes: Sequence[int], coordinates: int) -> list[SampledRuns]:
    """Return runs of about `coordinates` elements in all; every tensor has at least one."""
    total = sum(sizes)
    if total <= coordinates:
        return [SampledRuns(size, 1, size, 0, 0) for size in sizes]
    length = max(1, min(_RUN, coordinates // len(sizes)))
    return [
        _sampled_runs(size, max(1, size * coordinates // (total * length)), length)
        for size in sizes
    ]


def _sampled_runs(size: int, runs: int, length: int) -> SampledRuns:
    if size <= runs * length:
        return SampledRuns(size, 1, size, 0, 0)
    # A distance that shares a divisor with the length of a row would visit some columns only.
    widest = size // runs
    distance = next((d for d in range(widest, length, -1) if math.gcd(d, size) == 1), widest)
    start = (size - (runs - 1) * distance - length) // 2
    return SampledRuns(size, runs, length, start, distance)


def _flat(tensor: Tensor) -> Tensor:
    """Return all elements of `tensor` in the order of memory."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)


@dataclass(frozen=True)
class SampleSection:
    """Parameters that are measured together; completely sampled ones come first.

    Attributes:
        params: the parameters.
        pieces: the sampled runs of each, in the local part.
        preconditioner: their preconditioner.
        dual_decay: their dual decay.
        sigma_follows: whether sigma follows the gradients.
        tensor_of: for each coordinate the index of its tensor.
        part_of: the index of the optimizer's part.
        scale: the number of coordinates of the model that each one stands for.
    """

    params: list[Tensor]
    pieces: list[SampledRuns]
    preconditioner: Preconditioner
    dual_decay: float
    sigma_follows: bool
    tensor_of: Tensor
    part_of: Tensor
    scale: Tensor

    def gather(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return samples of tensors laid out like the parameters, one row per sequence."""
        parts = []
        for complete in (True, False):
            pieces = [piece for piece in self.pieces if piece.complete is complete]
            views = [
                piece.view_of(real(dtensor.local(tensor)))
                for row in rows
                for piece, tensor in zip(self.pieces, row, strict=True)
                if piece.complete is complete
            ]
            if pieces:
                samples = sum(piece.samples for piece in pieces)
                parts.append(torch.cat(views).reshape(len(rows), samples))
        sample = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return sample.to(self.scale.dtype)


class SampleLayout:
    """The sampled coordinates of all parameters that have state.

    Attributes:
        sections: the parameters, grouped by rule, device and dtype.
        home: the device on which sections are combined.
        shards: the number of processes that share the parameters.
        sizes: the number of elements, by part of the optimizer.
    """

    def __init__(self, optimizer: PISA) -> None:
        self._key, entries = _key(optimizer)
        sizes = [real(dtensor.local(param)).numel() for param, _ in entries]
        budget = min(_MAX_COORDINATES, max(1, _MAX_DUALS // optimizer.batches))
        by_kind: dict[Any, list[tuple[Tensor, int, SampledRuns]]] = {}
        pieces = sampled_runs(sizes, budget)
        for (param, number), (_, _, *kind), piece in zip(entries, self._key, pieces, strict=True):
            by_kind.setdefault(tuple(kind), []).append((param, number, piece))
        parts = dtensor.mesh_groups([param for param, _ in entries])
        self.shards = math.prod(group.size() for group in parts)
        self.sections = [_section(optimizer, group, self.shards) for group in by_kind.values()]
        devices = [section.scale.device for section in self.sections]
        on_host = torch.device("cpu")
        self.home = next((device for device in devices if device != on_host), on_host)
        self.sizes = [0] * len(optimizer.parts())
        for param, number in entries:
            self.sizes[number] += param.numel()

    def matches(self, optimizer: PISA) -> bool:
        """Return True if parameters, devices and rules are still the same."""
        return self._key == _key(optimizer)[0]


def _key(optimizer: PISA) -> tuple[list[Any], list[tuple[Tensor, int]]]:
    """Return a key for everything that a layout depends on, and parameters with their parts."""
    key = []
    entries = []
    for number, part in enumerate(optimizer.parts()):
        rule: Any = part.preconditioner
        if not foreach.knows(rule):
            rule = id(rule)  # unique, because the group keeps the rule alive
        for param in part.params:
            dual = optimizer.state.get(param, {}).get(state_key("dual", 0))
            if dual is not None:
                settings = part.group["dual_decay"], part.sigma_follows
                kind = dual.device, param.dtype, dual.dtype, rule, *settings
                key.append((id(param), number, *kind))
                entries.append((param, number))
    return key, entries


def _section(
    optimizer: PISA, entries: list[tuple[Tensor, int, SampledRuns]], shards: int
) -> SampleSection:
    entries = sorted(entries, key=lambda entry: not entry[2].complete)
    part = optimizer.parts()[entries[0][1]]
    counts = torch.tensor([piece.samples for _, _, piece in entries])
    device = dtensor.local(optimizer.state[entries[0][0]][state_key("dual", 0)]).device
    shares = [
        piece.size / max(1, piece.samples) / _copies(param, shards) for param, _, piece in entries
    ]
    # MPS has no float64.
    wide = torch.float32 if device.type == "mps" else torch.float64
    return SampleSection(
        params=[param for param, _, _ in entries],
        pieces=[piece for _, _, piece in entries],
        preconditioner=part.preconditioner,
        dual_decay=float(part.group["dual_decay"]),
        sigma_follows=part.sigma_follows,
        tensor_of=torch.arange(len(entries)).repeat_interleave(counts).to(device),
        part_of=torch.tensor([n for _, n, _ in entries]).repeat_interleave(counts).to(device),
        scale=torch.tensor(shares, dtype=wide).repeat_interleave(counts).to(device),
    )


def _copies(param: Tensor, shards: int) -> float:
    """Return the number of the `shards` processes that hold the same part of `param`."""
    if not dtensor.is_sharded(param):
        return shards
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    pairs = zip(mesh.shape, placements, strict=True)
    replicas: int = math.prod(size for size, placement in pairs if placement.is_replicate())
    processes: int = math.prod(mesh.shape)
    return replicas * shards / processes
