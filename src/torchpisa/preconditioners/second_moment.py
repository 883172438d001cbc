"""Q = Diag(sqrt(m)), the preconditioner of SISA."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchpisa.algorithms import sisa
from torchpisa.algorithms.pisa import Scalar
from torchpisa.checks import check_choice, check_range
from torchpisa.preconditioners.base import LocalProblem, Preconditioner, State

__all__ = ["SecondMoment"]


@dataclass(frozen=True)
class SecondMoment(Preconditioner):
    r"""\(Q_i = \mathrm{Diag}(\sqrt{m_i})\), equations (4.2) to (4.5).

    Args:
        scheme: `"adagrad"`, `"rmsprop"` or `"adam"`: Schemes I, II and III.
        beta: \(\beta_i\) of Schemes II and III.
        eta: \(\eta_i\), cap of \(\sqrt{m_i}\).
        eps: added to \(\sqrt{m_i}\); 0 in the paper.
    """

    homogeneous: ClassVar[bool] = True

    scheme: sisa.Scheme = "adam"
    beta: float = 0.99
    eta: float = math.inf
    eps: float = 0.0

    def __post_init__(self) -> None:
        check_choice("scheme", self.scheme, ("adagrad", "rmsprop", "adam"))
        check_range("beta", self.beta, 0, 1, low_open=True, high_open=True)
        check_range("eta", self.eta, 0, low_open=True)
        check_range("eps", self.eps, 0, high_open=True)

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"moment": torch.zeros_like(param)}

    def solve(self, problem: LocalProblem, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        moment = sisa.update_moment(state["moment"], problem.residual, self.scheme, self.beta)
        root = sisa.root_moment(moment, problem.step, self.scheme, self.beta, self.eta)
        d = sisa.direction(problem.residual, root, problem.sigma, problem.rho, self.eps)
        return d, {"moment": moment}

    def diagonal(self, dual: Tensor, state: State, step: Scalar) -> Tensor:
        return sisa.root_moment(state["moment"], step, self.scheme, self.beta, self.eta) + self.eps
