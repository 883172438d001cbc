"""What an optimizer knows of other processes; `torchpisa.distributed` implements it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.kernels.dispatch import Plans
from torchpisa.kernels.job import Member
from torchpisa.optim.round import Part, Round

# Not every build of torch has these, and type hints must be resolved in all of them.
if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
else:
    ProcessGroup = DeviceMesh = Any

__all__ = ["DeviceMesh", "Peers", "ProcessGroup"]


class Peers(Protocol):
    """The ranks that take every consensus together, as seen from one of them.

    Every rank joins every collective of every round, in the same order, whatever happened to its
    batches.

    Attributes:
        size: number of ranks.
        rank: this one.
        begun: whether a backward pass has taken part of the step that is due.
    """

    size: int
    rank: int
    begun: bool

    def shares(self, weights: Sequence[float] | None, batches: int) -> list[float]:
        """Return alpha_i of this rank's batches, from the weights of all ranks' batches."""

    def add(self, params: Sequence[Tensor]) -> None:
        """Agree on parameters that all ranks add; they take the values of the first rank."""

    def sum(self, values: Sequence[Scalar], device: torch.device) -> Tensor:
        """Return a few numbers, added up over all ranks."""

    def expect(self, slot: int, params: Sequence[Tensor]) -> None:
        """Raise if gradients are not what a rank's step for a batch needs."""

    def cleared(self, params: Sequence[Tensor]) -> None:
        """Note that gradients are about to be cleared."""

    def stepped(self) -> None:
        """Note that a batch was stepped, or is absent."""

    def contribute(
        self, parts: Sequence[Part], members: Sequence[list[Member]], round: Round
    ) -> None:
        """Complete what this rank's batches contribute to `members`, and send it."""

    def close(
        self,
        parts: Sequence[Part],
        members: Sequence[list[Member]],
        round: Round,
        problem: bool,
        plans: Plans,
    ) -> int:
        """Send the rest, wait for the others, and take the consensus.

        Args:
            parts: all parameters, by rule.
            members: those with state.
            round: where it stands.
            problem: whether a batch of this rank was left out for a reason that is to be raised.
            plans: of the fused kernels.

        Returns:
            How many ranks had a problem, as far as this one was told.
        """

    def raise_if_out_of_step(self) -> None:
        """Raise RuntimeError, on every rank, if ranks have stepped for different batches."""

    def forget(self) -> None:
        """Drop what is left of a round that is not to be finished."""
