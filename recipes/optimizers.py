"""Optimizers by name and the schedules of their learning rates, for vision, gan and rnn.

Settings are those of the sources that a recipe names; what is written here only says which class a
name means and how its arguments are passed on.
"""

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import torchpisa
from torchpisa.optim.param_groups import split
from torchpisa.penalty import gamma_l

__all__ = ["TITLES", "Choice", "Schedule", "build", "capturable", "gamma_rule"]
__all__ += ["grow_sigmas", "missing_requirement", "scale_learning_rates", "state_bytes"]

TITLES = {
    "sisa": "SISA",
    "nsisa": "NSISA",
    "misa": "MISA",
    "sgd": "SGD",
    "adabound": "AdaBound",
    "adam": "Adam",
    "radam": "RAdam",
    "msvag": "MSVAG",
    "adamw": "AdamW",
    "adabelief": "AdaBelief",
    "yogi": "Yogi",
    "lamb": "LAMB",
    "nadam": "NAdam",
    "padam": "PAdam",
    "rmsprop": "RMSProp",
    "muon": "Muon",
}


@dataclass(frozen=True)
class Schedule:
    """The factor of the learning rate during training.

    Attributes:
        kind: "constant", "cosine" down to zero, or "steps".
        steps: for "steps": (epoch, factor), in the order of the epochs; factors multiply.
        warm_up: epochs in which it rises linearly from zero.
    """

    kind: str = "constant"
    steps: tuple[tuple[int, float], ...] = ()
    warm_up: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "cosine", "steps"):
            raise ValueError(f"kind must be 'constant', 'cosine' or 'steps', got {self.kind!r}")

    def factor(self, epoch: float, epochs: int) -> float:
        """Return the factor at a time in epochs from 0; epochs begin at whole numbers."""
        value = 1.0
        if self.kind == "cosine":
            value = 0.5 * (1 + math.cos(math.pi * min(1.0, epoch / epochs)))
        elif self.kind == "steps":
            value = math.prod(by for start, by in self.steps if epoch >= start)
        return value * min(1.0, epoch / self.warm_up) if self.warm_up else value


@dataclass(frozen=True)
class Choice:
    """An optimizer with its settings.

    Attributes:
        name: one of `TITLES`.
        options: its arguments. SISA's `gamma` may be a pair (t, s): t every s epochs.
        batches: m, the parts of a batch that torchpisa's optimizers step with one by one.
        label: the label of its runs; by default the name.
        schedule: a schedule that replaces the one of all runs.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    batches: int = 1
    label: str = ""
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if self.name not in TITLES:
            raise ValueError(f"name must be one of {', '.join(TITLES)}, got {self.name!r}")
        if self.batches > 1 and self.name not in CONSENSUS:
            raise ValueError(
                f"batches must be 1 for {self.name}, which has no batches of its own, "
                f"got {self.batches}"
            )
        object.__setattr__(self, "label", self.label or self.name)


CONSENSUS = ("sisa", "nsisa", "misa")
THIRD_PARTY = {
    "adabound": "AdaBound",
    "msvag": "MSVAG",
    "adabelief": "AdaBelief",
    "yogi": "Yogi",
    "lamb": "Lamb",
    "padam": "PAdam",
    "muon": "Muon",
}


def missing_requirement(name: str) -> str | None:
    """Return what this machine lacks for an optimizer, or None."""
    if name in THIRD_PARTY and importlib.util.find_spec("pytorch_optimizer") is None:
        return f"{name} needs pytorch_optimizer: pip install 'torchpisa[recipes]'"
    return None


def build(choice: Choice, model: nn.Module, rounds: int) -> Optimizer:
    """Build the optimizer of a choice for a model.

    Args:
        choice: see `Choice`.
        model: the model.
        rounds: the rounds of an epoch, for a gamma that is given in epochs.

    Raises:
        ImportError: this machine lacks what the optimizer needs.
    """
    reason = missing_requirement(choice.name)
    if reason is not None:
        raise ImportError(reason)
    optimizer = BUILDERS[choice.name](choice, model, rounds)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
        if choice.options.get("capturable"):
            group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)
    return optimizer


def capturable(choice: Choice) -> Choice:
    """Return the choice for rounds captured in a CUDA graph; gamma is left to `grow_sigmas`."""
    options = {name: value for name, value in choice.options.items() if name != "gamma"}
    return replace(choice, options={**options, "capturable": True})


def gamma_rule(choice: Choice, rounds: int) -> Callable[[int], float] | None:
    """Return gamma by round for a choice that has it in epochs, else None."""
    gamma = choice.options.get("gamma")
    return gamma_l(*gamma, rounds) if isinstance(gamma, tuple | list) else None


def grow_sigmas(optimizer: Optimizer, gamma: float) -> None:
    """Divide the sigmas, which are tensors if the optimizer is capturable, by gamma."""
    for group in optimizer.param_groups:
        for sigma in group["sigma"]:
            sigma.div_(gamma)


def scale_learning_rates(optimizer: Optimizer, factor: float) -> None:
    """Set all learning rates to a multiple of their initial values."""
    for group in optimizer.param_groups:
        value = group["initial_lr"] * factor
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of all tensors in the state, without counters, which have 0 dimensions."""
    values = (value for state in optimizer.state.values() for value in state.values())
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.dim())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# torchpisa


def build_sisa(choice: Choice, model: nn.Module, rounds: int) -> Optimizer:
    return consensus(torchpisa.SISA, choice, model.parameters(), rounds)


def build_nsisa(choice: Choice, model: nn.Module, rounds: int) -> Optimizer:
    return consensus(torchpisa.NSISA, choice, split(model), rounds)


def build_misa(choice: Choice, model: nn.Module, rounds: int) -> Optimizer:
    return consensus(torchpisa.MISA, choice, split(model), rounds)


def consensus(cls: type[Optimizer], choice: Choice, params: Any, rounds: int) -> Optimizer:
    options = dict(choice.options)
    gamma = gamma_rule(choice, rounds)
    if gamma is not None:
        options["gamma"] = gamma
    # Gradients that are not finite show in the loss, which ends the run; looking costs time.
    return cls(params, batches=choice.batches, nonfinite="ignore", **options)


# torch and pytorch_optimizer


def build_torch(choice: Choice, model: nn.Module, rounds: int) -> Optimizer:
    cls = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "radam": torch.optim.RAdam,
        "nadam": torch.optim.NAdam,
        "rmsprop": torch.optim.RMSprop,
    }[choice.name]
    options = dict(choice.options)
    if "fused" in inspect.signature(cls).parameters:
        options["fused"] = next(model.parameters()).is_cuda
    return cls(model.parameters(), **options)


def build_third_party(choice: Choice, model: nn.Module, rounds: int) -> Optimizer:
    import pytorch_optimizer

    cls = getattr(pytorch_optimizer, THIRD_PARTY[choice.name])
    options = dict(choice.options)
    decay = options.pop("weight_decay", 0.0)
    if "weight_decay" in inspect.signature(cls).parameters:
        return cls(model.parameters(), weight_decay=decay, **options)
    optimizer = cls(model.parameters(), **options)
    if decay:
        optimizer.register_step_pre_hook(l2_decay_hook(decay))
    return optimizer


def l2_decay_hook(decay: float) -> Callable[..., None]:
    """Return a hook that adds the L2 term to the gradients, for a class that lacks one."""

    @torch.no_grad()
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.add_(param, alpha=decay)

    return hook


def build_muon(choice: Choice, model: nn.Module, rounds: int) -> Optimizer:
    """Build Muon for the hidden matrices, convolutions flattened, with AdamW for the rest."""
    from pytorch_optimizer import Muon

    options = dict(choice.options)
    rest_lr, decay = options.pop("rest_lr"), options.get("weight_decay", 0.0)
    groups = [
        {"params": [param for _, param in group["params"]], "use_muon": group["matrix"]}
        for group in split(model)
    ]
    return Muon(groups, adamw_lr=rest_lr, adamw_wd=decay, **options)


BUILDERS: dict[str, Callable[[Choice, nn.Module, int], Optimizer]] = {
    **dict.fromkeys(("sgd", "adam", "adamw", "radam", "nadam", "rmsprop"), build_torch),
    **dict.fromkeys(("adabound", "msvag", "adabelief", "yogi", "lamb", "padam"), build_third_party),
    "sisa": build_sisa,
    "nsisa": build_nsisa,
    "misa": build_misa,
    "muon": build_muon,
}
