"""Q from orthogonalised momentum, the preconditioner of NSISA."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchpisa.algorithms import nsisa
from torchpisa.algorithms.pisa import Scalar
from torchpisa.checks import check_choice, check_count, check_range
from torchpisa.preconditioners.base import LocalProblem, Preconditioner, State

__all__ = ["NewtonSchulz"]


@dataclass(frozen=True)
class NewtonSchulz(Preconditioner):
    r"""NSISA's rule for one matrix, equation (4.6).

    \(d_i = -(\pi_i + o_i + \epsilon_i^{\ell+1} v_i) / (\sigma_i + \rho_i |\pi_i + o_i|)\).

    For matrices; a tensor of more dimensions (a convolution) is flattened to rows of its first one.
    The gradient enters through the orthogonalised momentum only, so `clip` does not apply.

    Args:
        momentum: \(\mu_i\) in \(b_i = \mu_i b_i + g_i\).
        nesterov: orthogonalise \(g_i + \mu_i b_i\) instead of \(b_i\).
        ns_steps: Newton-Schulz iterations.
        perturbation: \(\epsilon_i\) in [0, 1).
        aspect_scaling: multiply \(o_i\) by \(\sqrt{\max(1, \mathrm{rows}/\mathrm{cols})}\), as the
            published GPT-2 script does.
        dtype: dtype of the Newton-Schulz iterations; by default that of the state.
    """

    clips: ClassVar[bool] = False
    homogeneous: ClassVar[bool] = True

    momentum: float = 0.95
    nesterov: bool = False
    ns_steps: int = 5
    perturbation: float = 1e-8
    aspect_scaling: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_range("momentum", self.momentum, 0, 1, high_open=True)
        check_choice("nesterov", self.nesterov, (True, False))
        check_count("ns_steps", self.ns_steps, high=100)  # many more than any matrix needs
        check_range("perturbation", self.perturbation, 0, 1, high_open=True)
        check_choice("aspect_scaling", self.aspect_scaling, (True, False))

    def check(self, params: Sequence[Tensor]) -> None:
        for param in params:
            if param.dim() < 2 or param.is_complex() or not param.numel():
                raise ValueError(
                    "params must be real matrices for NewtonSchulz, got one of shape "
                    f"{tuple(param.shape)} and {param.dtype}"
                )

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(param)}

    def solve(self, problem: LocalProblem, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        momentum, b = nsisa.momentum_step(
            state["momentum"], problem.grad, self.momentum, self.nesterov
        )
        d = nsisa.direction(
            problem.dual,
            self.orthogonalize(b),
            problem.sigma,
            problem.rho,
            self.perturbation**problem.step,
        )
        return d, {"momentum": momentum}

    def orthogonalize(self, b: Tensor) -> Tensor:
        """Return the orthogonalised momentum o for b, in the shape of `b`."""
        o = nsisa.newton_schulz(b.flatten(1), self.ns_steps, self.dtype)
        return (o * self.scale(*o.shape)).reshape(b.shape)

    def scale(self, rows: int, cols: int) -> float:
        """Return the factor on the orthogonalised momentum of a matrix."""
        return max(1.0, rows / cols) ** 0.5 if self.aspect_scaling else 1.0

    def diagonal(self, dual: Tensor, state: State, step: Scalar) -> Tensor:
        return (dual + self.orthogonalize(state["momentum"])).abs()
