"""Duals that average gradients, and a consensus by singular values, as in federated.MISA."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from torchpisa.checks import check_range
from torchpisa.preconditioners.base import LocalProblem, Preconditioner, State
from torchpisa.preconditioners.spectral import Spectral

__all__ = ["SpectralConsensus"]


@dataclass(frozen=True)
class SpectralConsensus(Preconditioner):
    r"""\(\rho_i Q_i = \frac{\mu}{1 - \mu} \sigma_i I\), and \(\rho\) at the consensus: ours.

    For matrices; a vector counts as one of a single column. The local step
    \(d_i = -(1 - \mu) r_i / \sigma_i\) makes the dual an average of gradients,
    \(\pi_i \leftarrow \mu \pi_i - (1 - \mu) g_i\), whatever rho. What the batches contribute is
    added up as in the paper, so what they disagree on cancels out; only the sum \(U\) is
    preconditioned, by a proximal term of the consensus (2.9):
    \(w \leftarrow w + (S I + \rho P)^{-1} U\) with \(P = (U U^\top)^{1/2}\). A singular value
    \(s\) of \(U\) becomes \(s / (S + \rho s)\).

    Args:
        momentum: \(\mu\).
        spectral: definition and computation of \(P\), without average.
    """

    homogeneous: ClassVar[bool] = True

    momentum: float = 0.95
    spectral: Spectral = field(default_factory=Spectral)

    def __post_init__(self) -> None:
        check_range("momentum", self.momentum, 0, 1, high_open=True)
        if not isinstance(self.spectral, Spectral):
            raise TypeError(f"spectral must be a Spectral, got {self.spectral!r}")
        if self.spectral.average:
            average = self.spectral.average
            raise ValueError(
                f"average must be 0 at the consensus, where none is kept, got {average!r}"
            )

    @property
    def proximal(self) -> Spectral:  # type: ignore[override]
        return self.spectral

    def check(self, params: Sequence[Tensor]) -> None:
        for param in params:
            sharded = hasattr(param, "full_tensor") and param.dim() < 2
            if param.is_complex() or not param.numel() or sharded:
                raise ValueError(
                    "params must be real and not empty for SpectralConsensus, and sharded ones "
                    f"matrices, got one of shape {tuple(param.shape)} and {param.dtype}"
                )

    def solve(self, problem: LocalProblem, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        return (self.momentum - 1) / problem.sigma * problem.residual, {}
