r"""Whiten the smaller side of a matrix, by matrix products only."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchpisa.algorithms.nsisa import COEFFICIENTS
from torchpisa.algorithms.spectral import POLAR, full_precision
from torchpisa.checks import check_count, check_range
from torchpisa.preconditioners.consensus.base import Stage, is_due
from torchpisa.preconditioners.consensus.symmetric import pack, packed_shape, unpack

__all__ = ["Whiten", "inverse_root"]

_MIN_EPS = 1e-7  # less is lost in the rounding of float32


@dataclass(frozen=True)
class Whiten(Stage):
    r"""\(U \leftarrow C^{-p} U\) with an average \(C\) of \(g g^\top\) over time.

    \[ C \leftarrow \beta C + (1 - \beta)\, g g^\top, \qquad
       R = \Bigl(\frac{C}{\operatorname{tr} C} + \epsilon I\Bigr)^{-p}, \qquad
       U \leftarrow R\, U. \]

    Of a matrix that is taller than wide, \(g^\top g\) and \(U R\). One side of Shampoo's
    preconditioner (Gupta et al., 2018), before an orthogonalisation.

    State of an n x k matrix, n <= k: a triangle of \(C\) in float32 and one of \(R\) in bfloat16,
    \(3\,n/k\) bytes per parameter, so 3 for a square matrix and 0.75 for one that is four times as
    wide. (Both are float64 for float64 parameters.)

    Args:
        power: \(p\), 1/4 or 1/2.
        beta: \(\beta\), how much of the average is kept, in [0, 1).
        every: rounds from one \(R\) to the next, fewer at first. With the default eps it takes 36
            products of n x n matrices for p = 1/2, and 60 for p = 1/4.
        eps: \(\epsilon\), in [1e-7, 1]: no direction is multiplied by more than \(\epsilon^{-p}\)
            times what the strongest is.
    """

    power: float = 0.25
    beta: float = 0.9
    every: int = 10
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.power not in (0.25, 0.5):
            raise ValueError(f"power must be 0.25 or 0.5, got {self.power!r}")
        check_range("beta", self.beta, 0, 1, high_open=True)
        check_count("every", self.every)
        check_range("eps", self.eps, _MIN_EPS, 1)

    @property
    def names(self) -> tuple[str, ...]:
        return "gram", "root"

    def init_state(self, n: int, k: int, like: Tensor) -> dict[str, Tensor]:
        # Not bfloat16 for the average: rounding could give it negative eigenvalues.
        wide = torch.promote_types(like.dtype, torch.float32)
        narrow = torch.float64 if wide == torch.float64 else torch.bfloat16
        gram = torch.zeros(packed_shape(n), dtype=wide, device=like.device)
        identity = torch.eye(n, dtype=narrow, device=like.device)
        return {"gram": gram, "root": pack(identity[None])[0]}

    def apply(
        self, u: Tensor, g: Tensor, state: Mapping[str, Tensor], round: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        gram = unpack(state["gram"].to(g.dtype))
        gram = torch.baddbmm(gram, g, g.mT, beta=self.beta, alpha=1 - self.beta)
        new = {"gram": pack(gram)}
        if is_due(round, self.every):
            trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
            a = gram / trace.clamp_min(torch.finfo(gram.dtype).tiny)
            a.diagonal(dim1=-2, dim2=-1).add_(self.eps)
            # Scaled as if the mean eigenvalue of C were one, so that R is about as large as I.
            root = inverse_root(a, self.power, self.eps) * gram.size(-1) ** -self.power
            new["root"] = pack(root)
        else:
            root = unpack(state["root"].to(u.dtype))
        return root @ u, new


def inverse_root(a: Tensor, power: float, least: float) -> Tensor:
    r"""Return \(A^{-1/2}\) or \(A^{-1/4}\) of symmetric matrices.

    Args:
        a: (c, n, n), eigenvalues in [least, 1 + least].
        power: 0.5 or 0.25.
        least: a bound on the eigenvalues, > 0.
    """
    with full_precision():
        root, inverse = _square_roots(a, math.sqrt(least))
        if power == 0.25:
            _, inverse = _square_roots(root, least**0.25)
    return inverse


def _square_roots(a: Tensor, least: float) -> tuple[Tensor, Tensor]:
    r"""Return \(A^{1/2}\) and \(A^{-1/2}\) by the coupled Newton-Schulz iteration.

    \(Y \leftarrow Y H\) and \(Z \leftarrow H Z\) with \(H = a I + b\,ZY + c\,(ZY)^2\), from
    \(Y = A\) and \(Z = I\): an eigenvalue \(s^2\) of A becomes \(s t\) and \(t / s\), where
    \(t \leftarrow a t + b t^3 + c t^5\) begins at s and ends at 1 (Higham, 2008, section 6.7).

    Args:
        a: symmetric matrices.
        least: a bound on the square roots of their eigenvalues, which are at most about 1.
    """
    lifts = max(0, math.ceil(math.log(0.68 / least) / math.log(COEFFICIENTS[0])))
    y, z = a, torch.eye(a.size(-1), dtype=a.dtype, device=a.device).expand_as(a)
    for linear, cubic, quintic in (*[COEFFICIENTS] * lifts, *POLAR[-3:]):
        zy = z @ y
        h = torch.baddbmm(zy, zy, zy, beta=cubic, alpha=quintic)
        h.diagonal(dim1=-2, dim2=-1).add_(linear)
        y, z = y @ h, h @ z
    return y, z
