"""MISA: PISA with singular values as preconditioner of matrices. Ours, not the paper's."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms.sisa import Scheme
from torchpisa.checks import check_choice
from torchpisa.optim.common import Common
from torchpisa.optim.matrices import MatrixOptimizer
from torchpisa.optim.rounds import Group
from torchpisa.optim.sisa import fill_in
from torchpisa.preconditioners import Preconditioner, Spectral, SpectralConsensus
from torchpisa.preconditioners.spectral import Method

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MISA"]


class MISA(MatrixOptimizer):
    r"""Matrix-preconditioned Inexact Stochastic ADMM: Algorithm 1 with a preconditioner of our own.

    For matrices, convolutions (flattened to two dimensions) among them:

    \[
    \begin{aligned}
    \delta_i &= -(1 - \mu)(\pi_i + g_i), \qquad
    U = \sum_i \alpha_i (\pi_i + 2 \delta_i), \qquad
    \pi_i \leftarrow \pi_i + \delta_i, \\
    w &\leftarrow w + \Big(\sum_i \alpha_i \sigma_i I + \rho P\Big)^{-1} U, \qquad
    P = \min((U U^\top)^{1/2}, \eta).
    \end{aligned}
    \]

    A singular value \(s\) of the sum \(U\) becomes \(s / (\sigma + \rho \min(s, \eta))\), so large
    ones are made equal as by Muon and small ones are scaled as by gradient descent. Everything else
    takes SISA's rule in the same consensus. Parameter groups are split, and may be told apart by
    `orthogonalize`, as in `NSISA`; `torchpisa.optim.param_groups.split(model)` keeps embeddings and
    the output layer with SISA's rule.

    Unlike in NSISA the batches are added up before anything is orthogonalised, so where it settles,
    the gradients of batches that differ add up to zero. For matrices the dual, an average of
    gradients, is its only state: with one batch 4 bytes per parameter, half of Adam's.

    `at="local"` is Algorithm 1 as it stands, with \(Q_i = \min((r_i r_i^\top)^{1/2}, \eta_i)\) in
    the local step of every batch; see `torchpisa.preconditioners.Spectral`.

    Args:
        params: parameters or parameter groups; groups may override everything but `batches`,
            `weights`, `clip` and `nonfinite`.
        sigma: \(\sigma_i^0 > 0\) for matrices: 1/sigma is the step that a constant gradient ends up
            with where singular values are small. One number, or one per batch. By default 1e-4, or
            0.1 with several batches; in the local step 0.5, or 1.
        rho: \(\rho \ge 0\) for matrices: a step moves a matrix by at most 1/rho in spectral norm.
            One number, or one per batch, of which the mean counts. By default 100, or 10 with
            several batches; in the local step, where it is 2/rho, 10 or 1.
        at: what is preconditioned, `"consensus"` or, as in the paper, the `"local"` step.
        momentum: \(\mu\), how much of the average of gradients is kept from round to round; 0.95
            by default. Only at the consensus.
        eta: \(\eta_i\), cap of the eigenvalues of P or Q and of SISA's \(\sqrt{m_i}\). The theory
            wants it finite; it costs time on GPUs.
        average: see `torchpisa.preconditioners.Spectral`; 0, the default, for no state but the
            dual. Only in the local step.
        aspect_scaling: let tall matrices move \(\sqrt{\mathrm{rows}/\mathrm{cols}}\) times further;
            see `torchpisa.preconditioners.Spectral`.
        method: how it is computed; see `torchpisa.preconditioners.Spectral`. By default
            `"smooth"`, which is cheap and as rough as Muon; with a finite eta, or in the local
            step, `"auto"`, which is as accurate as an SVD.
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
        at: Literal["consensus", "local"] = "consensus",
        momentum: float | None = None,
        eta: float = math.inf,
        average: float = 0.0,
        aspect_scaling: bool = False,
        method: Method | None = None,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | Literal["auto"] | None = "auto",
        sisa_sigma: float | Sequence[float] | None = None,
        sisa_rho: float | Sequence[float] | None = None,
        scheme: Scheme = "adam",
        beta: float = 0.99,
        eps: float = 0.0,
        **common: "Unpack[Common]",
    ) -> None:
        local = at == "local"
        sigma, rho = fill_in(
            *(sigma, rho, common),
            single=(0.5, 10.0) if local else (1e-4, 100.0),
            several=(1.0, 1.0) if local else (0.1, 10.0),
        )
        super().__init__(
            params,
            sigma,
            rho,
            {
                "at": at,
                "momentum": momentum,
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

    def _matrix_preconditioner(self, group: Group) -> Preconditioner:
        check_choice("at", group["at"], ("consensus", "local"))
        local = group["at"] == "local"
        rough = not local and group["eta"] == math.inf and not group["average"]
        method = group["method"]
        if method is None:
            method = "smooth" if rough else "auto"
        spectral = Spectral(
            group["eta"],
            group["average"],
            group["aspect_scaling"],
            method,
            group["ns_steps"],
            self._ns_dtype(group),
        )
        momentum = group["momentum"]
        if not local:
            return SpectralConsensus(0.95 if momentum is None else momentum, spectral)
        if momentum is not None:
            raise ValueError(
                f"momentum must be None with at='local', got {momentum!r}: the dual is no average"
            )
        return spectral
