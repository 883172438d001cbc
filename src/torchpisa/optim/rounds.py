"""One round over parameter groups: open it, take a batch's local step, close it.

Where a round stands is kept in every parameter group, because that is what checkpoints carry:
`iteration` (rounds done), `visited` (a set of bits: slots used in this round), `present` (those of
them that were not skipped) and `kept` (the same, as far as only the device knows).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.kernels import foreach, loop
from torchpisa.kernels.job import LocalJob, Member, Move, real
from torchpisa.optim import arguments
from torchpisa.preconditioners import Preconditioner

__all__ = ["PROGRESS", "Group", "any_nonfinite", "close", "local_step", "next_sigmas", "slots"]

Group = dict[str, Any]

PROGRESS: Group = {"iteration": 0, "visited": 0, "present": 0, "kept": None}


def slots(bits: int, batches: int) -> list[int]:
    """The slots whose bit is set."""
    return [slot for slot in range(batches) if bits >> slot & 1]


def next_sigmas(group: Group) -> list[Scalar]:
    """Equation (2.12) for all batches, the absent ones too: a round is a round for everybody."""
    batches = group["batches"]
    rules = arguments.per_batch("gamma", group["gamma"], batches, arguments.check_gamma)
    gammas = [rule(group["iteration"]) if callable(rule) else rule for rule in rules]
    for gamma in gammas:
        arguments.check_gamma("gamma", gamma)
    sigmas = per_batch(group, "sigma")
    return [sigma / gamma for sigma, gamma in zip(sigmas, gammas, strict=True)]


def local_step(
    groups: Sequence[Group],
    members: Sequence[list[Member]],
    preconditioners: Sequence[Preconditioner],
    slot: int,
    keep: Tensor | None,
    grad_scale: Tensor | None,
) -> None:
    """The local step of one batch over all groups; with a single batch the consensus too."""
    jobs = [
        _job(group, of_group, preconditioner, slot, keep, grad_scale)
        for group, of_group, preconditioner in zip(groups, members, preconditioners, strict=True)
    ]
    clip = groups[0]["clip"]
    if clip is not None:
        scale = _clip_scale(jobs, groups, clip)
        jobs = [replace(job, clip_scale=scale) for job in jobs]
    for job, group in zip(jobs, groups, strict=True):
        _run(job, group)
    for group in groups:
        _remember(group, slot, keep)


def close(group: Group, members: list[Member], preconditioner: Preconditioner) -> None:
    """Settle who was missing, take the consensus, and make the group ready for the next round.

    A parameter that no batch reached is left alone. Otherwise a batch that did not reach it had
    gradient zero there, and a batch that was absent contributes its dual.
    """
    reached = [member for member in members if member.state["arrived"]]
    batches, kept = group["batches"], group["kept"]
    if batches > 1 and reached:
        for slot in range(batches):
            if group["present"] >> slot & 1:
                missed = [
                    member._replace(grad=None)
                    for member in reached
                    if not member.state["arrived"] >> slot & 1
                ]
                keep = None if kept is None else kept[slot]
                _run(_job(group, missed, preconditioner, slot, keep, None), group)
            else:
                loop.add_dual(reached, slot, group["weights"][slot])
        if kept is not None:
            loop.consensus(reached, _move(group), kept.any())
        elif _use_foreach(group, reached):
            foreach.consensus(reached, _move(group))
        else:
            loop.consensus(reached, _move(group), None)
    for member in reached:
        member.state["arrived"] = 0
    group.update({**PROGRESS, "iteration": group["iteration"] + 1})


def _remember(group: Group, slot: int, keep: Tensor | None) -> None:
    """Note in `kept` who took part, from the first batch on for which only the device knows."""
    kept: Tensor | None = group["kept"]
    if group["batches"] == 1 or (kept is None and keep is None):
        return
    if kept is None:
        assert keep is not None
        kept = torch.zeros(group["batches"], dtype=torch.bool, device=keep.device)
        for earlier in slots(group["present"], group["batches"]):
            kept[earlier].fill_(True)
        group["kept"] = kept
    kept[slot].copy_(torch.ones_like(kept[slot]) if keep is None else keep)


def any_nonfinite(grads: Sequence[Tensor]) -> Tensor:
    """A 0-d bool tensor on the device of the first gradient.

    Looks at Euclidean norms, by far the fastest reduction there is: a gradient so large that its
    square overflows counts as infinite.
    """
    home = grads[0].device
    found = torch.zeros((), dtype=torch.bool, device=home)
    by_kind: dict[object, list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for alike in by_kind.values():
        dtype = torch.promote_types(alike[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(alike, 2, dtype))
        found = found | norms.isfinite().all().logical_not().to(home)
    return found


def total_sigma(group: Group) -> Scalar:
    """S, the weighted sum of all sigmas of the round."""
    pairs = zip(group["weights"], per_batch(group, "sigma"), strict=True)
    total: Scalar = sum(weight * sigma for weight, sigma in pairs)
    return total


def lr(group: Group) -> Scalar:
    """The relative learning rate, without the dimension that some schedulers' tensors have."""
    value: Scalar = group["lr"]
    return value.reshape(()) if isinstance(value, Tensor) else value


def _move(group: Group) -> Move:
    return Move(total_sigma(group), group["consensus_decay"], lr(group))


def _job(
    group: Group,
    members: list[Member],
    preconditioner: Preconditioner,
    slot: int,
    keep: Tensor | None,
    grad_scale: Tensor | None,
) -> LocalJob:
    return LocalJob(
        members=members,
        preconditioner=preconditioner,
        slot=slot,
        sigma=per_batch(group, "sigma")[slot],
        rho=per_batch(group, "rho")[slot],
        weight=group["weights"][slot],
        weight_decay=group["weight_decay"],
        dual_decay=group["dual_decay"],
        maximize=group["maximize"],
        grad_scale=grad_scale,
        clip_scale=None,
        keep=keep,
        move=_move(group) if group["batches"] == 1 else None,
    )


def per_batch(group: Group, name: str) -> list[Any]:
    """sigma or rho, one per batch, also after a user has written one number into the group."""
    value = group[name]
    return value if isinstance(value, list) else [value] * group["batches"]


def _run(job: LocalJob, group: Group) -> None:
    _kernel(job, group, foreach.local_step, loop.local_step)(job)


def _clip_scale(jobs: Sequence[LocalJob], groups: Sequence[Group], clip: float) -> Tensor | None:
    norms = [
        norm
        for job, group in zip(jobs, groups, strict=True)
        if job.preconditioner.clips
        for norm in _kernel(job, group, foreach.residual_norm, loop.residual_norm)(job)
    ]
    if not norms:
        return None
    dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
    total = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
    )
    scale: Tensor = clip / total
    return scale.clamp(max=1)


def _kernel(job: LocalJob, group: Group, fast: Any, plain: Any) -> Callable[[LocalJob], Any]:
    choice: Callable[[LocalJob], Any] = (
        fast if foreach.supports(job) and _use_foreach(group, job.members) else plain
    )
    return choice


def _use_foreach(group: Group, members: Sequence[Member]) -> bool:
    if group["foreach"] is not None:
        return bool(group["foreach"])
    return all(type(real(member.param)) in (Tensor, torch.nn.Parameter) for member in members)
