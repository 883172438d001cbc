"""Parameters that are spread over processes (DTensors), stepped where their parts lie.

SISA's rule goes element by element, so every process steps its own part with the kernels that it
has for plain tensors. Sums over all parts are here; what is done to whole matrices is in
`owners.py`.
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
    "cut",
    "groups",
    "groups_of_parts",
    "is_sharded",
    "laid_out_like",
    "local",
    "part",
    "summed",
    "summed_together",
    "whole_state",
]


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
            value = laid_out_like(self._param, value)
        self._own[key] = value

    def whole(self, key: str) -> Any:
        """Return what is spread over processes, not the part of it that is held here."""
        return self._own[key]

    def __delitem__(self, key: str) -> None:
        del self._own[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def whole_state(member: Member, key: str) -> Tensor:
    """Return a tensor of the state of a parameter, spread over processes if that is."""
    state = member.state
    value: Tensor = state.whole(key) if isinstance(state, _State) else state[key]
    return value


def groups(params: Sequence[Tensor]) -> list["ProcessGroup"]:
    """Return the process groups, one per dimension of the mesh that `params` are spread over."""
    for param in params:
        if is_sharded(param):
            return list(param.device_mesh.get_all_groups())  # type: ignore[attr-defined]
    return []


def groups_of_parts(param: Tensor, beyond: int = 0) -> list["ProcessGroup"]:
    """Return the process groups that hold different parts of a parameter, not copies of it.

    Args:
        param: a parameter; there are none if it is not sharded.
        beyond: only those along whose ranks it is cut in this dimension or a later one.
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
    """Return `value`, added up over the processes of every group."""
    from torch import distributed

    for group in over:
        distributed.all_reduce(value, group=group)
    return value


def summed_together(
    values: Sequence[Tensor], over: Sequence[Sequence["ProcessGroup"]]
) -> list[Tensor]:
    """Return each value added up over groups of its own, in one sum for those with the same."""
    alike: dict[tuple[ProcessGroup, ...], list[int]] = {}
    for index, of_value in enumerate(over):
        alike.setdefault(tuple(of_value), []).append(index)
    sums = list(values)
    for of_values, indexes in alike.items():
        if of_values:
            some = [values[index] for index in indexes]
            total = summed(torch.cat([value.reshape(-1) for value in some]), of_values)
            parts = torch.split(total, [value.numel() for value in some])
            for index, part_of_sum in zip(indexes, parts, strict=True):
                sums[index] = part_of_sum.view_as(values[index])
    return sums


def laid_out_like(whole: Tensor, held: Tensor) -> "DTensor":
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
