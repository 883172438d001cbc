"""Create optimizers by name, with the presets of the paper."""

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from torchpisa.checks import check_range
from torchpisa.optim import MISA, NSISA, PISA, SISA
from torchpisa.optim.param_groups import is_matrix, split
from torchpisa.presets import PRESETS, Preset

__all__ = ["OPTIMIZERS", "OptimizerInfo", "create", "list_optimizers", "list_presets"]

AnyOptimizer = PISA | SISA | NSISA | MISA


@dataclass(frozen=True)
class OptimizerInfo:
    """A named optimizer.

    Attributes:
        name: its name for `create`.
        cls: its class.
        description: one line.
        by_shape: True if hidden matrices have their own rule.
    """

    name: str
    cls: Callable[..., AnyOptimizer]
    description: str
    by_shape: bool = False


OPTIMIZERS: Mapping[str, OptimizerInfo] = MappingProxyType(
    {
        info.name: info
        for info in (
            OptimizerInfo("misa", MISA, "matrices orthogonalised, one lr in AdamW's terms", True),
            OptimizerInfo("sisa", SISA, "second moments, a dual per batch"),
            OptimizerInfo("nsisa", NSISA, "orthogonalised momentum, as in the paper", True),
            OptimizerInfo("pisa", PISA, "any preconditioner"),
        )
    }
)
"""All optimizers by name."""

# Hints for arguments of other optimizers, frameworks and configurations.
_NAMES_ELSEWHERE = {
    "betas": "; AdamW's betas are momentum and beta here.",
    "learning_rate": "; it is called lr.",
    "process_group": "; MISA takes gradients that DDP or FSDP2 has averaged, and needs none.",
}


def list_optimizers(pattern: str = "*") -> list[str]:
    """Return the names of the optimizers.

    Args:
        pattern: wildcards, such as `"*sisa"`.

    Examples:
        >>> list_optimizers()
        ['misa', 'sisa', 'nsisa', 'pisa']
    """
    return fnmatch.filter(OPTIMIZERS, pattern)


def list_presets(pattern: str = "*") -> list[str]:
    """Return the names of the presets.

    Args:
        pattern: wildcards, such as `"paper/imagenet/*"`.

    Examples:
        >>> list_presets("paper/rnn/*")
        ['paper/rnn/1', 'paper/rnn/2', 'paper/rnn/3']
    """
    return fnmatch.filter(PRESETS, pattern)


def create(
    name: str,
    model: nn.Module | Iterable[Any],
    *,
    preset: str | None = None,
    rounds: int | None = None,
    epochs: int | None = None,
    decay_vectors: bool | None = None,
    **arguments: Any,
) -> AnyOptimizer:
    """Make an optimizer by its name.

    From a model, parameters that require gradients come in named groups: MISA and NSISA learn which
    matrices are embeddings or output layers, and vectors (biases, norms) have no weight decay.

    Args:
        name: one of `list_optimizers()`.
        model: a model; or parameters or groups of your own, which are left as they are.
        preset: one of `list_presets()`, of this optimizer. Arguments override it.
        rounds: rounds of an epoch, for presets whose sigma grows with time; by default those of the
            paper.
        epochs: epochs of the training, likewise.
        decay_vectors: whether vectors have weight decay too; by default only with a preset, as in
            the paper. MISA's never do.
        **arguments: arguments of the optimizer.

    Raises:
        ValueError: there is no such name, the preset belongs to another optimizer, the model has no
            parameter that requires gradients, or `decay_vectors` cannot be obeyed.
        TypeError: the optimizer has no such argument.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> opt = create("misa", model, lr=1e-3)
        >>> [group["weight_decay"] for group in opt.param_groups]
        [0.1, 0.1, 0.0]
        >>> create("sisa", model, preset="paper/resnet34").batches
        4
    """
    info: OptimizerInfo = _find("name", name, OPTIMIZERS)
    if preset is not None:
        known: Preset = _find("preset", preset, PRESETS)
        if known.optimizer != info.name:
            raise ValueError(
                f"preset must be one of {info.name}'s, got {preset!r}, which is "
                f"{known.optimizer}'s: torchpisa.create({known.optimizer!r}, ...)"
            )
        arguments = {**known.arguments(rounds, epochs), **arguments}
    elif rounds is not None or epochs is not None:
        raise ValueError(f"rounds and epochs need a preset, got {rounds!r} and {epochs!r}")
    _check_names(info, arguments)
    if decay_vectors and info.cls is MISA:
        raise ValueError(
            "decay_vectors must be None or False for misa, whose vectors never decay, "
            f"got {decay_vectors!r}"
        )
    if not isinstance(model, nn.Module):
        if decay_vectors is not None:
            raise ValueError(
                f"decay_vectors needs a model, got {decay_vectors!r} for parameters: they are left "
                "as they are; give a group of vectors weight_decay=0"
            )
        return info.cls(model, **arguments)
    if decay_vectors is None:
        decay_vectors = preset is not None
    return info.cls(_groups(info, model, arguments, decay_vectors), **arguments)


def _groups(
    info: OptimizerInfo, model: nn.Module, arguments: Mapping[str, Any], decay_vectors: bool
) -> list[Any]:
    """Return the parameters of a model in groups, vectors without decay unless `decay_vectors`."""
    default = inspect.signature(info.cls).parameters.get("weight_decay")
    decay = arguments.get("weight_decay", 0.0 if default is None else default.default)
    check_range("weight_decay", decay, 0, high_open=True)
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not named:
        raise ValueError(
            "model must have a parameter that requires gradients, got "
            f"{sum(1 for _ in model.parameters())} parameters that do not"
        )
    if info.by_shape:
        return split(model, weight_decay=None if decay_vectors or not decay else decay)
    if decay_vectors or not (decay or arguments.get("consensus_decay")):
        return [{"params": named}]
    matrices = [(name, param) for name, param in named if is_matrix(param)]
    vectors = [(name, param) for name, param in named if not is_matrix(param)]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0, "consensus_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _check_names(info: OptimizerInfo, arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument that the optimizer does not have."""
    legal = [name for name in inspect.signature(info.cls).parameters if name != "params"]
    for name, value in arguments.items():
        if name not in legal:
            close = difflib.get_close_matches(name, legal, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            hint = _NAMES_ELSEWHERE.get(name, hint)
            raise TypeError(
                f"unknown argument {name}={value!r} for {info.name}{hint} Legal: {', '.join(legal)}"
            )


def _find(what: str, name: str, known: Mapping[str, Any]) -> Any:
    if not isinstance(name, str):
        raise TypeError(
            f"{what} must be a string, one of {', '.join(known)}, got a {type(name).__name__}"
        )
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{what} must be one of {', '.join(known)}, got {name!r}{hint}")
