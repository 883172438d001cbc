"""Checks of arguments. Every message names the argument, its value and what is legal."""

import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "check_choice",
    "check_group",
    "check_range",
    "per_batch",
    "reject_unknown",
    "shares",
]

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
        "max_momentum",
        "base_momentum",
    }
)


def reject_unknown(given: Mapping[str, Any], legal: Iterable[str], where: str) -> None:
    """Raise ValueError if `given` has a key that is not in `legal`."""
    legal = sorted(legal)
    for name, value in given.items():
        if name not in legal:
            close = difflib.get_close_matches(name, legal, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"unknown argument {name}={value!r} for {where}{hint} Legal: {', '.join(legal)}"
            )


def check_range(
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    *,
    low_open: bool = False,
    high_open: bool = False,
) -> None:
    """Raise ValueError unless `value` is a number (or a tensor of one) in the interval."""
    # Written out because a reader of the message should not have to decode it.
    if high == math.inf and high_open:
        legal = f"a finite number {'>' if low_open else '>='} {low:g}"
    elif high == math.inf:
        legal = f"a number {'>' if low_open else '>='} {low:g}"
    else:
        legal = f"in {'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number and not (isinstance(value, Tensor) and value.numel() == 1):
        raise ValueError(f"{name} must be {legal}, got {value!r}")
    x = float(value)
    if not ((x > low if low_open else x >= low) and (x < high if high_open else x <= high)):
        raise ValueError(f"{name} must be {legal}, got {value!r}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if not any(value is choice or value == choice for choice in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_count(name: str, value: Any, low: int = 1) -> None:
    """Raise ValueError unless `value` is an integer of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")


def per_batch(name: str, value: Any, batches: int, check: Callable[[str, Any], None]) -> list[Any]:
    """`value` as one entry per batch: a scalar or a function is repeated, a sequence is checked."""
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


def shares(weights: Sequence[float] | None, batches: int) -> list[float]:
    """alpha_i, equation (2.1): `weights` (sizes will do) divided by their sum."""
    if weights is None:
        return [1 / batches] * batches
    entries = per_batch("weights", list(weights), batches, _check_positive)
    total = math.fsum(float(entry) for entry in entries)
    return [float(entry) / total for entry in entries]


def check_group(group: Mapping[str, Any]) -> None:
    """Check what every optimizer here has in a parameter group, sigma, rho and gamma excepted."""
    check_range("lr", group["lr"], 0, high_open=True)
    check_range("weight_decay", group["weight_decay"], 0, high_open=True)
    check_range("consensus_decay", group["consensus_decay"], 0, high_open=True)
    check_range("dual_decay", group["dual_decay"], 0, 1)
    for flag in ("initial_consensus", "maximize", "capturable"):
        check_choice(flag, group[flag], (True, False))
    check_choice("foreach", group["foreach"], (None, True, False))
    dtype = group["state_dtype"]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"state_dtype must be None or a real floating dtype, got {dtype!r}")


def check_sigma(name: str, value: Any) -> None:
    check_range(name, value, 0, low_open=True, high_open=True)


def check_rho(name: str, value: Any) -> None:
    check_range(name, value, 0, high_open=True)


def check_gamma(name: str, value: Any) -> None:
    """A number in (0, 1], or a rule, whose values are checked when it is called."""
    if not callable(value):
        check_range(name, value, 0, 1, low_open=True)


def _check_positive(name: str, value: Any) -> None:
    check_range(name, value, 0, low_open=True, high_open=True)
