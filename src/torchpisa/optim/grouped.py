"""Parameter groups, their state and their checkpoints, before any step is taken."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms import pisa
from torchpisa.checks import check_count
from torchpisa.kernels.job import Member, check_shapes, real, state_key
from torchpisa.optim import arguments, checkpoint, ranks, rounds
from torchpisa.optim.common import DEFAULTS, SHARED, Common
from torchpisa.optim.exchange import Exchange
from torchpisa.optim.rounds import Group
from torchpisa.preconditioners import Preconditioner
from torchpisa.preconditioners.base import initial_state

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GroupedOptimizer"]


class GroupedOptimizer(Optimizer):
    """What an optimizer holds: checked groups, a dual and more for every parameter and batch."""

    # What connects it to other ranks; a load leaves that alone, and copies have none.
    _exchange: Exchange | None = None

    def __init__(
        self,
        params: ParamsT,
        sigma: float | Sequence[float] | None,
        rho: float | Sequence[float] | None,
        lr: float | Tensor,
        own: dict[str, Any],
        **common: "Unpack[Common]",
    ) -> None:
        legal = {"sigma", "rho", "lr", *own, *DEFAULTS}
        arguments.reject_unknown(common, legal, type(self).__name__)
        arguments.refuse_foreign({"sigma": sigma, "rho": rho, **own}, type(self).__name__)
        given: Group = {"sigma": sigma, "rho": rho, "lr": lr, **own, **DEFAULTS, **common}
        defaults = arguments.in_form(given, {**DEFAULTS, "lr": 1.0})
        check_count("batches", defaults["batches"])
        arguments.check_shared(defaults)
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
        arguments.warn_about_absolute_lr(defaults, type(self).__name__)
        super().__init__(params, defaults)
        self._step_supports_amp_scaling = self._takes_infinities

    @abstractmethod
    def preconditioner(self, group: Group) -> Preconditioner:
        """The preconditioner of a parameter group."""

    def _check_own(self, group: Group) -> None:
        """Check the subclass's own settings: by default, that they make a preconditioner."""
        self.preconditioner(group)

    def _forget(self) -> None:
        """Start afresh with what belongs to this object and these tensors, and is never saved."""
        self._params = [p for group in getattr(self, "param_groups", ()) for p in group["params"]]
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
        self._step_supports_amp_scaling = self._takes_infinities

    @property
    def _takes_infinities(self) -> bool:
        """Whether GradScaler calls step() even when it found infinities.

        A batch that is skipped then uses up its slot, and other ranks need not wait for it. Not
        otherwise: trainers refuse to clip gradients for optimizers that unscale them.
        """
        several = self.batches > 1 or self._exchange is not None
        return several or bool(self.defaults["capturable"])

    @property
    def batches(self) -> int:
        """The number of batches in a round; with a process group, of this rank's."""
        return int(self.defaults["batches"])

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
        state = self._state_of(param)
        if state is None:
            if grad is None:
                return None
            state = self._init_state(param, group)
        dual, shape = state["dual.0"], param.shape
        if dual.shape != shape or (grad is not None and grad.shape != shape):
            check_shapes([Member(param, grad, state)], ["dual.0"])
        # Numbers of devices, -1 for the CPU, are had for less than devices.
        if dual.get_device() != param.get_device():
            _move_state(state, param.device)
        return Member(param, grad, state)

    def _state_of(self, param: Tensor) -> dict[str, Any] | None:
        """The state of a parameter; None if it has none, or only what other code left there.

        To read `opt.state[param]` is to create an empty dictionary.
        """
        state = self.state.get(param)
        return state if state and "dual.0" in state else None

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
        own = arguments.in_form(param_group, self.defaults)
        group = {**self.defaults, **own, **inherited}
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
        if rounds.follows(group):
            arguments.check_following(group)
        else:
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
        preconditioner = self.preconditioner(group)
        rounds.check_fused(group, preconditioner)
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
            if group[name] is not None:
                values = arguments.per_batch(name, group[name], group["batches"], check)
                group[name] = arguments.numbers(values, device if group["capturable"] else None)
        for param in params:
            if param.requires_grad:
                self._init_state(param, group, preconditioner)
        if group["initial_consensus"]:
            total = rounds.total(group, "sigma")
            if self._exchange is not None:
                total = self._exchange.ranks.tally([total], device).item()
            settings = total, group["consensus_decay"], rounds.lr(group)
            with torch.no_grad():
                for param in filter(lambda param: param.requires_grad, params):
                    param.copy_(pisa.initial_consensus(param, *settings))

    def _init_state(
        self, param: Tensor, group: Group, preconditioner: Preconditioner | None = None
    ) -> dict[str, Any]:
        """Give a parameter the state that it starts with; the group's preconditioner if at hand."""
        preconditioner = preconditioner or self.preconditioner(group)
        fresh = _fresh_state(param, group, preconditioner, self.batches)
        state: dict[str, Any] = self.state[param]
        state.update(fresh)
        return state

    def _check_loaded(self, group: Group) -> None:
        """Raise ValueError if the optimizer could not have been made with a group, or not step."""
        arguments.check_shared(group)
        self._check_group(group)
        rounds.check_fused(group, self.preconditioner(group))

    def state_dict(self) -> dict[str, Any]:
        """torch's state_dict; functions and preconditioners stay out of it, so it loads anywhere.

        It may be taken in the middle of a round; a run resumed from it goes on bit for bit.
        """
        return checkpoint.packed(super().state_dict())

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same kind of optimizer with the same number of batches.

        Hooks see it first; then every entry of it is checked, and if one does not fit, nothing has
        changed. Tensors keep the dtype that they were saved with, counters are float32.

        Raises:
            ValueError: an entry, which the message names, does not fit.
        """
        preconditioners: dict[int, Preconditioner] = {}

        def fresh_state(param: Tensor, group: Group, batches: int) -> dict[str, Any]:
            if id(group) not in preconditioners:
                preconditioners[id(group)] = self.preconditioner(group)
            return _fresh_state(param, group, preconditioners[id(group)], batches)

        checkpoint.load(self, state_dict, self._check_loaded, fresh_state)


def _fresh_state(
    param: Tensor, group: Group, preconditioner: Preconditioner, batches: int
) -> dict[str, Any]:
    """Return the state that a parameter of a group starts with."""
    dtype = param.dtype
    if not dtype.is_complex:
        dtype = group["state_dtype"] or torch.promote_types(dtype, torch.float32)
    dual = torch.zeros_like(param, dtype=dtype, requires_grad=False)
    device = param.device if group["capturable"] else "cpu"
    state: dict[str, Any] = {}
    for slot in range(batches):
        state[state_key("dual", slot)] = dual.clone()
        if rounds.follows(group):
            wide = torch.promote_types(real(dual).dtype, torch.float32)
            for name in ("sigma", "level"):
                state[state_key(name, slot)] = torch.zeros((), dtype=wide, device=param.device)
        for name, value in initial_state(preconditioner, dual).items():
            state[state_key(name, slot)] = value
        # In float32 whatever torch's default dtype is: bfloat16 counts to 256.
        counter = torch.zeros((), dtype=torch.float32, device=device)
        state[state_key("step", slot)] = counter
    if not rounds.alone(group):
        state["pending"] = dual
    state["arrived"] = 0
    return state


def _move_state(state: dict[str, Any], device: torch.device) -> None:
    """Move the state of a parameter that was moved, as by `model.cuda()` after construction."""
    for key, value in state.items():
        # Counters stay on the CPU, where they cost nothing; kernels fetch them from there.
        if isinstance(value, Tensor) and (device.type == "cpu" or not key.startswith("step.")):
            state[key] = value.to(device)
