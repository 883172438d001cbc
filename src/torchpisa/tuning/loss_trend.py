"""Classify losses as steady, oscillating or diverging."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

__all__ = ["LossTrend", "loss_trend"]

LossTrend = Literal["steady", "oscillates", "diverges"]

# A loss that has grown by this factor since the start does not recover.
_DIVERGENCE_FACTOR = 3.0
# Sum of the rises in the second half, relative to the total gain, above which a run oscillates.
_LARGEST_RISES = 0.3


def loss_trend(losses: Sequence[float], noise: float = 0.0) -> LossTrend:
    """Classify a sequence of losses, from its start on.

    The first half may rise: with momentum a run overshoots before it settles.

    Args:
        losses: losses on the same data, or averages over different data.
        noise: standard deviation of such an average; smaller rises do not count.
    """
    if not all(map(math.isfinite, losses)):
        return "diverges"
    first, low = losses[0], min(losses)
    span = max(abs(first), first - low)
    if losses[-1] > first + (_DIVERGENCE_FACTOR - 1) * span:
        return "diverges"
    half = losses[len(losses) // 2 :]
    rises = sum(max(0.0, b - a - 3 * noise) for a, b in pairwise(half))
    gained = first - min(half)
    return "steady" if gained > 0 and rises <= _LARGEST_RISES * gained else "oscillates"
