"""Q = I, the preconditioner that does nothing."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.preconditioners.base import LocalProblem, Preconditioner, State

__all__ = ["Identity"]


@dataclass(frozen=True)
class Identity(Preconditioner):
    r"""\(Q_i = I\): \(d_i = -r_i / (\sigma_i + \rho_i)\), the simplest choice of Section 4.

    With equal sigma and rho the duals of all batches then add up to a single dual of the averaged
    gradient: plain momentum, which does not help with heterogeneous data.
    """

    homogeneous: ClassVar[bool] = True

    def solve(self, problem: LocalProblem, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        return -problem.residual / (problem.sigma + problem.rho), {}

    def diagonal(self, dual: Tensor, state: State, step: Scalar) -> Tensor:
        return torch.ones_like(dual)
