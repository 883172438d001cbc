"""MISA: PISA with the preconditioner `Spectral` for matrices. Ours, not the paper's."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms.sisa import Scheme
from torchpisa.optim.common import Common
from torchpisa.optim.matrices import MatrixOptimizer
from torchpisa.optim.rounds import Group
from torchpisa.optim.sisa import fill_in
from torchpisa.preconditioners import Spectral
from torchpisa.preconditioners.spectral import Method

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MISA"]


class MISA(MatrixOptimizer):
    r"""Matrix-preconditioned Inexact Stochastic ADMM: Algorithm 1 with a \(Q_i\) of our own.

    \[
    \begin{aligned}
    r_i &= \pi_i + g_i, \qquad Q_i = \min((r_i r_i^\top)^{1/2}, \eta_i), \\
    d_i &= -(\sigma_i I + \rho_i Q_i)^{-1} r_i, \\
    \pi_i &\leftarrow \pi_i + \sigma_i d_i, \qquad
    w \leftarrow w + \frac{\sum_i \alpha_i (\pi_i^{\mathrm{old}} + 2 \sigma_i d_i) - \lambda w}
                          {\sum_i \alpha_i \sigma_i + \lambda}.
    \end{aligned}
    \]

    That is for matrices, convolutions (flattened to two dimensions) among them: a singular value
    \(s\) of \(r_i\) becomes \(s / (\sigma_i + \rho_i \min(s, \eta_i))\), so large ones are made
    equal as by Muon and small ones are scaled as by gradient descent. Everything else takes SISA's
    rule in the same consensus. Parameter groups are split, and may be told apart by
    `orthogonalize`, as in `NSISA`; `torchpisa.optim.param_groups.split(model)` keeps embeddings and
    the output layer with SISA's rule.

    Unlike NSISA it is an instance of the paper's Algorithm 1, so where it settles, the gradients of
    batches that differ add up to zero. For matrices the dual is its only state: with one batch 4
    bytes per parameter, half of Adam's.

    Args:
        params: parameters or parameter groups; groups may override everything but `batches`,
            `weights`, `clip` and `nonfinite`.
        sigma: \(\sigma_i^0 > 0\) for matrices: 1/sigma is the step that a constant gradient ends up
            with. Near a minimum \(r_i\) and with it \(Q_i\) vanish, and curvatures up to two thirds
            of sigma are stable; with an average, larger ones. One number, or one per batch. By
            default 0.5, or 1 if there are several batches, which may differ.
        rho: \(\rho_i \ge 0\) for matrices: a new gradient moves a matrix by at most 2/rho in
            spectral norm. One number, or one per batch. By default 10, or 1 if there are several
            batches.
        eta: \(\eta_i\), cap of the eigenvalues of Q and of SISA's \(\sqrt{m_i}\). The theory wants
            it finite; it costs time on GPUs.
        average: see `torchpisa.preconditioners.Spectral`; 0, the default, for no state but the
            dual.
        aspect_scaling: let tall matrices move \(\sqrt{\mathrm{rows}/\mathrm{cols}}\) times further;
            see `torchpisa.preconditioners.Spectral`.
        method: how d is computed; see `torchpisa.preconditioners.Spectral`. `"smooth"` is the
            cheap one, by a few Newton-Schulz steps.
        ns_steps: Newton-Schulz iterations of `"smooth"`.
        ns_dtype: what they are computed in; see `NSISA`.
        sisa_sigma: sigma of what is not a matrix; `SISA`'s by default.
        sisa_rho: rho of what is not a matrix; `SISA`'s by default.
        scheme: see `SISA`; likewise `beta` and `eps`.
        beta: see `SISA`.
        eps: see `SISA`.
        **common: see `torchpisa.optim.Common`.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        sigma: float | Sequence[float] | None = None,
        rho: float | Sequence[float] | None = None,
        eta: float = math.inf,
        average: float = 0.0,
        aspect_scaling: bool = False,
        method: Method = "auto",
        ns_steps: int = 5,
        ns_dtype: torch.dtype | Literal["auto"] | None = "auto",
        sisa_sigma: float | Sequence[float] | None = None,
        sisa_rho: float | Sequence[float] | None = None,
        scheme: Scheme = "adam",
        beta: float = 0.99,
        eps: float = 0.0,
        **common: "Unpack[Common]",
    ) -> None:
        sigma, rho = fill_in(sigma, rho, common, single=(0.5, 10.0), several=(1.0, 1.0))
        super().__init__(
            params,
            sigma,
            rho,
            {
                "average": average,
                "aspect_scaling": aspect_scaling,
                "method": method,
                "ns_steps": ns_steps,
                "ns_dtype": ns_dtype,
            },
            sisa_sigma=sisa_sigma,
            sisa_rho=sisa_rho,
            scheme=scheme,
            beta=beta,
            eta=eta,
            eps=eps,
            **common,
        )

    def _matrix_preconditioner(self, group: Group) -> Spectral:
        return Spectral(
            group["eta"],
            group["average"],
            group["aspect_scaling"],
            group["method"],
            group["ns_steps"],
            self._ns_dtype(group),
        )
