"""Who takes part: clients by name, and the nodes behind them."""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from torchpisa.federated.flower.exchange import PullError, ask, pull
from torchpisa.federated.flower.wire import PayloadError, entry

__all__ = ["Client", "Roster"]

_log = logging.getLogger("flwr.torchpisa")


@dataclass
class Client:
    """What the server knows about a client.

    Attributes:
        name: who it is, whatever its node id.
        samples: how many it has.
        accepted: iteration of the last update taken from it, -1 before the first.
        node: the node that speaks for it, if one has introduced itself in this run.
    """

    name: str
    samples: int
    accepted: int = -1
    node: int | None = None


class Roster:
    """The clients, and the nodes that were asked who they are.

    Args:
        patience: seconds after which a node that has not said who it is gets asked again.
        joined: called with a new client before it is entered.
    """

    def __init__(self, patience: float, joined: Callable[[Client], None]) -> None:
        self.clients: dict[str, Client] = {}
        self.online: set[int] = set()
        self._patience = patience
        self._joined = joined
        self._asked: dict[int, tuple[str | None, float]] = {}
        self._names: dict[int, str] = {}  # of the nodes that have introduced themselves
        self._refused: set[int] = set()

    @property
    def samples(self) -> int:
        """Samples of all clients, absent or not."""
        return sum(client.samples for client in self.clients.values())

    @property
    def names(self) -> list[str]:
        """All clients, numbers in their order."""
        return sorted(self.clients, key=lambda name: (len(name), name))

    @property
    def reachable(self) -> list[Client]:
        """Clients whose node is online, in the order of their names."""
        found = (self.clients[name] for name in self.names)
        return [client for client in found if client.node in self.online]

    def update(self, grid: Grid) -> None:
        """See who is online, ask nodes that are new, read what has been answered; do not wait."""
        self.online = set(grid.get_node_ids())
        self._asked = {node: asked for node, asked in self._asked.items() if node in self.online}
        now = time.monotonic()
        for node in sorted(self.online - self._names.keys() - self._refused):
            if node in self._asked and now < self._asked[node][1] + self._patience:
                continue
            question = Message(RecordDict(), node, MessageType.QUERY, ttl=self._patience + 60)
            self._asked[node] = ask(grid, question), now
        for node, (message_id, asked) in sorted(self._asked.items()):
            try:
                replies = [] if message_id is None else pull(grid, [message_id])
                if replies:
                    self._asked[node] = None, asked
                    self._enter(node, *_introduction(replies[0]))
            except (PayloadError, PullError) as error:
                # It is asked again later: what is wrong with it may pass.
                self._asked[node] = None, asked
                _log.warning("node %d has not introduced itself: %s", node, error)
        self._take_over()

    def _enter(self, node: int, name: str, samples: int) -> None:
        self._names[node] = name
        if name not in self.clients:
            client = Client(name, samples)
            self._joined(client)
            self.clients[name] = client
        elif samples != self.clients[name].samples:
            _log.warning(
                "client %r has %d samples now, and is weighted by the %d it started with",
                name,
                samples,
                self.clients[name].samples,
            )

    def _take_over(self) -> None:
        """Give every client a node; the first to claim a name has it while it is online."""
        for node, name in self._names.items():
            client = self.clients[name]
            if node == client.node or node not in self.online:
                continue
            if client.node in self.online:
                if node not in self._refused:
                    _log.warning(
                        "node %d is refused: it claims to be client %r, which node %d is",
                        node,
                        name,
                        client.node,
                    )
                    self._refused.add(node)
                continue
            client.node = node
            self._refused.discard(node)

    def lost(self, chosen: Collection[str], present: Collection[str]) -> list[str]:
        """Those who were to take part in a round and did not."""
        return [name for name in self.names if name in chosen and name not in present]


def _introduction(reply: Message) -> tuple[str, int]:
    if reply.has_error():
        raise PayloadError(str(reply.error.reason))
    name = str(entry(reply.content, "name", str))
    samples = int(entry(reply.content, "samples", int))
    if not name or samples < 1:
        raise PayloadError(f"it must have a name and samples, got {name!r} and {samples}")
    return name, samples
