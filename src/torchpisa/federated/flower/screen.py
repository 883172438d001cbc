"""Reject updates that are too large, before they reach the global model."""

import math
from collections import deque

import torch

from torchpisa.checks import check_count, check_range
from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, ServerState, Tensors

__all__ = ["Screen", "Sizes", "norms", "update_template", "weight_scale"]

Sizes = dict[str, float]
"""The size of each part of an update, by name."""


class Screen:
    """A limit on the size of updates.

    Names, shapes, dtypes and finiteness of an update are always checked. The size of an update is
    the norm of the client's dual after it (Scaffold: the control variate; FedAvg, FedProx, FedNova:
    the movement). It is compared with the median over all updates of this round and of recent ones.
    Of an even number, the lower middle one is the median, so that one honest client of two is
    enough. Without recent rounds, updates are held back until all have arrived or the deadline has
    passed. Later ones are judged, and summed up, as they arrive.

    A jump that most clients share is not an attack, for instance if a schedule has raised `lr`. If
    the updates of more than half of the clients of a round, and of at least two, are too large,
    recent rounds are forgotten and the updates are compared with each other.

    The screen does not detect a majority of lying clients, or a lie within the limits. But the dual
    of a client that lies in every round is at most `largest` times that of an honest one.

    Args:
        largest: updates larger than so many times the median are rejected. The default is from
            `benchmarks/screen.py`, see the page on Flower.
        ceiling: updates larger than so many times the weights (their norm plus the root of their
            number, times sigma if that is larger than 1) are rejected even if there is nothing to
            compare with.
        rounds: the number of recent rounds in the median.
    """

    def __init__(self, largest: float = 3.0, ceiling: float = 1e3, rounds: int = 5) -> None:
        check_range("largest", largest, 1)
        check_range("ceiling", ceiling, 0, low_open=True)
        check_count("rounds", rounds)
        self.largest = largest
        self.ceiling = ceiling
        self._recent: deque[list[Sizes]] = deque(maxlen=rounds)

    @property
    def has_history(self) -> bool:
        """Return True if there are recent updates to compare with."""
        return any(self._recent)

    @property
    def history(self) -> list[list[Sizes]]:
        """Return the sizes of recent rounds, for a checkpoint."""
        return list(self._recent)

    def resume(self, history: list[list[Sizes]]) -> None:
        """Continue with the sizes of a run that was interrupted."""
        self._recent.extend(history)

    def complaint(self, size: Sizes, others: list[Sizes], weight_scale: float = 1.0) -> str | None:
        """Return the reason for rejecting an update of this size, or None.

        Args:
            size: the size of the update.
            others: sizes that arrived in this round so far, its own included.
            weight_scale: the unit of `ceiling`.
        """
        ceiling = self.ceiling * weight_scale
        for name, value in size.items():
            if not value <= ceiling:
                return f"{name} is of size {value:.3g}, more than the ceiling of {ceiling:.3g}"
            seen = [norms[name] for group in (*self._recent, others) for norms in group]
            middle = _lower_median([x for x in seen if 0 < x <= ceiling])
            if middle is not None and value > self.largest * middle:
                return (
                    f"{name} is of size {value:.3g}, more than {self.largest:g} times the median "
                    f"of {middle:.3g}"
                )
        return None

    def outgrown(self, seen: list[Sizes], asked: int, weight_scale: float = 1.0) -> bool:
        """Return True if most updates of a round are too large for recent rounds.

        Args:
            seen: sizes that arrived in the round.
            asked: the number of clients that were asked for an update, with or without an answer. A
                majority of the answers alone could be one client's, while the others are away.
            weight_scale: the unit of `ceiling`.
        """
        ceiling = self.ceiling * weight_scale
        larger = sum(
            max(size.values()) <= ceiling and self.complaint(size, [], weight_scale) is not None
            for size in seen
        )
        return larger >= 2 and larger > asked / 2

    def forget(self) -> None:
        """Forget recent rounds, so that sizes are compared within the round only."""
        self._recent.clear()

    def close(self, seen: list[Sizes]) -> None:
        """Add the sizes of a round to the history."""
        if seen:
            self._recent.append(seen)


def _lower_median(values: list[float]) -> float | None:
    return sorted(values)[(len(values) - 1) // 2] if values else None


def norms(fields: Fields) -> Sizes:
    """Return the norm of each field; not finite if an entry is not."""
    return {name: _norm(tensors) for name, tensors in fields.items()}


def weight_scale(server: ServerState) -> float:
    """Return the unit of `Screen.ceiling`."""
    count = sum(w.numel() for w in server.weights.values())
    return (_norm(server.weights) + math.sqrt(count)) * max(1.0, server.numbers.get("sigma", 1.0))


def _norm(tensors: Tensors) -> float:
    # In float64, because squares of float32 overflow at 1e19.
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def update_template(algorithm: Algorithm, server: ServerState) -> Message:
    """Return an update with the right names, shapes and dtypes, without values."""
    meta = ServerState(
        {name: w.to("meta") for name, w in server.weights.items()},
        {
            kind: {name: t.to("meta") for name, t in tensors.items()}
            for kind, tensors in server.memory.items()
        },
        server.numbers,
        server.iteration,
    )
    down = algorithm.broadcast(meta)
    memory = algorithm.remember(meta.weights)
    carry = algorithm.begin(down, memory)
    update, _ = algorithm.finish(down, memory, carry, torch.ones((), dtype=torch.float64))
    return update
