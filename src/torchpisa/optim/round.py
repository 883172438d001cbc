"""One round: the parameters by rule, where it stands, a batch's local step in it, and its end.

The optimizer of one process and the ranks of many (`distributed/process_group.py`) close rounds by
the same functions, and so does a checkpoint that is loaded on other ranks.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.checks import check_range
from torchpisa.kernels import dispatch
from torchpisa.kernels.foreach import knows
from torchpisa.kernels.job import Kernel, LocalJob, Member, Move, sigma_of
from torchpisa.kernels.loop import add_dual
from torchpisa.optim import arguments
from torchpisa.penalty import LARGEST_SIGMA, grown
from torchpisa.preconditioners import Preconditioner

__all__ = [
    "PROGRESS",
    "Group",
    "Part",
    "Round",
    "Rule",
    "Totals",
    "clip_scale",
    "consensus",
    "contribute_duals",
    "contribute_missing",
    "finish",
    "local_job",
]

Group = dict[str, Any]

# Far from the end of its range, and beyond where `theory.certify` stops.
_LARGEST_OF_FLOAT64 = 1e200


class Rule(NamedTuple):
    """The way to step one kind of parameters, in terms of the settings of their group.

    Attributes:
        settings: names of what the preconditioner depends on; none if it is given.
        build: makes the preconditioner from the group and its parameters of this kind.
        sigma: name of the penalty.
        rho: name of the weight of the preconditioner.
        momentum: name of the momentum that takes the place of both where sigma is None.
        lr: name of a factor on `lr` there; "" for none.
    """

    settings: tuple[str, ...]
    build: Callable[[Group, Sequence[Tensor]], Preconditioner]
    sigma: str = "sigma"
    rho: str = "rho"
    momentum: str = "momentum"
    lr: str = ""


class Totals(NamedTuple):
    """S, the weighted sum of all sigmas of the round, and likewise of rho; see `Move`."""

    sigma: Any
    rho: Scalar = 0.0


class Part:
    """The parameters of a group that follow one rule. NSISA's groups have two, others one.

    Attributes:
        number: of the group.
        group: its settings.
        params: the parameters.
        rule: what they follow.
    """

    def __init__(self, number: int, group: Group, params: list[Tensor], rule: Rule) -> None:
        self.number = number
        self.group = group
        self.params = params
        self.rule = rule
        self._built_for: tuple[Any, ...] | None = None
        self._preconditioner: Preconditioner | None = None

    @property
    def preconditioner(self) -> Preconditioner:
        """Q; made anew only when a setting that it depends on has changed."""
        device = self.params[0].device if self.params else None
        settings = device, *map(self.group.__getitem__, self.rule.settings)
        if self._preconditioner is None or settings != self._built_for:
            self._preconditioner = self.rule.build(self.group, self.params)
            # One that is given is no setting to be compared: it is what it is.
            self._built_for = settings if self.rule.settings else None
        return self._preconditioner

    @property
    def known(self) -> bool:
        """True if the preconditioner is one of the package's."""
        return bool(self.rule.settings) or knows(self.preconditioner)

    @property
    def follows(self) -> bool:
        """True if the sigma of every parameter follows its gradients instead of being given."""
        return self.group[self.rule.sigma] is None

    @property
    def sigmas(self) -> list[Any]:
        """sigma by batch, also after a user has written one number into the group."""
        value = self.group[self.rule.sigma]
        return value if isinstance(value, list) else [value] * self.group["batches"]

    @property
    def rhos(self) -> list[Any]:
        """rho by batch; where sigma follows gradients, what gives the momentum that was asked."""
        group = self.group
        if group[self.rule.sigma] is None:
            momentum: float = group[self.rule.momentum]
            return [momentum / (1 - momentum)] * group["batches"]
        value = group[self.rule.rho]
        return value if isinstance(value, list) else [value] * group["batches"]

    @property
    def lr(self) -> Scalar:
        """The learning rate, without the dimension that some schedulers' tensors have."""
        lr: Any = self.group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.reshape(())
        elif not (type(lr) is float and 0 <= lr < torch.inf):
            check_range("lr", lr, 0, high_open=True)
        if self.rule.lr and self.follows:
            lr = lr * self.group[self.rule.lr]
        scalar: Scalar = lr
        return scalar

    def next_sigmas(self, iteration: int) -> list[Scalar]:
        """Return equation (2.12) for all batches: a round is a round for the absent ones too.

        No sigma grows beyond `torchpisa.penalty.LARGEST_SIGMA`, or what float64 takes where all
        parameters are of it.
        """
        group = self.group
        rules = arguments.per_batch(
            "gamma", group["gamma"], group["batches"], arguments.check_gamma
        )
        gammas = [rule(iteration) if callable(rule) else rule for rule in rules]
        for gamma in gammas:
            arguments.check_gamma("gamma", gamma)
        wide = not group["capturable"] and all(p.dtype == torch.float64 for p in self.params)
        largest = _LARGEST_OF_FLOAT64 if wide else LARGEST_SIGMA
        pairs = zip(self.sigmas, gammas, strict=True)
        return [grown(sigma, gamma, largest) for sigma, gamma in pairs]

    def total(self, values: Sequence[Any]) -> Scalar:
        """Return the sum of sigmas or rhos, weighted by alpha; on several ranks, this one's."""
        total: Scalar = sum(map(mul, self.group["weights"], values))
        return total

    def totals(self, members: Sequence[Member]) -> Totals:
        """Return the sums of the round over some members; on several ranks, this one's part."""
        if not self.follows:
            return Totals(self.total(self.sigmas), self.total(self.rhos))
        slots = range(self.group["batches"])
        sigmas = {id(m.origin): self.total([sigma_of(m, slot) for slot in slots]) for m in members}
        return Totals(sigmas, self.total(self.rhos))


# How a round is written into each group of a state_dict.
PROGRESS = ("iteration", "visited", "present", "kept")


@dataclass
class Round:
    """The progress of a round.

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
    at_once: bool,
) -> LocalJob:
    """Return the local step of one batch.

    Args:
        part: the rule and its numbers.
        members: some of its parameters.
        slot: the batch.
        keep: whether it takes part, if only the device knows.
        at_once: take the consensus in the same step, because there is no other batch.
    """
    group, sigmas, rhos = part.group, part.sigmas, part.rhos
    move = None
    if at_once:
        sigma = None if sigmas[0] is None else part.total(sigmas)
        move = _move(part, Totals(sigma, part.total(rhos)))
    return LocalJob(
        members=members,
        preconditioner=part.preconditioner,
        slot=slot,
        sigma=sigmas[slot],
        rho=rhos[slot],
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

                square = dtensor.summed(square, dtensor.groups_of_parts(wholes[0]))
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
            job = local_job(part, missed, slot, keep, at_once=False)
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
