"""The optimizers of the recipe by name, and the schedule of their learning rates."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

import torchpisa
from recipes import ranks
from torchpisa.optim.param_groups import split
from torchpisa.preconditioners.consensus import EigenbasisMoment, Stage, Whiten

__all__ = ["BETAS", "DEFAULTS", "NAMES", "TITLES", "WARM_DOWN"]
__all__ += ["Choice", "Team", "build", "choose", "factor", "missing_requirement", "state_bytes"]

WARM_DOWN = 1450 / 5100  # of the published GPT-2 script's steps


@dataclass(frozen=True)
class Choice:
    """An optimizer with its settings.

    Attributes:
        name: of the optimizer, one of `NAMES`.
        options: its arguments.
        rest: who takes the embedding where the optimizer is for matrices: `"adamw"`, as in
            the published GPT-2 script, `"own"`, the optimizer itself by its rule for what is not
            a matrix, or beside Muon `"misa"`, MISA by that rule.
        rest_lr: of AdamW in that case.
        rest_decay: weight decay of what is not a matrix where the optimizer itself takes it; None
            for that of the matrices.
        warm_up: steps over which the learning rate rises.
        warm_down: the last part of the steps, over which it falls linearly to zero.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rest: str = "adamw"
    rest_lr: float = 3.6e-3
    rest_decay: float | None = None
    warm_up: int = 0
    warm_down: float = WARM_DOWN


BETAS = (0.9, 0.95)
TITLES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "soap": "SOAP",
    "sisa": "SISA",
    "nsisa": "NSISA",
    "misa": "MISA",
    "normuon": "NorMuon",
    "soap_muon": "SOAP-Muon",
    "shampoo": "Shampoo",
    "adam_mini": "Adam-mini",
}
NAMES = tuple(TITLES)

# What a trial does not say otherwise; no weight decay.
DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1.2e-3, "betas": BETAS, "weight_decay": 0.0},
    "muon": {
        **{"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0},
        "adjust_lr_fn": "original",  # times sqrt(max(1, rows / columns)), like aspect_scaling
    },
    "soap": {
        **{"lr": 3e-3, "betas": (0.95, 0.95), "weight_decay": 0.0},
        "precondition_frequency": 10,
    },
    "sisa": {"sigma": 0.3, "rho": 1000.0, "beta": 0.99},
    # The published GPT-2 script; dual_decay 1 is the paper.
    "nsisa": {
        **{"sigma": 80.0, "rho": 100.0, "momentum": 0.95, "nesterov": True},
        **{"aspect_scaling": True, "dual_decay": 0.25},
    },
    "misa": {"weight_decay": 0.0},
    # Nesterov momentum and nothing of ours but the code: matrices as published, beside AdamW. Rows
    # are normalised in both, because SOAP-Muon is better with it.
    "normuon": {"weight_decay": 0.0, "row_beta": 0.95},
    "soap_muon": {
        **{"weight_decay": 0.0, "row_beta": 0.95},
        "before": {"stage": "eigenbasis", "sides": "both"},
    },
    # In blocks, with the size of RMSProp's steps, so that learning rates are comparable to AdamW's.
    "shampoo": {
        **{"lr": 1.2e-3, "betas": BETAS, "weight_decay": 0.0, "decoupled_weight_decay": True},
        **{"moving_average_for_momentum": True, "graft_type": 3, "block_size": 1024},
        **{"start_preconditioning_step": 40, "preconditioning_compute_steps": 40},
    },
    "adam_mini": {"lr": 1.2e-3, "betas": BETAS, "weight_decay": 0.0},
}
THIRD_PARTY = ("soap", "shampoo", "adam_mini")
# What `before` may name.
STAGES = {"whiten": Whiten, "eigenbasis": EigenbasisMoment}
# MISA's rule for what is not a matrix, beside Muon: its best setting of the pilot.
REST_MISA = {"lr": 3e-3, "momentum": 0.85, "weight_decay": 0.0}


def choose(
    name: str,
    *,
    rest: str = "adamw",
    rest_decay: float | None = None,
    warm_up: int = 0,
    warm_down: float = WARM_DOWN,
    **options: Any,
) -> Choice:
    """Return the defaults of an optimizer with some options changed."""
    check_name(name)
    schedule = {"warm_up": warm_up, "warm_down": warm_down}
    return Choice(
        *(name, {**DEFAULTS[name], **options}), rest=rest, rest_decay=rest_decay, **schedule
    )


def check_name(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"optimizer must be one of {', '.join(NAMES)}, got {name!r}")


def factor(step: int, steps: int, warm_up: int = 0, warm_down: float = WARM_DOWN) -> float:
    """Return the factor of the learning rate in a step.

    Args:
        step: from 0.
        steps: of the whole run.
        warm_up: steps of the rise.
        warm_down: the part of the steps in which it falls; the step after the last would have 0.
    """
    rise = (step + 1) / warm_up if step < warm_up else 1.0
    fall = (steps - step) / (warm_down * steps) if warm_down else 1.0
    return min(rise, fall, 1.0)


class Team:
    """Optimizers that train a model together, in rounds of batches.

    Those of torchpisa take a step per batch. Others take one per round, with the mean gradient of
    its batches, so everyone sees the same data between two changes of the weights. Of several
    processes, gradients are averaged before a step, unless the optimizer has a process group.

    Args:
        consensus: optimizers of torchpisa, all with this number of batches.
        averaging: others.
        batches: of a round, in this process.
    """

    def __init__(
        self, consensus: Sequence[Optimizer], averaging: Sequence[Optimizer], batches: int
    ) -> None:
        self.consensus, self.averaging, self.batches = list(consensus), list(averaging), batches
        self._batches_seen = 0
        for group in self._groups():
            group["initial_lr"] = group["lr"]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Return all optimizers."""
        return [*self.consensus, *self.averaging]

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def set_factor(self, value: float) -> None:
        """Set all learning rates to this multiple of what they were given."""
        for group in self._groups():
            group["lr"] = group["initial_lr"] * value

    def step(self) -> None:
        """Step with the gradients of the next batch, and zero those that are used up."""
        for optimizer in self.consensus:
            if getattr(optimizer, "peers", None) is None:
                ranks.average(gradients(optimizer))
            optimizer.step()
            optimizer.zero_grad()
        self._batches_seen = (self._batches_seen + 1) % self.batches
        if self._batches_seen:
            return
        for optimizer in self.averaging:
            if self.batches > 1:
                torch._foreach_div_(gradients(optimizer), self.batches)
            ranks.average(gradients(optimizer))
            optimizer.step()
            optimizer.zero_grad()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all optimizers; between rounds only."""
        assert not self._batches_seen
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Continue from what `state_dict` returned."""
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [param.grad for param in params if param.grad is not None]


def state_bytes(team: Team) -> int:
    """Return the bytes of all tensors in the state, without counters, which have 0 dimensions."""

    def size(value: object) -> int:
        if isinstance(value, Tensor):
            return value.numel() * value.element_size() if value.dim() else 0
        if isinstance(value, Mapping):
            return sum(map(size, value.values()))
        if isinstance(value, list | tuple):
            return sum(map(size, value))
        # Shampoo keeps objects with lists of tensors in its state.
        entries = vars(value).values() if hasattr(value, "__dict__") else ()
        return sum(size(entry) for entry in entries if isinstance(entry, Tensor | list))

    return sum(size(optimizer.state) for optimizer in team.optimizers)


# Building


def missing_requirement(choice: Choice) -> str | None:
    """Return what this machine lacks for an optimizer, or None."""
    if choice.name in THIRD_PARTY and importlib.util.find_spec("pytorch_optimizer") is None:
        return f"{choice.name} needs pytorch_optimizer: pip install pytorch_optimizer"
    if choice.name == "muon" and not hasattr(torch.optim, "Muon"):
        return f"muon needs torch 2.9 or newer, got {torch.__version__}"
    return None


def build(choice: Choice, model: nn.Module, batches: int = 1, nodes: bool = False) -> Team:
    """Build the optimizers of a choice for a model.

    Args:
        choice: see `Choice`.
        model: with tied embedding, no head of its own.
        batches: steps that the optimizers of torchpisa take per round, m in one process.
        nodes: whether processes have different batches, and so SISA and NSISA duals of their own.

    Raises:
        ValueError: there is no such optimizer.
        ImportError: this machine lacks what it needs.
    """
    check_name(choice.name)
    legal = ("adamw", "misa") if choice.name == "muon" else ("adamw", "own")
    if choice.rest not in legal:
        raise ValueError(f"rest must be {' or '.join(map(repr, legal))}, got {choice.rest!r}")
    reason = missing_requirement(choice)
    if reason is not None:
        raise ImportError(reason)
    if nodes and choice.name in ("sisa", "nsisa"):
        group = {"process_group": distributed.group.WORLD}
        choice = replace(choice, options={**choice.options, **group})
    return BUILDERS[choice.name](choice, model, batches)


def adamw(params: Sequence[nn.Parameter], lr: float, **options: Any) -> Optimizer:
    fused = params[0].device.type == "cuda"
    return torch.optim.AdamW(params, lr=lr, fused=fused, **options)


def split_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of the blocks, and the rest."""
    groups = split(model, head=())  # the output layer is the embedding
    matrices, rest = ([param for _, param in group["params"]] for group in groups)
    return matrices, rest


def beside_adamw(make: Callable[..., Optimizer], choice: Choice, model: nn.Module) -> Any:
    """Build an optimizer for the matrices, and AdamW for the rest."""
    matrices, rest = split_matrices(model)
    other = adamw(rest, choice.rest_lr, betas=BETAS, weight_decay=0.0)
    return make(matrices, **choice.options), other


def build_adamw(choice: Choice, model: nn.Module, batches: int) -> Team:
    return Team([], [adamw(list(model.parameters()), **choice.options)], batches)


def build_muon(choice: Choice, model: nn.Module, batches: int) -> Team:
    if choice.rest == "misa":
        matrices, rest = split_matrices(model)
        group = {"params": rest, "matrix": False}
        misa = torchpisa.MISA([group], **REST_MISA, batches=batches, **COMMON)
        return Team([misa], [torch.optim.Muon(matrices, **choice.options)], batches)
    return Team([], beside_adamw(torch.optim.Muon, choice, model), batches)


def build_soap(choice: Choice, model: nn.Module, batches: int) -> Team:
    from pytorch_optimizer import SOAP

    return Team([], beside_adamw(SOAP, choice, model), batches)


def build_shampoo(choice: Choice, model: nn.Module, batches: int) -> Team:
    from recipes.language.third_party import Shampoo

    return Team([], beside_adamw(Shampoo, choice, model), batches)


def build_adam_mini(choice: Choice, model: nn.Module, batches: int) -> Team:
    from recipes.language.third_party import adam_mini

    return Team([], [adam_mini(model, **choice.options)], batches)


# Gradients that are not finite are not looked for: they show in the loss, which ends the run, and
# the other optimizers do not look either.
COMMON = {"nonfinite": "ignore"}


def build_sisa(choice: Choice, model: nn.Module, batches: int) -> Team:
    common = {**COMMON, "batches": batches}
    return Team([torchpisa.SISA(model.parameters(), **choice.options, **common)], [], batches)


def build_matrix(cls: type[Optimizer], choice: Choice, model: nn.Module, batches: int) -> Team:
    """Build NSISA or MISA, with AdamW or the optimizer itself for what is not a matrix."""

    def make(params: Any, **options: Any) -> Optimizer:
        return cls(params, batches=batches, **COMMON, **options)

    if choice.rest == "own":
        groups = split(model, head=())
        if choice.rest_decay is not None:
            groups[1]["weight_decay"] = choice.rest_decay
        return Team([make(groups, **choice.options)], [], batches)
    matrix_optimizer, other = beside_adamw(make, choice, model)
    return Team([matrix_optimizer], [other], batches)


def build_nsisa(choice: Choice, model: nn.Module, batches: int) -> Team:
    return build_matrix(torchpisa.NSISA, choice, model, batches)


def build_misa(choice: Choice, model: nn.Module, batches: int) -> Team:
    options = {**choice.options, "before": stage(choice.options.get("before"))}
    return build_matrix(torchpisa.MISA, replace(choice, options=options), model, batches)


def build_nesterov(choice: Choice, model: nn.Module, batches: int) -> Team:
    """Build MISA with the momentum of Muon."""
    options = {"look_ahead": 1 + choice.options.get("momentum", 0.9), **choice.options}
    return build_misa(replace(choice, options=options), model, batches)


def stage(setting: Mapping[str, Any] | None) -> Stage | None:
    """Build what MISA does before it orthogonalises, from its name and its arguments."""
    if setting is None:
        return None
    name, arguments = setting["stage"], {k: v for k, v in setting.items() if k != "stage"}
    if name not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {name!r}")
    return STAGES[name](**arguments)


BUILDERS: dict[str, Callable[[Choice, nn.Module, int], Team]] = {
    "adamw": build_adamw,
    "muon": build_muon,
    "soap": build_soap,
    "sisa": build_sisa,
    "nsisa": build_nsisa,
    "misa": build_misa,
    "normuon": build_nesterov,
    "soap_muon": build_nesterov,
    "shampoo": build_shampoo,
    "adam_mini": build_adam_mini,
}
