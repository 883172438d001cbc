"""What PISA, SISA and NSISA share as torch optimizers: rounds of batches, and their steps."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from torchpisa.checks import check_count
from torchpisa.kernels import foreach
from torchpisa.kernels.fused import Plans
from torchpisa.kernels.job import Member
from torchpisa.optim import nonfinite, report, rounds, traced
from torchpisa.optim.accumulated import AccumulationWatch
from torchpisa.optim.grouped import GroupedOptimizer
from torchpisa.optim.guard import Guard
from torchpisa.optim.undo import Undo

__all__ = ["ConsensusOptimizer"]


class Attached(Protocol):
    """A model whose backward pass takes parts of the steps."""

    @property
    def model(self) -> torch.nn.Module:
        """The model."""

    def check(self, slot: int) -> None:
        """Raise RuntimeError if the backward pass has not taken its part of this batch's step."""


class ConsensusOptimizer(GroupedOptimizer):
    """A torch optimizer that takes one batch per step and moves the weights once per round.

    Subclasses say which preconditioner a parameter group has; everything else is here.
    """

    # Neither is touched by a load, and copies have none: a model that is attached, and what is
    # called at the end of every round.
    _attached: Attached | None = None
    _observers: tuple[Callable[[], None], ...] = ()

    def _forget(self) -> None:
        super()._forget()
        self._plans: Plans = {}
        self._watch = nonfinite.Watch()
        self._guard = Guard()
        self._accumulation = AccumulationWatch()
        self._number = traced.register(self)
        self._problem: str | None = None

    # Where it stands

    @property
    def iteration(self) -> int:
        """Rounds done, that is, how often the weights have moved."""
        return int(self.param_groups[0]["iteration"])

    @property
    def batch(self) -> int:
        """The slot that the next `step()` uses if it is not told one."""
        return self._free_slots()[0]

    @property
    def synced(self) -> bool:
        """Whether no round is open: the last `step()` moved the weights."""
        return not self.param_groups[0]["visited"]

    def memory(self) -> report.Memory:
        """Bytes of state: in total, per parameter and by name."""
        return report.memory(self.state, self.param_groups)

    def effective(self) -> list[report.Effective]:
        """Step size and momentum as other optimizers count them, per parameter group."""
        return [
            report.effective(group, self.preconditioner(group), self.state)
            for group in self.param_groups
        ]

    # The step

    @overload
    def step(self, closure: None = None, *, batch: int | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, batch: int | None = None) -> float: ...

    def step(
        self, closure: Callable[[], float] | None = None, *, batch: int | None = None
    ) -> float | None:
        """Take the local step of one batch; the last of a round also moves the weights.

        Args:
            closure: reevaluates the model and returns the loss.
            batch: slot, from 0, of the batch that the gradients belong to. By default the first
                one that is free in this round.

        Raises:
            ValueError: the slot does not exist or was used in this round, or a gradient is sparse.
            FloatingPointError: a gradient is not finite and `nonfinite="raise"`; on a GPU, that of
                an earlier step.
        """
        if closure is None and torch.compiler.is_compiling():
            traced.step(self._params, self._number, batch)
            return None
        return self._step(closure, batch)

    @_disable_dynamo
    @torch.no_grad()
    def _step(self, closure: Callable[[], float] | None, batch: int | None) -> float | None:
        self._report_nonfinite()
        self._accumulation.look(self._params, self.batches)
        slot = self._claim(batch)
        for group in self.param_groups:
            rounds.lr(group)  # raises before a batch's dual has changed
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients(slot)
        members = self._members()
        rest = [[m for m in own if m.grad is not None and not _took(m, slot)] for own in members]
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        with self._all_or_nothing(members):
            if any(rest) or self._exchange is None or not self._exchange.begun:
                self._take(slot, rest, "step", scale, found_inf)
            complete = self._use_up(slot, members)
        if complete:
            self._end_round(members)
        return loss

    @torch.no_grad()
    def skip(self, *, batch: int | None = None) -> None:
        """Use up the slot of a batch that is absent from this round: it contributes its dual.

        With a process group, this is what a rank calls that has no data left while others go on.

        Args:
            batch: slot, from 0. By default the first one that is free in this round.
        """
        self._report_nonfinite()
        self._accumulation.skipped()
        slot = self._claim(batch)
        self._check_gradients(slot)
        members = self._members()
        with self._all_or_nothing(members):
            self._open()
            complete = self._use_up(slot, members)
        if complete:
            self._end_round(members)

    @torch.no_grad()
    def flush(self) -> None:
        """Close an incomplete round: batches that were not stepped contribute their duals.

        Does nothing between rounds. With a process group, all ranks call it or none.
        """
        self._report_nonfinite(wait=True)
        if not self.synced:
            members = self._members()
            with self._all_or_nothing(members):
                if self._exchange is None:
                    self._close_alone(members)
            self._end_round(members)

    @contextmanager
    def _all_or_nothing(self, members: Sequence[Sequence[Member]]) -> Iterator[None]:
        """Put everything back if an error is raised, as by a preconditioner of the user's own."""
        foreign = not all(map(foreach.knows, self._preconditioners()))
        everyone = [member for own in members for member in own] if foreign else []
        undo = Undo(self.param_groups, everyone)
        try:
            yield
        except BaseException:
            undo.restore()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        if self._exchange is not None:
            self._exchange.lockstep.cleared(self._params)
        super().zero_grad(set_to_none)

    def join_hook(self, **_: object) -> NoReturn:
        """Refuse `torch.distributed.algorithms.join.Join`: a rank that is done calls `skip()`."""
        raise RuntimeError(
            "Join cannot hold an optimizer of torchpisa: a rank without data still has a dual to "
            "contribute. Call skip() on it, once for each step() of the others"
        )

    def _take(
        self,
        slot: int,
        reached: list[list[Member]],
        key: Hashable,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> bool:
        """Take the local step of a batch over members with gradients, by group.

        Args:
            slot: the batch.
            reached: the members; all of the batch, or a part that `key` names.
            key: by which kernels find again what they have prepared for the same members.
            grad_scale: what the gradients were multiplied by.
            found_inf: whether a GradScaler found infinities in them.

        Returns:
            False if the batch was left out.
        """
        groups = self.param_groups
        preconditioners = self._preconditioners()
        for preconditioner, of_group in zip(preconditioners, reached, strict=True):
            if of_group:
                preconditioner.check([member.origin for member in of_group])
        kernels = [
            rounds.choose(group, (number, key), own, preconditioner, slot, self._plans)
            for number, (group, own, preconditioner) in enumerate(
                zip(groups, reached, preconditioners, strict=True)
            )
        ]
        where = f"batch {slot} of iteration {self.iteration}"
        verdict = nonfinite.verdict(groups, reached, kernels, found_inf, where)
        present, keep, search, problem, deferred = verdict
        flags = self._watch.flags(groups, reached, deferred)
        if problem is not None:
            if self._exchange is None:
                raise FloatingPointError(
                    f"{problem}. Nothing was changed; nonfinite='skip' leaves such batches out"
                )
            # The other ranks are waiting for this one, so it joins them, and raises afterwards.
            self._problem = problem
        self._open()
        if present:
            rounds.local_step(
                groups, reached, preconditioners, kernels, slot, keep, grad_scale, search, flags
            )
        if search or any(deferred):
            self._watch.note(kernels, reached, where)
        for group in groups:
            group["present"] |= present << slot
        return present

    def _open(self) -> None:
        """Begin a round, unless it has begun. Wrong input has raised by now."""
        if not self.synced or (self._exchange is not None and self._exchange.begun):
            return
        # All rules are asked before anything changes: one may raise.
        sigmas = [rounds.next_sigmas(group) for group in self.param_groups]
        for group, new in zip(self.param_groups, sigmas, strict=True):
            if rounds.follows(group):
                continue
            if group["capturable"]:
                for sigma, value in zip(group["sigma"], new, strict=True):
                    sigma.copy_(value)
            else:
                group["sigma"] = new

    def _use_up(self, slot: int, members: list[list[Member]]) -> bool:
        """Note that a slot was used, and return whether it was the last of the round.

        Then the weights move, unless other ranks have a say in it.
        """
        if self._exchange is not None:
            self._exchange.lockstep.stepped()
        for group in self.param_groups:
            group["visited"] |= 1 << slot
        complete = not self._free_slots()
        if complete and self._exchange is None:
            self._close_alone(members)
        return complete

    def _end_round(self, members: list[list[Member]]) -> None:
        """Move the weights together with other ranks, if there are any, and tell observers."""
        groups, preconditioners = self.param_groups, self._preconditioners()
        own, self._problem = self._problem, None
        problems = 0
        if self._exchange is not None:
            problems = self._exchange.close(
                groups, members, preconditioners, own is not None, self._plans
            )
        follows = rounds.follows(groups[0])
        remedy = "lower lr" if follows else "give a larger sigma, or leave out sigma and rho"
        self._guard.look(self.iteration, self._params, remedy)
        # Before anything is raised: some ranks may raise and others not, and all must observe.
        for observe in self._observers:
            observe()
        if problems:
            where = f"iteration {self.iteration - 1}"
            raise FloatingPointError(
                f"{own or f'non-finite gradient on another rank in {where}'}. The batch was left "
                "out, its dual was contributed, and all ranks have completed the round; "
                "nonfinite='skip' goes on without an error"
            )

    def _close_alone(self, members: list[list[Member]]) -> None:
        preconditioners = self._preconditioners()
        for number, (group, own) in enumerate(zip(self.param_groups, members, strict=True)):
            reached = [member for member in own if member.state["arrived"]]
            if not rounds.alone(group):
                rounds.settle(group, reached, preconditioners[number])
                keep = None if group["kept"] is None else group["kept"].any()
                totals = rounds.totals(group, reached)
                rounds.consensus(
                    group, number, reached, preconditioners[number], totals, keep, self._plans
                )
            rounds.finish(group, reached)

    # Parts of a step, taken while the backward pass is still running

    @property
    def _last_slot(self) -> int | None:
        """The slot of the batch that ends the round, if it is next."""
        free = self._free_slots()
        return free[0] if len(free) == 1 else None

    @torch.no_grad()
    def _step_early(
        self,
        params: Sequence[tuple[int, Tensor, Tensor | None]],
        key: Hashable,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Step some parameters with the last batch of a round.

        Args:
            params: number of the group, parameter and gradient (None for zero) of each.
            key: names them, see `_take`.
            grad_scale: what the gradients were multiplied by.
            found_inf: whether they have infinities, if a GradScaler is in use.
        """
        slot = self._last_slot
        assert self._exchange is not None
        assert slot is not None
        reached = self._of(params, with_gradient=True)
        if any(_took(member, slot) for own in reached for member in own):
            raise RuntimeError(
                "backward() ran twice before step(), but what the first one found is on its way "
                "already: accumulate gradients under model.no_sync(), all but the last"
            )
        with self._all_or_nothing(reached):
            present = self._take(slot, reached, key, grad_scale, found_inf)
        if not present:
            for group, own in zip(self.param_groups, reached, strict=True):
                rounds.contribute_duals(group, own, slot)
        self._exchange.begun = True

    @torch.no_grad()
    def _send_early(self, params: Sequence[tuple[int, Tensor, Tensor | None]]) -> None:
        """Send, in one go, what parameters contribute that `_step_early` has been called for."""
        assert self._exchange is not None
        members = self._of(params, with_gradient=False)
        self._exchange.send(self.param_groups, members, self._preconditioners(), math.inf)

    def _of(
        self, params: Sequence[tuple[int, Tensor, Tensor | None]], with_gradient: bool
    ) -> list[list[Member]]:
        """Parameters as members, by group; those with a gradient, or all."""
        members: list[list[Member]] = [[] for _ in self.param_groups]
        for number, param, grad in params:
            member = self._member(param, grad, self.param_groups[number])
            if member is not None and (grad is not None or not with_gradient):
                members[number].append(member)
        return members

    def _check_gradients(self, slot: int) -> None:
        """Raise if gradients are not what a rank needs; before anything changes."""
        if self._exchange is None:
            return
        if self._attached is not None:
            self._attached.check(slot)
        model = None if self._attached is None else self._attached.model
        self._exchange.ranks.refuse_averages(self._params, model)

    def _free_slots(self) -> list[int]:
        return rounds.slots(~self.param_groups[0]["visited"], self.batches)

    def _claim(self, batch: int | None) -> int:
        if batch is None:
            return self.batch
        check_count("batch", batch, 0)
        if batch not in self._free_slots():
            problem = "was used in this round" if batch < self.batches else "does not exist"
            raise ValueError(
                f"batch must be one of the free slots {self._free_slots()}, got {batch}, "
                f"which {problem} (batches={self.batches})"
            )
        return batch

    def _report_nonfinite(self, wait: bool = False) -> None:
        self._watch.report(lambda params: nonfinite.named(params, self.param_groups), wait)


def _took(member: Member, slot: int) -> bool:
    """Whether the batch has contributed to this parameter in this round."""
    return bool(member.state["arrived"] >> slot & 1)
