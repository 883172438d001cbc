"""Compute with whole matrices that are sharded or replicated: each is the work of one process.

Every matrix has an owner. If the matrix is sharded, the owner receives its parts, computes, and
sends the parts of the result back. If replicas share the work, the owner is in one of them, and the
others receive copies of the result. Owners are chosen so that all have about the same work. The
choice is deterministic, so every process knows all owners.

Matrices travel in trips of many, with one all-to-all to the owners and one back. While one trip is
computed the next one is on its way.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchpisa.distributed import dtensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = [
    "by_owners",
    "check_replicas",
    "is_sharded_once",
    "shard_rows_like",
    "solve",
    "with_gradient_elsewhere",
]

# The most elements of a trip, for every process that may own some of them.
_TRIP_ELEMENTS = 2**23

# A matrix and the tensors that belong to it.
Tensors = list[Tensor]


@torch.no_grad()
def solve(
    bs: Sequence[Tensor],
    wholes: Sequence[Tensor],
    function: Callable[[Sequence[Tensor]], list[Tensor]],
) -> list[Tensor]:
    """Apply a function to whole matrices of which this process holds parts.

    Args:
        bs: the local parts, of one device and dtype.
        wholes: DTensors with the layouts of the matrices.
        function: takes and returns lists of whole matrices, flattened to two dimensions.

    Returns:
        The local parts of the results, shaped like `bs`.
    """

    def function_of_lists(given: list[Tensors]) -> list[Tensors]:
        matrices = [matrix for (matrix,) in given]
        os = function([matrix.flatten(1) for matrix in matrices])
        return [[o.view_as(matrix)] for o, matrix in zip(os, matrices, strict=True)]

    results = by_owners([[b] for b in bs], [[whole] for whole in wholes], function_of_lists)
    return [o for (o,) in results]


@torch.no_grad()
def by_owners(
    given: Sequence[Sequence[Tensor]],
    wholes: Sequence[Sequence[Tensor]],
    function: Callable[[list[Tensors]], list[Tensors]],
    *,
    returned: Sequence[int] = (0,),
    blocks: int = 1,
    replicas: "ProcessGroup | None" = None,
) -> list[Tensors]:
    """Apply a function to whole matrices, each at its owner.

    All processes call this with the same matrices in the same order.

    Args:
        given: for each matrix the local parts of it and of the tensors that belong to it, all of
            one device and dtype.
        wholes: tensors with the layouts of `given`: DTensors, or plain tensors that every process
            has in full.
        function: takes and returns a list of whole tensors for each matrix.
        returned: for each tensor that `function` returns, the index of the one in `given` that has
            its layout.
        blocks: the number of blocks in every tensor, along the first dimension. Each block is a
            matrix with its own owner, and `function` takes blocks.
        replicas: processes with the same tensors, which share the work; None if each does all.

    Returns:
        For each matrix, the local parts of the tensors that `function` returns.
    """
    results: list[Tensors] = [[] for _ in given]
    by_group: dict[ProcessGroup | None, list[int]] = {}
    layouts = [[_layout(whole) for whole in of_matrix] for of_matrix in wholes]
    for index, (layout, *_) in enumerate(layouts):
        if layout is None:
            results[index] = _everywhere(given[index], wholes[index], function, returned, blocks)
        else:
            by_group.setdefault(layout.group, []).append(index)
    for group, indexes in by_group.items():
        group_layouts = [[layout for layout in layouts[i] if layout is not None] for i in indexes]
        group_given = [given[index] for index in indexes]
        exchange = _Exchange(group_given, group_layouts, returned, blocks, group, replicas)
        for index, result in zip(indexes, exchange.run(function), strict=True):
            results[index] = result
    return results


def is_sharded_once(whole: Tensor) -> bool:
    """Return whether a tensor is sharded along at most one dimension of its mesh."""
    return _layout(whole) is not None


def shard_rows_like(full: Tensor, whole: Tensor) -> Tensor:
    """Shard the rows of a tensor along the mesh dimension along which another one is sharded.

    Args:
        full: the tensor, which every process has in full.
        whole: the other one, for which `is_sharded_once` is true.
    """
    if not dtensor.is_sharded(whole):
        return full
    from torch.distributed.tensor import DTensor, Replicate, Shard

    assert isinstance(whole, DTensor)
    mesh = whole.device_mesh
    layout = _layout(whole)
    assert layout is not None
    placements = [
        Replicate() if placement.is_replicate() else Shard(0) for placement in whole.placements
    ]
    held = full
    if layout.group is not None:
        from torch import distributed

        of_full = layout._replace(shape=tuple(full.shape), dim=0)
        first, last = of_full.bounds(distributed.get_rank(layout.group))
        held = full[first:last].clone()
    return DTensor.from_local(
        held, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def check_replicas(params: Sequence[Tensor], replicas: "ProcessGroup") -> None:
    """Raise ValueError if two processes of `replicas` hold different parts of a parameter."""
    from torch import distributed

    ours = set(distributed.get_process_group_ranks(replicas))
    for param in params:
        layout = _layout(param)
        if layout is None or layout.group is None:
            continue
        shards = distributed.get_process_group_ranks(layout.group)
        if len(ours & set(shards)) > 1:
            raise ValueError(
                "replicas must be processes that hold the same, but a parameter of shape "
                f"{tuple(param.shape)} is sharded over ranks {shards}: sharded matrices are "
                "orthogonalised once without `replicas`. With HSDP give the dimension of the mesh "
                "that replicas lie along, as in mesh['replicate']"
            )


def with_gradient_elsewhere(params: Sequence[Tensor], over: Sequence["ProcessGroup"]) -> set[int]:
    """Return the `id` of parameters that have a gradient on other processes but not on this one.

    All processes call it. One that has all gradients does not read the result, and so does not
    wait for the others.

    Args:
        params: the parameters, the same on all processes.
        over: the process groups that share them.
    """
    from torchpisa.distributed.process_group import on_device

    if not params:
        return set()
    has_gradient = [param.grad is not None for param in params]
    flags = on_device(has_gradient, dtensor.local(params[0]).device, torch.float32)
    dtensor.summed(flags, over)
    if all(has_gradient):
        return set()
    return {
        id(param)
        for param, is_local, count in zip(params, has_gradient, flags.tolist(), strict=True)
        if count and not is_local
    }


# Layouts: the parts of each process


class _Layout(NamedTuple):
    """A sharding into equal chunks along one dimension; the last chunks may be shorter or empty.

    Attributes:
        shape: the shape of the whole tensor.
        dim: the dimension; None if every process has the whole tensor.
        group: the processes that hold the chunks, in order.
        processes: their number.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    group: "ProcessGroup | None" = None
    processes: int = 1

    def bounds(self, process: int) -> tuple[int, int]:
        """Return the first index along `dim` of a process's chunk, and the one after its last."""
        assert self.dim is not None
        length = self.shape[self.dim]
        chunk = -(-length // self.processes)
        return min(process * chunk, length), min((process + 1) * chunk, length)


def _layout(whole: Tensor) -> _Layout | None:
    """Return the layout of a tensor; None if `_Layout` cannot describe it."""
    shape = tuple(whole.shape)
    if not dtensor.is_sharded(whole):
        return _Layout(shape)
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(whole, DTensor)
    mesh = whole.device_mesh
    cuts = [
        (mesh_dim, placement)
        for mesh_dim, placement in enumerate(whole.placements)
        if mesh.size(mesh_dim) > 1 and not placement.is_replicate()
    ]
    if not cuts:
        return _Layout(shape)
    (mesh_dim, placement), *others = cuts
    if others or type(placement) is not Shard:  # subclasses shard in other ways
        return None
    return _Layout(shape, placement.dim, mesh.get_group(mesh_dim), mesh.size(mesh_dim))


class _Matrix(NamedTuple):
    """A matrix and its owner.

    Attributes:
        position: index of the matrix in the caller's list.
        block: index of the block.
        replica: the replica of the owner.
        owner: the owner's rank in the group that holds parts of the matrix.
    """

    position: int
    block: int
    replica: int
    owner: int


class _Piece(NamedTuple):
    """The part of a block that a process holds.

    Attributes:
        shape: the shape of the piece.
        axis: the dimension along which the block is sharded.
        start: index along `axis` at which the piece begins in the block.
        offset: index of the first row of the piece in the process's local tensor.
    """

    shape: tuple[int, ...]
    axis: int
    start: int
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def from_block(self, block: Tensor) -> Tensor:
        """Return the piece as a view of a whole block."""
        return block.narrow(self.axis, self.start, self.shape[self.axis])

    def from_local(self, local: Tensor) -> Tensor:
        """Return the piece as a view of the process's local tensor."""
        return local.narrow(0, self.offset, self.shape[0])


def _piece(layout: _Layout, block: int, blocks: int, process: int) -> _Piece:
    rows = layout.shape[0] // blocks
    first = rows * block
    shape = [rows, *layout.shape[1:]]
    if layout.dim is None:
        return _Piece(tuple(shape), 0, 0, first)
    low, high = layout.bounds(process)
    if layout.dim > 0:
        shape[layout.dim] = high - low
        return _Piece(tuple(shape), layout.dim, low, first)
    start, stop = (min(max(bound - first, 0), rows) for bound in (low, high))
    shape[0] = stop - start
    return _Piece(tuple(shape), 0, start, first + start - low if stop > start else 0)


# Owners


class _Task(NamedTuple):
    """The size of a matrix.

    Attributes:
        rows: the number of rows.
        cols: the number of columns.
        holder: the process that holds all of it; None if several hold parts.
    """

    rows: int
    cols: int
    holder: int | None


def _task(layout: _Layout, block: int, blocks: int) -> _Task:
    rows, *others = (layout.shape[0] // blocks, *layout.shape[1:])
    holder = None
    if layout.dim == 0:
        first, last = rows * block, rows * (block + 1) - 1
        chunk = -(-layout.shape[0] // layout.processes)
        holder = first // chunk if first // chunk == last // chunk else None
    if blocks > 1 and rows == 1:  # an entry of a stack
        rows, *others = others
    return _Task(rows, math.prod(others), holder)


@lru_cache(maxsize=64)
def _trips(
    tasks: tuple[_Task, ...], replicas: int, processes: int, limit: int
) -> list[list[tuple[int, int, int]]]:
    """Divide matrices into trips, and choose their owners.

    Args:
        tasks: the matrices.
        replicas: the number of replicas to choose owners from.
        processes: the number of processes of each.
        limit: the most elements of a trip, per process; a single matrix may have more.

    Returns:
        By trip: index of the matrix, replica and process.
    """
    limit *= replicas * processes
    # Large matrices first, and equal shapes together, because they are computed in one batch.
    order = sorted(
        range(len(tasks)), key=lambda i: (-tasks[i].rows * tasks[i].cols, tasks[i].rows, i)
    )
    load = {(replica, owner): 0 for replica in range(replicas) for owner in range(processes)}
    trips: list[list[tuple[int, int, int]]] = []
    elements = 0
    for number in order:
        rows, cols, holder = tasks[number]
        if not trips or elements + rows * cols > limit:
            trips.append([])
            elements = 0
        elements += rows * cols
        candidates = load if holder is None else [place for place in load if place[1] == holder]
        owner = min(candidates, key=lambda place: (load[place], place))
        load[owner] += rows * cols * min(rows, cols)
        trips[-1].append((number, *owner))
    return trips


# The exchange


@dataclass
class _Transfer:
    """A collective under way.

    Attributes:
        work: waits for it; None if there is nothing to wait for.
        sent: the memory that is sent, kept alive until then.
        received: the memory that is received.
        sizes: the number of elements from each process.
    """

    work: "Work | None"
    sent: Tensor
    received: Tensor
    sizes: list[int]

    def wait(self) -> list[Tensor]:
        """Return what each process has sent, once it has arrived."""
        if self.work is not None:
            self.work.wait()
        return list(torch.split(self.received, self.sizes))


class _Exchange:
    """The exchange of matrices that are sharded over one process group; see `by_owners`.

    Args:
        given: the local parts.
        layouts: the layouts of their tensors.
        returned: indexes of the layouts of the returned tensors.
        blocks: the number of blocks of every tensor.
        group: the processes that hold the parts; None if every process has whole tensors.
        replicas: processes with the same tensors.
    """

    def __init__(
        self,
        given: Sequence[Sequence[Tensor]],
        layouts: Sequence[Sequence[_Layout]],
        returned: Sequence[int],
        blocks: int,
        group: "ProcessGroup | None",
        replicas: "ProcessGroup | None",
    ) -> None:
        from torch import distributed

        self._given, self._layouts, self._blocks = given, layouts, blocks
        self._returned = [[of_matrix[i] for i in returned] for of_matrix in layouts]
        self._results = [
            [of_matrix[i] if blocks == 1 else torch.empty_like(of_matrix[i]) for i in returned]
            for of_matrix in given
        ]
        self._group, self._replicas = group, replicas
        self._size = self._replica_count = 1
        self._rank = self._replica = 0
        if group is not None:
            self._size, self._rank = distributed.get_world_size(group), distributed.get_rank(group)
        if replicas is not None:
            self._replica_count = distributed.get_world_size(replicas)
            self._replica = distributed.get_rank(replicas)

    def run(self, function: Callable[[list[Tensors]], list[Tensors]]) -> list[Tensors]:
        """Apply `function` at the owners; return the local parts of the results."""
        trips = self._plan()
        next_inbound = self._to_owners(trips[0]) if trips else None
        outbound: list[_Transfer] = []
        shared: list[list[_Transfer | list[Tensor]]] = []
        for trip, next_trip in zip(trips, [*trips[1:], None], strict=True):
            inbound = next_inbound
            next_inbound = None if next_trip is None else self._to_owners(next_trip)
            mine = self._owned(trip, self._rank)
            matrices = self._assembled(mine, inbound)
            results = function(matrices) if mine else []
            if self._group is None:
                pieces = [tensor.reshape(-1) for of_matrix in results for tensor in of_matrix]
                shared.append(self._share(trip, pieces))
            else:
                outbound.append(self._from_owners(trip, mine, results))
        if self._group is not None:
            for trip, transfer in zip(trips, outbound, strict=True):
                shared.append(self._share(trip, self._collected(trip, transfer)))
        for trip, by_replica in zip(trips, shared, strict=True):
            for replica, arriving in enumerate(by_replica):
                self._deliver([m for m in trip if m.replica == replica], arriving)
        return self._results

    def _plan(self) -> list[list[_Matrix]]:
        matrices = [
            (index, block) for index in range(len(self._given)) for block in range(self._blocks)
        ]
        tasks = tuple(
            _task(self._layouts[index][0], block, self._blocks) for index, block in matrices
        )
        trips = _trips(tasks, self._replica_count, self._size, _TRIP_ELEMENTS)
        return [
            [_Matrix(*matrices[number], replica, owner) for number, replica, owner in trip]
            for trip in trips
        ]

    def _owned(self, trip: Sequence[_Matrix], owner: int) -> list[_Matrix]:
        """Return the matrices of a trip that a process of this replica owns."""
        return [m for m in trip if m.owner == owner and m.replica == self._replica]

    def _pieces(
        self, matrix: _Matrix, layouts: Sequence[Sequence[_Layout]], process: int
    ) -> list[_Piece]:
        """Return the pieces of a matrix, and of its tensors, that a process holds."""
        block, blocks = matrix.block, self._blocks
        return [_piece(layout, block, blocks, process) for layout in layouts[matrix.position]]

    def _sizes(
        self, matrices: Sequence[_Matrix], layouts: Sequence[Sequence[_Layout]], process: int
    ) -> list[int]:
        """Return the number of elements that a process holds of each tensor of each matrix."""
        return [
            piece.numel for matrix in matrices for piece in self._pieces(matrix, layouts, process)
        ]

    def _to_owners(self, trip: Sequence[_Matrix]) -> _Transfer | None:
        """Start sending the local parts of a trip's matrices to their owners."""
        if self._group is None:
            return None
        parcels = [
            [
                piece.from_local(part).reshape(-1)
                for matrix in self._owned(trip, owner)
                for part, piece in zip(
                    self._given[matrix.position],
                    self._pieces(matrix, self._layouts, self._rank),
                    strict=True,
                )
            ]
            for owner in range(self._size)
        ]
        mine = self._owned(trip, self._rank)
        sizes = [sum(self._sizes(mine, self._layouts, source)) for source in range(self._size)]
        return self._send(parcels, sizes)

    def _assembled(self, mine: Sequence[_Matrix], inbound: _Transfer | None) -> list[Tensors]:
        """Return the whole tensors of the matrices that this process owns."""
        if inbound is None:
            return [
                [
                    piece.from_local(part)
                    for part, piece in zip(
                        self._given[matrix.position],
                        self._pieces(matrix, self._layouts, 0),
                        strict=True,
                    )
                ]
                for matrix in mine
            ]
        flat = [
            iter(torch.split(received, self._sizes(mine, self._layouts, source)))
            for source, received in enumerate(inbound.wait())
        ]
        assembled = []
        for matrix in mine:
            by_source = [
                self._pieces(matrix, self._layouts, source) for source in range(self._size)
            ]
            assembled.append(
                [
                    torch.cat(
                        [next(flat[s]).view(piece.shape) for s, piece in enumerate(pieces)],
                        dim=pieces[0].axis,
                    )
                    for pieces in zip(*by_source, strict=True)
                ]
            )
        return assembled

    def _from_owners(
        self, trip: Sequence[_Matrix], mine: Sequence[_Matrix], results: Sequence[Tensors]
    ) -> _Transfer:
        """Start sending the parts of results from their owners to the processes that hold them."""
        parcels = [
            [
                piece.from_block(tensor).reshape(-1)
                for matrix, of_matrix in zip(mine, results, strict=True)
                for tensor, piece in zip(
                    of_matrix, self._pieces(matrix, self._returned, target), strict=True
                )
            ]
            for target in range(self._size)
        ]
        sizes = [
            sum(self._sizes(self._owned(trip, owner), self._returned, self._rank))
            for owner in range(self._size)
        ]
        return self._send(parcels, sizes)

    def _collected(self, trip: Sequence[_Matrix], transfer: _Transfer) -> list[Tensor]:
        """Return the local pieces of this replica's results, in the order of the trip."""
        from_owners = []
        for owner, received in enumerate(transfer.wait()):
            sizes = self._sizes(self._owned(trip, owner), self._returned, self._rank)
            from_owners.append(iter(torch.split(received, sizes)))
        return [
            next(from_owners[matrix.owner])
            for matrix in trip
            if matrix.replica == self._replica
            for _ in self._returned[matrix.position]
        ]

    def _share(
        self, trip: Sequence[_Matrix], pieces: list[Tensor]
    ) -> list[_Transfer | list[Tensor]]:
        """Send this replica's results to the others; return the results of each replica."""
        if self._replicas is None:
            return [pieces]
        from torch import distributed

        transfers: list[_Transfer | list[Tensor]] = []
        for replica in range(self._replica_count):
            matrices = [matrix for matrix in trip if matrix.replica == replica]
            if not matrices:
                transfers.append([])
                continue
            sizes = self._sizes(matrices, self._returned, self._rank)
            is_source = replica == self._replica
            flat = torch.cat(pieces) if is_source else self._given[0][0].new_empty(sum(sizes))
            source = distributed.get_global_rank(self._replicas, replica)
            work = distributed.broadcast(flat, source, group=self._replicas, async_op=True)
            transfers.append(_Transfer(work, flat, flat, sizes))
        return transfers

    def _deliver(self, matrices: Sequence[_Matrix], arriving: _Transfer | list[Tensor]) -> None:
        """Write pieces of results into the tensors that `run` returns."""
        pieces = iter(arriving.wait() if isinstance(arriving, _Transfer) else arriving)
        for matrix in matrices:
            results = self._results[matrix.position]
            for place, piece in enumerate(self._pieces(matrix, self._returned, self._rank)):
                received = next(pieces).view(piece.shape)
                if self._blocks == 1:
                    results[place] = received
                else:
                    piece.from_local(results[place]).copy_(received)

    def _send(self, parcels: Sequence[Sequence[Tensor]], sizes: list[int]) -> _Transfer:
        """Start sending flat tensors to each process; `sizes` are the elements from each."""
        from torch import distributed

        like = self._given[0][0]
        sent = torch.cat([like.new_empty(0), *(tensor for parcel in parcels for tensor in parcel)])
        received = like.new_empty(sum(sizes))
        work = distributed.all_to_all_single(
            received,
            sent,
            sizes,
            [sum(tensor.numel() for tensor in parcel) for parcel in parcels],
            group=self._group,
            async_op=True,
        )
        return _Transfer(work, sent, received, sizes)


def _everywhere(
    given: Sequence[Tensor],
    wholes: Sequence[Tensor],
    function: Callable[[list[Tensors]], list[Tensors]],
    returned: Sequence[int],
    blocks: int,
) -> Tensors:
    """Apply a function to a matrix with an unusual layout: every process computes all of it."""
    full = [
        dtensor.from_local(whole, part).full_tensor()
        for whole, part in zip(wholes, given, strict=True)
    ]
    chunks = (tensor.chunk(blocks) for tensor in full)
    by_block = function([list(tensors) for tensors in zip(*chunks, strict=True)])
    joined = [torch.cat(tensors) for tensors in zip(*by_block, strict=True)]
    return [dtensor.local_shard(o, wholes[i]) for o, i in zip(joined, returned, strict=True)]
