r"""The augmented Lagrangian \(\mathcal{L}\) and the merit function \(\widetilde{\mathcal{L}}\).

Both are evaluated from \(d_i = w_i - w\). Their changes from one iterate to the next shrink with
\(\gamma^\ell\), so that differences of values would soon be nothing but rounding. So the changes
have functions of their own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchpisa.theory.problems import Problem
from torchpisa.theory.trajectory import Iterate

__all__ = [
    "augmented_lagrangian",
    "lagrangian_change",
    "lagrangian_gap",
    "merit",
    "penalty",
    "slack",
    "tail",
]


def augmented_lagrangian(problem: Problem, at: Iterate) -> float:
    r"""Return \(\mathcal{L}(w, W, \Pi; \sigma)\), equation (2.6)."""
    losses = [float(problem.local_objective(i, at.w + d)) for i, d in enumerate(at.d)]
    local = torch.tensor(losses, dtype=torch.float64) + _coupling(at)
    return float(problem.alpha @ local + 0.5 * problem.consensus_decay * (at.w @ at.w))


def merit(problem: Problem, at: Iterate, gamma: Sequence[float]) -> float:
    r"""Return \(\widetilde{\mathcal{L}}^\ell\), equation (3.7).

    Args:
        problem: the problem.
        at: the iterate.
        gamma: \(\gamma_i\), one per batch.
    """
    extra = penalty(problem, at) + tail(problem, at.iteration, gamma)
    return augmented_lagrangian(problem, at) + extra


def penalty(problem: Problem, at: Iterate) -> float:
    r"""Return \(\sum_i \alpha_i \frac{8}{\sigma_i} \|\rho_i Q_i d_i\|^2\) of equation (3.7)."""
    return float(problem.alpha @ (8 / at.sigma * at.pull.square().sum(1)))


def tail(problem: Problem, iteration: int, gamma: Sequence[float]) -> float:
    r"""Return \(\sum_i \alpha_i \gamma_i^\ell / (16 (1 - \gamma_i))\) of equation (3.7)."""
    gammas = torch.tensor(gamma, dtype=torch.float64)
    return float(problem.alpha @ (gammas**iteration / (16 * (1 - gammas))))


def slack(problem: Problem, iteration: int, gamma: Sequence[float]) -> float:
    r"""Return \(\sum_i \alpha_i \gamma_i^\ell / 16\), by which `tail` falls in one iteration."""
    gammas = torch.tensor(gamma, dtype=torch.float64)
    return float(problem.alpha @ (gammas**iteration / 16))


def lagrangian_gap(problem: Problem, at: Iterate) -> float:
    r"""Return \(\mathcal{L}^\ell - F_\lambda(w^\ell)\)."""
    changes = [problem.change(i, at.w, d) for i, d in enumerate(at.d)]
    return float(problem.alpha @ (torch.tensor(changes, dtype=torch.float64) + _coupling(at)))


def lagrangian_change(problem: Problem, before: Iterate, after: Iterate) -> float:
    r"""Return \(\mathcal{L}^{\ell+1} - \mathcal{L}^\ell\)."""
    steps = after.step + after.d - before.d
    changes = [
        problem.change(i, before.w + d, step)
        for i, (d, step) in enumerate(zip(before.d, steps, strict=True))
    ]
    local = torch.tensor(changes, dtype=torch.float64) + _coupling(after) - _coupling(before)
    decay = problem.consensus_decay * (before.w @ after.step + 0.5 * after.step @ after.step)
    return float(problem.alpha @ local + decay)


def _coupling(at: Iterate) -> Tensor:
    r"""Return \(\langle \pi_i, d_i \rangle + \frac{\sigma_i}{2} \|d_i\|^2\), one per batch."""
    return (at.dual * at.d).sum(1) + 0.5 * at.sigma * at.d.square().sum(1)
