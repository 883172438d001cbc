"""Checks of single arguments. Every message names the argument, its value and what is legal.

Warnings, which `warn` gives, name the line of the user's program.
"""

import math
import numbers
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_choice", "check_count", "check_range", "warn"]


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
    x = _number(value)
    if (x > low if low_open else x >= low) and (x < high if high_open else x <= high):
        return
    # Written out because a reader of the message should not have to decode it.
    if high == math.inf:
        legal = f"a {'finite ' if high_open else ''}number {'>' if low_open else '>='} {low:g}"
    else:
        legal = f"in {'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
    raise ValueError(f"{name} must be {legal}, got {value!r}")


def _number(value: Any) -> float:
    """Return a real number, or a tensor of one, as a float, anything else (a bool too) as nan."""
    if isinstance(value, Tensor):
        real = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
        return float(value) if real and not value.is_meta else math.nan
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is one of `choices`; 1 is not True."""
    words = [choice for choice in choices if isinstance(choice, str)]
    known = value in words if isinstance(value, str) else any(value is c for c in choices)
    if not known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_count(name: str, value: Any, low: int = 1, high: float = math.inf) -> None:
    """Raise ValueError unless `value` is an integer of at least `low` and at most `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")
    if value > high:
        raise ValueError(f"{name} must be an integer <= {high}, got {value!r}")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn about the innermost line that is neither torchpisa's nor torch's."""
    frame, level = sys._getframe(1), 2
    while _is_internal(frame.f_globals.get("__name__", "")) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_internal(module: str) -> bool:
    return module.partition(".")[0] in ("torchpisa", "torch")
