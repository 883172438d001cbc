"""Sharded parameters (DTensors): local parts, and sums over all parts.

SISA's rule works element by element, so every process steps its local part with the kernels for
plain tensors. Operations on whole matrices are in `owners.py`.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchpisa.kernels.job import Member

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

__all__ = [
    "from_local",
    "groups_of_parts",
    "is_sharded",
    "local",
    "local_member",
    "local_shard",
    "mesh_groups",
    "summed",
    "summed_together",
    "whole_state",
]


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor; import DTensor only if it may be."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the local part of `tensor`: the tensor itself unless it is sharded."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        local_part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local_part.detach()


def local_member(member: Member) -> Member:
    """Return `member` with local parts in place of sharded tensors."""
    param, grad, state, _ = member
    if not is_sharded(param):
        return member
    local_grad = None if grad is None else local(grad)
    return Member(local(param), local_grad, _LocalState(state, param), whole=param)


class _LocalState(MutableMapping[str, Any]):
    """A view of the state of a sharded parameter in which all tensors are local parts."""

    def __init__(self, state: MutableMapping[str, Any], param: Tensor) -> None:
        self._state = state
        self._param = param

    def __getitem__(self, key: str) -> Any:
        value = self._state[key]
        return local(value) if isinstance(value, Tensor) else value

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(self._state.get(key), Tensor) and is_sharded(self._state[key]):
            value = from_local(self._param, value)
        self._state[key] = value

    def whole(self, key: str) -> Any:
        """Return an entry itself, a DTensor if it is sharded."""
        return self._state[key]

    def __delitem__(self, key: str) -> None:
        del self._state[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def whole_state(member: Member, key: str) -> Tensor:
    """Return a tensor of a parameter's state, a DTensor if it is sharded."""
    state = member.state
    value: Tensor = state.whole(key) if isinstance(state, _LocalState) else state[key]
    return value


def mesh_groups(params: Sequence[Tensor]) -> list["ProcessGroup"]:
    """Return the process groups of the first sharded parameter, one per dimension of its mesh."""
    for param in params:
        if is_sharded(param):
            return list(param.device_mesh.get_all_groups())  # type: ignore[attr-defined]
    return []


def groups_of_parts(param: Tensor, beyond: int = 0) -> list["ProcessGroup"]:
    """Return the process groups whose ranks hold different parts of a parameter, not copies.

    Args:
        param: the parameter; without sharding there are no such groups.
        beyond: consider sharding along this dimension of the parameter and later ones only.
    """
    if not is_sharded(param):
        return []
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(param, DTensor)
    return [
        param.device_mesh.get_group(dim)
        for dim, placement in enumerate(param.placements)
        if isinstance(placement, Shard) and placement.dim >= beyond
    ]


def summed(value: Tensor, over: Sequence["ProcessGroup"]) -> Tensor:
    """Sum `value` in place over the processes of every group, and return it."""
    from torch import distributed

    for group in over:
        distributed.all_reduce(value, group=group)
    return value


def summed_together(
    values: Sequence[Tensor], over: Sequence[Sequence["ProcessGroup"]]
) -> list[Tensor]:
    """Return each value summed over its own groups, with one collective for equal groups."""
    alike: dict[tuple[ProcessGroup, ...], list[int]] = {}
    for index, groups_of_value in enumerate(over):
        alike.setdefault(tuple(groups_of_value), []).append(index)
    sums = list(values)
    for groups, indexes in alike.items():
        if groups:
            batch = [values[index] for index in indexes]
            flat = summed(torch.cat([value.reshape(-1) for value in batch]), groups)
            pieces = torch.split(flat, [value.numel() for value in batch])
            for index, piece in zip(indexes, pieces, strict=True):
                sums[index] = piece.view_as(values[index])
    return sums


def from_local(whole: Tensor, local_part: Tensor) -> "DTensor":
    """Return a DTensor with the layout of `whole`, given its local part."""
    from torch.distributed.tensor import DTensor

    assert isinstance(whole, DTensor)
    return DTensor.from_local(
        local_part,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def local_shard(full: Tensor, whole: Tensor) -> Tensor:
    """Return the local part that `full` has in the layout of `whole`."""
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(whole, DTensor)
    mesh = whole.device_mesh
    everywhere = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local(everywhere.redistribute(placements=whole.placements))
