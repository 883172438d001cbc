r"""MISA: gradients averaged in the dual, preconditioned at the consensus. Ours, not the paper's.

The local step is PISA's with \(\rho_i Q_i = \frac{\mu}{1 - \mu} \sigma_i I\), so each dual is minus
an exponential average of its batch's gradients, independent of sigma. The sum over the batches is
preconditioned, not each batch, so that what batches disagree on cancels first. One round:

    r     = pi + sum(a_i * g_i)
    delta = average(r, mu)                       # -(1 - mu) r
    u     = look_ahead(pi, delta, c)             # pi + c delta; c = 2 in the paper
    pi    = pi + delta
    w     = move(w, P(u), lr, weight_decay)

With every batch present only the weighted sum of the duals matters, so `pi` is one dual for all of
them. P may be any descent direction that vanishes only at zero:

- a matrix is orthogonalised, with an optional damping (`damp`), then each row is divided by its
  running root mean square (`normalize_rows`), so that its entries are as large as those of AdamW's
  steps;
- everything else is divided, entry by entry, by the running root mean square of r
  (`scale_entries`): of the gradient less its average, as in AdaBelief (Zhuang et al., 2020).

With c = 1 + mu and rows left as they are (`match_rms`), the rule for matrices is Muon (Jordan et
al., 2024) with Nesterov momentum. Normalised rows are NorMuon's idea (Li et al., 2025).
"""

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.algorithms.spectral import augmented

__all__ = ["RMS", "average", "damp", "look_ahead", "match_rms", "move", "normalize_rows"]
__all__ += ["scale_entries"]

RMS = 0.2
"""Root mean square of AdamW's steps, so that one learning rate serves all (Liu et al., 2025)."""


def average(r: Tensor, mu: float) -> Tensor:
    r"""Return \(\delta = -(1 - \mu)\, r\) for the residual \(r = \pi + \sum_i \alpha_i g_i\)."""
    return (mu - 1) * r


def look_ahead(dual: Tensor, delta: Tensor, c: float) -> Tensor:
    r"""Return \(U = \pi + c\,\delta\), with the dual before its update.

    c = 2 gives the paper's consensus, \(1 + \mu\) Nesterov momentum, 1 heavy-ball momentum.
    """
    return dual + c * delta


def damp(u: Tensor, damping: float) -> Tensor:
    r"""Return \([U, \tau I]\), to be orthogonalised instead of U.

    The first block of its polar factor is \((U U^\top + \tau^2 I)^{-1/2} U\): a singular value s
    becomes \(s / \sqrt{s^2 + \tau^2}\) instead of 1, so that directions of noise stay small.
    For a matrix that is taller than wide the blocks are one above the other.

    Args:
        u: a matrix.
        damping: \(\tau\) as a multiple of the root mean square of the singular values.
    """
    wide = u if u.size(0) <= u.size(1) else u.mT
    # In float64 the squares of tiny entries do not underflow.
    square: Tensor = torch.linalg.vector_norm(wide, dtype=torch.float64)
    tau = (damping / wide.size(0) ** 0.5 * square).to(u.dtype)
    both, _ = augmented(wide, tau, 1.0)
    return both if wide is u else both.mT


def match_rms(o: Tensor, rows: int, cols: int) -> Tensor:
    r"""Return \(0.2 \sqrt{\max(\mathrm{rows}, \mathrm{cols})}\, o\) for an orthogonal matrix."""
    scale: float = RMS * max(rows, cols) ** 0.5
    return scale * o


def normalize_rows(
    o: Tensor, squares: Tensor, rows: Tensor, step: Scalar, beta: float, eps: float
) -> tuple[Tensor, Tensor]:
    r"""Divide each row of an orthogonal matrix by its running root mean square.

    Args:
        o: the matrix.
        squares: mean square of each of its rows, (rows, 1).
        rows: running averages of `squares`.
        step: the number of updates, the current one included.
        beta: decay of the averages.
        eps: added to the roots.

    Returns:
        The matrix, whose entries have the root mean square 0.2 over time, and the new averages.
    """
    rows = beta * rows + (1 - beta) * squares
    return RMS * o / ((rows / (1 - beta**step)).sqrt() + eps), rows


def scale_entries(
    u: Tensor, r: Tensor, moment: Tensor, step: Scalar, beta: float, eps: float
) -> tuple[Tensor, Tensor]:
    r"""Divide each entry of u by the running root mean square of r.

    Args:
        u: \(U\).
        r: the residual.
        moment: average of \(r \odot r\).
        step: the number of updates, the current one included.
        beta: decay of the average.
        eps: added to the root.

    Returns:
        The quotient and the new average.
    """
    moment = beta * moment + (1 - beta) * r * r
    return u / ((moment / (1 - beta**step)).sqrt() + eps), moment


def move(w: Tensor, p: Tensor, lr: Scalar, weight_decay: float) -> Tensor:
    r"""Return \((1 - \mathrm{lr}\,\lambda)\, w + \mathrm{lr}\, P(U)\): decay as AdamW has it."""
    if isinstance(lr, Tensor):
        lr = lr.to(w.device)
    return torch.add(w * (1 - lr * weight_decay) if weight_decay else w, lr * p)
