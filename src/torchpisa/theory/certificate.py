r"""`certify`: run PISA, and compare every iterate with the statements of Section 3."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchpisa.checks import check_count, check_range
from torchpisa.optim.arguments import check_rho, check_sigma, per_batch
from torchpisa.preconditioners import Hessian, Identity, Preconditioner
from torchpisa.theory.blocks import eta_of
from torchpisa.theory.constants import Constants, ConstantsKind, constants_of, delta_of
from torchpisa.theory.problems import Problem
from torchpisa.theory.statements import STATEMENTS, Run, Statement
from torchpisa.theory.trajectory import Iterate, record_run

__all__ = ["Certificate", "Check", "certify"]

# A margin may be this far below zero; the values themselves are good to about 1e-12.
_TOLERANCE = 1e-9

_check_gamma = functools.partial(check_range, low=0, high=1, low_open=True, high_open=True)


@dataclass(frozen=True)
class Check:
    r"""A checked statement, at the iterate where it came closest to failing.

    Attributes:
        name: the name of the statement.
        reference: its place in the paper.
        holds: whether it holds at every iterate.
        margin: (bound - value) / |bound|, the part of the bound that is left (-1 if the bound
            is 0 and the value is not); negative if the statement fails, -inf if a side is not a
            number.
        iteration: \(\ell\) of the smallest margin.
        value: the smaller side there.
        bound: the larger side there.
    """

    name: str
    reference: str
    holds: bool
    margin: float
    iteration: int
    value: float
    bound: float

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "FAILS"
        return (
            f"{verdict}  {self.name:<19}  {self.value:>9.2e} <= {self.bound:<8.2e}  "
            f"margin {self.margin:>9.6g} at l = {self.iteration:<4}  {self.reference}"
        )


@dataclass(frozen=True)
class Certificate:
    r"""The result of `certify`.

    Attributes:
        title: a description of the run.
        constants: \(\delta\), \(\varepsilon_i\), \(r_i\), the terms of (3.4) and those of the rate.
        sigma0: \(\sigma^0 = \min_i \sigma_i^0\) of the run.
        unmet: conditions of the theory that the run does not meet, in words.
        checks: the checks, one per statement.
        covered: \(\|w^T - w^0\| / \|w^* - w^0\|\), if the solution is known.
        gradient_left: \(\|\nabla F_\lambda(w^T)\| / \|\nabla F_\lambda(w^0)\|\).
        iterates: the run itself.
    """

    title: str
    constants: Constants
    sigma0: float
    unmet: tuple[str, ...]
    checks: tuple[Check, ...]
    covered: float | None
    gradient_left: float
    iterates: tuple[Iterate, ...]

    @property
    def holds(self) -> bool:
        """Return True if every statement holds, whether or not the conditions are met."""
        return all(check.holds for check in self.checks)

    @property
    def passed(self) -> bool:
        """Return True if the conditions are met and every statement holds."""
        return not self.unmet and self.holds

    def __getitem__(self, name: str) -> Check:
        """Return the check of that name."""
        matches = [check for check in self.checks if check.name == name]
        if not matches:
            known = ", ".join(repr(check.name) for check in self.checks)
            raise KeyError(f"no check named {name!r}; there are {known}")
        return matches[0]

    def __str__(self) -> str:
        lines = [self.title, *(f"unmet condition: {line}" for line in self.unmet)]
        if not self.unmet:
            lines.append(
                f"conditions met: sigma0 = {self.sigma0:.6g} >= {self.constants.sigma0:.6g} (3.4), "
                f"dominated by the term {self.constants.dominant}"
            )
        if not self.constants.proven:
            lines.append("the constants are estimates: nothing is proven")
        lines += [str(check) for check in self.checks]
        distance = (
            "" if self.covered is None else f"{self.covered:.2g} of the way to the solution, "
        )
        lines.append(f"moved: {distance}gradient norm {self.gradient_left:.6g} of its start")
        return "\n".join(lines)


def certify(
    problem: Problem,
    preconditioner: Preconditioner | None = None,
    *,
    gamma: float | Sequence[float] = 0.9,
    rho: float | Sequence[float] = 1.0,
    eta: float | None = None,
    sigma: float | None = None,
    sigma0: float | Sequence[float] | None = None,
    iterations: int = 200,
    batch_size: int | None = None,
    constants: ConstantsKind = "corrected",
    start: Tensor | None = None,
    seed: int = 0,
) -> Certificate:
    r"""Run `torchpisa.PISA` in float64 and check the statements of Section 3 at every iterate.

    If a statement fails or a condition is not met the certificate says so; nothing is raised.

    Args:
        problem: the problem; `LeastSquares`, `LogisticRegression`, `Network`, or your own.
        preconditioner: \(Q_i\); by default `Identity()`.
        gamma: \(\gamma_i\) in (0, 1), one number or one per batch. The theory needs
            \(\gamma_i \ge 3/4\).
        rho: \(\rho_i\), one number or one per batch.
        eta: \(\eta\) with \(0 \preceq Q_i \preceq \eta I\), which the run checks. By default what
            the preconditioner guarantees: 1 for `Identity`, its own `eta`, and for `Hessian`
            \(r_i\).
        sigma: \(\sigma\) of (3.2), see `constants_of`.
        sigma0: \(\sigma_i^0\), one number or one per batch; by default the least that (3.4) allows.
        iterations: \(T\); a run ends earlier if it diverges, or if sigma grows beyond 1e150.
        batch_size: \(|B_i|\), or None for full gradients.
        constants: `"corrected"` or `"printed"`, see `constants_of`.
        start: \(w^0\); by default the problem's.
        seed: seed of the mini-batches.

    Examples:
        >>> import torch
        >>> from torchpisa.theory import LeastSquares, certify
        >>> data = [(torch.eye(2), torch.ones(2)), (torch.eye(2), torch.zeros(2))]
        >>> certificate = certify(LeastSquares(data), iterations=20)
        >>> certificate.passed
        True
    """
    if not isinstance(problem, Problem):
        raise ValueError(
            f"problem must be a Problem, such as LeastSquares(batches), got {problem!r}"
        )
    m = len(problem.sizes)
    preconditioner = Identity() if preconditioner is None else preconditioner
    if not isinstance(preconditioner, Preconditioner):
        raise ValueError(
            "preconditioner must be a torchpisa.preconditioners.Preconditioner, "
            f"got {preconditioner!r}"
        )
    if preconditioner.proximal is not None:
        raise ValueError(
            "preconditioner must leave the consensus (2.9) to the theory, got "
            f"{type(preconditioner).__name__}"
        )
    gammas = [float(g) for g in per_batch("gamma", gamma, m, _check_gamma)]
    rhos = [float(r) for r in per_batch("rho", rho, m, check_rho)]
    check_count("iterations", iterations)
    _check_batch_size(batch_size, problem)
    start = _start(problem, start)
    delta = delta_of(problem, gamma=max(gammas), sigma=sigma, start=start)
    etas = _etas(problem, preconditioner, eta, delta)
    theory = constants_of(
        problem,
        gamma=max(gammas),
        rho_eta=[r * e for r, e in zip(rhos, etas, strict=True)],
        kind=constants,
        stochastic=batch_size is not None,
        sigma=sigma,
        start=start,
    )
    sigmas = per_batch("sigma0", theory.sigma0 if sigma0 is None else sigma0, m, check_sigma)
    iterates = record_run(
        problem,
        preconditioner,
        sigma0=[float(s) for s in sigmas],
        rho=rhos,
        eta=etas,
        gamma=gammas,
        iterations=iterations,
        batch_size=batch_size,
        start=start,
        seed=seed,
    )
    run = Run(problem, theory, gammas, batch_size is not None, iterates)
    checks = (_check(statement, run) for statement in STATEMENTS)
    covered, gradient_left = _progress(problem, iterates)
    return Certificate(
        title=_title(problem, preconditioner, gammas, batch_size, constants),
        constants=theory,
        sigma0=float(min(sigmas)),
        unmet=_unmet(theory, float(min(sigmas)), gammas),
        checks=tuple(check for check in checks if check is not None),
        covered=covered,
        gradient_left=gradient_left,
        iterates=tuple(iterates),
    )


def _check(statement: Statement, run: Run) -> Check | None:
    """Return the inequality with the smallest margin, or None if the run has none."""
    worst = min(statement.inequalities(run), key=lambda sample: sample.margin, default=None)
    if worst is None:
        return None
    return Check(
        name=statement.name,
        reference=statement.reference,
        holds=worst.margin >= -_TOLERANCE,
        margin=worst.margin,
        iteration=worst.iteration,
        value=worst.value,
        bound=worst.bound,
    )


def _check_batch_size(batch_size: int | None, problem: Problem) -> None:
    if batch_size is not None:
        check_count("batch_size", batch_size)
        if batch_size > min(problem.sizes):
            raise ValueError(
                f"batch_size must be at most {min(problem.sizes)}, the size of the smallest batch, "
                f"got {batch_size}"
            )


def _start(problem: Problem, start: Tensor | None) -> Tensor:
    if start is None:
        return problem.start
    if start.shape != (problem.dimension,):
        raise ValueError(
            f"start must be a vector of {problem.dimension} weights, got shape {tuple(start.shape)}"
        )
    return start.detach().to(torch.float64)


def _etas(
    problem: Problem, preconditioner: Preconditioner, eta: float | None, delta: float
) -> list[float]:
    batches = range(len(problem.sizes))
    if eta is not None:
        check_range("eta", eta, 0, low_open=True, high_open=True)
        return [eta for _ in batches]
    guaranteed = eta_of(preconditioner, (problem.dimension,))
    if isinstance(preconditioner, Hessian):
        return [min(guaranteed, problem.smoothness(i, 2 * delta)) for i in batches]
    if guaranteed == math.inf:
        raise ValueError(
            f"eta must be given for {type(preconditioner).__name__} without a finite eta of its own"
        )
    return [guaranteed for _ in batches]


def _unmet(constants: Constants, sigma0: float, gammas: Sequence[float]) -> tuple[str, ...]:
    unmet = []
    if sigma0 < constants.sigma0:
        unmet.append(
            f"sigma0 = {sigma0:.6g} < {constants.sigma0:.6g}, the choice of sigma (3.4), dominated "
            f"by the term {constants.dominant}"
        )
    if min(gammas) < 0.75:
        unmet.append(f"gamma = {min(gammas):g} < 0.75 (B.5)")
    return tuple(unmet)


def _progress(problem: Problem, iterates: Sequence[Iterate]) -> tuple[float | None, float]:
    first, last = iterates[0].w, iterates[-1].w
    covered = None
    if problem.optimum is not None:
        covered = float((last - first).norm() / (problem.optimum - first).norm())
    left = problem.gradient(last).norm() / problem.gradient(first).norm()
    return covered, float(left)


def _title(
    problem: Problem,
    preconditioner: Preconditioner,
    gammas: Sequence[float],
    batch_size: int | None,
    kind: ConstantsKind,
) -> str:
    gradients = "full gradients" if batch_size is None else f"mini-batches of {batch_size}"
    return (
        f"{type(problem).__name__}, m = {len(problem.sizes)}, n = {problem.dimension}; "
        f"{type(preconditioner).__name__}, {gradients}, gamma = {max(gammas):g}; {kind} constants"
    )
