r"""The constants of Section 3: \(\delta\), \(\varepsilon_i\), \(r_i\), the least \(\sigma^0\)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from torchpisa.checks import check_choice, check_range
from torchpisa.theory.problems import Problem

__all__ = ["Constants", "ConstantsKind", "constants_of", "delta_of"]

ConstantsKind = Literal["corrected", "printed"]
r"""Which \(\varepsilon_i\): a bound on gradients, or as printed in equation (3.1)."""


@dataclass(frozen=True)
class Constants:
    r"""Constants of a problem, a preconditioner and \(\gamma\).

    Attributes:
        kind: `"corrected"` or `"printed"`; they differ in \(\varepsilon_i\) only.
        proven: True if all of them are proven bounds, False if some are estimates.
        sigma: \(\sigma\) of equation (3.2).
        gamma: \(\gamma = \max_i \gamma_i\).
        floor: a lower bound of \(F^*\).
        delta: a bound of \(\delta\), equation (3.3).
        epsilon: \(\varepsilon_i(2\delta)\).
        epsilon_delta: \(\varepsilon = \max_i \varepsilon_i(\delta)\).
        smoothness: \(r_i\) on \(\mathbb{N}(2\delta)\).
        rho_eta: \(\rho_i \eta_i\).
        consensus_decay: \(\lambda\).
    """

    kind: ConstantsKind
    proven: bool
    sigma: float
    gamma: float
    floor: float
    delta: float
    epsilon: tuple[float, ...]
    epsilon_delta: float
    smoothness: tuple[float, ...]
    rho_eta: tuple[float, ...]
    consensus_decay: float

    @property
    def terms(self) -> dict[str, float]:
        r"""Return the five terms of equation (3.4), each times 8 and at its largest over \(i\)."""
        return {
            "sigma": 8 * self.sigma,
            "rho_i eta_i": 8 * max(self.rho_eta),
            "r_i": 8 * max(self.smoothness),
            "delta^-2": 8 * self.delta**-2,
            "epsilon_i(2 delta)": 8 * max(self.epsilon),
        }

    @property
    def sigma0(self) -> float:
        r"""Return the least \(\sigma^0\) that equation (3.4) allows."""
        return max(self.terms.values())

    @property
    def dominant(self) -> str:
        """Return the name of the largest term."""
        return max(self.terms, key=self.terms.__getitem__)

    @property
    def varpi(self) -> float:
        r"""Return \(\varpi\) of (B.28): \(\|\sigma_i^\ell (w_i^\ell - w^\ell)\| \le \varpi\)."""
        return math.sqrt(6 * (max(self.rho_eta) * self.delta) ** 2 + self.epsilon_delta / 4)

    @property
    def c(self) -> float:
        r"""Return \(c\) of (B.29): \(\|w^{\ell+1} - w^\ell\| \le c \gamma^\ell / \sigma\)."""
        decay = 18 * max(self.rho_eta) ** 2 + 3 * self.consensus_decay**2
        return math.sqrt(decay * self.delta**2 + self.epsilon_delta)

    @property
    def c1(self) -> float:
        r"""Return \(C_1\) of Theorem 3.2."""
        tail = self.c / (self.sigma * (1 - self.gamma))
        return max(self.varpi / self.sigma + tail, self.varpi / 8 + max(self.smoothness) * tail)

    @property
    def c2(self) -> float:
        r"""Return \(C_2\) of Theorem 3.2, with the terms that the printed one lacks.

        That is the factor \(C_1\) on \(8\lambda\delta\), and all that \(\mathcal{L}^\ell\) and
        \(\widetilde{\mathcal{L}}^\ell\) have beyond \(F_\lambda(w^\ell)\).
        """
        slope = math.sqrt(self.epsilon_delta)
        r = max(self.smoothness)
        gap = self.varpi / self.sigma
        dual = math.sqrt(5 * self.epsilon_delta / 64 + 5 * (max(self.rho_eta) * self.delta) ** 2)
        objective = (slope + 8 * self.consensus_decay * self.delta) * self.c1 / 8
        objective += (r + self.consensus_decay) * self.c1**2 / 2
        lagrangian = gap * (slope / 8 + dual + self.varpi / 2) + r * gap**2 / 2
        merit = gap * self.varpi / 8 + 1 / (16 * (1 - self.gamma))
        return objective + lagrangian + merit


def delta_of(
    problem: Problem, *, gamma: float, sigma: float | None = None, start: Tensor | None = None
) -> float:
    r"""Return a bound of \(\delta\), the radius of \(\Omega\), equation (3.3).

    With \(F_\lambda(w) \ge F_{\min} + \frac{h}{2} \|w - \bar w\|^2\) (`Problem.growth`), the
    smallest share \(\alpha\) and \(E = F_\lambda(w^0) + 1/(1 - \gamma) - F_{\min}\),

    \[ \delta \le \|\bar w\| + \sqrt{2 E \left(\frac{1}{h} + \frac{1}{\sigma \alpha}\right)} . \]

    Args:
        problem: the problem.
        gamma: \(\gamma = \max_i \gamma_i\).
        sigma: \(\sigma\) of (3.2); by default \(h/\alpha\), which makes the two summands equal.
        start: \(w^0\); by default the problem's.
    """
    check_range("gamma", gamma, 0, 1, low_open=True, high_open=True)
    growth, sigma = problem.growth(), _sigma(problem, sigma)
    energy = float(problem.objective(problem.start if start is None else start))
    energy += 1 / (1 - gamma) - growth.floor
    inverse = 1 / growth.curvature + 1 / (sigma * float(problem.alpha.min()))
    return float(growth.center.norm()) + math.sqrt(2 * energy * inverse)


def constants_of(
    problem: Problem,
    *,
    gamma: float,
    rho_eta: Sequence[float],
    kind: ConstantsKind = "corrected",
    stochastic: bool = False,
    sigma: float | None = None,
    start: Tensor | None = None,
) -> Constants:
    r"""Compute the constants of Section 3.

    Args:
        problem: the problem.
        gamma: \(\gamma = \max_i \gamma_i\).
        rho_eta: \(\rho_i \eta_i\), one per batch.
        kind: `"corrected"`, \(\varepsilon_i(R) = 64 \sup \|\nabla F_i(w; B)\|^2\), or `"printed"`,
            \(64 \sup \|\nabla F_i(w; B) - \nabla F_i(w; B')\|^2\), equation (3.1).
        stochastic: whether mini-batches are drawn; if not, the printed \(\varepsilon_i\) is 0.
        sigma: \(\sigma\) of (3.2), see `delta_of`.
        start: \(w^0\); by default the problem's.
    """
    check_choice("constants", kind, ("corrected", "printed"))
    batches = range(len(problem.sizes))
    delta = delta_of(problem, gamma=gamma, sigma=sigma, start=start)

    def epsilon(i: int, radius: float) -> float:
        if kind == "corrected":
            return 64 * problem.gradient_bound(i, radius) ** 2
        return 64 * problem.gradient_spread(i, radius) ** 2 if stochastic else 0.0

    return Constants(
        kind=kind,
        proven=problem.proven,
        sigma=_sigma(problem, sigma),
        gamma=gamma,
        floor=problem.growth().floor,
        delta=delta,
        epsilon=tuple(epsilon(i, 2 * delta) for i in batches),
        epsilon_delta=max(epsilon(i, delta) for i in batches),
        smoothness=tuple(problem.smoothness(i, 2 * delta) for i in batches),
        rho_eta=tuple(rho_eta),
        consensus_decay=problem.consensus_decay,
    )


def _sigma(problem: Problem, sigma: float | None) -> float:
    if sigma is None:
        return problem.growth().curvature / float(problem.alpha.min())
    check_range("sigma", sigma, 0, low_open=True, high_open=True)
    return sigma
