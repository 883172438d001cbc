"""Learning rates that change from round to round."""

from collections.abc import Callable
from dataclasses import dataclass

from torchpisa.checks import check_count, check_range

__all__ = ["LinearDecay", "Schedule", "check_schedule", "factor"]

Schedule = float | Callable[[int], float]
"""A number, or a function of the round, from 0, that returns a factor."""


@dataclass(frozen=True)
class LinearDecay:
    """A factor of 1 that falls to zero in equal steps.

    At a constant rate the weights keep moving with the noise of mini-batches. Steps that shrink
    average it out.

    Args:
        rounds: the rounds of the training. Later ones have the factor of the last.
        hold: the fraction of rounds before the decay begins.

    Examples:
        >>> decay = LinearDecay(rounds=4)
        >>> [decay(iteration) for iteration in range(5)]
        [1.0, 0.75, 0.5, 0.25, 0.25]
    """

    rounds: int
    hold: float = 0.0

    def __post_init__(self) -> None:
        check_count("rounds", self.rounds)
        check_range("hold", self.hold, 0, 1, high_open=True)

    def __call__(self, iteration: int) -> float:
        left = self.rounds - min(iteration, self.rounds - 1)
        return min(1.0, left / (self.rounds * (1 - self.hold)))


def check_schedule(name: str, schedule: Schedule) -> None:
    """Raise ValueError if a schedule is a number outside of (0, 1]; a function is checked later."""
    if not callable(schedule):
        check_range(name, schedule, 0, 1, low_open=True)


def factor(name: str, schedule: Schedule, iteration: int) -> float:
    """Return the factor of a round: a power of a number, or the value of a function.

    Args:
        name: the name of the argument, for the error about what a function returned.
        schedule: the schedule.
        iteration: the round, from 0.
    """
    if not callable(schedule):
        return float(schedule**iteration)
    value = schedule(iteration)
    check_range(name, value, 0, high_open=True)
    return value
