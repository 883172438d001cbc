"""Malicious clients for a simulation: what they send instead of their updates."""

from collections.abc import Callable, Collection, Sequence

from torch.utils._pytree import tree_map

from torchpisa.federated import Simulation
from torchpisa.federated.algorithms.base import Message, add
from torchpisa.federated.clients.local_round import RoundResult

__all__ = ["LIES", "Lie", "corrupt"]

Lie = Callable[[Message, Message], Message]
"""From a client's update and the first that it made to what it sends."""

LIES: dict[str, Lie] = {
    "scaling": lambda update, first: _times(10.0, update),
    "sign flip": lambda update, first: _times(-3.0, update),
    "replay": lambda update, first: first,
}


def _times(factor: float, update: Message) -> Message:
    return Message(tree_map(lambda tensor: factor * tensor, update.tensors), update.numbers)


def corrupt(simulation: Simulation, client: int, lie: Lie) -> None:
    """Let a client of a simulation lie from now on. It goes on from its memory as if honest."""
    simulation._clients = _Corrupted(simulation, client, lie)  # type: ignore[assignment]


class _Corrupted:
    """The clients of a simulation, one of which sends other updates than it has computed."""

    def __init__(self, simulation: Simulation, client: int, lie: Lie) -> None:
        self._honest = simulation._clients
        self._alphas: list[float] = simulation._alphas.tolist()
        self._client = client
        self._lie = lie
        self._first: Message | None = None

    def round(
        self, down: Message, present: Sequence[int], iteration: int, separate: Collection[int] = ()
    ) -> RoundResult:
        done = self._honest.round(down, present, iteration, set(present))
        updates = dict(done.separate)
        if self._client in updates:
            self._first = self._first or updates[self._client]
            updates[self._client] = self._lie(updates[self._client], self._first)
        total = None
        for client in present:
            if client not in separate:
                total = add(total, updates[client], self._alphas[client])
        held = {client: updates[client] for client in present if client in separate}
        return done._replace(total=total, separate=held)
