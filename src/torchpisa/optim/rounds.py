"""One round over parameter groups: open it, take a batch's local step, close it.

Where a round stands is kept in every parameter group, because that is what checkpoints carry:
`iteration` (rounds done), `visited` (a set of bits: slots used in this round), `present` (those of
them that were not skipped) and `kept` (the same, as far as only the device knows).
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.checks import check_range
from torchpisa.kernels import blocked, foreach, fused, loop, native, sharded
from torchpisa.kernels.job import Kernel, LocalJob, Member, Move, own_sigma, real
from torchpisa.optim import arguments
from torchpisa.penalty import LARGEST_SIGMA, grown
from torchpisa.preconditioners import Preconditioner

__all__ = [
    "PROGRESS",
    "Group",
    "Totals",
    "alone",
    "choose",
    "consensus",
    "finish",
    "follows",
    "local_step",
    "next_sigmas",
    "settle",
    "sigmas_of",
    "slots",
    "total",
    "totals",
]

Group = dict[str, Any]

# Far from the end of its range, and beyond where `theory.certify` stops.
_LARGEST_OF_FLOAT64 = 1e200

PROGRESS: Group = {"iteration": 0, "visited": 0, "present": 0, "kept": None}


class Totals(NamedTuple):
    """S, the weighted sum of all sigmas of the round, and likewise of rho; see `Move`."""

    sigma: Scalar | Mapping[int, Scalar] | None
    rho: Scalar = 0.0


def alone(group: Group) -> bool:
    """Whether a round is a single batch, so that its step can move the weights at once."""
    return bool(group["batches"] == 1 and group["ranks"] == 1)


def slots(bits: int, batches: int) -> list[int]:
    """The slots whose bit is set."""
    return [slot for slot in range(batches) if bits >> slot & 1]


def next_sigmas(group: Group) -> list[Scalar]:
    """Equation (2.12) for all batches, the absent ones too: a round is a round for everybody.

    No sigma grows beyond `torchpisa.penalty.LARGEST_SIGMA`, or what float64 takes where all
    parameters are of it.
    """
    if follows(group):
        return []
    batches = group["batches"]
    rules = arguments.per_batch("gamma", group["gamma"], batches, arguments.check_gamma)
    gammas = [rule(group["iteration"]) if callable(rule) else rule for rule in rules]
    for gamma in gammas:
        arguments.check_gamma("gamma", gamma)
    sigmas = per_batch(group, "sigma")
    wide = not group["capturable"] and all(p.dtype == torch.float64 for p in group["params"])
    largest = _LARGEST_OF_FLOAT64 if wide else LARGEST_SIGMA
    return [grown(sigma, gamma, largest) for sigma, gamma in zip(sigmas, gammas, strict=True)]


def check_fused(group: Group, preconditioner: Preconditioner) -> None:
    """Raise ValueError if a group asks for fused kernels that cannot step its parameters."""
    if not group["fused"]:
        return
    if follows(group) and "sisa_lr" in group:
        return  # what is not a matrix of NSISA, and small
    if follows(group):
        raise ValueError(
            "fused=True is not possible: sigma follows the gradients of every parameter; give "
            "sigma and rho"
        )
    params = [sharded.local(param) for param in group["params"]]
    if _on_cpu(params):
        found = _cpu_kernel(params, preconditioner, insist=True)
        reason = found if isinstance(found, str) else None
        if group["state_dtype"] not in (None, *(param.dtype for param in params)):
            reason = f"on a CPU state must be of its parameter's dtype, got {group['state_dtype']}"
    else:
        reason = fused.obstacle(params, preconditioner)
    if reason is not None:
        raise ValueError(f"fused=True is not possible: {reason}")


def here(group: Group, members: list[Member], preconditioner: Preconditioner) -> list[Member]:
    """Members as a kernel takes them: of sharded parameters the parts that this process holds.

    Not for preconditioners of which nothing is known: they may need all of a parameter, and what
    they compute with sharded tensors is right, if slow.
    """
    if group["foreach"] is False or not foreach.knows(preconditioner):
        return members
    return [sharded.part(member) for member in members]


def choose(
    group: Group,
    key: Hashable,
    members: list[Member],
    preconditioner: Preconditioner,
    slot: int,
    plans: fused.Plans,
) -> Kernel:
    """What computes the local step of a batch over `members` of a group; `key` names them."""
    if _wants_fused(group):
        params = [member.param for member in members]
        found: Kernel | str
        if _on_cpu(params):
            found = _cpu_kernel(params, preconditioner, insist=bool(group["fused"]))
        else:
            found = fused.find(plans, (key, slot), members, preconditioner, slot)
        if not isinstance(found, str):
            return found
        if group["fused"]:
            raise ValueError(f"fused=True is not possible: {found}")
    known = foreach.knows(preconditioner)
    return foreach if known and _use_foreach(group, members) else loop


def local_step(
    groups: Sequence[Group],
    members: Sequence[list[Member]],
    preconditioners: Sequence[Preconditioner],
    kernels: Sequence[Kernel],
    slot: int,
    keep: Tensor | None,
    grad_scale: Tensor | None,
    search: bool,
    flags: Sequence[Sequence[Tensor] | None],
) -> None:
    """The local step of one batch over all groups; with a single batch the consensus too."""
    jobs = []
    for group, own, preconditioner, flagged in zip(
        groups, members, preconditioners, flags, strict=True
    ):
        job = _job(group, own, preconditioner, slot, keep)
        jobs.append(replace(job, grad_scale=grad_scale, search=search, flags=flagged))
    clip = groups[0]["clip"]
    if clip is not None:
        scale = _clip_scale(jobs, kernels, clip)
        jobs = [replace(job, clip_scale=scale) for job in jobs]
    for job, kernel in zip(jobs, kernels, strict=True):
        _able(kernel, job).local_step(job)
    for group in groups:
        _remember(group, slot, keep)


def settle(group: Group, members: list[Member], preconditioner: Preconditioner) -> None:
    """Complete the pending sums of `members`, each of which some batch of the round has reached.

    A batch that did not reach a parameter had gradient zero there; one that was absent contributes
    its dual.
    """
    kept = group["kept"]
    for slot in range(group["batches"]):
        missed = [
            member._replace(grad=None)
            for member in members
            if not member.state["arrived"] >> slot & 1
        ]
        if not missed:
            continue
        if group["present"] >> slot & 1:
            keep = None if kept is None else kept[slot]
            job = _job(group, missed, preconditioner, slot, keep)
            _able(foreach if _use_foreach(group, missed) else loop, job).local_step(job)
        else:
            contribute_duals(group, missed, slot)


def contribute_duals(group: Group, members: list[Member], slot: int) -> None:
    """Let a batch that is absent for `members` contribute its duals."""
    loop.add_dual(members, slot, group["weights"][slot], group["stochastic_rounding"])


def consensus(
    group: Group,
    number: int,
    members: list[Member],
    preconditioner: Preconditioner,
    totals: Totals,
    keep: Tensor | None,
    plans: fused.Plans,
) -> None:
    """Equation (2.9) for `members` of group `number`, from pending sums and `totals`."""
    if members:
        move = _move(group, totals, preconditioner)
        kernel = _consensus_kernel(group, number, members, move, keep, plans)
        kernel.consensus(members, move, keep)


def finish(group: Group, members: list[Member]) -> None:
    """Make the group ready for the next round."""
    for member in members:
        member.state["arrived"] = 0
    group.update({**PROGRESS, "iteration": group["iteration"] + 1})


def _remember(group: Group, slot: int, keep: Tensor | None) -> None:
    """Note in `kept` who took part, from the first batch on for which only the device knows."""
    kept: Tensor | None = group["kept"]
    if alone(group) or (kept is None and keep is None):
        return
    if kept is None:
        assert keep is not None
        kept = torch.zeros(group["batches"], dtype=torch.bool, device=keep.device)
        for earlier in slots(group["present"], group["batches"]):
            kept[earlier].fill_(True)
        group["kept"] = kept
    # Part of a batch may be stepped before the rest: it took part if any of it did.
    here = torch.ones_like(kept[slot]) if keep is None else keep.to(kept.device)
    kept[slot].logical_or_(here)


def follows(group: Group) -> bool:
    """Return whether sigma of every parameter follows its gradients instead of being given."""
    return group["sigma"] is None


def sigmas_of(group: Group, members: Sequence[Member]) -> dict[int, Scalar]:
    """Return S of every parameter whose sigma follows its gradients; this rank's part of it."""
    return {
        id(member.origin): sum(
            weight * own_sigma(member, slot) for slot, weight in enumerate(group["weights"])
        )
        for member in members
    }


def total(group: Group, name: str) -> Scalar:
    """Return the weighted sum of sigma or rho of a group; on several ranks, this one's part."""
    pairs = zip(group["weights"], per_batch(group, name), strict=True)
    summed: Scalar = sum(weight * value for weight, value in pairs)
    return summed


def totals(group: Group, members: Sequence[Member]) -> Totals:
    """Return the sums of a group; on several ranks, this one's part of them."""
    sigma = sigmas_of(group, members) if follows(group) else total(group, "sigma")
    return Totals(sigma, total(group, "rho"))


def lr(group: Group) -> Scalar:
    """The relative learning rate, without the dimension that some schedulers' tensors have."""
    value: Scalar = group["lr"]
    if not isinstance(value, Tensor):
        check_range("lr", value, 0, high_open=True)
    # What is not a matrix of NSISA has an absolute learning rate of its own.
    factor = group.get("sisa_lr", 1.0) if follows(group) else 1.0
    return value.reshape(()) * factor if isinstance(value, Tensor) else value * factor


def _move(group: Group, totals: Totals, preconditioner: Preconditioner) -> Move:
    return Move(
        totals.sigma,
        group["consensus_decay"],
        lr(group),
        group["stochastic_rounding"],
        preconditioner.proximal,
        totals.rho,
    )


def _alone_totals(group: Group) -> Totals:
    """Return the sums of a round of one batch, which its step takes along."""
    return Totals(None if follows(group) else total(group, "sigma"), total(group, "rho"))


def _job(
    group: Group,
    members: list[Member],
    preconditioner: Preconditioner,
    slot: int,
    keep: Tensor | None,
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
        grad_scale=None,
        clip_scale=None,
        keep=keep,
        move=_move(group, _alone_totals(group), preconditioner) if alone(group) else None,
        stochastic_rounding=group["stochastic_rounding"],
    )


def per_batch(group: Group, name: str) -> list[Any]:
    """sigma or rho, one per batch, also after a user has written one number into the group."""
    if follows(group) and name == "rho":
        momentum: float = group["sisa_momentum" if "sisa_momentum" in group else "momentum"]
        return [momentum / (1 - momentum)] * group["batches"]
    value = group[name]
    return value if isinstance(value, list) else [value] * group["batches"]


def _clip_scale(jobs: Sequence[LocalJob], kernels: Sequence[Kernel], clip: float) -> Tensor | None:
    squares = []
    for job, kernel in zip(jobs, kernels, strict=True):
        norms = _able(kernel, job).residual_norm(job) if job.preconditioner.clips else []
        if norms:
            dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
            home = norms[0].device
            own = torch.stack([norm.to(home, dtype) for norm in norms]).square().sum()
            wholes = [member.whole for member in job.members if member.whole is not None]
            squares.append(sharded.summed(own, sharded.groups(wholes)))
    if not squares:
        return None
    dtype = functools.reduce(torch.promote_types, (square.dtype for square in squares))
    total = torch.stack([square.to(squares[0].device, dtype) for square in squares]).sum().sqrt()
    scale: Tensor = clip / total
    return scale.clamp(max=1)


def _able(kernel: Kernel, job: LocalJob) -> Kernel:
    """`kernel`, or the next slower one for what it does not know."""
    if (kernel is native and not native.supports(job)) or (
        kernel is blocked and not blocked.supports(job)
    ):
        kernel = foreach
    return loop if kernel is foreach and not foreach.supports(job) else kernel


def _consensus_kernel(
    group: Group,
    number: int,
    members: list[Member],
    move: Move,
    keep: Tensor | None,
    plans: fused.Plans,
) -> Kernel:
    on_cpu = _on_cpu([member.param for member in members])
    if _wants_fused(group) and not on_cpu and move.proximal is None:
        plan = fused.find_consensus(plans, (number, "consensus"), members)
        if not isinstance(plan, str):
            return plan
    if keep is None and _use_foreach(group, members):
        return foreach
    return loop


def _wants_fused(group: Group) -> bool:
    if follows(group):
        return False
    return bool(group["fused"] or (group["fused"] is None and group["foreach"] is None))


def _cpu_kernel(
    params: Sequence[Tensor], preconditioner: Preconditioner, insist: bool
) -> Kernel | str:
    """The fastest there is; without `insist` nothing is compiled for small models."""
    reason = None
    if insist or native.worthwhile(params):
        reason = native.obstacle(params, preconditioner)
        if reason is None:
            return native
    other = blocked.obstacle(params, preconditioner)
    return blocked if other is None else reason or other


def _on_cpu(params: Sequence[Tensor]) -> bool:
    """Whether torch's own kernels have to do; Triton's interpreter, in tests, takes CPUs too."""
    return "cpu" not in fused.DEVICES and all(param.is_cpu for param in params)


def _use_foreach(group: Group, members: Sequence[Member]) -> bool:
    if group["foreach"] is not None:
        return bool(group["foreach"])
    return all(type(real(member.param)) in (Tensor, torch.nn.Parameter) for member in members)
