"""Rounds: parameters by rule, the progress of a round, its local steps and its consensus.

One process (`optim/pisa.py`), many ranks (`distributed/process_group.py`) and a checkpoint that is
loaded on other ranks (`distributed/checkpoint/remap.py`) all close rounds by the functions here.
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
from torchpisa.kernels.job import Consensus, Kernel, LocalJob, Member, Rows, sigma_of
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
    "clear_arrived",
    "clip_scale",
    "consensus",
    "contribute_duals",
    "contribute_missing",
    "local_job",
]

Group = dict[str, Any]

# Far from the end of its range, and beyond where `theory.certify` stops.
_LARGEST_OF_FLOAT64 = 1e200


class Rule(NamedTuple):
    """The update rule for one kind of parameters: the settings of the group that play each role.

    Attributes:
        settings: names of the settings that the preconditioner is built from; empty if the user
            gave the preconditioner itself.
        build: makes the preconditioner from the group and the parameters that follow this rule.
        sigma: name of the setting for the penalty.
        rho: name of the setting for the weight of the preconditioner.
        momentum: name of the setting that replaces both where sigma is None.
        lr: name of an additional factor on `lr` where sigma is None; "" for none.
    """

    settings: tuple[str, ...]
    build: Callable[[Group, Sequence[Tensor]], Preconditioner]
    sigma: str = "sigma"
    rho: str = "rho"
    momentum: str = "momentum"
    lr: str = ""


class Totals(NamedTuple):
    """S, the sum of sigma over the batches, weighted by alpha, and the same sum of rho."""

    sigma: Any
    rho: Scalar = 0.0


class Part:
    """The parameters of a group that follow one rule. NSISA has up to two per group, others one.

    Attributes:
        group_index: index of the group.
        group: its settings.
        params: the parameters.
        rule: their rule.
        rows: what kernels remember of the parameters' state from step to step.
    """

    def __init__(self, group_index: int, group: Group, params: list[Tensor], rule: Rule) -> None:
        self.group_index = group_index
        self.group = group
        self.params = params
        self.rule = rule
        self._built_for: tuple[Any, ...] | None = None
        self._preconditioner: Preconditioner | None = None
        self.rows: Rows = {}

    @property
    def preconditioner(self) -> Preconditioner:
        """Q, rebuilt only when one of its settings has changed."""
        device = self.params[0].device if self.params else None
        settings = device, *map(self.group.__getitem__, self.rule.settings)
        if self._preconditioner is None or settings != self._built_for:
            self._preconditioner = self.rule.build(self.group, self.params)
            # One that the user gave has no settings to compare, and is read from the group anew.
            self._built_for = settings if self.rule.settings else None
        return self._preconditioner

    @property
    def built_in(self) -> bool:
        """True if the preconditioner is one of torchpisa's own."""
        return bool(self.rule.settings) or knows(self.preconditioner)

    @property
    def sigma_follows(self) -> bool:
        """True if sigma was not given: each parameter's own then follows its gradients."""
        return self.group[self.rule.sigma] is None

    @property
    def sigmas(self) -> list[Any]:
        """sigma by batch, even if a user has written a single number into the group."""
        value = self.group[self.rule.sigma]
        return value if isinstance(value, list) else [value] * self.group["batches"]

    @property
    def rhos(self) -> list[Any]:
        """rho by batch; where sigma follows gradients, derived from the momentum."""
        group = self.group
        if group[self.rule.sigma] is None:
            momentum: float = group[self.rule.momentum]
            if not 0 <= momentum < 1:
                check_range(self.rule.momentum, momentum, 0, 1, high_open=True)
            return [momentum / (1 - momentum)] * group["batches"]
        value = group[self.rule.rho]
        return value if isinstance(value, list) else [value] * group["batches"]

    @property
    def lr(self) -> Scalar:
        """The learning rate; a tensor of one element as a 0-d tensor."""
        lr: Any = self.group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.reshape(())
        elif not (type(lr) is float and 0 <= lr < torch.inf):
            check_range("lr", lr, 0, high_open=True)
            lr = float(lr)  # not numpy's float32, which kernels would not know
        if self.rule.lr and self.sigma_follows:
            lr = lr * self.group[self.rule.lr]
        scalar: Scalar = lr
        return scalar

    def next_sigmas(self, iteration: int) -> list[Scalar]:
        """Return all sigmas after equation (2.12), those of absent batches included.

        They stop growing at `torchpisa.penalty.LARGEST_SIGMA` or, if all parameters are float64,
        at a larger number.
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
        """Return the sum of sigmas or rhos weighted by alpha, over the batches of this rank."""
        total: Scalar = sum(map(mul, self.group["weights"], values))
        return total

    def totals(self, members: Sequence[Member]) -> Totals:
        """Return S and the sum of rho for these members, over the batches of this rank."""
        if not self.sigma_follows:
            return Totals(self.total(self.sigmas), self.total(self.rhos))
        slots = range(self.group["batches"])
        sigmas = {id(m.origin): self.total([sigma_of(m, slot) for slot in slots]) for m in members}
        return Totals(sigmas, self.total(self.rhos))


# The keys under which a round is written into each group of a state_dict.
PROGRESS = ("iteration", "visited", "present", "kept")


@dataclass
class Round:
    """The progress of a round.

    Attributes:
        iteration: the number of rounds done before it.
        used: slots whose batch was stepped or skipped.
        present: slots whose batch is present, that is, was stepped.
        kept: a bool per slot on the device, where only the device knows whether a batch had
            finite gradients and is present; else None.
    """

    iteration: int = 0
    used: set[int] = field(default_factory=set)
    present: set[int] = field(default_factory=set)
    kept: Tensor | None = None

    def free(self, batches: int) -> list[int]:
        """Return the slots that have not been used."""
        return [slot for slot in range(batches) if slot not in self.used]

    def add_present(self, slot: int, batches: int, keep: Tensor | None) -> None:
        """Mark a batch as present; `keep`, if given, holds on the device whether it really is."""
        if keep is not None or self.kept is not None:
            if self.kept is None:
                assert keep is not None
                self.kept = torch.zeros(batches, dtype=torch.bool, device=keep.device)
                for earlier in self.present:
                    self.kept[earlier].fill_(True)
            is_present = torch.ones_like(self.kept[slot]) if keep is None else keep
            # A batch that is stepped bucket by bucket is present if any bucket is.
            self.kept[slot].logical_or_(is_present.to(self.kept.device))
        self.present.add(slot)

    def keep(self) -> Tensor | None:
        """Return whether any batch is present, where only the device knows; else None."""
        return None if self.kept is None else self.kept.any()

    def begin_next(self) -> None:
        """Begin the next round."""
        self.iteration += 1
        self.used.clear()
        self.present.clear()
        self.kept = None

    def copy(self) -> "Round":
        """Return an independent copy."""
        kept = None if self.kept is None else self.kept.clone()
        return Round(self.iteration, set(self.used), set(self.present), kept)

    def packed(self) -> Group:
        """Return the entries for a group of a state_dict, sets of slots as bits."""
        return {
            "iteration": self.iteration,
            "visited": sum(1 << slot for slot in self.used),
            "present": sum(1 << slot for slot in self.present),
            "kept": self.kept,
        }

    @classmethod
    def unpacked(cls, group: Mapping[str, Any]) -> "Round":
        """Return the round from the entries that `packed` made."""
        slots = range(group["visited"].bit_length())
        used = {slot for slot in slots if group["visited"] >> slot & 1}
        present = {slot for slot in slots if group["present"] >> slot & 1}
        return cls(group["iteration"], used, present, group.get("kept"))


def local_job(
    part: Part,
    members: list[Member],
    slot: int,
    keep: Tensor | None,
    moves_weights: bool,
) -> LocalJob:
    """Return the job for the local step of one batch.

    Args:
        part: the rule and its numbers.
        members: the parameters to step.
        slot: the batch.
        keep: whether the batch is present, where only the device knows.
        moves_weights: include the consensus, because the round has no other batch.
    """
    group, sigmas, rhos = part.group, part.sigmas, part.rhos
    numbers = None
    if moves_weights:
        sigma = None if sigmas[0] is None else part.total(sigmas)
        numbers = _consensus_numbers(part, Totals(sigma, part.total(rhos)))
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
        consensus=numbers,
        stochastic_rounding=group["stochastic_rounding"],
        rows=part.rows,
    )


def clip_scale(jobs: Sequence[LocalJob], kernels: Sequence[Kernel], clip: float) -> Tensor | None:
    """Return the factor that limits the norm of the residuals over all jobs to `clip`."""
    squares = []
    for job, kernel in zip(jobs, kernels, strict=True):
        if not job.preconditioner.clips:
            continue
        for its_kernel, its_job in dispatch.by_layout(kernel, job):
            norms = dispatch.supporting(its_kernel, its_job).residual_norm(its_job)
            if not norms:
                continue
            dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
            home = norms[0].device
            square = torch.stack([norm.to(home, dtype) for norm in norms]).square().sum()
            whole = its_job.members[0].whole
            if whole is not None:
                from torchpisa.distributed import dtensor

                square = dtensor.summed(square, dtensor.groups_of_parts(whole))
            squares.append(square)
    if not squares:
        return None
    dtype = functools.reduce(torch.promote_types, (square.dtype for square in squares))
    total = torch.stack([square.to(squares[0].device, dtype) for square in squares]).sum().sqrt()
    scale: Tensor = clip / total
    return scale.clamp(max=1)


def contribute_missing(part: Part, members: list[Member], round: Round) -> None:
    """Add to the pending sums of `members` what batches without a gradient there contribute.

    A present batch without a gradient for a parameter had gradient zero there. An absent one
    contributes its dual.
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
            job = local_job(part, missed, slot, keep, moves_weights=False)
            kernel = dispatch.for_missed_batch(part.group, missed)
            dispatch.supporting(kernel, job).local_step(job)
        else:
            contribute_duals(part, missed, slot)


def contribute_duals(part: Part, members: list[Member], slot: int) -> None:
    """Add the duals of an absent batch to the pending sums of `members`."""
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
        numbers = _consensus_numbers(part, totals)
        key = part.group_index, part.rule.sigma, "consensus"
        kernel = dispatch.for_consensus(
            part.group, members, numbers, keep, part.sigma_follows, key, plans
        )
        kernel.take_consensus(members, numbers, keep)


def clear_arrived(members: Sequence[Member]) -> None:
    """Mark that no batch of the next round has contributed yet."""
    for member in members:
        member.state["arrived"] = 0


def _consensus_numbers(part: Part, totals: Totals) -> Consensus:
    group = part.group
    return Consensus(
        totals.sigma,
        group["consensus_decay"],
        part.lr,
        group["stochastic_rounding"],
        part.preconditioner.proximal,
        totals.rho,
    )
