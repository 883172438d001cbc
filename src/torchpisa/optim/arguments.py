"""Checks and normal forms of optimizer arguments: groups, values per batch, unknown names."""

import difflib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchpisa.checks import check_choice, check_range, warn

__all__ = [
    "Calibrated",
    "check_dtype",
    "check_gamma",
    "check_group",
    "check_penalties",
    "check_rho",
    "check_shared",
    "check_sigma",
    "check_without_sigma",
    "copy_of_group",
    "family",
    "has_peers",
    "normalize_penalties",
    "normalized",
    "numbers",
    "of_constructor",
    "per_batch",
    "plain",
    "reject_foreign_calibration",
    "reject_unknown",
    "shares",
    "warn_about_absolute_lr",
    "warn_about_unused_momentum",
]

# Settings that are stored as floats even if an integer was given.
FLOATS = dict.fromkeys(("lr", "gamma", "weight_decay", "consensus_decay", "dual_decay"), 0.0)

# Settings with one value for each batch.
PENALTIES = ("sigma", "rho", "sisa_sigma", "sisa_rho")

# What torch's schedulers and common trainers write into parameter groups.
FOREIGN_KEYS = frozenset(
    {
        "params",
        "param_names",
        "name",
        "initial_lr",
        "max_lr",
        "min_lr",
        "swa_lr",
        "lr_scale",
        "group_name",
        "fix_lr",
        "max_momentum",
        "base_momentum",
    }
)


def of_constructor(local_variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an optimizer's constructor, parameters apart, from its `locals()`."""
    params = local_variables["params"]
    if isinstance(params, nn.Module):
        name = family(type(local_variables["self"]))
        raise TypeError(
            f"params must be the parameters of a model, got the model, a {type(params).__name__}: "
            f"torchpisa.{name}(model.parameters()) or torchpisa.create({name.lower()!r}, model)"
        )
    others = ("self", "params", "__class__")
    return {name: value for name, value in local_variables.items() if name not in others}


def family(optimizer: type) -> str:
    """Return the name of an optimizer's class or, of a user's subclass, of the one it extends."""
    return next(
        cls.__name__ for cls in optimizer.__mro__ if cls.__module__.startswith("torchpisa.")
    )


def copy_of_group(param_group: object) -> dict[str, Any]:
    """Return a copy of a parameter group; raise TypeError if it is not a dictionary, as torch."""
    if not isinstance(param_group, dict):
        raise TypeError(f"param_group must be a dict, got a {type(param_group).__name__}")
    return dict(param_group)


def has_peers(process_group: Any) -> bool:
    """Return whether a `process_group` has other ranks."""
    if process_group is None:
        return False
    from torchpisa.distributed.process_group import join

    return join(process_group, None) is not None


def reject_unknown(given: Mapping[str, Any], legal: Iterable[str], where: str) -> None:
    """Raise ValueError if `given` has a key that is not in `legal`."""
    legal = sorted(legal)
    for name, value in given.items():
        if name not in legal:
            close = difflib.get_close_matches(name, legal, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(
                f"unknown argument {name}={value!r} for {where}{hint} Legal: {', '.join(legal)}"
            )


def normalized(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with plain Python numbers, floats where the default is a float.

    So checkpoints load without numpy, and no integer is too large for torch.
    """
    given = {name: value if name == "params" else plain(value) for name, value in group.items()}
    for name, value in given.items():
        if type(value) is int and (name == "clip" or type(defaults.get(name)) is float):
            check_range(name, value, -sys.float_info.max, sys.float_info.max)
            given[name] = float(value)
    return given


def plain(value: Any) -> Any:
    """Return `value` with numpy numbers turned into Python's, so checkpoints need no numpy."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return tuple(map(plain, value)) if type(value) is tuple else value


def per_batch(name: str, value: Any, batches: int, check: Callable[[str, Any], None]) -> list[Any]:
    """Return `value` as one entry per batch; a scalar or a function is repeated."""
    if isinstance(value, Tensor) and value.dim() == 1:
        value = value.tolist()
    if isinstance(value, list | tuple):
        if len(value) != batches:
            raise ValueError(
                f"{name} must be one value or a sequence of {batches} (batches={batches}), "
                f"got {len(value)} values: {value!r}"
            )
        entries = list(value)
    else:
        entries = [value] * batches
    for entry in entries:
        check(name, entry)
    return entries


def numbers(values: Sequence[Any], device: torch.device | None) -> list[Any]:
    """Return `values` as floats, or as tensors of float32 on `device`.

    Never in torch's default dtype, which may be too coarse.
    """
    floats = [float(value) for value in values]
    if device is None:
        return floats
    return [torch.tensor(value, dtype=torch.float32, device=device) for value in floats]


def shares(weights: Sequence[float] | None, batches: int) -> list[float]:
    """Return alpha_i, equation (2.1): `weights` (sizes will do) divided by their sum."""
    if weights is None:
        return [1 / batches] * batches
    given: Any = weights
    if not isinstance(given, Iterable) or (isinstance(given, Tensor) and not given.dim()):
        raise ValueError(
            f"weights must be None or a sequence of {batches} (batches={batches}), got {weights!r}"
        )
    entries = per_batch("weights", list(weights), batches, check_sigma)
    total = math.fsum(float(entry) for entry in entries)
    return [float(entry) / total for entry in entries]


def check_group(group: Mapping[str, Any]) -> None:
    """Check the settings that all optimizers share, except sigma, rho and gamma."""
    check_range("lr", group["lr"], 0, high_open=True)
    check_range("weight_decay", group["weight_decay"], 0, high_open=True)
    check_range("consensus_decay", group["consensus_decay"], 0, high_open=True)
    check_range("dual_decay", group["dual_decay"], 0, 1)
    for flag in ("initial_consensus", "maximize", "capturable", "stochastic_rounding"):
        check_choice(flag, group[flag], (True, False))
    check_kernels(group)
    check_dtype("state_dtype", group["state_dtype"])


def check_kernels(group: Mapping[str, Any]) -> None:
    """Check `foreach` and `fused` of a group."""
    for flag in ("foreach", "fused"):
        check_choice(flag, group[flag], (None, True, False))
    if group["foreach"] and group["fused"]:
        raise ValueError("fused must be None or False when foreach=True, got True")


def check_shared(group: Mapping[str, Any]) -> None:
    """Check settings that must be the same in all groups."""
    check_choice("nonfinite", group["nonfinite"], ("raise", "skip", "ignore"))
    if group["clip"] is not None:
        check_range("clip", group["clip"], 0, low_open=True)


class Calibrated(float):
    """A penalty that was calibrated for one class of optimizers.

    Attributes:
        optimizer: the name of the class.
    """

    optimizer: str

    def __new__(cls, value: float, optimizer: str) -> "Calibrated":
        made = super().__new__(cls, value)
        made.optimizer = optimizer
        return made


def reject_foreign_calibration(given: Mapping[str, Any], optimizer: str) -> None:
    """Raise ValueError if a penalty was calibrated for an optimizer with another scale."""
    for name, value in given.items():
        if isinstance(value, Calibrated) and optimizer not in (value.optimizer, "PISA"):
            raise ValueError(
                f"{name} must be calibrated for {optimizer}, got {value:g} for {value.optimizer}: "
                f"call calibrate(..., optimizer={optimizer})"
            )


def check_penalties(group: Mapping[str, Any], sigma: str, rho: str) -> None:
    """Check the settings of a group with the names `sigma` and `rho`."""
    per_batch(sigma, group[sigma], group["batches"], check_sigma)
    per_batch(rho, group[rho], group["batches"], check_rho)


def normalize_penalties(group: dict[str, Any]) -> None:
    """Turn penalties into one number per batch: floats or, if capturable, tensors."""
    params = group["params"]
    device = params[0].device if params else torch.device("cpu")
    for name in PENALTIES:
        if group.get(name) is not None:
            check = check_sigma if name.endswith("sigma") else check_rho
            values = per_batch(name, group[name], group["batches"], check)
            group[name] = numbers(values, device if group["capturable"] else None)


def check_without_sigma(group: Mapping[str, Any]) -> None:
    """Check a group without sigma, whose sigma follows the gradients."""
    for name, legal in (("rho", None), ("gamma", 1.0), ("initial_consensus", False)):
        if group[name] != legal:
            raise ValueError(
                f"{name} must be {legal!r} without sigma, got {group[name]!r}: sigma follows the "
                "gradients then; give sigma and rho for the paper's terms"
            )


def warn_about_absolute_lr(lr: float | Tensor, optimizer: str) -> None:
    """Warn if a learning rate that multiplies given penalties looks like AdamW's."""
    if not 0 < float(lr) < 0.1:
        return
    remedy = {
        "SISA": "leave out sigma and rho for a learning rate in AdamW's terms",
        "NSISA": "leave it out, or use torchpisa.MISA for a learning rate in AdamW's terms",
    }.get(optimizer, "leave it out and give a larger sigma for smaller steps")
    warn(
        f"lr={float(lr):g} is relative here: it multiplies the step that sigma and rho give, and 1 "
        f"is the paper; {remedy}"
    )


def warn_about_unused_momentum(
    name: str, given: float, sigma: str, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Warn if a momentum was given although all groups have a sigma, which leaves it no effect."""
    default, rho = 0.9, sigma.replace("sigma", "rho")
    if given != default and all(group[sigma] is not None for group in groups):
        warn(
            f"{name}={given!r} has no effect beside {sigma}: momentum follows from {sigma} and "
            f"{rho}. Leave out {name}, or both of these"
        )


def check_dtype(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is None or a real floating dtype."""
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ValueError(f"{name} must be None or a real floating dtype, got {value!r}")


def check_ns_dtype(value: Any) -> None:
    """Raise ValueError unless `value` is a real floating dtype, None or "auto"."""
    floating = isinstance(value, torch.dtype) and value.is_floating_point
    if not (floating or value is None or value == "auto"):
        raise ValueError(f"ns_dtype must be a real floating dtype, None or 'auto', got {value!r}")


def check_sigma(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is finite and above 0."""
    check_range(name, value, 0, low_open=True, high_open=True)


def check_rho(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a finite number of at least 0."""
    check_range(name, value, 0, high_open=True)


def check_gamma(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is in (0, 1] or a function of the iteration."""
    if not callable(value):
        check_range(name, value, 0, 1, low_open=True)
