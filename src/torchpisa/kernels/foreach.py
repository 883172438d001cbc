"""The plain loop's mathematics with one call per operation for all parameters of a kind.

`supports` says which jobs; everything else goes through the loop.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.kernels.job import LocalJob, Member, Move, compute_dtype, real, state_key
from torchpisa.preconditioners import Identity, NewtonSchulz, Preconditioner, SecondMoment

__all__ = ["consensus", "local_step", "residual_norm", "supports"]

Tensors = list[Tensor]


def supports(job: LocalJob) -> bool:
    """Whether `local_step` takes this job: a known preconditioner, and nobody to leave out."""
    return type(job.preconditioner) in _SOLVERS and job.keep is None


@torch.no_grad()
def local_step(job: LocalJob) -> None:
    """See `loop.local_step`."""
    solve = _SOLVERS[type(job.preconditioner)]
    for members in _alike(job.members, job.slot):
        dtype = compute_dtype(real(members[0].param), real(members[0].state[f"dual.{job.slot}"]))
        stored_duals = _own(members, "dual", job.slot)
        duals = _as(stored_duals, dtype)
        grads = _gradients(job, members, dtype)
        torch._foreach_add_(_own(members, "step", job.slot), 1)

        deltas = solve(job, members, duals, grads)
        torch._foreach_mul_(deltas, job.sigma)
        # u = pi + 2 delta goes where the consensus needs it, before pi is overwritten.
        if job.move is not None:
            contributions = torch._foreach_add(duals, deltas, alpha=2)
            _move(members, list(contributions), job.move)
        else:
            _accumulate(job, members, duals, deltas)
        torch._foreach_add_(duals, deltas)
        if job.dual_decay != 1:
            torch._foreach_mul_(duals, job.dual_decay)
        _write_back(stored_duals, duals)
        for member in members:
            member.state["arrived"] |= 1 << job.slot


@torch.no_grad()
def consensus(members: list[Member], move: Move) -> None:
    """See `loop.consensus`."""
    for alike in _alike(members, 0):
        _move(alike, [real(member.state["pending"]) for member in alike], move)


@torch.no_grad()
def residual_norm(job: LocalJob) -> Tensors:
    """See `loop.residual_norm`."""
    norms: Tensors = []
    for members in _alike(job.members, job.slot):
        dtype = compute_dtype(real(members[0].param), real(members[0].state[f"dual.{job.slot}"]))
        duals = _as(_own(members, "dual", job.slot), dtype)
        norms += torch._foreach_norm(torch._foreach_add(duals, _gradients(job, members, dtype)))
    return norms


def _identity(job: LocalJob, members: list[Member], duals: Tensors, grads: Tensors) -> Tensors:
    rs = _residuals(job, duals, grads)
    torch._foreach_div_(rs, job.sigma + job.rho)
    torch._foreach_neg_(rs)
    return rs


def _second_moment(job: LocalJob, members: list[Member], duals: Tensors, grads: Tensors) -> Tensors:
    preconditioner = job.preconditioner
    assert isinstance(preconditioner, SecondMoment)
    rs = _residuals(job, duals, grads)
    stored = _own(members, "moment", job.slot)
    moments = _as(stored, rs[0].dtype)
    if preconditioner.scheme == "adagrad":
        torch._foreach_addcmul_(moments, rs, rs)
    else:
        torch._foreach_mul_(moments, preconditioner.beta)
        torch._foreach_addcmul_(moments, rs, rs, 1 - preconditioner.beta)
    _write_back(stored, moments)
    denominators = list(torch._foreach_sqrt(moments))
    if preconditioner.scheme == "adam":
        torch._foreach_div_(denominators, _corrections(job, members))
    if preconditioner.eta < float("inf"):
        torch._foreach_clamp_max_(denominators, preconditioner.eta)
    if preconditioner.eps != 0:
        torch._foreach_add_(denominators, preconditioner.eps)
    torch._foreach_mul_(denominators, job.rho)
    torch._foreach_add_(denominators, job.sigma)
    torch._foreach_div_(rs, denominators)
    torch._foreach_neg_(rs)
    return rs


def _newton_schulz(job: LocalJob, members: list[Member], duals: Tensors, grads: Tensors) -> Tensors:
    preconditioner = job.preconditioner
    assert isinstance(preconditioner, NewtonSchulz)
    stored = _own(members, "momentum", job.slot)
    momenta = _as(stored, duals[0].dtype)
    torch._foreach_mul_(momenta, preconditioner.momentum)
    torch._foreach_add_(momenta, grads)
    _write_back(stored, momenta)
    bs = momenta
    if preconditioner.nesterov:
        bs = list(torch._foreach_add(grads, momenta, alpha=preconditioner.momentum))
    rs = [preconditioner.orthogonalize(b) for b in bs]
    torch._foreach_add_(rs, duals)
    denominators = list(torch._foreach_abs(rs))
    for r, step in zip(rs, _steps(job, members), strict=True):
        perturbation = preconditioner.perturbation**step
        if isinstance(perturbation, Tensor) or perturbation != 0:
            r.add_(perturbation * (r == 0))
    torch._foreach_mul_(denominators, job.rho)
    torch._foreach_add_(denominators, job.sigma)
    torch._foreach_div_(rs, denominators)
    torch._foreach_neg_(rs)
    return rs


_SOLVERS: dict[
    type[Preconditioner], Callable[[LocalJob, list[Member], Tensors, Tensors], Tensors]
] = {Identity: _identity, SecondMoment: _second_moment, NewtonSchulz: _newton_schulz}


def _alike(members: list[Member], slot: int) -> list[list[Member]]:
    """Members in lists that share devices and dtypes, as foreach's fast routes want them."""
    lists: dict[object, list[Member]] = {}
    for member in members:
        dual = member.state[state_key("dual", slot)]
        kind = (member.param.device, member.param.dtype, dual.dtype)
        lists.setdefault((*kind, None if member.grad is None else member.grad.dtype), []).append(
            member
        )
    return list(lists.values())


def _own(members: list[Member], name: str, slot: int) -> Tensors:
    key = state_key(name, slot)
    return [real(member.state[key]) for member in members]


def _as(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return tensors if tensors[0].dtype == dtype else [tensor.to(dtype) for tensor in tensors]


def _write_back(stored: Tensors, computed: Tensors) -> None:
    if stored is not computed:
        torch._foreach_copy_(stored, computed)


def _gradients(job: LocalJob, members: list[Member], dtype: torch.dtype) -> Tensors:
    """g_i in `dtype`, never to be written to: it may be the user's own gradient."""
    params = [real(member.param) for member in members]
    if members[0].grad is None:
        grads = [torch.zeros_like(param, dtype=dtype) for param in params]
    else:
        grads = _as([real(member.grad) for member in members if member.grad is not None], dtype)
        if job.grad_scale is not None:
            grads = list(torch._foreach_div(grads, job.grad_scale.to(grads[0].device)))
    if job.maximize:
        grads = list(torch._foreach_neg(grads))
    if job.weight_decay != 0:
        grads = list(torch._foreach_add(grads, _as(params, dtype), alpha=job.weight_decay))
    return grads


def _residuals(job: LocalJob, duals: Tensors, grads: Tensors) -> Tensors:
    rs = list(torch._foreach_add(duals, grads))
    if job.clip_scale is not None:
        torch._foreach_mul_(rs, job.clip_scale.to(rs[0].device))
    return rs


def _steps(job: LocalJob, members: list[Member]) -> list[Scalar]:
    steps = [member.state[state_key("step", job.slot)] for member in members]
    return [step.item() if step.device.type == "cpu" else step for step in steps]


def _corrections(job: LocalJob, members: list[Member]) -> Any:
    """sqrt(1 - beta^step) of Scheme III, per member."""
    assert isinstance(job.preconditioner, SecondMoment)
    corrections = (1 - job.preconditioner.beta**step for step in _steps(job, members))
    return [c.sqrt() if isinstance(c, Tensor) else c**0.5 for c in corrections]


def _accumulate(job: LocalJob, members: list[Member], duals: Tensors, deltas: Tensors) -> None:
    """pending = sum of a_i u_i: started by the first batch of a round, added to by the others."""
    first = [i for i, member in enumerate(members) if not member.state["arrived"]]
    for i in first:
        members[i].state["pending"].zero_()
    pendings = [real(member.state["pending"]) for member in members]
    totals = _as(pendings, duals[0].dtype)
    torch._foreach_add_(totals, duals, alpha=job.weight)
    torch._foreach_add_(totals, deltas, alpha=2 * job.weight)
    _write_back(pendings, totals)


def _move(members: list[Member], totals: Tensors, move: Move) -> None:
    params = [real(member.param) for member in members]
    dtype = torch.promote_types(params[0].dtype, totals[0].dtype)
    ws, totals = _as(params, dtype), _as(totals, dtype)
    scale = move.lr / (move.total_sigma + move.lr * move.consensus_decay)
    if move.consensus_decay != 0:
        totals = list(torch._foreach_add(totals, ws, alpha=-move.consensus_decay))
    if isinstance(scale, Tensor):
        torch._foreach_add_(ws, torch._foreach_mul(totals, scale.to(ws[0].device)))
    else:
        torch._foreach_add_(ws, totals, alpha=scale)
    _write_back(params, ws)
