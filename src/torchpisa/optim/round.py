"""One round: where it stands, a batch's local step in it, and its end.

The optimizer of one process and the ranks of many (`distributed/process_group.py`) close rounds by
the same functions, and so does a checkpoint that is loaded on other ranks.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchpisa.kernels import dispatch
from torchpisa.kernels.job import Kernel, LocalJob, Member, Move
from torchpisa.kernels.loop import add_dual
from torchpisa.optim.part import Group, Part, Totals

__all__ = [
    "PROGRESS",
    "Round",
    "clip_scale",
    "consensus",
    "contribute_duals",
    "contribute_missing",
    "finish",
    "local_job",
]

# How a round is written into each group of a state_dict.
PROGRESS = ("iteration", "visited", "present", "kept")


@dataclass
class Round:
    """Where a round stands.

    Attributes:
        iteration: rounds done before it.
        used: slots whose batch was stepped or skipped.
        present: those whose batch takes part.
        kept: the same as far as only the device knows, a bool for each slot; else None.
    """

    iteration: int = 0
    used: set[int] = field(default_factory=set)
    present: set[int] = field(default_factory=set)
    kept: Tensor | None = None

    def free(self, batches: int) -> list[int]:
        """Return the slots that have not been used."""
        return [slot for slot in range(batches) if slot not in self.used]

    def note(self, slot: int, batches: int, keep: Tensor | None) -> None:
        """Note that a batch takes part or, if only the device knows, whether it does."""
        if keep is not None or self.kept is not None:
            if self.kept is None:
                assert keep is not None
                self.kept = torch.zeros(batches, dtype=torch.bool, device=keep.device)
                for earlier in self.present:
                    self.kept[earlier].fill_(True)
            taking_part = torch.ones_like(self.kept[slot]) if keep is None else keep
            # Part of a batch may be stepped before the rest: it takes part if any of it does.
            self.kept[slot].logical_or_(taking_part.to(self.kept.device))
        self.present.add(slot)

    def keep(self) -> Tensor | None:
        """Return whether any batch takes part, if only the device knows; else None."""
        return None if self.kept is None else self.kept.any()

    def begin_next(self) -> None:
        """Begin the next round."""
        self.iteration += 1
        self.used.clear()
        self.present.clear()
        self.kept = None

    def copy(self) -> "Round":
        """Return a round that stands where this one does."""
        kept = None if self.kept is None else self.kept.clone()
        return Round(self.iteration, set(self.used), set(self.present), kept)

    def packed(self) -> Group:
        """Return plain values for a group of a state_dict; slots are bits there."""
        return {
            "iteration": self.iteration,
            "visited": sum(1 << slot for slot in self.used),
            "present": sum(1 << slot for slot in self.present),
            "kept": self.kept,
        }

    @classmethod
    def unpacked(cls, group: Mapping[str, Any]) -> "Round":
        """Return the round that `packed` has described."""
        slots = range(group["visited"].bit_length())
        used = {slot for slot in slots if group["visited"] >> slot & 1}
        present = {slot for slot in slots if group["present"] >> slot & 1}
        return cls(group["iteration"], used, present, group.get("kept"))


def local_job(
    part: Part,
    members: list[Member],
    slot: int,
    keep: Tensor | None,
    alone: bool,
) -> LocalJob:
    """Return the local step of one batch.

    Args:
        part: the rule and its numbers.
        members: some of its parameters.
        slot: the batch.
        keep: whether it takes part, if only the device knows.
        alone: whether it is the only batch, so that its step takes the consensus along.
    """
    group = part.group
    move = None
    if alone:
        sigma = None if part.follows else part.total(part.sigmas)
        move = _move(part, Totals(sigma, part.total(part.rhos)))
    return LocalJob(
        members=members,
        preconditioner=part.preconditioner,
        slot=slot,
        sigma=part.sigmas[slot],
        rho=part.rhos[slot],
        weight=group["weights"][slot],
        weight_decay=group["weight_decay"],
        dual_decay=group["dual_decay"],
        maximize=group["maximize"],
        keep=keep,
        move=move,
        stochastic_rounding=group["stochastic_rounding"],
    )


def clip_scale(jobs: Sequence[LocalJob], kernels: Sequence[Kernel], clip: float) -> Tensor | None:
    """Return what residuals are multiplied by to bring their norm over all jobs to `clip`."""
    squares = []
    for job, kernel in zip(jobs, kernels, strict=True):
        norms = dispatch.able(kernel, job).residual_norm(job) if job.preconditioner.clips else []
        if norms:
            dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
            home = norms[0].device
            square = torch.stack([norm.to(home, dtype) for norm in norms]).square().sum()
            wholes = [member.whole for member in job.members if member.whole is not None]
            if wholes:
                from torchpisa.distributed import dtensor

                square = dtensor.summed(square, dtensor.groups(wholes))
            squares.append(square)
    if not squares:
        return None
    dtype = functools.reduce(torch.promote_types, (square.dtype for square in squares))
    total = torch.stack([square.to(squares[0].device, dtype) for square in squares]).sum().sqrt()
    scale: Tensor = clip / total
    return scale.clamp(max=1)


def contribute_missing(part: Part, members: list[Member], round: Round) -> None:
    """Complete the pending sums of `members`, each of which some batch of the round has reached.

    A batch that did not reach a parameter had gradient zero there; one that was absent contributes
    its dual.
    """
    for slot in range(part.group["batches"]):
        missed = [
            member._replace(grad=None)
            for member in members
            if not member.state["arrived"] >> slot & 1
        ]
        if not missed:
            continue
        if slot in round.present:
            keep = None if round.kept is None else round.kept[slot]
            job = local_job(part, missed, slot, keep, alone=False)
            kernel = dispatch.for_missed_batch(part.group, missed)
            dispatch.able(kernel, job).local_step(job)
        else:
            contribute_duals(part, missed, slot)


def contribute_duals(part: Part, members: list[Member], slot: int) -> None:
    """Let a batch that is absent for `members` contribute its duals."""
    group = part.group
    add_dual(members, slot, group["weights"][slot], group["stochastic_rounding"])


def consensus(
    part: Part,
    members: list[Member],
    totals: Totals,
    keep: Tensor | None,
    plans: dispatch.Plans,
) -> None:
    """Take equation (2.9) for `members`, from pending sums and `totals`."""
    if members:
        move = _move(part, totals)
        key = part.number, part.rule.sigma, "consensus"
        kernel = dispatch.for_consensus(part.group, members, move, keep, part.follows, key, plans)
        kernel.consensus(members, move, keep)


def finish(members: Sequence[Member]) -> None:
    """Make parameters ready for the next round."""
    for member in members:
        member.state["arrived"] = 0


def _move(part: Part, totals: Totals) -> Move:
    group = part.group
    return Move(
        totals.sigma,
        group["consensus_decay"],
        part.lr,
        group["stochastic_rounding"],
        part.preconditioner.proximal,
        totals.rho,
    )
