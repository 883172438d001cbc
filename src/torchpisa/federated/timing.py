"""Virtual time: the delays of clients, and how long the server waits for them."""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torchpisa.checks import check_count, check_range
from torchpisa.data import hashed

__all__ = ["LognormalDelay", "Timing"]


@dataclass(frozen=True)
class Timing:
    """The delays of updates, and the rule by which a round ends.

    A round begins when the one before has ended. It ends when all expected updates have arrived,
    when `enough` of them have, or at the deadline, whichever comes first. A late update counts
    once, in the round in which it arrives. Until then its client is absent, and does not take part
    in other rounds.

    Args:
        delay: a function of client and round, both from 0, that returns the virtual seconds
            between the beginning of the round and the arrival of the client's update. Infinity is
            an update that is lost: the client then keeps its memory from before the round.
        deadline: virtual seconds after which a round ends.
        enough: the number of updates that end a round, late ones of earlier rounds included.

    Examples:
        >>> patient = Timing(LognormalDelay(median=2.0), deadline=5.0)  # stragglers are late
        >>> asynchronous = Timing(LognormalDelay(median=2.0), enough=10)  # ten updates at a time
    """

    delay: Callable[[int, int], float]
    deadline: float = math.inf
    enough: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.delay):
            raise TypeError(f"delay must be a function of client and round, got {self.delay!r}")
        check_range("deadline", self.deadline, 0, low_open=True)
        if self.enough is not None:
            check_count("enough", self.enough)

    def arrival(self, now: float, client: int, iteration: int) -> float:
        """Return the time at which a client's update arrives if its round begins now."""
        delay = self.delay(client, iteration)
        check_range(f"delay of client {client} in round {iteration}", delay, 0)
        return now + float(delay)  # NumPy's numbers cannot be read back from a checkpoint

    def end(self, now: float, arrivals: Iterable[float]) -> float:
        """Return the end of a round that begins now.

        Args:
            now: the current virtual time.
            arrivals: the times at which updates arrive.
        """
        times = sorted(arrivals)
        awaited = len(times) if self.enough is None else min(self.enough, len(times))
        last = times[awaited - 1] if times else now
        end = min(max(now, last), now + self.deadline)
        # Without a deadline the server does not wait for lost updates.
        return end if end < math.inf else max([now, *(t for t in times if t < math.inf)])


@dataclass(frozen=True)
class LognormalDelay:
    """Log-normal delays: some clients are slow, and every client is slow at times.

    Args:
        median: median of all delays, in virtual seconds.
        clients: standard deviation of the logarithm from client to client.
        rounds: standard deviation of the logarithm from round to round.
        seed: seed of the delays.

    Examples:
        >>> delay = LognormalDelay(median=10.0)
        >>> [round(delay(client, iteration=0), 1) for client in range(4)]
        [17.1, 15.4, 28.0, 16.4]
    """

    median: float = 1.0
    clients: float = 0.7
    rounds: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("median", self.median, 0, low_open=True, high_open=True)
        check_range("clients", self.clients, 0, high_open=True)
        check_range("rounds", self.rounds, 0, high_open=True)
        check_count("seed", self.seed, 0)

    def __call__(self, client: int, iteration: int) -> float:
        of_client = random.Random(hashed("speed", self.seed, client)).gauss(0, self.clients)
        of_round = random.Random(hashed("delay", self.seed, client, iteration)).gauss(
            0, self.rounds
        )
        return self.median * math.exp(of_client + of_round)
