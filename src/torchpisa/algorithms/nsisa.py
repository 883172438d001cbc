r"""Algorithm 3: Newton-Schulz-based Inexact Stochastic ADMM (NSISA).

The residual \(\pi_i + g_i\) of PISA is replaced by \(\pi_i + o_i\), where \(o_i\) is the
orthogonalised momentum, and the second moment is that of the current round
alone, \(m_i = (\pi_i + o_i)^2\). The rest of the round is in `pisa.py`.
"""

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar

__all__ = ["direction", "momentum_step", "newton_schulz"]

# The quintic iteration of Jordan et al. (2024): the largest slope at zero that still keeps the
# singular values within about [0.7, 1.2]; they do not converge to one, and need not.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def momentum_step(
    momentum: Tensor, grad: Tensor, mu: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    r"""Return \(b_i = \mu_i b_i + g_i\), and the matrix to orthogonalise.

    That is \(b_i\) itself, as in the paper, or \(g_i + \mu_i b_i\) in Nesterov's form.
    """
    momentum = mu * momentum + grad
    return momentum, (grad + mu * momentum if nesterov else momentum)


def newton_schulz(b: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    r"""Return \(o = \mathtt{NewtonSchulz}(b) \approx U V^\top\) for \(b = U \Lambda V^\top\).

    Args:
        b: matrices in the last two dimensions; leading dimensions are a batch.
        steps: number of quintic iterations.
        dtype: dtype of the products; by default that of `b`.

    Returns:
        A tensor of the shape and dtype of `b`. A zero matrix stays zero.
    """
    wide = b.size(-2) <= b.size(-1)
    # Singular values of at most one are needed, and the Frobenius norm bounds them. Dividing by
    # the largest entry first keeps tiny matrices from underflowing when they are squared.
    largest = b.abs().amax(dim=(-2, -1), keepdim=True)
    x = b / largest.clamp_min(torch.finfo(b.dtype).tiny)
    norm: Tensor = torch.linalg.matrix_norm(x, keepdim=True)
    x = x / norm.clamp_min(1)
    x = (x if wide else x.mT).to(dtype or b.dtype)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = linear * x + (cubic * gram + quintic * gram @ gram) @ x
    return (x if wide else x.mT).to(b.dtype)


def direction(
    dual: Tensor, o: Tensor, sigma: Scalar, rho: Scalar, perturbation: Scalar = 0.0
) -> Tensor:
    r"""Return the step of equation (4.6).

    \(d_i = -(\pi_i + o_i + \epsilon_i^{\ell+1} v_i) / (\sigma_i + \rho_i \sqrt{m_i})\).

    Args:
        dual: \(\pi_i\).
        o: the orthogonalised momentum.
        sigma: \(\sigma_i^{\ell+1}\).
        rho: \(\rho_i\).
        perturbation: \(\epsilon_i^{\ell+1}\), which replaces entries of \(\pi_i + o_i\) that are
            exactly zero (\(v_i\) is the indicator of those entries).
    """
    s = dual + o
    root = s.abs()
    if isinstance(perturbation, Tensor) or perturbation != 0:
        s = s + perturbation * (s == 0)
    return -s / (sigma + rho * root)
