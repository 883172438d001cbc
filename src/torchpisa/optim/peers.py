"""Interface between an optimizer and other processes; `torchpisa.distributed` implements it."""

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

    Every rank joins every collective of every round, in the same order, even if its own batches are
    absent.

    Attributes:
        size: the number of ranks.
        rank: the number of this rank.
        step_begun: True if a backward pass has stepped some parameters, and `step()` has to follow.
    """

    size: int
    rank: int
    step_begun: bool

    def shares(self, weights: Sequence[float] | None, batches: int) -> list[float]:
        """Return alpha_i of this rank's batches, normalised over the batches of all ranks."""

    def add_params(self, params: Sequence[Tensor]) -> None:
        """Check that all ranks add the same parameters, and copy the values of the first rank."""

    def sum(self, values: Sequence[Scalar], device: torch.device) -> Tensor:
        """Return the sums of a few numbers over all ranks."""

    def before_step(self, slot: int, params: Sequence[Tensor]) -> None:
        """Prepare the step of a batch; raise if its gradients were averaged over ranks."""

    def on_zero_grad(self, params: Sequence[Tensor]) -> None:
        """Handle `zero_grad()`, before gradients are cleared."""

    def on_step(self) -> None:
        """Handle `step()` or `skip()`."""

    def contribute(
        self, parts: Sequence[Part], members: Sequence[list[Member]], round: Round
    ) -> None:
        """Complete the contributions of this rank's batches to `members`, and send them."""

    def close(
        self,
        parts: Sequence[Part],
        members: Sequence[list[Member]],
        round: Round,
        problem: bool,
        plans: Plans,
    ) -> int:
        """Send the contributions that are left, wait for the other ranks, and take the consensus.

        Args:
            parts: all parameters, by group and rule.
            members: the parameters with state, by part.
            round: the round to close.
            problem: True if this rank left out a batch and will raise an error for it.
            plans: cache of the fused kernels.

        Returns:
            The number of ranks with a problem, as far as this rank knows it.
        """

    def raise_if_out_of_step(self) -> None:
        """Raise RuntimeError, on every rank, if ranks have stepped for different batches."""

    def reset_round(self) -> None:
        """Forget everything about the open round."""
