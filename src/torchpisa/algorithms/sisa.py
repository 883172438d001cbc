r"""Algorithm 2: Second moment-based Inexact Stochastic ADMM (SISA).

PISA with \(Q_i = \mathrm{Diag}(\sqrt{m_i})\), equation (4.2). Everything else of the round is in
`pisa.py`.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar

__all__ = ["Scheme", "direction", "followed", "root_moment", "update_moment"]

Scheme = Literal["adagrad", "rmsprop", "adam"]
"""Schemes I, II and III of equation (4.4)."""


def update_moment(moment: Tensor, r: Tensor, scheme: Scheme, beta: float) -> Tensor:
    r"""Return the updated second moment, equation (4.4).

    Scheme I (`"adagrad"`) sums \(r_i \odot r_i\), Schemes II (`"rmsprop"`) and III (`"adam"`)
    average it. For Scheme III the moment is \(n_i\), whose bias `root_moment` corrects.
    """
    if scheme == "adagrad":
        return moment + r * r
    return beta * moment + (1 - beta) * (r * r)


def root_moment(
    moment: Tensor, step: Scalar, scheme: Scheme, beta: float, eta: float = math.inf
) -> Tensor:
    r"""Return the diagonal of Q, \(\sqrt{m_i} = \min(\sqrt{\tilde m_i}, \eta_i)\): (4.3) and (4.4).

    Args:
        moment: \(\tilde m_i\) (Schemes I and II) or \(n_i\) (Scheme III) after its update.
        step: the number of updates of the moment, \(\ell + 1\) if no round was missed.
        scheme: `"adagrad"`, `"rmsprop"` or `"adam"`.
        beta: \(\beta_i\).
        eta: \(\eta_i\), the cap of the preconditioner.
    """
    root = moment.sqrt()
    if scheme == "adam":
        correction = 1 - beta**step
        root = root / (correction.sqrt() if isinstance(correction, Tensor) else correction**0.5)
    return root if eta == math.inf else torch.clamp(root, max=eta)


def followed(
    sigma: Tensor, level: Tensor, r: Tensor, step: Scalar, scheme: Scheme, beta: float
) -> tuple[Tensor, Tensor]:
    r"""Return the updated sigma of a tensor where it follows the gradients, and its level. Ours.

    \(\sigma_i \leftarrow \max(\sigma_i, \mathrm{rms}(\sqrt{m_i}))\), the root mean square taken
    over the tensor. It never decreases, so this is an instance of (2.12) with a gamma per tensor.
    With \(\rho = b/(1 - b)\) a typical coordinate has momentum b, and under a constant gradient the
    step is lr times the gradient over its root mean square, whatever the scale of the loss.

    Args:
        sigma: \(\sigma_i^\ell\), a tensor of one number.
        level: the mean over the tensor of the moment of `update_moment`, one number.
        r: the root mean square of \(r_i\) over the tensor, one number.
        step: the number of updates of the level, the current one included.
        scheme: see `root_moment`.
        beta: see `root_moment`.
    """
    level = update_moment(level, r, scheme, beta)
    return torch.maximum(sigma, root_moment(level, step, scheme, beta)), level


def direction(r: Tensor, root: Tensor, sigma: Scalar, rho: Scalar, eps: float = 0.0) -> Tensor:
    r"""Return (4.5), \(d_i = -r_i / (\sigma_i + \rho_i (\sqrt{m_i} + \epsilon))\).

    The paper has no epsilon; the published scripts use 1e-8.
    """
    return -r / (sigma + rho * (root + eps))
