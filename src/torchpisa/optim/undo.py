"""A step that fails changes nothing: what it may change is noted, and put back after an error."""

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchpisa.kernels.job import Member

if TYPE_CHECKING:
    from torchpisa.optim.optimizer import RoundOptimizer

__all__ = ["Undo"]

# Settings that a round changes.
_PENALTIES = ("sigma", "sisa_sigma")


class Undo:
    """Put an optimizer back where it stood if the block that this guards raises.

    Args:
        optimizer: its round and penalties are noted.
        members: parameters of which copies are made, with their state. What torchpisa's own
            kernels compute does not fail half-way, and needs none.
    """

    def __init__(self, optimizer: "RoundOptimizer", members: Sequence[Member]) -> None:
        self._optimizer = optimizer
        self._round = optimizer.round.copy()
        self._penalties = [
            (group, name, group[name])
            for group in optimizer.param_groups
            for name in _PENALTIES
            if name in group
        ]
        self._members = members
        if members:
            self._copy()

    def _copy(self) -> None:
        self._states = [(member.state, dict(member.state)) for member in self._members]
        self._weights = [
            (member.param, member.param._version, member.param.detach().clone())
            for member in self._members
        ]
        changing: list[Any] = [value for _, before in self._states for value in before.values()]
        for _, _, value in self._penalties:
            changing += value if isinstance(value, list) else [value]
        self._copies = [
            (tensor, tensor.detach().clone()) for tensor in changing if isinstance(tensor, Tensor)
        ]

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            with torch.no_grad():
                self._restore()

    def _restore(self) -> None:
        self._optimizer.round = self._round
        for group, name, value in self._penalties:
            group[name] = value
        if not self._members:
            return
        for state, held in self._states:
            for name, value in held.items():
                state[name] = value
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        for param, version, copy in self._weights:
            # Only those that were changed: autograd may still need the others as they are.
            if param._version != version:
                param.copy_(copy)
