"""The plain loop over parameters: the specification that every other kernel is tested against."""

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchpisa.algorithms import pisa, sisa
from torchpisa.kernels.job import (
    TINY,
    Consensus,
    Kernel,
    LocalJob,
    Member,
    check_shapes,
    compute_dtype,
    keys_shaped_like_params,
    real,
)
from torchpisa.kernels.rounding import store
from torchpisa.preconditioners import LocalProblem, Preconditioner, SecondMoment
from torchpisa.preconditioners.base import State, solve_for_deltas
from torchpisa.state_keys import of_slot, slot_keys, state_key

__all__ = ["LOOP", "Loop", "add_dual"]


class Loop:
    """The kernel that steps one parameter after the other, with any preconditioner."""

    finds_nonfinite: ClassVar[bool] = False
    takes_flags: ClassVar[bool] = False
    slower: ClassVar[Kernel | None] = None

    def supports(self, job: LocalJob) -> bool:
        """Return True: the loop takes everything."""
        return True

    @torch.no_grad()
    def local_step(self, job: LocalJob) -> None:
        """Take the local step, see `Kernel`."""
        check_shapes(job.members, keys_shaped_like_params(job.preconditioner, job.slot))
        chunks = [job.members] if job.preconditioner.joint else [[m] for m in job.members]
        for chunk in filter(None, chunks):
            problems = [_problem(job, member) for member in chunk]
            states = [
                _preconditioner_state(job, member, problem.dual.dtype)
                for member, problem in zip(chunk, problems, strict=True)
            ]
            new_sigmas = [_updated_sigma(job, *pair) for pair in zip(chunk, problems, strict=True)]
            problems = [
                replace(problem, sigma=new["sigma"]) if new else problem
                for problem, new in zip(problems, new_sigmas, strict=True)
            ]
            solved = solve_for_deltas(job.preconditioner, problems, states)
            _check_solution(job.preconditioner, problems, states, solved)
            for member, problem, state, (delta, new_state), new_sigma in zip(
                chunk, problems, states, solved, new_sigmas, strict=True
            ):
                local = pisa.local_step_of_delta(problem.dual, delta, job.dual_decay)
                keep = _keep(job, problem.dual)
                for name, value in new_sigma.items():
                    target = member.state[state_key(name, job.slot)]
                    target.copy_(_chooser(keep)(value, target))
                _store(job, member, problem, local, state, new_state)

    @torch.no_grad()
    def residual_norm(self, job: LocalJob) -> list[Tensor]:
        """Return the norm of r for each member."""
        problems = (_problem(job, member) for member in job.members)
        return [torch.linalg.vector_norm(problem.residual) for problem in problems]

    @torch.no_grad()
    def take_consensus(
        self, members: list[Member], consensus: Consensus, keep: Tensor | None
    ) -> None:
        """Take the consensus, see `Kernel`."""
        check_shapes(members, ("pending",))
        for member in members:
            _take_consensus(member, real(member.state["pending"]), consensus, keep)


LOOP = Loop()


@torch.no_grad()
def add_dual(members: list[Member], slot: int, weight: float, stochastic_rounding: bool) -> None:
    """Add the dual of an absent batch to the pending sums: u_i = pi_i."""
    key = slot_keys(slot).dual
    check_shapes(members, (key, "pending"))
    for param, _, state, _ in members:
        pending, dual = real(state["pending"]), real(state[key])
        total = weight * dual.to(compute_dtype(real(param), dual))
        if state["arrived"]:
            total = total + pending.to(total.dtype)
        store(pending, total, stochastic_rounding)
        state["arrived"] |= 1 << slot


def _problem(job: LocalJob, member: Member) -> LocalProblem:
    param, grad, state, _ = member
    dtype = compute_dtype(real(param), real(state[state_key("dual", job.slot)]))
    dual = real(state[state_key("dual", job.slot)]).to(dtype)
    w = real(param).to(dtype)
    g = torch.zeros_like(w) if grad is None else real(grad).to(dtype)
    if job.grad_scale is not None and grad is not None:
        g = g / job.grad_scale.to(g.device)
    if job.maximize:
        g = -g
    if job.weight_decay != 0:
        g = g + job.weight_decay * w
    r = pisa.residual(dual, g)
    if job.clip_scale is not None and job.preconditioner.clips:
        r = r * job.clip_scale.to(r.device)
    step = _counter(state, state_key("step", job.slot), _keep(job, dual))
    return LocalProblem(
        param=param,
        grad=g,
        dual=dual,
        residual=r,
        sigma=1.0 if job.sigma is None else job.sigma,
        rho=job.rho,
        weight_decay=job.weight_decay,
        step=step + 1 if step.device.type != "cpu" else step.item() + 1,
        present=grad is not None,
    )


def _updated_sigma(job: LocalJob, member: Member, problem: LocalProblem) -> dict[str, Tensor]:
    """Return the new sigma and level if sigma follows the gradients, else an empty dict."""
    rule = job.preconditioner
    if job.sigma is not None:
        return {}
    assert isinstance(rule, SecondMoment)
    r = problem.residual
    norm = torch.linalg.vector_norm(r)
    if hasattr(norm, "full_tensor"):  # sharded
        norm = norm.full_tensor()
    sigma, level = (member.state[state_key(name, job.slot)] for name in ("sigma", "level"))
    rms = (norm / max(1, r.numel()) ** 0.5).to(level.device, level.dtype)
    sigma, level = sisa.followed(sigma, level, rms, problem.step, rule.scheme, rule.beta)
    return {"sigma": sigma.clamp(min=TINY), "level": level}


def _preconditioner_state(job: LocalJob, member: Member, dtype: torch.dtype) -> State:
    """Return the preconditioner's state for this batch, under the names of its `init`."""
    state = {}
    for name, value in of_slot(member.state, job.slot).items():
        if name not in ("dual", "step", "sigma", "level"):
            value = real(value)
            state[name] = value.to(dtype) if value.is_floating_point() else value
    return state


def _check_solution(
    preconditioner: Preconditioner,
    problems: list[LocalProblem],
    states: list[State],
    solved: list[tuple[Tensor, dict[str, Tensor]]],
) -> None:
    """Raise ValueError for a solution of the wrong shape, which torch would broadcast silently."""
    name = type(preconditioner).__name__
    for problem, state, (d, new_state) in zip(problems, states, solved, strict=True):
        if d.shape != problem.residual.shape:
            raise ValueError(
                f"d must have the shape {tuple(problem.residual.shape)} of the residual, got "
                f"{tuple(d.shape)} from {name}"
            )
        if new_state.keys() != state.keys():
            raise ValueError(
                f"new state must have the names of {name}.init, {sorted(state)}, got "
                f"{sorted(new_state)}"
            )
        for key, value in new_state.items():
            if value.shape != state[key].shape:
                raise ValueError(
                    f"new {key} of {name} must have the shape {tuple(state[key].shape)} that it "
                    f"was made with, got {tuple(value.shape)}"
                )


def _store(
    job: LocalJob,
    member: Member,
    problem: LocalProblem,
    local: pisa.Local,
    state: State,
    new_state: State,
) -> None:
    keep = _keep(job, problem.dual)
    chosen = _chooser(keep)
    stored = member.state
    contribution = chosen(local.contribution, problem.dual)
    dual = chosen(local.dual, problem.dual)
    store(real(stored[state_key("dual", job.slot)]), dual, job.stochastic_rounding)
    for name, value in new_state.items():
        target = real(stored[state_key(name, job.slot)])
        store(target, chosen(value, state[name]), job.stochastic_rounding)
    _count(stored, state_key("step", job.slot), keep)
    if job.consensus is not None:
        _take_consensus(member, contribution, job.consensus, keep)
    else:
        total = job.weight * contribution
        if stored["arrived"]:
            total = total + real(stored["pending"]).to(total.dtype)
        store(real(stored["pending"]), total, job.stochastic_rounding)
        stored["arrived"] |= 1 << job.slot


def _keep(job: LocalJob, dual: Tensor) -> Tensor | None:
    return None if job.keep is None else job.keep.to(dual.device)


def _count(state: MutableMapping[str, Any], key: str, keep: Tensor | None) -> None:
    """Add one to a counter, if `keep` says so."""
    _counter(state, key, keep).add_(1 if keep is None else keep)


def _counter(state: MutableMapping[str, Any], key: str, keep: Tensor | None) -> Tensor:
    """Return a counter, moved for good to the device of `keep` if that decides about it.

    It moves when first read, so that a loaded run computes with the same precision.
    """
    if keep is not None and state[key].device != keep.device:
        state[key] = state[key].to(keep.device, non_blocking=True)
    counter: Tensor = state[key]
    return counter


def _chooser(keep: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
    if keep is None:
        return lambda new, old: new
    return lambda new, old: torch.where(keep, new, old)


def _take_consensus(
    member: Member, total: Tensor, consensus: Consensus, keep: Tensor | None
) -> None:
    w = real(member.param)
    dtype = compute_dtype(w, total)
    numbers = consensus.total(member), consensus.consensus_decay, consensus.lr
    if consensus.proximal is None:
        moved = pisa.consensus(w.to(dtype), total.to(dtype), *numbers)
    else:
        moved = consensus.proximal.consensus(w.to(dtype), total.to(dtype), consensus.rho, *numbers)
    if keep is not None:
        moved = torch.where(keep.to(w.device), moved, w.to(dtype))
    store(w, moved, consensus.stochastic_rounding)
