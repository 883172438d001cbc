"""Checks of single arguments. Every message names the argument, its value and what is legal."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["check_choice", "check_count", "check_range"]


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
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if number or (isinstance(value, Tensor) and value.numel() == 1):
        x = float(value)
        if (x > low if low_open else x >= low) and (x < high if high_open else x <= high):
            return
    # Written out because a reader of the message should not have to decode it.
    if high == math.inf:
        legal = f"a {'finite ' if high_open else ''}number {'>' if low_open else '>='} {low:g}"
    else:
        legal = f"in {'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
    raise ValueError(f"{name} must be {legal}, got {value!r}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if not any(value is choice or value == choice for choice in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_count(name: str, value: Any, low: int = 1) -> None:
    """Raise ValueError unless `value` is an integer of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")
