r"""Algorithm 1: Preconditioned Inexact Stochastic ADMM (PISA), as pure functions of tensors.

The paper keeps a copy \(w_i\) of the weights for every batch. Here only the difference
\(d_i = w_i - w\) exists, during one call; `algorithms/README.md` shows that this is equivalent. One
round, with the equations of the paper:

    for i in range(m):
        g_i     = gradient of F_i at w                                  # (2.10)
        sigma_i = sigma_i / gamma_i                                     # (2.12)
        d_i     = -(sigma_i I + rho_i Q_i)^-1 residual(pi_i, g_i)       # (2.13), the preconditioner
        u_i, pi_i = local_step(pi_i, d_i, sigma_i)                      # (2.13), (2.14)
    w = consensus(w, sum(a_i * u_i), sum(a_i * sigma_i), lambda)        # (2.9)
"""

from typing import NamedTuple

from torch import Tensor

__all__ = [
    "Local",
    "consensus",
    "consensus_of_deltas",
    "initial_consensus",
    "local_step",
    "local_step_of_delta",
    "residual",
]

Scalar = float | Tensor


class Local(NamedTuple):
    r"""The results of batch i in one round.

    Attributes:
        contribution: \(u_i = \pi_i + 2 \sigma_i d_i\), the term of the batch in the consensus.
        dual: \(\pi_i\), the new Lagrange multiplier.
        delta: \(\sigma_i d_i\), the update that a client sends to a server.
    """

    contribution: Tensor
    dual: Tensor
    delta: Tensor


def residual(dual: Tensor, grad: Tensor) -> Tensor:
    r"""Return \(r_i = \pi_i + g_i\), the right-hand side of equation (2.13)."""
    return dual + grad


def local_step(dual: Tensor, d: Tensor, sigma: Scalar, dual_decay: float = 1.0) -> Local:
    r"""Take equations (2.13) and (2.14) for one batch.

    Args:
        dual: \(\pi_i^\ell\).
        d: \(d_i = w_i^{\ell+1} - w^{\ell+1}\), from a preconditioner.
        sigma: \(\sigma_i^{\ell+1}\), already divided by gamma.
        dual_decay: factor on the new dual; the paper's algorithms have none (1).
    """
    return local_step_of_delta(dual, sigma * d, dual_decay)


def local_step_of_delta(dual: Tensor, delta: Tensor, dual_decay: float = 1.0) -> Local:
    r"""Take `local_step`, given \(\delta_i = \sigma_i d_i\).

    When sigma grows \(\delta_i\) stays finite, while \(d_i\) may underflow.
    """
    return Local(contribution=dual + 2 * delta, dual=dual_decay * (dual + delta), delta=delta)


def consensus(
    w: Tensor, total: Tensor, total_sigma: Scalar, consensus_decay: float = 0.0, lr: Scalar = 1.0
) -> Tensor:
    r"""Return the next \(w\), equation (2.9) in delta form.

    \(w + \mathrm{lr}\,(U - \lambda w) / (S + \mathrm{lr}\,\lambda)\). The relative learning rate
    divides sigma and rho alike, which leaves every \(u_i\) unchanged. So it enters here only.

    Args:
        w: \(w^{\ell+1}\).
        total: \(U = \sum_i \alpha_i u_i\).
        total_sigma: \(S = \sum_i \alpha_i \sigma_i^{\ell+1}\).
        consensus_decay: \(\lambda\).
        lr: relative learning rate; 0 leaves the weights where they are.
    """
    if consensus_decay == 0:
        return w + (lr / total_sigma) * total
    return w + (lr / (total_sigma + lr * consensus_decay)) * (total - consensus_decay * w)


def initial_consensus(
    w: Tensor, total_sigma: Scalar, consensus_decay: float, lr: Scalar = 1.0
) -> Tensor:
    r"""Return the very first \(w\), for \(w_i^0 = w^0\) and duals of zero."""
    return w * (total_sigma / (total_sigma + lr * consensus_decay))


def consensus_of_deltas(
    w: Tensor,
    dual: Tensor,
    delta: Tensor,
    total_sigma: Scalar,
    consensus_decay: float = 0.0,
    lr: Scalar = 1.0,
) -> tuple[Tensor, Tensor]:
    r"""Return the next \(w\) and \(\Pi\) by (2.9), from changes of duals.

    An absent batch contributes \(u_i = \pi_i\), a present one \(\pi_i + 2 \delta_i\), so
    \(U = \Pi + 2 D\) with the old \(\Pi\) in either case.

    Args:
        w: \(w^{\ell+1}\).
        dual: \(\Pi = \sum_i \alpha_i \pi_i\) over all batches, before this round.
        delta: \(D = \sum_i \alpha_i \delta_i\) over the batches that are present.
        total_sigma: \(S = \sum_i \alpha_i \sigma_i^{\ell+1}\) over all batches.
        consensus_decay: \(\lambda\).
        lr: relative learning rate.
    """
    dual = dual + delta
    return consensus(w, dual + delta, total_sigma, consensus_decay, lr), dual
