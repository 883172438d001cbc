r"""PISA with the preconditioner of a matrix's own singular values. Ours, not the paper's.

The paper leaves \(Q_i\) of equation (2.13) open, within \(0 \preceq Q_i \preceq \eta_i I\), (2.11).
Here it is \(Q_i = \min((r_i r_i^\top)^{1/2}, \eta_i)\), with \(r_i = \pi_i + g_i\) as a matrix and
the minimum taken of eigenvalues. Then \((\sigma_i I + \rho_i Q_i)^{-1} r_i\) keeps the singular
vectors of \(r_i\), and a singular value \(s\) becomes \(s / (\sigma_i + \rho_i \min(s, \eta_i))\).
On the other side, \(r_i (\sigma_i I + \rho_i (r_i^\top r_i)^{1/2})^{-1}\) is the same matrix, so
the smaller side is the one to compute with. Everything else of the round is in `pisa.py`.

`by_svd` is the definition. `by_gram` and `by_polar` compute the same: with one eigendecomposition
in float64, which is what CPUs are good at, and with products and one Cholesky decomposition in
float32, which is what GPUs are good at.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torchpisa.algorithms.nsisa import COEFFICIENTS, newton_schulz
from torchpisa.algorithms.pisa import Scalar

__all__ = ["augmented", "averaged", "by_gram", "by_polar", "by_svd", "polar_factor", "smoothed"]
__all__ += ["full_precision", "update_average"]

# Odd quintics whose composition takes every singular value in [3e-7, 1] to 1. First those of
# nsisa.py, which multiply small ones by 3.4445 each and leave large ones between 0.68 and 1.21: the
# best ones for lifting (Amsel et al., 2025) lift by 4.26, but take some large ones almost to zero
# on the way, where float32 loses them. Then the best ones for what is left, by Remez' algorithm.
# What is smaller than 3e-7 of the largest is hardly more than rounding in float32, and is taken to
# something between 0 and 1.
POLAR = (
    *[COEFFICIENTS] * 12,
    (2.084837, -1.60952, 0.518372),
    (1.875217, -1.250241, 0.375024),
    (1.875, -1.25, 0.375),
)

# Where sigma outweighs this much of sigma + rho |r|, dividing by sigma is the accurate formula;
# where it does not, subtracting from the polar factor is.
_HEAVY = 0.25
# Rounding leaves eigenvalues of H down to about minus this, in units of its largest times epsilon.
_SLACK = 16.0


def by_svd(r: Tensor, sigma: Scalar, rho: Scalar, eta: float = math.inf) -> Tensor:
    r"""Return \((\sigma I + \rho Q)^{-1} r\) with \(Q = \min((r r^\top)^{1/2}, \eta)\).

    Args:
        r: matrices in the last two dimensions; leading dimensions are a batch.
        sigma: \(\sigma_i\).
        rho: \(\rho_i\).
        eta: \(\eta_i\), cap of the eigenvalues of Q.

    Returns:
        A tensor of the shape and dtype of `r`; all nan for a matrix that is not finite.
    """
    finite = r.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    u, s, vh = torch.linalg.svd(torch.where(finite, r, 0.0), full_matrices=False)
    y = (u * (s / (sigma + rho * s.clamp(max=eta))).unsqueeze(-2)) @ vh
    return torch.where(finite, y, math.nan)


def by_gram(r: Tensor, sigma: Scalar, rho: Scalar, eta: float = math.inf) -> Tensor:
    r"""Return `by_svd`, by eigenvalues of the smaller one of \(r r^\top\) and \(r^\top r\).

    In float64, where squaring costs no digit that float32 has: for matrices of float32 or less.
    """
    wide = r.size(-2) <= r.size(-1)
    x = (r if wide else r.mT).to(torch.float64)
    gram = x @ x.mT
    y = _apply(_eigen(gram), x, 1.0, sigma, rho, eta)
    return (y if wide else y.mT).to(r.dtype)


def update_average(average: Tensor, r: Tensor, beta: float) -> Tensor:
    r"""Return \(A_i = \beta A_i + (1 - \beta) r_i r_i^\top\), or of \(r_i^\top r_i\) if smaller."""
    x = r if r.size(-2) <= r.size(-1) else r.mT
    return beta * average + (1 - beta) * (x @ x.mT)


def averaged(
    r: Tensor,
    average: Tensor,
    step: Scalar,
    beta: float,
    sigma: Scalar,
    rho: Scalar,
    eta: float = math.inf,
) -> Tensor:
    r"""Return \((\sigma I + \rho Q)^{-1} r\) with \(Q = \min((A / (1 - \beta^t))^{1/2}, \eta)\).

    One side of Shampoo's preconditioner (Gupta et al., 2018), with its square root instead of the
    fourth one. Unlike \(r\) itself it does not vanish when \(r\) does.

    Args:
        r: matrices in the last two dimensions; leading dimensions are a batch.
        average: \(A_i\) after its update.
        step: \(t\), how often the average was updated.
        beta: \(\beta\).
        sigma: \(\sigma_i\).
        rho: \(\rho_i\).
        eta: \(\eta_i\), cap of the eigenvalues of Q.
    """
    wide = r.size(-2) <= r.size(-1)
    x = (r if wide else r.mT).to(torch.float64)
    y = _apply(_eigen(average.to(torch.float64)), x, 1 - beta**step, sigma, rho, eta)
    return (y if wide else y.mT).to(r.dtype)


def _eigen(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors; of zero where an entry is not finite.

    None is negative, or less than the rounding of the largest: a direction of which the product has
    nothing left may have something in the matrix, and would be divided by sigma alone.
    """
    finite = gram.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    values, vectors = torch.linalg.eigh(torch.where(finite, gram, 0.0))
    rounding = gram.size(-1) * torch.finfo(gram.dtype).eps
    return torch.maximum(values, rounding * values[..., -1:].clamp(min=0)), vectors


def _apply(
    eigen: tuple[Tensor, Tensor], x: Tensor, weight: Scalar, sigma: Scalar, rho: Scalar, eta: float
) -> Tensor:
    values, vectors = eigen
    q = (values / weight).sqrt().clamp(max=eta)
    # The two small factors first: x has more columns than they have.
    return ((vectors / (sigma + rho * q).unsqueeze(-2)) @ vectors.mT) @ x


def by_polar(r: Tensor, sigma: Scalar, rho: Scalar, eta: float = math.inf) -> Tensor:
    r"""Return `by_svd`, by a polar factor and one Cholesky decomposition, in the dtype of `r`.

    With the polar factor \(U\) of \(r\) and \(H = r U^\top = (r r^\top)^{1/2}\),

    \[ (\sigma I + \rho H)^{-1} r = \frac{1}{\rho} (U - \sigma (\sigma I + \rho H)^{-1} U), \]

    whose right-hand side does not multiply the rounding of large singular values by
    \(\rho/\sigma\), as the left-hand side would. A cap needs one polar factor more, that of
    \(H - \eta I\), for what the cap adds:
    \((I + \frac{\rho}{\sigma + \rho \eta} (H - \eta I)_+) (\sigma I + \rho H)^{-1} r\).

    Nothing here waits for a device. \(\sigma\) counts as at least about 16 roundings of
    \(\rho \lVert r \rVert\), which adds a multiple of I to Q, so that the decomposition exists;
    should it fail all the same, the step is that of \(Q = \min(\lVert r \rVert, \eta) I\).
    """
    wide = r.size(-2) <= r.size(-1)
    x = (r if wide else r.mT).reshape(-1, min(r.shape[-2:]), max(r.shape[-2:]))
    with full_precision():
        x, size = _normalized(x)
        u = polar_factor(x)
        h = _symmetric(x @ u.mT)
        # sigma and rho |r| by their sum, so that nothing leaves the range of the dtype.
        pull = rho * size
        near, far = sigma / (sigma + pull), pull / (sigma + pull)
        near = torch.maximum(near, _SLACK * torch.finfo(x.dtype).eps * far)
        cap = (eta / size).clamp(max=2.0)  # H has no eigenvalue above one
        factor = size / (sigma + pull)
        near, far, cap, factor = (each.to(x.dtype) for each in (near, far, cap, factor))
        heavy = near > _HEAVY
        matrix = far * h
        matrix.diagonal(dim1=-2, dim2=-1).add_(near.squeeze(-1))
        triangle, info = torch.linalg.cholesky_ex(matrix)
        y = torch.cholesky_solve(torch.where(heavy, x, u), triangle)
        y = torch.where(heavy, y, (u - near * y) / far.clamp_min(_HEAVY))
        if eta < math.inf:
            y = y + (far / (near + far * cap)) * (_above(h, cap) @ y)
    safe = x / (near + far * cap.clamp(max=1))
    y = factor * torch.where((info == 0).view(-1, 1, 1), y, safe)
    return (y if wide else y.mT).reshape(r.shape)


def smoothed(
    r: Tensor, sigma: Scalar, rho: Scalar, steps: int = 5, dtype: torch.dtype | None = None
) -> Tensor:
    r"""Return the resolvent of another Q: \((r r^\top + \tau^2 I)^{1/2} - \tau I\).

    With \(\tau = \sigma/\rho\) a singular value \(s\) becomes \(s / (\rho \sqrt{\tau^2 + s^2})\),
    not \(s / (\rho (\tau + s))\). It is the first block of the polar factor of \([r, \tau I]\),
    which a few steps of Newton-Schulz give as well as they do in Muon, in bfloat16 too. No singular
    value of that matrix is less than \(\tau\); where \(\tau\) is less than about 1/500 of its norm,
    five steps treat it as that.

    Args:
        r: matrices in the last two dimensions; leading dimensions are a batch.
        sigma: \(\sigma_i\).
        rho: \(\rho_i\).
        steps: the number of Newton-Schulz iterations.
        dtype: dtype of their products; by default that of `r`.
    """
    wide = r.size(-2) <= r.size(-1)
    x = r if wide else r.mT
    both, scale = augmented(x, sigma, rho)
    y = newton_schulz(both, steps, dtype)[..., : x.size(-1)] / scale
    return y if wide else y.mT


def augmented(x: Tensor, sigma: Scalar, rho: Scalar) -> tuple[Tensor, Scalar]:
    r"""Return \([\rho x, \sigma I]\) for matrices no taller than wide, and \(\rho\)."""
    rho = rho + 1e-12 * sigma  # so that rho = 0 is divided by as well
    n = x.size(-2)
    identity = torch.eye(n, dtype=x.dtype, device=x.device).expand(*x.shape[:-1], n)
    return torch.cat([rho * x, sigma * identity], dim=-1), rho


def polar_factor(x: Tensor) -> Tensor:
    """Return U V^T for matrices U S V^T, no taller than wide, without singular values above one.

    Singular values below 3e-7 become something between 0 and 1; zero stays zero.
    """
    for linear, cubic, quintic in POLAR:
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        x = torch.baddbmm(x, gram, x, beta=linear)
    return x


def _normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrices over bounds of their largest singular values, and the bounds in float64."""
    tiny = torch.finfo(x.dtype).tiny
    largest = x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)
    x = x / largest
    # (sum s^4)^(1/4) is less than n^(1/4) times too large, and the product is small.
    norm = torch.linalg.matrix_norm(x @ x.mT, keepdim=True).sqrt().clamp_min(tiny)
    return x / norm, largest.to(torch.float64) * norm


def _symmetric(x: Tensor) -> Tensor:
    return (x + x.mT) / 2


def _above(h: Tensor, cap: Tensor) -> Tensor:
    """Return the positive part of H - cap I, (M + |M|)/2 with |M| = M sign(M)."""
    m = h.clone()
    m.diagonal(dim1=-2, dim2=-1).sub_(cap.squeeze(-1))
    unit, size = _normalized(m)
    return size.to(m.dtype) * _symmetric(unit + unit @ polar_factor(unit)) / 2


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products of float32 with all of its digits, whatever is allowed for the model."""
    setting = torch.backends.cuda.matmul
    # Newer versions of torch complain if what is set in one way is then read in the other.
    name, full = (
        ("fp32_precision", "ieee") if hasattr(setting, "fp32_precision") else ("allow_tf32", False)
    )
    before = getattr(setting, name)
    if before == full:
        yield
        return
    setattr(setting, name, full)
    try:
        yield
    finally:
        setattr(setting, name, before)
