"""Whether a loss decreases steadily, oscillates or diverges."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

__all__ = ["Verdict", "judge"]

Verdict = Literal["steady", "oscillates", "diverges"]

# A loss that has grown by this factor over its start does not come back.
_FAR = 3.0
# Rises in the second half, relative to all that was gained, beyond which a run oscillates.
_RISES = 0.3


def judge(losses: Sequence[float], noise: float = 0.0) -> Verdict:
    """What a sequence of losses does, from its start on.

    The first half may rise: with momentum a run overshoots before it settles.

    Args:
        losses: of the same data, or averages over different data.
        noise: standard deviation of such an average; what it explains is not counted as a rise.
    """
    if not all(map(math.isfinite, losses)):
        return "diverges"
    first, low = losses[0], min(losses)
    span = max(abs(first), first - low)
    if losses[-1] > first + (_FAR - 1) * span:
        return "diverges"
    half = losses[len(losses) // 2 :]
    rises = sum(max(0.0, b - a - 3 * noise) for a, b in pairwise(half))
    gained = first - min(half)
    return "steady" if gained > 0 and rises <= _RISES * gained else "oscillates"
