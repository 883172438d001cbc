r"""Run the optimizer, and record all quantities in the lemmas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchpisa.algorithms import pisa
from torchpisa.optim import PISA
from torchpisa.preconditioners import Hessian, LocalProblem, Preconditioner
from torchpisa.theory.problems import Problem

__all__ = ["Iterate", "record_run"]

# The squares of larger numbers leave the range of float64.
_LARGEST = 1e150


@dataclass(frozen=True)
class Iterate:
    r"""The variables of PISA at \(\ell\).

    Local weights are kept as \(d_i = w_i - w\), and the last movement of \(w\) as computed, because
    differences of stored weights would lose all digits as \(\sigma_i\) grows. At \(\ell = 0\) all
    but `w` and `sigma` are zero.

    Attributes:
        iteration: \(\ell\).
        w: \(w^\ell\).
        step: \(w^\ell - w^{\ell-1}\).
        d: \(d_i = w_i^\ell - w^\ell\), one row per batch, like the following.
        dual: \(\pi_i^\ell\).
        grad: \(g_i^\ell\).
        pull: \(\rho_i Q_i^\ell d_i\).
        sigma: \(\sigma_i^\ell\).
        probe: a direction in which \(Q_i^\ell\) was evaluated.
        probe_pull: \(\rho_i Q_i^\ell\) times `probe`.
    """

    iteration: int
    w: Tensor
    step: Tensor
    d: Tensor
    dual: Tensor
    grad: Tensor
    pull: Tensor
    sigma: Tensor
    probe: Tensor
    probe_pull: Tensor

    def next_step(self, alpha: Tensor, consensus_decay: float) -> Tensor:
        r"""Return \(w^{\ell+1} - w^\ell\), equation (2.9)."""
        total = alpha @ (self.dual + self.sigma.unsqueeze(1) * self.d)
        pull = total - consensus_decay * self.w
        scale = float(alpha @ self.sigma) + consensus_decay
        return pisa.consensus(torch.zeros_like(self.w), pull, scale)


class _LocalSolution(NamedTuple):
    """The result of one batch in one round."""

    w: Tensor
    grad: Tensor
    d: Tensor
    pull: Tensor
    sigma: float
    probe: Tensor
    probe_pull: Tensor


class _Recorder(Preconditioner):
    """A wrapper of a preconditioner that records its problems and solutions."""

    def __init__(self, inner: Preconditioner, scale: float) -> None:
        self.inner = inner
        self.scale = scale
        self.solved: list[_LocalSolution] = []

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return self.inner.init(param)

    def check(self, params: Sequence[Tensor]) -> None:
        self.inner.check(params)

    def solve(
        self, problem: LocalProblem, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        d, new_state = self.inner.solve(problem, state)
        r, sigma = problem.residual, float(problem.sigma)
        # rho Q d = -r - sigma d leaves few digits of Q once sigma is large, so Q is also probed
        # with a sigma of its size.
        probe, _ = self.inner.solve(replace(problem, sigma=self.scale), state)
        self.solved.append(
            _LocalSolution(
                w=problem.param.detach().clone(),
                grad=problem.grad.clone(),
                d=d.clone(),
                pull=-r - sigma * d,
                sigma=sigma,
                probe=probe,
                probe_pull=-r - self.scale * probe,
            )
        )
        return d, new_state


def record_run(
    problem: Problem,
    preconditioner: Preconditioner,
    *,
    sigma0: Sequence[float],
    rho: Sequence[float],
    eta: Sequence[float],
    gamma: Sequence[float],
    iterations: int,
    batch_size: int | None,
    start: Tensor,
    seed: int,
) -> list[Iterate]:
    r"""Run `torchpisa.PISA` on a problem and return the iterates \(\ell = 0, \ldots, T\).

    Args:
        problem: the problem.
        preconditioner: \(Q_i\).
        sigma0: \(\sigma_i^0\), one per batch, like the following.
        rho: \(\rho_i\).
        eta: \(\eta_i\).
        gamma: \(\gamma_i\).
        iterations: \(T\); a run ends earlier if it diverges, or if sigma grows beyond 1e150.
        batch_size: \(|B_i|\), drawn without replacement; None for full gradients.
        start: \(w^0\).
        seed: seed of the draws.
    """
    w = torch.nn.Parameter(start.detach().to(torch.float64).clone())
    scale = max(r * e for r, e in zip(rho, eta, strict=True)) or 1.0
    recorder = _Recorder(preconditioner, scale)
    iterates = [_first(w, sigma0)]
    opt = PISA(
        [w],
        recorder,
        sigma=list(sigma0),
        rho=list(rho),
        gamma=list(gamma),
        batches=len(problem.sizes),
        weights=problem.sizes,
        weight_decay=problem.weight_decay,
        consensus_decay=problem.consensus_decay,
        initial_consensus=True,
        nonfinite="ignore",
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(iterations):
        for i, size in enumerate(problem.sizes):
            samples = None
            if batch_size is not None:
                samples = torch.randperm(size, generator=generator)[:batch_size]
            opt.zero_grad()
            _backward(problem.loss(i, w, samples), preconditioner)
            opt.step()
        duals = [opt.state[w][f"dual.{i}"] for i in range(len(problem.sizes))]
        iterates.append(_next(problem, iterates[-1], recorder.solved, duals))
        recorder.solved.clear()
        if not _bounded(iterates[-1], w):
            break
    return iterates


def _backward(loss: Tensor, preconditioner: Preconditioner) -> None:
    torch.autograd.backward(loss, retain_graph=isinstance(preconditioner, Hessian))
    if isinstance(preconditioner, Hessian):
        preconditioner.observe(loss)


def _first(w: Tensor, sigma0: Sequence[float]) -> Iterate:
    zeros = torch.zeros(len(sigma0), len(w), dtype=torch.float64)
    return Iterate(
        iteration=0,
        w=w.detach().clone(),
        step=zeros[0],
        d=zeros,
        dual=zeros,
        grad=zeros,
        pull=zeros,
        sigma=torch.tensor(sigma0, dtype=torch.float64),
        probe=zeros,
        probe_pull=zeros,
    )


def _next(
    problem: Problem, last: Iterate, solved: Sequence[_LocalSolution], duals: Sequence[Tensor]
) -> Iterate:
    return Iterate(
        iteration=last.iteration + 1,
        w=solved[0].w,
        step=last.next_step(problem.alpha, problem.consensus_decay),
        d=torch.stack([solution.d for solution in solved]),
        dual=torch.stack([dual.clone() for dual in duals]),
        grad=torch.stack([solution.grad for solution in solved]),
        pull=torch.stack([solution.pull for solution in solved]),
        sigma=torch.tensor([solution.sigma for solution in solved], dtype=torch.float64),
        probe=torch.stack([solution.probe for solution in solved]),
        probe_pull=torch.stack([solution.probe_pull for solution in solved]),
    )


def _bounded(iterate: Iterate, w: Tensor) -> bool:
    return all(bool((x.abs() < _LARGEST).all()) for x in (w.detach(), iterate.dual, iterate.sigma))
