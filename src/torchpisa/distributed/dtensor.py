"""Parameters that are spread over processes (DTensors), stepped where their parts lie.

SISA's rule goes element by element, so every process steps its own part with the kernels that it
has for plain tensors. What concerns whole parameters or whole gradients is here: sums over all
parts, and what is done to whole matrices, for which they go to one process each and come back.
"""

import heapq
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchpisa.kernels.job import Member

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.tensor import DTensor

__all__ = ["cut", "groups", "groups_of_columns", "is_sharded", "local", "part", "solve", "summed"]

# Elements that travel together. While some are solved for, the next are on their way.
_STAGE = 2**23


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor; those who have none never import what defines them."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of `tensor`: itself, unless it is sharded."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        held: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return held.detach()


def part(member: Member) -> Member:
    """Return what this process holds of `member`."""
    param, grad, state, _ = member
    if not is_sharded(param):
        return member
    held = None if grad is None else local(grad)
    return Member(local(param), held, _State(state, param), whole=param)


class _State(MutableMapping[str, Any]):
    """The state of a sharded parameter; its tensors are seen as the parts held here."""

    def __init__(self, state: MutableMapping[str, Any], param: Tensor) -> None:
        self._own = state
        self._param = param

    def __getitem__(self, key: str) -> Any:
        value = self._own[key]
        return local(value) if isinstance(value, Tensor) else value

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(self._own.get(key), Tensor) and is_sharded(self._own[key]):
            value = _like(self._param, value)
        self._own[key] = value

    def __delitem__(self, key: str) -> None:
        del self._own[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def groups(params: Sequence[Tensor]) -> list["ProcessGroup"]:
    """Return the process groups, one per dimension of the mesh that `params` are spread over."""
    for param in params:
        if is_sharded(param):
            return list(param.device_mesh.get_all_groups())  # type: ignore[attr-defined]
    return []


def groups_of_columns(whole: Tensor) -> list["ProcessGroup"]:
    """Return the process groups over which the columns of a sharded matrix are spread."""
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(whole, DTensor)
    return [
        whole.device_mesh.get_group(dim)
        for dim, placement in enumerate(whole.placements)
        if isinstance(placement, Shard) and placement.dim > 0
    ]


def summed(value: Tensor, over: Sequence["ProcessGroup"]) -> Tensor:
    """Return `value`, added up over the processes of every group."""
    from torch import distributed

    for group in over:
        distributed.all_reduce(value, group=group)
    return value


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
    by_rows: dict[ProcessGroup, list[int]] = {}
    os = list(bs)
    for index, whole in enumerate(wholes):
        group = _group_of_rows(whole)
        if group is not None:
            by_rows.setdefault(group, []).append(index)
            continue
        full = _like(whole, bs[index]).full_tensor()
        (o,) = solved([full.flatten(1)])
        os[index] = cut(o.reshape(full.shape), whole)
    for group, indexes in by_rows.items():
        parts = _by_owners(
            [bs[index] for index in indexes], [wholes[index] for index in indexes], group, solved
        )
        for index, o in zip(indexes, parts, strict=True):
            os[index] = o
    return os


def _like(whole: Tensor, held: Tensor) -> "DTensor":
    """Return a tensor spread like `whole`, of which this process holds `held`."""
    from torch.distributed.tensor import DTensor

    assert isinstance(whole, DTensor)
    return DTensor.from_local(
        held,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def cut(full: Tensor, whole: Tensor) -> Tensor:
    """Return what this process holds of `full` if it is spread like `whole`."""
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(whole, DTensor)
    mesh = whole.device_mesh
    everywhere = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local(everywhere.redistribute(placements=whole.placements))


def _group_of_rows(whole: Tensor) -> "ProcessGroup | None":
    """Return the processes that hold consecutive rows of `whole`, if it is spread so."""
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(whole, DTensor)
    if whole.device_mesh.ndim == 1 and whole.placements == (Shard(0),):
        group: ProcessGroup = whole.device_mesh.get_group()
        return group
    return None


class _Matrix(NamedTuple):
    """A matrix on its way: where it is in the caller's list, and who solves for it."""

    position: int
    rows: int
    cols: int
    owner: int


@dataclass
class _Travel:
    """Numbers under way between the processes of a group."""

    work: "Work | None"
    sent: Tensor
    received: Tensor
    sizes: list[int]

    def arrived(self) -> list[Tensor]:
        """Wait, then what came from each process."""
        if self.work is not None:
            self.work.wait()
        return list(torch.split(self.received, self.sizes))


def _by_owners(
    bs: Sequence[Tensor],
    wholes: Sequence[Tensor],
    group: "ProcessGroup",
    solve: Callable[[Sequence[Tensor]], list[Tensor]],
) -> list[Tensor]:
    """Bring the rows of every matrix to one process, its owner, solve there, and bring them back.

    Each process solves its share of the matrices instead of all of them, and no process ever holds
    them all.
    """
    from torch import distributed

    size, rank = distributed.get_world_size(group), distributed.get_rank(group)
    shapes = [(whole.size(0), whole.numel() // whole.size(0)) for whole in wholes]
    stages = _stages(shapes, size)
    os = list(bs)
    ahead = _to_owners(bs, stages[0], group) if stages else None
    coming_back: list[tuple[list[_Matrix], _Travel]] = []
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        assert ahead is not None
        here = ahead
        ahead = None if following is None else _to_owners(bs, following, group)
        mine = [matrix for matrix in stage if matrix.owner == rank]
        pieces = [
            torch.split(flat, _sizes(mine, source, size))
            for source, flat in enumerate(here.arrived())
        ]
        whole_matrices = [
            torch.cat([of_source[number] for of_source in pieces]).view(matrix.rows, matrix.cols)
            for number, matrix in enumerate(mine)
        ]
        solved = [
            torch.split(o.reshape(-1), [_rows(m.rows, r, size) * m.cols for r in range(size)])
            for m, o in zip(mine, solve(whole_matrices), strict=True)
        ]
        parcels = [[rows[target] for rows in solved] for target in range(size)]
        sizes = [sum(_sizes(_owned(stage, r), rank, size)) for r in range(size)]
        coming_back.append((stage, _send(parcels, sizes, bs[0], group)))
    for stage, travel in coming_back:
        for owner, flat in enumerate(travel.arrived()):
            owned = _owned(stage, owner)
            for matrix, rows in zip(
                owned, torch.split(flat, _sizes(owned, rank, size)), strict=True
            ):
                os[matrix.position] = rows.view(bs[matrix.position].shape)
    return os


def _to_owners(bs: Sequence[Tensor], stage: Sequence[_Matrix], group: "ProcessGroup") -> _Travel:
    from torch import distributed

    size, rank = distributed.get_world_size(group), distributed.get_rank(group)
    parcels = [
        [bs[matrix.position].reshape(-1) for matrix in _owned(stage, owner)]
        for owner in range(size)
    ]
    mine = _owned(stage, rank)
    return _send(parcels, [sum(_sizes(mine, r, size)) for r in range(size)], bs[0], group)


def _send(
    parcels: Sequence[Sequence[Tensor]], sizes: list[int], like: Tensor, group: "ProcessGroup"
) -> _Travel:
    """Send a list of flat tensors to each process; `sizes` are of what comes from each."""
    from torch import distributed

    sent = torch.cat([like.new_empty(0), *(tensor for parcel in parcels for tensor in parcel)])
    received = like.new_empty(sum(sizes))
    work = distributed.all_to_all_single(
        received,
        sent,
        sizes,
        [sum(tensor.numel() for tensor in parcel) for parcel in parcels],
        group=group,
        async_op=True,
    )
    return _Travel(work, sent, received, sizes)


def _owned(stage: Sequence[_Matrix], owner: int) -> list[_Matrix]:
    return [matrix for matrix in stage if matrix.owner == owner]


def _sizes(matrices: Sequence[_Matrix], process: int, processes: int) -> list[int]:
    """Return the elements of each matrix that a process holds."""
    return [_rows(matrix.rows, process, processes) * matrix.cols for matrix in matrices]


def _rows(rows: int, process: int, processes: int) -> int:
    """Return how many rows a process holds: equal chunks, of which the last may be shorter."""
    chunk = -(-rows // processes)
    return max(0, min(rows - process * chunk, chunk))


def _stages(shapes: Sequence[tuple[int, int]], processes: int) -> list[list[_Matrix]]:
    """Return matrices that travel together, with owners that have about as much to do each."""
    # Of one shape together, because they are solved for in one batch; large ones first.
    order = sorted(range(len(shapes)), key=lambda i: (-shapes[i][0] * shapes[i][1], shapes[i]))
    bounds = [0]
    elements = 0
    for position, index in enumerate(order):
        rows, cols = shapes[index]
        if elements and elements + rows * cols > _STAGE:
            bounds.append(position)
            elements = 0
        elements += rows * cols
    if order:
        bounds.append(len(order))
    load = [(0, process) for process in range(processes)]
    stages = []
    for start, stop in pairwise(bounds):
        stage = []
        for index in order[start:stop]:
            rows, cols = shapes[index]
            least, owner = heapq.heappop(load)
            heapq.heappush(load, (least + rows * cols * min(rows, cols), owner))
            stage.append(_Matrix(index, rows, cols, owner))
        stages.append(stage)
    return stages
