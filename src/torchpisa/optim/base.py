"""What PISA, SISA and NSISA share as torch optimizers: groups, slots, state and checkpoints."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms import pisa
from torchpisa.checks import check_choice, check_count, check_range
from torchpisa.kernels.fused import Plans
from torchpisa.kernels.job import Member, state_key
from torchpisa.optim import arguments, checkpoint, nonfinite, report, rounds, traced
from torchpisa.optim.common import DEFAULTS, SHARED, Common
from torchpisa.optim.rounds import Group
from torchpisa.preconditioners import Preconditioner

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ConsensusOptimizer"]


class ConsensusOptimizer(Optimizer):
    """A torch optimizer that takes one batch per step and moves the weights once per round.

    Subclasses say which preconditioner a parameter group has; everything else is here.
    """

    # GradScaler then calls step() even when it found infinities, so that a skipped batch uses up
    # its slot and the batches after it stay with their own duals.
    _step_supports_amp_scaling = True

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
        defaults["weights"] = arguments.shares(defaults["weights"], defaults["batches"])
        self._check_group(defaults)
        self._forget()
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    # Where it stands

    @property
    def batches(self) -> int:
        """m, the number of batches in a round."""
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
        groups = self.param_groups
        members = [self._members(group) for group in groups]
        reached = [[m for m in of_group if m.grad is not None] for of_group in members]
        preconditioners = [self.preconditioner(group) for group in groups]
        for preconditioner, of_group in zip(preconditioners, reached, strict=True):
            if of_group:
                preconditioner.check([member.param for member in of_group])
        kernels = [
            rounds.choose(group, number, own, preconditioner, slot, self._plans)
            for number, (group, own, preconditioner) in enumerate(
                zip(groups, reached, preconditioners, strict=True)
            )
        ]
        where = f"batch {slot} of iteration {self.iteration}"
        found_inf = getattr(self, "found_inf", None)
        present, keep, search = nonfinite.verdict(groups, reached, kernels, found_inf, where)
        sigmas = [rounds.next_sigmas(group) if self.synced else None for group in groups]

        # Wrong input has raised by now; from here on state changes.
        for group, new in zip(groups, sigmas, strict=True):
            if new is not None and group["capturable"]:
                for sigma, value in zip(group["sigma"], new, strict=True):
                    sigma.copy_(value)
            elif new is not None:
                group["sigma"] = new
        if present:
            scale = getattr(self, "grad_scale", None)
            rounds.local_step(groups, reached, preconditioners, kernels, slot, keep, scale, search)
        if search:
            self._watch.note(kernels, reached, where)
        for group in groups:
            group["visited"] |= 1 << slot
            group["present"] |= present << slot
        if not self._free_slots():
            self._close(members)
        return loss

    @torch.no_grad()
    def flush(self) -> None:
        """Close an incomplete round: batches that were not stepped contribute their duals.

        Does nothing between rounds.
        """
        self._report_nonfinite(wait=True)
        if not self.synced:
            self._close([self._members(group) for group in self.param_groups])

    def _close(self, members: list[list[Member]]) -> None:
        for number, group in enumerate(self.param_groups):
            preconditioner = self.preconditioner(group)
            rounds.close(group, number, members[number], preconditioner, self._plans)

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

    def _members(self, group: Group) -> list[Member]:
        members = []
        states, dense = self.state, torch.strided
        for param in group["params"]:
            grad = param.grad
            if grad is not None and grad.layout is not dense:
                raise ValueError(
                    f"gradients must be dense, got {grad.layout} for a parameter of shape "
                    f"{tuple(param.shape)}; give nn.Embedding sparse=False"
                )
            state = states.get(param)
            if state is None:
                if grad is None:
                    continue
                state = self._init_state(param, group)
            # Numbers of devices, -1 for the CPU, are had for less than devices.
            if state["dual.0"].get_device() != param.get_device():
                _move_state(state, param.device)
            members.append(Member(param, grad, state))
        return members

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
        self._check_own(group)

    def _prepare(self, group: Group) -> None:
        """Give a new group one sigma and rho per batch and its parameters their state."""
        params = group["params"]
        for param in params:
            if not (param.is_floating_point() or param.is_complex()):
                raise ValueError(f"params must be floating point or complex, got {param.dtype}")
        rounds.check_fused(group, self.preconditioner(group))
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
            settings = rounds.total_sigma(group), group["consensus_decay"], rounds.lr(group)
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
        if self.batches > 1:
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


def _move_state(state: dict[str, Any], device: torch.device) -> None:
    """Move the state of a parameter that was moved, as by `model.cuda()` after construction."""
    for key, value in state.items():
        if isinstance(value, Tensor) and not key.startswith("step."):
            state[key] = value.to(device)
