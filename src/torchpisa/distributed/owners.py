"""What is done to whole matrices of which processes hold parts or copies: one process does it.

Every matrix has an owner. If it is sharded, its parts go to the owner, and the parts of what the
owner makes of it come back. If replicas are to share the work, the owner is in one of them, and
the others get copies of the result. Owners are chosen so that all have about as much to do; every
process knows them, since all choose alike.

Many matrices travel together: one all-to-all there and one back for as many as keep every process
busy for a while, during which the next ones are on their way.
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

__all__ = ["by_owners", "check_replicas", "is_cut_once", "reached_elsewhere", "solve", "spread"]

# Elements that travel together, for every process that may own some of them.
_STAGE = 2**23

# Whole tensors of one matrix: itself, and what belongs to it.
Tensors = list[Tensor]


@torch.no_grad()
def solve(
    bs: Sequence[Tensor],
    wholes: Sequence[Tensor],
    solved: Callable[[Sequence[Tensor]], list[Tensor]],
) -> list[Tensor]:
    """Return what a function makes of matrices of which this process holds parts.

    Args:
        bs: the parts, of one device and dtype.
        wholes: sharded tensors that are laid out like the matrices.
        solved: takes and returns lists of whole matrices, flattened to two dimensions.

    Returns:
        The parts of the results, shaped like `bs`.
    """

    def solved_one_by_one(given: list[Tensors]) -> list[Tensors]:
        matrices = [matrix for (matrix,) in given]
        os = solved([matrix.flatten(1) for matrix in matrices])
        return [[o.view_as(matrix)] for o, matrix in zip(os, matrices, strict=True)]

    results = by_owners([[b] for b in bs], [[whole] for whole in wholes], solved_one_by_one)
    return [o for (o,) in results]


@torch.no_grad()
def by_owners(
    given: Sequence[Sequence[Tensor]],
    wholes: Sequence[Sequence[Tensor]],
    solved: Callable[[list[Tensors]], list[Tensors]],
    *,
    returned: Sequence[int] = (0,),
    blocks: int = 1,
    replicas: "ProcessGroup | None" = None,
) -> list[Tensors]:
    """Return what a function makes of matrices, each of which goes to one process.

    All processes call this with the same matrices in the same order.

    Args:
        given: for each matrix what this process holds of it, and of tensors that belong to it; all
            of one device and dtype.
        wholes: tensors that are laid out like these: sharded ones, or plain ones of which every
            process holds all.
        solved: takes and returns, for each matrix, a list of whole tensors.
        returned: the tensors it returns are laid out like these of the ones it takes.
        blocks: every tensor consists of so many blocks along its first dimension, each of them a
            matrix with an owner of its own. `solved` gets blocks.
        replicas: processes that hold the same, and share the work; None if there are none, or if
            each is to do all of it.

    Returns:
        For each matrix, what this process holds of the tensors that `solved` returns.
    """
    results: list[Tensors] = [[] for _ in given]
    cut_alike: dict[ProcessGroup | None, list[int]] = {}
    layouts = [[_layout(whole) for whole in of_matrix] for of_matrix in wholes]
    for index, (layout, *_) in enumerate(layouts):
        if layout is None:
            results[index] = _everywhere(given[index], wholes[index], solved, returned, blocks)
        else:
            cut_alike.setdefault(layout.group, []).append(index)
    for group, indexes in cut_alike.items():
        known = [[layout for layout in layouts[i] if layout is not None] for i in indexes]
        some = [given[index] for index in indexes]
        exchange = _Exchange(some, known, returned, blocks, group, replicas)
        for index, result in zip(indexes, exchange.run(solved), strict=True):
            results[index] = result
    return results


def is_cut_once(whole: Tensor) -> bool:
    """Return whether a tensor is sharded along one dimension of its mesh at most."""
    return _layout(whole) is not None


def spread(full: Tensor, whole: Tensor) -> Tensor:
    """Return `full`, which every process has, as a tensor that is cut by rows where `whole` is cut.

    Args:
        full: a tensor that belongs to `whole`, of any shape.
        whole: a tensor that `is_cut_once`.
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
        first, last = of_full.held_by(distributed.get_rank(layout.group))
        held = full[first:last].clone()
    return DTensor.from_local(
        held, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def check_replicas(params: Sequence[Tensor], replicas: "ProcessGroup") -> None:
    """Raise ValueError if processes that are to hold the same hold parts of a parameter."""
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


def reached_elsewhere(params: Sequence[Tensor], over: Sequence["ProcessGroup"]) -> set[int]:
    """Return the `id` of parameters that have a gradient on other processes, but not on this one.

    All processes call it. One that has all gradients does not wait for what the others have: a
    parameter without a gradient anywhere lacks one here, too.

    Args:
        params: the parameters, the same on all processes.
        over: the groups of processes that share them.
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
        for param, here, count in zip(params, has_gradient, flags.tolist(), strict=True)
        if count and not here
    }


# Where the parts lie


class _Layout(NamedTuple):
    """How a tensor is cut: into equal chunks along a dimension, of which the last may be shorter.

    Attributes:
        shape: of the whole tensor.
        dim: the dimension; None if every process holds all of it.
        group: the processes that hold the chunks, in order.
        processes: how many they are.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    group: "ProcessGroup | None" = None
    processes: int = 1

    def held_by(self, process: int) -> tuple[int, int]:
        """Return the first index along `dim` that a process holds, and the one after the last."""
        assert self.dim is not None
        length = self.shape[self.dim]
        chunk = -(-length // self.processes)
        return min(process * chunk, length), min((process + 1) * chunk, length)


def _layout(whole: Tensor) -> _Layout | None:
    """Return how a tensor is cut; None if it is in another way than `_Layout` can say."""
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
    if others or type(placement) is not Shard:  # subclasses cut in other ways
        return None
    return _Layout(shape, placement.dim, mesh.get_group(mesh_dim), mesh.size(mesh_dim))


class _Matrix(NamedTuple):
    """A matrix on its way.

    Attributes:
        position: where it is in the caller's list.
        block: which block of it this is.
        replica: the replica in which its owner is.
        owner: its owner, among the processes that hold parts of it.
    """

    position: int
    block: int
    replica: int
    owner: int


class _Piece(NamedTuple):
    """What a process holds of a block.

    Attributes:
        shape: its shape.
        axis: the dimension along which the block is cut.
        start: where the piece begins in the block.
        offset: where it begins, along the first dimension, in what the process holds.
    """

    shape: tuple[int, ...]
    axis: int
    start: int
    offset: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def of_block(self, block: Tensor) -> Tensor:
        """Return the piece of a whole block."""
        return block.narrow(self.axis, self.start, self.shape[self.axis])

    def of_part(self, part: Tensor) -> Tensor:
        """Return the piece of what the process holds of the whole tensor."""
        return part.narrow(0, self.offset, self.shape[0])


def _piece(layout: _Layout, block: int, blocks: int, process: int) -> _Piece:
    rows = layout.shape[0] // blocks
    first = rows * block
    shape = [rows, *layout.shape[1:]]
    if layout.dim is None:
        return _Piece(tuple(shape), 0, 0, first)
    low, high = layout.held_by(process)
    if layout.dim > 0:
        shape[layout.dim] = high - low
        return _Piece(tuple(shape), layout.dim, low, first)
    start, stop = (min(max(bound - first, 0), rows) for bound in (low, high))
    shape[0] = stop - start
    return _Piece(tuple(shape), 0, start, first + start - low if stop > start else 0)


# Who does what


class _Work(NamedTuple):
    """What a matrix costs: rows, columns, and the only process that holds any of it, if so."""

    rows: int
    cols: int
    holder: int | None


def _work(layout: _Layout, block: int, blocks: int) -> _Work:
    rows, *others = (layout.shape[0] // blocks, *layout.shape[1:])
    holder = None
    if layout.dim == 0:
        first, last = rows * block, rows * (block + 1) - 1
        chunk = -(-layout.shape[0] // layout.processes)
        holder = first // chunk if first // chunk == last // chunk else None
    if blocks > 1 and rows == 1:  # an entry of a stack
        rows, *others = others
    return _Work(rows, math.prod(others), holder)


@lru_cache(maxsize=64)
def _stages(
    work: tuple[_Work, ...], replicas: int, processes: int, most: int
) -> list[list[tuple[int, int, int]]]:
    """Return matrices that travel together, with their owners.

    Args:
        work: the matrices.
        replicas: replicas to choose owners from.
        processes: processes of each.
        most: elements that travel together, for every process; a single matrix may have more.

    Returns:
        By stage: number of the matrix, replica and process.
    """
    most *= replicas * processes
    # Of one shape together, because they are solved for in one batch; large ones first.
    order = sorted(range(len(work)), key=lambda i: (-work[i].rows * work[i].cols, work[i].rows, i))
    load = {(replica, owner): 0 for replica in range(replicas) for owner in range(processes)}
    stages: list[list[tuple[int, int, int]]] = []
    elements = 0
    for number in order:
        rows, cols, holder = work[number]
        if not stages or elements + rows * cols > most:
            stages.append([])
            elements = 0
        elements += rows * cols
        able = load if holder is None else [place for place in load if place[1] == holder]
        owner = min(able, key=lambda place: (load[place], place))
        load[owner] += rows * cols * min(rows, cols)
        stages[-1].append((number, *owner))
    return stages


# The journey


@dataclass
class _Travel:
    """Numbers under way between processes, and the memory they come from.

    Attributes:
        work: what to wait for.
        sent: kept until then.
        received: where they arrive.
        sizes: how many come from each process.
    """

    work: "Work | None"
    sent: Tensor
    received: Tensor
    sizes: list[int]

    def arrived(self) -> list[Tensor]:
        """Wait; return what has come from each process."""
        if self.work is not None:
            self.work.wait()
        return list(torch.split(self.received, self.sizes))


class _Exchange:
    """Matrices that are cut over the same processes, or not at all, on their way; see `by_owners`.

    Args:
        given: what this process holds.
        layouts: how it is cut.
        returned: the tensors that come back are laid out like these.
        blocks: of every tensor.
        group: the processes that hold the parts; None if this one holds all.
        replicas: processes that hold the same.
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

    def run(self, solved: Callable[[list[Tensors]], list[Tensors]]) -> list[Tensors]:
        """Send, solve, send back; return what this process holds of the results."""
        stages = self._plan()
        ahead = self._to_owners(stages[0]) if stages else None
        coming_back: list[_Travel] = []
        shared: list[list[_Travel | list[Tensor]]] = []
        for stage, following in zip(stages, [*stages[1:], None], strict=True):
            here = ahead
            ahead = None if following is None else self._to_owners(following)
            mine = self._owned(stage, self._rank)
            matrices = self._assembled(mine, here)
            results = solved(matrices) if mine else []
            if self._group is None:
                pieces = [tensor.reshape(-1) for of_matrix in results for tensor in of_matrix]
                shared.append(self._share(stage, pieces))
            else:
                coming_back.append(self._back(stage, mine, results))
        if self._group is not None:
            for stage, travel in zip(stages, coming_back, strict=True):
                shared.append(self._share(stage, self._arrived(stage, travel)))
        for stage, of_replicas in zip(stages, shared, strict=True):
            for replica, back in enumerate(of_replicas):
                self._deliver([m for m in stage if m.replica == replica], back)
        return self._results

    def _plan(self) -> list[list[_Matrix]]:
        matrices = [
            (index, block) for index in range(len(self._given)) for block in range(self._blocks)
        ]
        work = tuple(
            _work(self._layouts[index][0], block, self._blocks) for index, block in matrices
        )
        stages = _stages(work, self._replica_count, self._size, _STAGE)
        return [
            [_Matrix(*matrices[number], replica, owner) for number, replica, owner in stage]
            for stage in stages
        ]

    def _owned(self, stage: Sequence[_Matrix], owner: int) -> list[_Matrix]:
        """Return the matrices that a process of this replica owns."""
        return [m for m in stage if m.owner == owner and m.replica == self._replica]

    def _pieces(
        self, matrix: _Matrix, layouts: Sequence[Sequence[_Layout]], process: int
    ) -> list[_Piece]:
        """Return what a process holds of the tensors of a matrix."""
        block, blocks = matrix.block, self._blocks
        return [_piece(layout, block, blocks, process) for layout in layouts[matrix.position]]

    def _sizes(
        self, matrices: Sequence[_Matrix], layouts: Sequence[Sequence[_Layout]], process: int
    ) -> list[int]:
        """Return how many elements a process holds of each tensor of each matrix."""
        return [
            piece.numel for matrix in matrices for piece in self._pieces(matrix, layouts, process)
        ]

    def _to_owners(self, stage: Sequence[_Matrix]) -> _Travel | None:
        if self._group is None:
            return None
        parcels = [
            [
                piece.of_part(part).reshape(-1)
                for matrix in self._owned(stage, owner)
                for part, piece in zip(
                    self._given[matrix.position],
                    self._pieces(matrix, self._layouts, self._rank),
                    strict=True,
                )
            ]
            for owner in range(self._size)
        ]
        mine = self._owned(stage, self._rank)
        sizes = [sum(self._sizes(mine, self._layouts, source)) for source in range(self._size)]
        return self._send(parcels, sizes)

    def _assembled(self, mine: Sequence[_Matrix], here: _Travel | None) -> list[Tensors]:
        """Return the whole tensors of the matrices that this process owns."""
        if here is None:
            return [
                [
                    piece.of_part(part)
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
            for source, received in enumerate(here.arrived())
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

    def _back(
        self, stage: Sequence[_Matrix], mine: Sequence[_Matrix], results: Sequence[Tensors]
    ) -> _Travel:
        """Send the parts of results to those who hold them."""
        parcels = [
            [
                piece.of_block(tensor).reshape(-1)
                for matrix, of_matrix in zip(mine, results, strict=True)
                for tensor, piece in zip(
                    of_matrix, self._pieces(matrix, self._returned, target), strict=True
                )
            ]
            for target in range(self._size)
        ]
        sizes = [
            sum(self._sizes(self._owned(stage, owner), self._returned, self._rank))
            for owner in range(self._size)
        ]
        return self._send(parcels, sizes)

    def _arrived(self, stage: Sequence[_Matrix], travel: _Travel) -> list[Tensor]:
        """Return pieces of the matrices that were solved in this replica, in the stage's order."""
        from_owners = []
        for owner, received in enumerate(travel.arrived()):
            sizes = self._sizes(self._owned(stage, owner), self._returned, self._rank)
            from_owners.append(iter(torch.split(received, sizes)))
        return [
            next(from_owners[matrix.owner])
            for matrix in stage
            if matrix.replica == self._replica
            for _ in self._returned[matrix.position]
        ]

    def _share(
        self, stage: Sequence[_Matrix], pieces: list[Tensor]
    ) -> list[_Travel | list[Tensor]]:
        """Send the replicas what was solved in this one; return what comes from each."""
        if self._replicas is None:
            return [pieces]
        from torch import distributed

        travels: list[_Travel | list[Tensor]] = []
        for replica in range(self._replica_count):
            solved = [matrix for matrix in stage if matrix.replica == replica]
            if not solved:
                travels.append([])
                continue
            sizes = self._sizes(solved, self._returned, self._rank)
            here = replica == self._replica
            flat = torch.cat(pieces) if here else self._given[0][0].new_empty(sum(sizes))
            source = distributed.get_global_rank(self._replicas, replica)
            work = distributed.broadcast(flat, source, group=self._replicas, async_op=True)
            travels.append(_Travel(work, flat, flat, sizes))
        return travels

    def _deliver(self, matrices: Sequence[_Matrix], back: _Travel | list[Tensor]) -> None:
        """Put pieces of results where the caller finds them."""
        arrived = iter(back.arrived() if isinstance(back, _Travel) else back)
        for matrix in matrices:
            results = self._results[matrix.position]
            for place, piece in enumerate(self._pieces(matrix, self._returned, self._rank)):
                received = next(arrived).view(piece.shape)
                if self._blocks == 1:
                    results[place] = received
                else:
                    piece.of_part(results[place]).copy_(received)

    def _send(self, parcels: Sequence[Sequence[Tensor]], sizes: list[int]) -> _Travel:
        """Send a list of flat tensors to each process; `sizes` are of what comes from each."""
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
        return _Travel(work, sent, received, sizes)


def _everywhere(
    given: Sequence[Tensor],
    wholes: Sequence[Tensor],
    solved: Callable[[list[Tensors]], list[Tensors]],
    returned: Sequence[int],
    blocks: int,
) -> Tensors:
    """Return what `by_owners` does for a matrix that is cut in another way: all solve for it."""
    full = [
        dtensor.laid_out_like(whole, part).full_tensor()
        for whole, part in zip(wholes, given, strict=True)
    ]
    cut = (each.chunk(blocks) for each in full)
    of_blocks = solved([list(parts) for parts in zip(*cut, strict=True)])
    joined = [torch.cat(parts) for parts in zip(*of_blocks, strict=True)]
    return [dtensor.cut(o, wholes[i]) for o, i in zip(joined, returned, strict=True)]
