"""A step that fails changes nothing: what it may change is noted, and put back after an error."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchpisa.kernels.job import Member
from torchpisa.optim.rounds import PROGRESS, Group

__all__ = ["Undo"]


class Undo:
    """Where parameter groups and some parameters stand before a step.

    Args:
        groups: the parameter groups.
        members: parameters of which copies are to be made, with their state. What torchpisa's own
            kernels compute does not fail half-way, and needs none.
    """

    def __init__(self, groups: Sequence[Group], members: Sequence[Member]) -> None:
        self._groups = [
            (group, {name: group[name] for name in (*PROGRESS, "sigma")}) for group in groups
        ]
        self._states = [(member.state, dict(member.state)) for member in members]
        self._weights = [
            (member.param, member.param._version, member.param.detach().clone())
            for member in members
        ]
        changing: list[Any] = []
        if members:
            changing += [value for _, before in self._states for value in before.values()]
            for _, before in self._groups:
                changing += [before["kept"], *_listed(before["sigma"])]
        self._copies = [
            (tensor, tensor.detach().clone()) for tensor in changing if isinstance(tensor, Tensor)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for group, before in self._groups:
            group.update(before)
        for state, held in self._states:
            for name, value in held.items():
                state[name] = value
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        for param, version, copy in self._weights:
            # Only those that were changed: autograd may still need the others as they are.
            if param._version != version:
                param.copy_(copy)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
