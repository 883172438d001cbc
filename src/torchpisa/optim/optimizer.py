"""Base class of all optimizers: rounds of batches, parameter groups, state and checkpoints."""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from torchpisa.checks import check_count, check_range
from torchpisa.kernels.job import PLAIN_TYPES, Member, check_shapes
from torchpisa.optim import arguments, nonfinite, report, traced
from torchpisa.optim.accumulated import AccumulationWatch
from torchpisa.optim.guard import Guard
from torchpisa.optim.round import PROGRESS, Group, Round
from torchpisa.optim.state import packed, unpacked
from torchpisa.torch_private import disable_dynamo, without_autocast

__all__ = ["RoundOptimizer"]


class RoundOptimizer(Optimizer):
    """A torch optimizer that takes one batch per step and moves the weights once per round.

    Every step calls `_step_batch`; the last one of a round also calls `_consensus`. A subclass
    implements these two, `fresh_state` and `_check_group`.

    Attributes:
        batches: the number of batches in a round; with a process group, of this rank's batches.
        all_params: the parameters of all groups.
        round: the progress of the open round.
        observers: functions to call at the end of every round; neither copied nor saved.
    """

    # Settings that all groups must share, because a round is a round of all parameters.
    shared: ClassVar[tuple[str, ...]] = ("batches", "weights", "clip", "nonfinite")
    # True if all batches share one dual, so that between rounds state fits any number of them.
    one_dual: ClassVar[bool] = False
    # The entry that every parameter with state has.
    _dual_key: ClassVar[str]

    observers: tuple[Callable[[], None], ...] = ()

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        self.defaults = defaults
        self.round = Round()
        self.reset_unsaved()
        super().__init__(params, defaults)

    def reset_unsaved(self) -> None:
        """Reset what no checkpoint holds: caches, and what watches this run."""
        self.batches = int(self.defaults["batches"])
        self.all_params = [
            p for group in getattr(self, "param_groups", ()) for p in group["params"]
        ]
        self._nonfinite = nonfinite.Watch()
        self._guard = Guard()
        self._accumulation = AccumulationWatch()
        self._step_supports_amp_scaling = self._takes_infinities
        # A new number after every load.
        self.instance_id = traced.register(self)

    @property
    def _takes_infinities(self) -> bool:
        """True if GradScaler is to call step() even when it found infinities.

        The batch is then skipped but still uses its slot, so the batches after it keep their own
        duals. It is False where possible, because trainers refuse to clip gradients for optimizers
        that unscale them.
        """
        return self.batches > 1 or bool(self.defaults["capturable"])

    # Progress

    @property
    def iteration(self) -> int:
        """The number of rounds done, that is, how often the weights have moved."""
        return self.round.iteration

    @property
    def batch(self) -> int:
        """The slot that the next `step()` uses unless it is given one."""
        return self.round.free(self.batches)[0]

    @property
    def synced(self) -> bool:
        """True if no round is open: the last `step()` moved the weights."""
        return not self.round.used

    def memory(self) -> report.Memory:
        """Return the bytes of state: in total, per parameter and by name."""
        return report.memory(self.state, self.param_groups)

    # The step

    @overload
    def step(self, closure: None = None, *, batch: int | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, batch: int | None = None) -> float: ...

    def step(
        self, closure: Callable[[], float] | None = None, *, batch: int | None = None
    ) -> float | None:
        """Take the gradients of one batch; the last batch of a round also moves the weights.

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
            traced.step(self.all_params, self.instance_id, batch)
            return None
        return self._step(closure, batch)

    @disable_dynamo
    @torch.no_grad()
    def _step(self, closure: Callable[[], float] | None, batch: int | None) -> float | None:
        if self._nonfinite.under_way:
            self._report_nonfinite()
        # Two passes are often two losses of one batch, as of a GAN's real and generated images.
        if self.batches > 2:
            self._accumulation.on_step(self.all_params, self.batches)
        slot = self._free_slot(batch)
        for group in self.param_groups:  # checked before any dual changes
            lr = group["lr"]
            if not isinstance(lr, Tensor) and not (type(lr) is float and 0 <= lr < torch.inf):
                check_range("lr", lr, 0, high_open=True)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with without_autocast():  # it would round the products of matrices
            members = self._members(slot)
            with Undo(self, self._needing_backup(members)):
                self._step_batch(slot, members)
                complete = self._finish_batch(slot, members)
            if complete:
                self._end_round(members)
        return loss

    @torch.no_grad()
    def skip(self, *, batch: int | None = None) -> None:
        """Mark a batch as absent from this round, and use its slot.

        It contributes its dual, as if its gradient were the average of its past gradients.

        Args:
            batch: slot, from 0. By default the first one that is free in this round.
        """
        self._report_nonfinite()
        self._accumulation.on_skip()
        slot = self._free_slot(batch)
        with without_autocast():
            members = self._members(slot)
            with Undo(self, self._needing_backup(members)):
                self._open_round()
                complete = self._finish_batch(slot, members)
            if complete:
                self._end_round(members)

    @torch.no_grad()
    def flush(self) -> None:
        """Close an incomplete round as if all other batches had been skipped.

        Does nothing between rounds. With a process group, all ranks call it or none.
        """
        self._report_nonfinite(wait=True)
        if self.synced:
            return
        with without_autocast():
            members = self._members()
            with Undo(self, self._needing_backup(members)):
                self._consensus(members)
            self._end_round(members)

    @abstractmethod
    def _step_batch(self, slot: int, members: list[list[Member]]) -> None:
        """Take the local step of a batch, and record in `round` whether it is present."""

    @abstractmethod
    def _consensus(self, members: list[list[Member]]) -> None:
        """Move the weights by what the batches of the round have contributed."""

    def _open_round(self) -> None:
        """Begin a round unless one is open; called once all input has been checked."""

    def _needing_backup(self, members: list[list[Member]]) -> list[Member]:
        """Return the parameters to restore if a step fails half-way."""
        return []

    def _abandon_batch(self) -> None:
        """Forget which parameters a batch has reached whose step failed half-way."""

    def _finish_batch(self, slot: int, members: list[list[Member]]) -> bool:
        """Mark a slot as used; take the consensus and return True if it was the last one."""
        self.round.used.add(slot)
        complete = len(self.round.used) == self.batches
        if complete:
            self._consensus(members)
        return complete

    def _end_round(self, members: list[list[Member]]) -> None:
        """Begin the next round, check now and then that weights stay bounded, call observers."""
        self.round.begin_next()
        if not self.round.iteration % self._guard.every:
            self._guard.check(self.round.iteration, self.all_params, self._advice)
        for observe in self.observers:
            observe()

    @property
    def _advice(self) -> str:
        """Advice for the warning that the training diverges."""
        return "lower lr"

    def _free_slot(self, batch: int | None) -> int:
        """Return the slot of a batch; raise ValueError if it is not free."""
        free = self.round.free(self.batches)
        if batch is None:
            return free[0]
        check_count("batch", batch, 0)
        if batch not in free:
            problem = "was used in this round" if batch < self.batches else "does not exist"
            raise ValueError(
                f"batch must be one of the free slots {free}, got {batch}, "
                f"which {problem} (batches={self.batches})"
            )
        return batch

    def _report_nonfinite(self, wait: bool = False) -> None:
        if self._nonfinite.under_way:
            self._nonfinite.report(lambda params: nonfinite.named(params, self.param_groups), wait)

    # Parameters and their state

    def _members(self, slot: int | None = None) -> list[list[Member]]:
        """Return the parameters that have state, or get it now, by group.

        Args:
            slot: the batch that is stepped next; None to close the round only.
        """
        return [
            [m for p in group["params"] if (m := self.member(p, p.grad, group)) is not None]
            for group in self.param_groups
        ]

    def member(self, param: Tensor, grad: Tensor | None, group: Group) -> Member | None:
        """Return a parameter with its state, which is made when the first gradient arrives.

        Args:
            param: the parameter.
            grad: its gradient; None for zero.
            group: its group.

        Returns:
            Of a sharded parameter the local part; None if it has no state and gets none now.
        """
        state = self.state.get(param)
        if not state or self._dual_key not in state:
            if not self._joins_now(param, grad):
                return None
            self.init_state([param], group)
            state = self.state[param]
        dual: Tensor = state[self._dual_key]
        if grad is not None and grad.layout is not torch.strided:
            raise ValueError(
                f"gradients must be dense, got {grad.layout} for a parameter of shape "
                f"{tuple(param.shape)}; give nn.Embedding sparse=False"
            )
        shape = param.shape
        if dual.shape != shape or (grad is not None and grad.shape != shape):
            check_shapes([Member(param, grad, state)], [self._dual_key])
        # Cheaper than comparing `device` objects; -1 is the CPU.
        if dual.get_device() != param.get_device():
            _move_state(state, param.device)
        if type(param) in PLAIN_TYPES:
            return Member(param, grad, state)
        return self._local_part(Member(param, grad, state), group)

    def _joins_now(self, param: Tensor, grad: Tensor | None) -> bool:
        """Return whether a parameter without state gets it now."""
        return grad is not None

    def _local_part(self, member: Member, group: Group) -> Member:
        """Return the part of a sharded parameter that this process holds."""
        from torchpisa.distributed import dtensor

        return dtensor.local_member(member)

    def has_state(self, param: Tensor) -> bool:
        """Return whether a parameter has state of this optimizer, not only of other code."""
        return self._dual_key in self.state.get(param, ())

    @abstractmethod
    def fresh_state(self, group: Group, batches: int | None = None) -> Callable[[Tensor], Group]:
        """Return a function that makes the initial state of a parameter.

        Args:
            group: the parameter's group.
            batches: the number of batches to make state for; by default the optimizer's.
        """

    def init_state(self, params: Sequence[Tensor], group: Group) -> None:
        """Give parameters of a group their initial state."""
        fresh = self.fresh_state(group)
        for param in params:
            self.state[param].update(fresh(param))

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, which joins the open round."""
        param_group = arguments.copy_of_group(param_group)
        legal = {*self.defaults, *arguments.FOREIGN_KEYS}
        arguments.reject_unknown(param_group, legal, "a parameter group")
        first = self.param_groups[0] if self.param_groups else self.defaults
        for name in self.shared:
            if param_group.get(name, first[name]) != first[name]:
                raise ValueError(
                    f"{name} must be the same for all parameter groups ({first[name]!r}), "
                    f"got {param_group[name]!r}"
                )
        given = arguments.normalized(param_group, self.defaults)
        group = {**self.defaults, **given, **{name: first[name] for name in self.shared}}
        if not isinstance(group["params"], Tensor | set):
            group["params"] = list(group["params"])  # a generator can be read only once
        self._check_group(group)
        self._check_named(group)
        super().add_param_group(group)
        added = self.param_groups[-1]
        try:
            for param in added["params"]:
                if not (param.is_floating_point() or param.is_complex()):
                    raise ValueError(f"params must be floating point or complex, got {param.dtype}")
            self._prepare(added)
        except Exception:
            self.param_groups.pop()
            for param in added["params"]:
                self.state.pop(param, None)
            raise
        self.all_params += added["params"]

    def _check_named(self, group: Group) -> None:
        """Raise ValueError if some groups would have names for their parameters and others not.

        torch refuses that as well, but does not say what to do.
        """
        params = group["params"]
        if not self.param_groups or not isinstance(params, list) or not params:
            return
        named = isinstance(params[0], tuple)
        if named == ("param_names" in self.param_groups[0]):
            return
        if named:
            raise ValueError(
                "params must be without names, as those of the other groups are, got named "
                "parameters: give list(module.parameters())"
            )
        raise ValueError(
            "params must be named, as those of the other groups are (torchpisa.create names them), "
            "got parameters without names: give list(module.named_parameters())"
        )

    @abstractmethod
    def _check_group(self, group: Group) -> None:
        """Raise ValueError if a setting is wrong; the group need not have parameters yet."""

    def _prepare(self, group: Group) -> None:
        """Check that the parameters of a new group can be stepped, and make their state."""
        self.init_state([param for param in group["params"] if param.requires_grad], group)

    # Copies and checkpoints

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "round": self.round}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "round" not in self.__dict__:  # pickled by a version that kept it in the groups
            packed_rounds = [
                {name: group.pop(name, None) for name in PROGRESS} for group in self.param_groups
            ]
            self.round = Round.unpacked(packed_rounds[0])
        self.reset_unsaved()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict, without functions and preconditioners.

        It may be taken in the middle of a round; a run resumed from it goes on bit for bit.
        """
        # Taken away for now, because they are to see the round too.
        hooks = self._optimizer_state_dict_post_hooks
        self._optimizer_state_dict_post_hooks = OrderedDict()
        try:
            state_dict = packed(super().state_dict(), self.round)
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        for after in hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    @disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer of the same class and with the same number of batches.

        MISA also loads that of another number if it was saved between rounds, and keeps its own
        `weights`.

        Hooks run first. Then every entry is checked, and nothing changes if one does not fit.
        Tensors keep the dtype that they were saved with; counters are float32.

        Raises:
            ValueError: an entry does not fit; the message names it.
        """
        given: Any = state_dict.copy() if isinstance(state_dict, dict) else state_dict
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            given = given if changed is None else changed
        self.__setstate__(unpacked(given, self, self._check_loaded)._asdict())
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def upgrade_state_dict(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state_dict of an earlier version in today's form."""
        return state_dict

    def _check_loaded(self, group: Group) -> None:
        """Raise ValueError if the settings of a loaded group are wrong or cannot be stepped."""
        arguments.check_shared(group)
        self._check_group(group)


# Settings that a round changes.
_PENALTIES = ("sigma", "sisa_sigma")


class Undo:
    """Context manager that restores an optimizer if the block inside it raises.

    Args:
        optimizer: its round and penalties are always restored.
        members: parameters to back up too, with their state. torchpisa's own kernels do not fail
            half-way, unless they are interrupted, and need no backup; a user's preconditioner may.
    """

    def __init__(self, optimizer: "RoundOptimizer", members: Sequence[Member]) -> None:
        self._optimizer = optimizer
        self._round = optimizer.round.copy()
        self._penalties = [
            (group, name, group[name])
            for group in optimizer.param_groups
            for name in _PENALTIES
            if name in group
        ]
        self._members = members
        if members:
            self._back_up()

    def _back_up(self) -> None:
        self._states = [(member.state, dict(member.state)) for member in self._members]
        self._weights = [
            (member.param, member.param._version, member.param.detach().clone())
            for member in self._members
        ]
        changing: list[Any] = [value for _, saved in self._states for value in saved.values()]
        for _, _, value in self._penalties:
            changing += value if isinstance(value, list) else [value]
        self._copies = [
            (tensor, tensor.detach().clone()) for tensor in changing if isinstance(tensor, Tensor)
        ]

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            with torch.no_grad():
                self._restore()

    def _restore(self) -> None:
        self._optimizer.round = self._round
        for group, name, value in self._penalties:
            group[name] = value
        if not self._members:
            self._optimizer._abandon_batch()
            return
        for state, saved in self._states:
            for name, value in saved.items():
                state[name] = value
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        for param, version, copy in self._weights:
            # Writing to the others would tell autograd that they have changed.
            if param._version != version:
                param.copy_(copy)


def names_of(group: Mapping[str, Any]) -> Sequence[str | None]:
    """Return the names of a group's parameters, None for those without."""
    names: Sequence[str | None] | None = group.get("param_names")
    return [None] * len(group["params"]) if names is None else names


def _move_state(state: Group, device: torch.device) -> None:
    """Move state after its parameter, as when `model.cuda()` is called after construction."""
    for key, value in state.items():
        # Counters stay on the CPU, where reading them costs nothing.
        is_counter = key.partition(".")[0] == "step"
        if isinstance(value, Tensor) and (device.type == "cpu" or not is_counter):
            state[key] = value.to(device)
