r"""A second moment in the eigenbasis of the gradients, before the orthogonalisation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchpisa.algorithms.spectral import full_precision
from torchpisa.checks import check_choice, check_count, check_range
from torchpisa.preconditioners.consensus.base import Stage, is_due
from torchpisa.preconditioners.consensus.symmetric import pack, packed_shape, unpack

__all__ = ["EigenbasisMoment"]

# Eigenvectors whose eigenvalue is less than this times the largest stay as they are: their part of
# a product is mostly rounding.
_RIDGE = 2.0**-20
# Steps of a refresh in the first rounds, when the basis is still far from the eigenvectors.
_FIRST_STEPS = 4


@dataclass(frozen=True)
class EigenbasisMoment(Stage):
    r"""\(U \leftarrow Q\,\bigl(Q^\top U \oslash \sqrt{V}\bigr)\): SOAP's second moment.

    \[ A \leftarrow \beta A + (1 - \beta)\, g g^\top, \qquad
       V \leftarrow \beta V + (1 - \beta)\, (Q^\top g)^{\odot 2} \]

    with the eigenvectors \(Q\) of \(A\), refreshed in some rounds by one step of orthogonal
    iteration (four in the first rounds), a QR decomposition of \(A Q\). With both sides,
    \(Q^\top U\) becomes \(Q^\top U S\) with the eigenvectors \(S\) of an average of
    \(g^\top g\). This is SOAP (Vyas et al., 2024), whose step is then orthogonalised.

    State of an n x k matrix, n <= k, in the optimizer's state dtype: \(V\), n k numbers; a triangle
    of \(A\) and \(Q\), 1.5 n n numbers; for both sides 1.5 k k more. In float32, bytes per
    parameter of a square matrix: 10 for one side, 16 for both; of one four times as wide: 5.5 and
    29.5.

    Args:
        sides: `"smaller"` or `"both"`.
        beta: \(\beta\), how much of the averages is kept, in [0, 1).
        every: rounds from one refresh of the eigenvectors to the next, fewer at first.
        eps: added to V, as a multiple of its mean, > 0.
    """

    sides: Literal["smaller", "both"] = "smaller"
    beta: float = 0.95
    every: int = 5
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_choice("sides", self.sides, ("smaller", "both"))
        check_range("beta", self.beta, 0, 1, high_open=True)
        check_count("every", self.every)
        check_range("eps", self.eps, 0, low_open=True, high_open=True)

    @property
    def names(self) -> tuple[str, ...]:
        one_side = "squares", "gram", "basis"
        return one_side if self.sides == "smaller" else (*one_side, "other_gram", "other_basis")

    def init_state(self, n: int, k: int, like: Tensor) -> dict[str, Tensor]:
        state = {"squares": like.new_zeros(n, k)}
        sizes = {"": n} if self.sides == "smaller" else {"": n, "other_": k}
        for side, size in sizes.items():
            state[f"{side}gram"] = like.new_zeros(packed_shape(size))
            state[f"{side}basis"] = torch.eye(size, dtype=like.dtype, device=like.device)
        return state

    def apply(
        self, u: Tensor, g: Tensor, state: Mapping[str, Tensor], round: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        refresh = is_due(round, self.every)
        new: dict[str, Tensor] = {}
        squares = state["squares"].to(g.dtype)
        q, order = self._basis("", g, state, round, new)
        if refresh:
            squares = squares.gather(1, order[:, :, None].expand_as(squares))
        u, g = q.mT @ u, q.mT @ g
        s = None
        if self.sides == "both":
            # g^T g is the same for g and Q^T g, and so are its eigenvectors.
            s, order = self._basis("other_", g.mT, state, round, new)
            if refresh:
                squares = squares.gather(2, order[:, None, :].expand_as(squares))
            u, g = u @ s, g @ s
        squares = torch.addcmul(self.beta * squares, g, g, value=1 - self.beta)
        new["squares"] = squares
        mean = squares.mean(dim=(-2, -1), keepdim=True)
        floor = (self.eps * mean).clamp_min(torch.finfo(squares.dtype).tiny)
        u = q @ (u / (squares + floor).sqrt())
        return (u if s is None else u @ s.mT), new

    def _basis(
        self,
        side: str,
        g: Tensor,
        state: Mapping[str, Tensor],
        round: int,
        new: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the eigenvectors of one side, and the old index of each.

        Args:
            side: the prefix of the names of its state.
            g: the gradient, with its rows on this side.
            state: as in `apply`.
            round: as in `apply`.
            new: the new state of this side is added to it.
        """
        gram, basis = (state[f"{side}{name}"].to(g.dtype) for name in ("gram", "basis"))
        gram = torch.baddbmm(unpack(gram), g, g.mT, beta=self.beta, alpha=1 - self.beta)
        order = torch.arange(gram.size(-1), device=g.device).expand(gram.shape[:2])
        new[f"{side}gram"] = pack(gram)
        if is_due(round, self.every):
            with full_precision():
                for _ in range(_FIRST_STEPS if round <= self.every else 1):
                    basis, step_order = _iterate(gram, basis)
                    order = order.gather(1, step_order)
            new[f"{side}basis"] = basis
        return basis, order


def _iterate(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Take a step of orthogonal iteration; return the basis, and the old index of each column."""
    tiny = torch.finfo(gram.dtype).tiny
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    product = (gram / trace.clamp_min(tiny)) @ basis
    values, order = (basis * product).sum(-2).sort(dim=-1, descending=True)
    columns = order[:, None, :].expand_as(basis)
    basis, product = basis.gather(2, columns), product.gather(2, columns)
    x = _orthonormal(product + _RIDGE * values[:, :1, None] * basis)
    # A matrix without a finite, nonzero gradient keeps its basis.
    finite = x.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    return torch.where(finite, x, basis), order


def _orthonormal(x: Tensor) -> Tensor:
    r"""Return the Q of a QR decomposition of square matrices.

    It is computed by Cholesky's decomposition \(R^\top R = X^\top X\), which GPUs are better at. If
    the old basis was nearly right, the normalised columns are nearly orthogonal, and squaring loses
    nothing. If it was not, a small multiple of I makes sure that the decomposition exists; the
    second pass removes most of its effect, and a step of Newton-Schulz the rest.
    """
    shift = 4 * x.size(-1) * torch.finfo(x.dtype).eps
    for _ in range(2):
        x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True)
        product = x.mT @ x
        product.diagonal(dim1=-2, dim2=-1).add_(shift)
        triangle, _ = torch.linalg.cholesky_ex(product)
        x = torch.linalg.solve_triangular(triangle, x.mT, upper=False).mT
    return torch.baddbmm(x, x, x.mT @ x, beta=1.5, alpha=-0.5)
