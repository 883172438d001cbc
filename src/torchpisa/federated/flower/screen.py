"""What may not touch the global model: updates that are not what they should be."""

import math
from collections import deque

import torch

from torchpisa.checks import check_count, check_range
from torchpisa.federated.algorithms.base import Algorithm, Message, ServerState, Tensors

__all__ = ["Screen", "Sizes", "sizes", "template"]

Sizes = dict[str, float]
"""How large each part of an update is, by name."""


class Screen:
    """Decides whether an update is absurdly large.

    Names, shapes, dtypes and finiteness of an update are checked anyway. Its size (the norm of
    each field, and each number that comes with it) is compared with the median size of the updates
    of this round and of recent ones: all that arrived, since a jump that most clients share is
    not an attack. Of an even number, the lower one is the median, so that one sane client of two
    is enough. In the first round, updates are held back until all have arrived or the deadline has
    passed; later ones are judged, and summed up, as they arrive.

    A majority of clients that lie, or a lie within the limits, is not found out.

    Args:
        largest: updates larger than so many times the median are rejected.
        ceiling: updates larger than this are rejected even if there is nothing to compare with.
        rounds: how many rounds back the median looks.
    """

    def __init__(self, largest: float = 1e3, ceiling: float = 1e12, rounds: int = 5) -> None:
        check_range("largest", largest, 1)
        check_range("ceiling", ceiling, 0, low_open=True)
        check_count("rounds", rounds)
        self.largest = largest
        self.ceiling = ceiling
        self._recent: deque[list[Sizes]] = deque(maxlen=rounds)

    @property
    def knows(self) -> bool:
        """Whether there is something to compare with."""
        return any(self._recent)

    def complaint(self, size: Sizes, others: list[Sizes]) -> str | None:
        """What is wrong with an update of this size, if anything.

        Args:
            size: of the update.
            others: sizes that arrived in this round so far, its own included.
        """
        for name, value in size.items():
            if not value <= self.ceiling:
                return f"{name} is of size {value:.3g}, more than the ceiling of {self.ceiling:g}"
            known = [sizes[name] for group in (*self._recent, others) for sizes in group]
            middle = _lower_median([x for x in known if 0 < x <= self.ceiling])
            if middle is not None and value > self.largest * middle:
                return (
                    f"{name} is of size {value:.3g}, more than {self.largest:g} times the median "
                    f"of {middle:.3g}"
                )
        return None

    def close(self, seen: list[Sizes]) -> None:
        """Remember the sizes of a round."""
        if seen:
            self._recent.append(seen)


def _lower_median(values: list[float]) -> float | None:
    return sorted(values)[(len(values) - 1) // 2] if values else None


def sizes(update: Message) -> Sizes:
    """The size of each field of an update and of each of its numbers; not finite if one is not."""
    found = {name: _norm(tensors) for name, tensors in update.tensors.items()}
    return found | {name: abs(float(value)) for name, value in update.numbers.items()}


def _norm(tensors: Tensors) -> float:
    # In float64: squares of float32 overflow at 1e19.
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def template(algorithm: Algorithm, server: ServerState) -> Message:
    """An update with the right names, shapes and dtypes, whatever is in it."""
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
