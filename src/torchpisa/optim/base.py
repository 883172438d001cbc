"""What PISA, SISA and NSISA share as torch optimizers: groups, slots, state and checkpoints."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms import pisa
from torchpisa.checks import check_choice, check_count, check_range
from torchpisa.kernels.fused import Plans
from torchpisa.kernels.job import Member, state_key
from torchpisa.optim import arguments, checkpoint, nonfinite, ranks, report, rounds, traced
from torchpisa.optim.common import DEFAULTS, SHARED, Common
from torchpisa.optim.exchange import Exchange
from torchpisa.optim.rounds import Group
from torchpisa.preconditioners import Preconditioner

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ConsensusOptimizer"]


class Attached(Protocol):
    """A model whose backward pass takes parts of the steps."""

    @property
    def model(self) -> torch.nn.Module:
        """The model."""

    def check(self, slot: int) -> None:
        """Raise RuntimeError if the backward pass has not taken its part of this batch's step."""


class ConsensusOptimizer(Optimizer):
    """A torch optimizer that takes one batch per step and moves the weights once per round.

    Subclasses say which preconditioner a parameter group has; everything else is here.
    """

    # GradScaler then calls step() even when it found infinities, so that a skipped batch uses up
    # its slot and the batches after it stay with their own duals.
    _step_supports_amp_scaling = True

    # What connects it to other ranks; a load leaves that alone, and copies have none.
    _exchange: Exchange | None = None
    _attached: Attached | None = None

    def __init__(
        self,
        params: ParamsT,
        sigma: float | Sequence[float],
        rho: float | Sequence[float],
        own: dict[str, Any],
        **common: "Unpack[Common]",
    ) -> None:
        legal = {"sigma", "rho", *own, *DEFAULTS}
        arguments.reject_unknown(common, legal, type(self).__name__)
        defaults: Group = {"sigma": sigma, "rho": rho, **own, **DEFAULTS, **common}
        check_count("batches", defaults["batches"])
        check_choice("nonfinite", defaults["nonfinite"], ("raise", "skip", "ignore"))
        if defaults["clip"] is not None:
            check_range("clip", defaults["clip"], 0, low_open=True)
        arguments.check_dtype("reduce_dtype", defaults["reduce_dtype"])
        self._forget()
        # Neither can be part of a group: a process group cannot be saved.
        together = ranks.join(defaults.pop("process_group"), defaults.pop("reduce_dtype"))
        defaults["ranks"] = 1 if together is None else together.size
        shares = arguments.shares(defaults["weights"], defaults["batches"])
        if together is not None:
            self._exchange = Exchange(together)
            shares = together.shares(defaults["weights"], defaults["batches"])
        defaults["weights"] = shares
        self._check_group(defaults)
        super().__init__(params, defaults)

    @abstractmethod
    def preconditioner(self, group: Group) -> Preconditioner:
        """The preconditioner of a parameter group."""

    def _check_own(self, group: Group) -> None:
        """Check the subclass's own settings: by default, that they make a preconditioner."""
        self.preconditioner(group)

    def _forget(self) -> None:
        """Start afresh with what belongs to this object and these tensors, and is never saved."""
        self._plans: Plans = {}
        self._watch = nonfinite.Watch()
        self._number = traced.register(self)
        self._params = [p for group in getattr(self, "param_groups", ()) for p in group["params"]]
        self._problem: str | None = None
        if self._exchange is not None:
            self._exchange.forget()

    def __getstate__(self) -> dict[str, Any]:
        if self._exchange is not None:
            raise TypeError(
                "an optimizer with a process_group cannot be copied or pickled; save its "
                "state_dict(), or use torchpisa.distributed.save"
            )
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    # Where it stands

    @property
    def batches(self) -> int:
        """The number of batches in a round; with a process group, of this rank's."""
        return int(self.defaults["batches"])

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
        slot = self._claim(batch)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients(slot)
        members = self._members()
        rest = [[m for m in own if m.grad is not None and not _took(m, slot)] for own in members]
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if any(rest) or self._exchange is None or not self._exchange.begun:
            self._take(slot, rest, "step", scale, found_inf)
        self._use_up(slot, members)
        return loss

    @torch.no_grad()
    def skip(self, *, batch: int | None = None) -> None:
        """Use up the slot of a batch that is absent from this round: it contributes its dual.

        With a process group, this is what a rank calls that has no data left while others go on.

        Args:
            batch: slot, from 0. By default the first one that is free in this round.
        """
        self._report_nonfinite()
        slot = self._claim(batch)
        self._check_gradients(slot)
        self._open()
        self._use_up(slot, self._members())

    @torch.no_grad()
    def flush(self) -> None:
        """Close an incomplete round: batches that were not stepped contribute their duals.

        Does nothing between rounds. With a process group, all ranks call it or none.
        """
        self._report_nonfinite(wait=True)
        if not self.synced:
            self._close(self._members())

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
        present, keep, search, problem = verdict
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
                groups, reached, preconditioners, kernels, slot, keep, grad_scale, search
            )
        if search:
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
            if group["capturable"]:
                for sigma, value in zip(group["sigma"], new, strict=True):
                    sigma.copy_(value)
            else:
                group["sigma"] = new

    def _use_up(self, slot: int, members: list[list[Member]]) -> None:
        for group in self.param_groups:
            group["visited"] |= 1 << slot
        if not self._free_slots():
            self._close(members)

    def _close(self, members: list[list[Member]]) -> None:
        groups, preconditioners = self.param_groups, self._preconditioners()
        if self._exchange is not None:
            self._close_together(members)
            return
        for number, (group, own) in enumerate(zip(groups, members, strict=True)):
            reached = [member for member in own if member.state["arrived"]]
            if not rounds.alone(group):
                rounds.settle(group, reached, preconditioners[number])
                keep = None if group["kept"] is None else group["kept"].any()
                total = rounds.total_sigma(group)
                rounds.consensus(group, number, reached, total, keep, self._plans)
            rounds.finish(group, reached)

    def _close_together(self, members: list[list[Member]]) -> None:
        assert self._exchange is not None
        where = f"iteration {self.iteration}"
        own, self._problem = self._problem, None
        problems = self._exchange.close(
            self.param_groups, members, self._preconditioners(), own is not None, self._plans
        )
        if problems:
            raise FloatingPointError(
                f"{own or f'non-finite gradient on another rank in {where}'}. The batch was left "
                "out on all ranks' accounts and the round is complete; nonfinite='skip' goes on"
            )

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
        """Step some parameters with the last batch of a round and send what they contribute.

        Args:
            params: number of the group, parameter and gradient (None for zero) of each.
            key: names them, see `_take`.
            grad_scale: what the gradients were multiplied by.
            found_inf: whether they have infinities, if a GradScaler is in use.
        """
        assert self._exchange is not None
        slot = self._last_slot
        assert slot is not None
        members: list[list[Member]] = [[] for _ in self.param_groups]
        for number, param, grad in params:
            member = self._member(param, grad, self.param_groups[number])
            if member is not None:
                members[number].append(member)
        reached = [[m for m in own if m.grad is not None] for own in members]
        if any(_took(member, slot) for own in reached for member in own):
            raise RuntimeError(
                "backward() ran twice before step(), but what the first one found is on its way "
                "already: accumulate gradients under model.no_sync(), all but the last"
            )
        if not self._take(slot, reached, key, grad_scale, found_inf):
            for group, own in zip(self.param_groups, reached, strict=True):
                rounds.contribute_duals(group, own, slot)
        self._exchange.send(self.param_groups, members, self._preconditioners())

    def _check_gradients(self, slot: int) -> None:
        """Raise if gradients are not what a rank needs; before anything changes."""
        if self._exchange is None:
            return
        if self._attached is not None:
            self._attached.check(slot)
        if self.iteration == 0:
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

    def _preconditioners(self) -> list[Preconditioner]:
        return [self.preconditioner(group) for group in self.param_groups]

    def _members(self) -> list[list[Member]]:
        """All parameters that have, or now get, state; by group."""
        members = []
        for group in self.param_groups:
            own = [self._member(param, param.grad, group) for param in group["params"]]
            found = [member for member in own if member is not None]
            members.append(rounds.here(group, found, self.preconditioner(group)))
        return members

    def _member(self, param: Tensor, grad: Tensor | None, group: Group) -> Member | None:
        if grad is not None and grad.layout is not torch.strided:
            raise ValueError(
                f"gradients must be dense, got {grad.layout} for a parameter of shape "
                f"{tuple(param.shape)}; give nn.Embedding sparse=False"
            )
        state = self.state.get(param)
        if state is None:
            if grad is None:
                return None
            state = self._init_state(param, group)
        # Numbers of devices, -1 for the CPU, are had for less than devices.
        if state["dual.0"].get_device() != param.get_device():
            _move_state(state, param.device)
        return Member(param, grad, state)

    def _report_nonfinite(self, wait: bool = False) -> None:
        self._watch.report(lambda params: nonfinite.named(params, self.param_groups), wait)

    # Groups, state, checkpoints

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group; it joins the round where that stands."""
        legal = {*self.defaults, *arguments.FOREIGN_KEYS}
        arguments.reject_unknown(param_group, legal, "a parameter group")
        first = self.param_groups[0] if self.param_groups else {**self.defaults, **rounds.PROGRESS}
        for name in SHARED:
            if param_group.get(name, first[name]) != first[name]:
                raise ValueError(
                    f"{name} must be the same for all parameter groups ({first[name]!r}), "
                    f"got {param_group[name]!r}"
                )
        inherited = {name: first[name] for name in (*SHARED, *rounds.PROGRESS)}
        group = {**self.defaults, **param_group, **inherited}
        self._check_group(group)
        super().add_param_group(group)
        try:
            self._prepare(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise
        self._params += self.param_groups[-1]["params"]

    def _check_group(self, group: Group) -> None:
        arguments.check_group(group)
        arguments.per_batch("sigma", group["sigma"], group["batches"], arguments.check_sigma)
        arguments.per_batch("rho", group["rho"], group["batches"], arguments.check_rho)
        rules = arguments.per_batch(
            "gamma", group["gamma"], group["batches"], arguments.check_gamma
        )
        if group["capturable"] and any(callable(rule) for rule in rules):
            raise ValueError(
                f"gamma must be a number when capturable=True, got {group['gamma']!r}: a replayed "
                "graph runs no Python; change the group's sigma tensors instead"
            )
        for flag in ("capturable", "stochastic_rounding"):
            if group[flag] and group["ranks"] > 1:
                raise ValueError(f"{flag} must be False with a process_group, got True")
        self._check_own(group)

    def _prepare(self, group: Group) -> None:
        """Give a new group one sigma and rho per batch and its parameters their state."""
        params = group["params"]
        for param in params:
            if not (param.is_floating_point() or param.is_complex()):
                raise ValueError(f"params must be floating point or complex, got {param.dtype}")
        rounds.check_fused(group, self.preconditioner(group))
        if self._exchange is not None:
            self._exchange.ranks.refuse_shards(params)
            self._exchange.ranks.welcome(params)
        device = params[0].device if params else torch.device("cpu")
        if group["capturable"] and isinstance(group["lr"], Tensor) and group["lr"].device != device:
            raise ValueError(
                f"lr must be on the parameters' device {device} when capturable=True, "
                f"got {group['lr']!r}"
            )
        for name, check in (("sigma", arguments.check_sigma), ("rho", arguments.check_rho)):
            # Plain floats, whatever kind of number was given, so that checkpoints load anywhere.
            values = arguments.per_batch(name, group[name], group["batches"], check)
            group[name] = [float(value) for value in values]
            if group["capturable"]:
                group[name] = [torch.tensor(value, device=device) for value in group[name]]
        for param in params:
            if param.requires_grad:
                self._init_state(param, group)
        if group["initial_consensus"]:
            total = rounds.total_sigma(group)
            if self._exchange is not None:
                total = self._exchange.ranks.tally([total], device).item()
            settings = total, group["consensus_decay"], rounds.lr(group)
            with torch.no_grad():
                for param in params:
                    param.copy_(pisa.initial_consensus(param, *settings))

    def _init_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        dtype = param.dtype
        if not dtype.is_complex:
            dtype = group["state_dtype"] or torch.promote_types(dtype, torch.float32)
        dual = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        preconditioner = self.preconditioner(group)
        state: dict[str, Any] = self.state[param]
        for slot in range(self.batches):
            state[state_key("dual", slot)] = dual.clone()
            for name, value in preconditioner.init(dual).items():
                state[state_key(name, slot)] = value
            device = param.device if group["capturable"] else "cpu"
            state[state_key("step", slot)] = torch.zeros((), device=device)
        if not rounds.alone(group):
            state["pending"] = dual
        state["arrived"] = 0
        return state

    def state_dict(self) -> dict[str, Any]:
        """torch's state_dict; functions and preconditioners stay out of it, so it loads anywhere.

        It may be taken in the middle of a round; a run resumed from it goes on bit for bit.
        """
        return checkpoint.packed(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same kind of optimizer with the same number of batches.

        Tensors keep the dtype that they were saved with. Raises ValueError before anything is
        changed if the state does not fit.
        """
        checkpoint.check(state_dict, self.param_groups, self.state)
        previous = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        checkpoint.restore(state_dict, previous, self.param_groups, self.state)
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad and param not in self.state:
                    self._init_state(param, group)


def _took(member: Member, slot: int) -> bool:
    """Whether the batch has contributed to this parameter in this round."""
    return bool(member.state["arrived"] >> slot & 1)


def _move_state(state: dict[str, Any], device: torch.device) -> None:
    """Move the state of a parameter that was moved, as by `model.cuda()` after construction."""
    for key, value in state.items():
        if isinstance(value, Tensor) and not key.startswith("step."):
            state[key] = value.to(device)
