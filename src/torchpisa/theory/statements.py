r"""The statements of Section 3 as inequalities `value <= bound`, at every iterate of a run."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torchpisa.theory.constants import Constants
from torchpisa.theory.lagrangian import lagrangian_change, lagrangian_gap, penalty, slack, tail
from torchpisa.theory.problems import Problem
from torchpisa.theory.trajectory import Iterate

__all__ = ["STATEMENTS", "Inequality", "Run", "Statement"]

_ROUNDING = 64 * torch.finfo(torch.float64).eps


class Inequality(NamedTuple):
    """One inequality at one iterate, value <= bound, and the unit of its margin.

    By default that is the bound.
    """

    iteration: int
    value: float
    bound: float
    scale: float | None = None

    @property
    def margin(self) -> float:
        """Return (bound - value) / scale; inf if both are zero, -inf if a side is not a number."""
        scale = self.scale or abs(self.bound) or abs(self.value)
        if scale == 0:
            return math.inf
        margin = (self.bound - self.value) / scale
        return -math.inf if math.isnan(margin) else margin


@dataclass(frozen=True)
class Run:
    r"""A run with its settings.

    Attributes:
        problem: the problem.
        constants: its constants.
        gamma: \(\gamma_i\), one per batch.
        stochastic: whether mini-batches were drawn.
        iterates: \(\ell = 0, \ldots, T\).
    """

    problem: Problem
    constants: Constants
    gamma: Sequence[float]
    stochastic: bool
    iterates: list[Iterate]

    def pairs(self) -> Iterator[tuple[Iterate, Iterate]]:
        r"""Return the pairs of iterates \(\ell\) and \(\ell + 1\)."""
        return pairwise(self.iterates)


class Statement(NamedTuple):
    """A statement of the paper.

    Attributes:
        name: its name in a certificate.
        reference: its place in the paper.
        inequalities: yields its inequalities in a run.
    """

    name: str
    reference: str
    inequalities: Callable[[Run], Iterator[Inequality]]


def _farthest(w: Tensor, rows: Tensor) -> float:
    """Return the largest norm of a vector and of rows; not a number if one of them is not."""
    return float(torch.cat([w.unsqueeze(0), rows]).norm(dim=1).max())


def _updates(run: Run) -> Iterator[Inequality]:
    """Yield how well the iterates obey the algorithm, to rounding."""
    for last, now in run.pairs():
        grown = last.sigma / torch.tensor(run.gamma, dtype=torch.float64)
        for value, expected, size in (
            (now.w, last.w + now.step, last.w.abs().max() + now.w.abs().max()),
            (now.dual, last.dual + now.sigma.unsqueeze(1) * now.d, now.dual.abs().max()),
            (now.sigma, grown, grown.max()),
        ):
            difference = float((value - expected).abs().max())
            yield Inequality(now.iteration, difference, _ROUNDING * float(size))


def _preconditioner(run: Run) -> Iterator[Inequality]:
    r"""Yield |Q v|^2 <= eta <v, Q v>, which follows from 0 <= Q <= eta I, with rho at the probe."""
    for now in run.iterates[1:]:
        for v, pull, rho_eta in zip(now.probe, now.probe_pull, run.constants.rho_eta, strict=True):
            # In units of (rho eta |v|)^2: both sides are mere rounding if Q tends to zero.
            scale = (rho_eta * float(v.norm())) ** 2
            if scale == 0:  # Q was not probed
                continue
            bound = rho_eta * float(v @ pull) / scale
            yield Inequality(now.iteration, float(pull @ pull) / scale, bound, 1.0)


def _containment(run: Run) -> Iterator[Inequality]:
    for now in run.iterates:
        yield Inequality(now.iteration, _farthest(now.w, now.w + now.d), run.constants.delta)


def _descent(run: Run) -> Iterator[Inequality]:
    r"""Yield the descent, with the last term of (3.7) on the other side as the bound."""
    problem = run.problem
    for last, now in run.pairs():
        step = now.step.square().sum()
        local_steps = (now.step + now.d - last.d).square().sum(1)
        descent = (last.sigma + 2 * problem.consensus_decay) / 4 * step
        descent = problem.alpha @ (descent + last.sigma / 4 * local_steps)
        rise = lagrangian_change(problem, last, now)
        rise += penalty(problem, now) - penalty(problem, last)
        bound = slack(problem, last.iteration, run.gamma)
        yield Inequality(last.iteration, rise + float(descent), bound)


def _lower_bound(run: Run) -> Iterator[Inequality]:
    constants, problem = run.constants, run.problem
    for now in run.iterates[1:]:
        gap = lagrangian_gap(problem, now)
        distance = float(problem.alpha @ now.d.square().sum(1))
        yield Inequality(now.iteration, constants.sigma / 2 * distance - gap, 1.0)
        below = constants.floor - float(problem.objective(now.w)) - gap
        yield Inequality(now.iteration, below, 1.0)


def _duals(run: Run) -> Iterator[Inequality]:
    for last, now in run.pairs():
        moved = (now.sigma.unsqueeze(1) * now.d).square().sum(1)
        phi = last.pull.square().sum(1) - now.pull.square().sum(1)
        for value, epsilon in zip(moved - 16 / 3 * phi, run.constants.epsilon, strict=True):
            yield Inequality(now.iteration, float(value), epsilon / 6)


def _consensus_gap(run: Run) -> Iterator[Inequality]:
    for now in run.iterates[1:]:
        worst = float((now.sigma * now.d.norm(dim=1)).max())
        yield Inequality(now.iteration, worst, run.constants.varpi)


def _steps(run: Run) -> Iterator[Inequality]:
    constants = run.constants
    for last, now in run.pairs():
        bound = constants.c / constants.sigma * constants.gamma**last.iteration
        yield Inequality(last.iteration, float(now.step.norm()), bound)


def _local_steps(run: Run) -> Iterator[Inequality]:
    constants = run.constants
    for last, now in run.pairs():
        value = float((now.step + now.d - last.d).norm(dim=1).max())
        bound = (constants.c + 2 * constants.varpi) / constants.sigma
        yield Inequality(last.iteration, value, bound * constants.gamma**last.iteration)


def _merit_gap(run: Run) -> Iterator[Inequality]:
    constants = run.constants
    limit = constants.varpi**2 / (8 * constants.sigma)
    for now in run.iterates:
        bound = limit * constants.gamma**now.iteration
        yield Inequality(now.iteration, penalty(run.problem, now), bound)


def _weights_rate(run: Run) -> Iterator[Inequality]:
    r"""Yield the rate of the weights, with the last iterate in place of the limit.

    The bound on the distance to it is the same sum, cut off.
    """
    constants = run.constants
    remaining = torch.zeros_like(run.iterates[0].w)  # w^T - w^l, summed from the end
    for now in reversed(run.iterates):
        bound = constants.c1 * constants.gamma**now.iteration
        yield Inequality(now.iteration, _farthest(remaining, now.d - remaining), bound)
        remaining = remaining + now.step


def _duals_rate(run: Run) -> Iterator[Inequality]:
    r"""Yield the rate of the duals; of mini-batches only their expectation has a limit."""
    if run.stochastic:
        return
    constants, problem = run.constants, run.problem
    limits = [problem.local_gradient(i, run.iterates[-1].w) for i in range(len(problem.sizes))]
    limit = torch.stack(limits)
    for now in run.iterates[1:]:
        rounding = _ROUNDING * float(limit.norm())
        bound = constants.c1 * constants.gamma**now.iteration + rounding
        yield Inequality(now.iteration, float((now.dual + limit).norm(dim=1).max()), bound)


def _objective_rate(run: Run) -> Iterator[Inequality]:
    constants, problem = run.constants, run.problem
    last = run.iterates[-1].w
    away = torch.zeros_like(last)  # w^l - w^T
    for now in reversed(run.iterates):
        changes = [problem.change(i, last, away) for i in range(len(problem.sizes))]
        decay = problem.consensus_decay * (last @ away + 0.5 * away @ away)
        value = float(problem.alpha @ torch.tensor(changes, dtype=torch.float64) + decay)
        gap = lagrangian_gap(problem, now)
        # The largest of the three is L~ or F.
        above = gap + penalty(problem, now) + tail(problem, now.iteration, run.gamma)
        bound = constants.c2 * constants.gamma**now.iteration
        yield Inequality(now.iteration, value + max(above, 0.0), bound)
        away = away - now.step


STATEMENTS = (
    Statement("updates", "Algorithm 1", _updates),
    Statement("preconditioner", "(2.11)", _preconditioner),
    Statement("containment", "Lemma 3.2, 1)", _containment),
    Statement("descent", "Lemma 3.2, (3.6)", _descent),
    Statement("lower bound", "(B.12)", _lower_bound),
    Statement("successive duals", "(B.16)", _duals),
    Statement("w_i - w vanishes", "Theorem 3.1, (B.28)", _consensus_gap),
    Statement("steps of w vanish", "Theorem 3.1, (B.29)", _steps),
    Statement("steps of w_i vanish", "Theorem 3.1", _local_steps),
    Statement("merit gap vanishes", "Theorem 3.1", _merit_gap),
    Statement("rate of w, w_i", "Theorem 3.2, (3.9)", _weights_rate),
    Statement("rate of pi_i", "Theorem 3.2, (3.9)", _duals_rate),
    Statement("rate of F, L, L~", "Theorem 3.2, (3.10)", _objective_rate),
)
