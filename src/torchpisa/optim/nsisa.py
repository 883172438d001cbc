"""NSISA, Algorithm 3."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms.sisa import Scheme
from torchpisa.optim.common import Common
from torchpisa.optim.matrices import MatrixOptimizer
from torchpisa.optim.rounds import Group
from torchpisa.preconditioners import NewtonSchulz

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["NSISA"]


class NSISA(MatrixOptimizer):
    r"""Newton-Schulz-based Inexact Stochastic ADMM (Algorithm 3).

    \[
    \begin{aligned}
    b_i &\leftarrow \mu_i b_i + g_i, \qquad o_i = \mathtt{NewtonSchulz}(b_i), \\
    d_i &= -\frac{\pi_i + o_i + \epsilon_i^{\ell+1} v_i}{\sigma_i + \rho_i |\pi_i + o_i|}, \\
    \pi_i &\leftarrow \pi_i + \sigma_i d_i, \qquad
    w \leftarrow w + \frac{\sum_i \alpha_i (\pi_i^{\mathrm{old}} + 2 \sigma_i d_i) - \lambda w}
                          {\sum_i \alpha_i \sigma_i + \lambda}.
    \end{aligned}
    \]

    That is for matrices, convolutions (flattened to two dimensions) among them. Everything else
    takes SISA's rule in the same consensus. Each parameter group is split into these two kinds; to
    decide yourself, give groups `matrix=True` or `False`, or let
    `torchpisa.optim.param_groups.split(model)` keep embeddings and the output layer from being
    orthogonalised.

    With batches that differ, NSISA as printed settles where \(\sum_i \alpha_i o_i = 0\), which is
    not a stationary point of the loss. Use SISA or MISA for uneven data.

    Args:
        params: parameters or parameter groups; groups may override everything but `batches`,
            `weights`, `clip` and `nonfinite`.
        sigma: \(\sigma_i^0 > 0\) for matrices: 1/sigma is comparable to Muon's learning rate. One
            number, or one per batch.
        rho: \(\rho_i \ge 0\) for matrices. One number, or one per batch.
        momentum: \(\mu_i\) in [0, 1).
        nesterov: orthogonalise \(g_i + \mu_i b_i\), as the published GPT-2 script does.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: what their products are computed in: a dtype, None for that of the state, or
            `"auto"`: bfloat16 on GPUs and, for a million elements or more, on CPUs that have
            instructions for it; never for float64 parameters.
        perturbation: \(\epsilon_i\) in [0, 1); it stands in where \(\pi_i + o_i\) is exactly zero.
        aspect_scaling: multiply \(o_i\) by \(\sqrt{\max(1, \mathrm{rows}/\mathrm{cols})}\), as the
            published GPT-2 script does.
        sisa_sigma: sigma of what is not orthogonalised; `SISA`'s by default.
        sisa_rho: rho of what is not orthogonalised; `SISA`'s by default.
        scheme: see `SISA`; likewise `beta`, `eta` and `eps`.
        beta: see `SISA`.
        eta: see `SISA`.
        eps: see `SISA`.
        **common: see `torchpisa.optim.Common`.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        sigma: float | Sequence[float] = 80.0,
        rho: float | Sequence[float] = 100.0,
        momentum: float = 0.95,
        nesterov: bool = False,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | Literal["auto"] | None = "auto",
        perturbation: float = 1e-8,
        aspect_scaling: bool = False,
        sisa_sigma: float | Sequence[float] | None = None,
        sisa_rho: float | Sequence[float] | None = None,
        scheme: Scheme = "adam",
        beta: float = 0.99,
        eta: float = math.inf,
        eps: float = 0.0,
        **common: "Unpack[Common]",
    ) -> None:
        own = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "perturbation": perturbation,
            "aspect_scaling": aspect_scaling,
        }
        super().__init__(
            params,
            sigma,
            rho,
            own,
            sisa_sigma=sisa_sigma,
            sisa_rho=sisa_rho,
            scheme=scheme,
            beta=beta,
            eta=eta,
            eps=eps,
            **common,
        )

    def _matrix_preconditioner(self, group: Group) -> NewtonSchulz:
        return NewtonSchulz(
            group["momentum"],
            group["nesterov"],
            group["ns_steps"],
            group["perturbation"],
            group["aspect_scaling"],
            self._ns_dtype(group),
        )
