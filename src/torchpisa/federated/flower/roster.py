"""Who takes part: clients by name, and the nodes behind them."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from torchpisa.federated.flower.checkpoint import ClientRecord
from torchpisa.federated.flower.exchange import Inbox, PullError, ask
from torchpisa.federated.flower.wire import PayloadError, entry, fingerprint

__all__ = ["Admission", "Client", "Roster"]

_log = logging.getLogger("flwr.torchpisa")

_INTRODUCTION = 1024 * 1024
"""Bytes that an introduction may have."""


@dataclass
class Client(ClientRecord):
    """What the server knows about a client.

    Attributes:
        name: who it is, whatever its node id.
        node: the node that speaks for it, if one has introduced itself in this run.
    """

    name: str = ""
    node: int | None = None

    @property
    def record(self) -> ClientRecord:
        """What outlives the run."""
        return ClientRecord(self.samples, self.accepted, self.life, self.key)


@dataclass(frozen=True)
class Admission:
    """Who is let in.

    Attributes:
        samples: the numbers of samples that count, by client; others are not let in. None
            believes what clients say, within `max_share`.
        max_share: the largest part of all samples that one of three or more clients may claim.
        bind_names: whether a name belongs to the key that first introduced itself with it.
    """

    samples: Mapping[str, int] | None = None
    max_share: float = 0.5
    bind_names: bool = True


class Roster:
    """The clients, and the nodes that were asked who they are.

    Args:
        patience: seconds after which a node that has not said who it is gets asked again.
        joined: called with a new client before it is entered.
        admission: who is let in.

    Attributes:
        clients: by name.
        online: the nodes that are.
        refused: why a node was not let in.
        evicted: names that are not let in.
        lives: of clients that have left.
        aside: why a client is not asked any more in this run.
        started: whether training has begun. Before, shares are not known yet.
    """

    def __init__(
        self,
        patience: float,
        joined: Callable[[Client], None],
        admission: Admission | None = None,
    ) -> None:
        self.clients: dict[str, Client] = {}
        self.online: set[int] = set()
        self.refused: dict[int, str] = {}
        self.evicted: set[str] = set()
        self.lives: dict[str, int] = {}
        self.aside: dict[str, str] = {}
        self.started = False
        self._patience = patience
        self._joined = joined
        self._admission = Admission() if admission is None else admission
        self._asked: dict[int, tuple[str | None, float]] = {}
        self._names: dict[int, str] = {}  # of the nodes that have introduced themselves
        self._keys: dict[int, str | None] = {}
        self._inbox = Inbox(_INTRODUCTION)

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
        found = (self.clients[name] for name in self.names if name not in self.aside)
        return [client for client in found if client.node in self.online]

    def update(self, grid: Grid) -> None:
        """See who is online, ask nodes that are new, read what has been answered; do not wait."""
        self._keys = _online(grid)
        self.online = set(self._keys)
        self._asked = {node: asked for node, asked in self._asked.items() if node in self.online}
        # A node that has gone may have been mended when it is back.
        self.refused = {node: why for node, why in self.refused.items() if node in self.online}
        now = time.monotonic()
        for node in sorted(self.online - self._names.keys() - self.refused.keys()):
            if node in self._asked and now < self._asked[node][1] + self._patience:
                continue
            question = Message(RecordDict(), node, MessageType.QUERY, ttl=self._patience + 60)
            self._asked[node] = ask(grid, question), now
        for node, (message_id, asked) in sorted(self._asked.items()):
            try:
                replies = [] if message_id is None else self._inbox.pull(grid, [message_id])
                if replies:
                    self._asked[node] = None, asked
                    self._enter(node, *_introduction(replies[0]))
            except (PayloadError, PullError) as error:
                # It is asked again later: what is wrong with it may pass.
                self._asked[node] = None, asked
                _log.warning("node %d has not introduced itself: %s", node, error)
        self._take_over()
        if not self.started:
            self._trim()

    def _enter(self, node: int, name: str, claimed: int) -> None:
        samples = self._counted(node, name, claimed)
        if samples is None:
            return
        client, key = self.clients.get(name), self._keys[node]
        if client is None:
            if self.started and not self._may_join(node, name, samples):
                return
            client = Client(samples, life=self.lives.get(name, 0), key=key, name=name)
            self._joined(client)
            self.clients[name] = client
        elif self._admission.bind_names and key is not None:
            if client.key is None:
                client.key = key
            elif client.key != key:
                self._refuse(
                    node,
                    f"it claims to be client {name!r}, who has another key ({client.key[:12]}, not "
                    f"{key[:12]}). If it was given a new one: python -m torchpisa.federated.flower "
                    "release CHECKPOINT CLIENT",
                )
                return
        self._names[node] = name
        if samples != client.samples:
            _log.warning(
                "client %r has %d samples now, and is weighted by the %d it started with",
                *(name, samples, client.samples),
            )

    def _counted(self, node: int, name: str, claimed: int) -> int | None:
        """How many samples of a client count; None if it is not let in."""
        if name in self.evicted:
            self._refuse(node, f"client {name!r} was evicted")
            return None
        table = self._admission.samples
        if table is None:
            return claimed
        if name not in table:
            self._refuse(node, f"client {name!r} is not in samples")
            return None
        if claimed != table[name]:
            _log.warning(
                "client %r says it has %d samples; what counts is samples[%r] = %d",
                *(name, claimed, name, table[name]),
            )
        return table[name]

    def _may_join(self, node: int, name: str, samples: int) -> bool:
        total = self.samples + samples
        if len(self.clients) < 2 or not self._too_much(samples, total):
            return True
        self._refuse(node, self._complaint(name, samples, total))
        return False

    def _too_much(self, samples: int, total: int) -> bool:
        known = self._admission.samples is not None  # then the operator vouches for it
        return not known and samples > self._admission.max_share * total

    def _complaint(self, name: str, samples: int, total: int) -> str:
        return (
            f"client {name!r} claims {samples} of {total} samples, more than "
            f"max_share={self._admission.max_share:g} of them: raise max_share or list it in "
            "samples if that is true"
        )

    def _trim(self) -> None:
        """Before the start, leave out who claims too much beside the others."""
        while len(self.clients) >= 3:
            largest = max(self.clients.values(), key=lambda client: client.samples)
            if not self._too_much(largest.samples, self.samples):
                return
            complaint = self._complaint(largest.name, largest.samples, self.samples)
            del self.clients[largest.name]
            for node in [node for node, name in self._names.items() if name == largest.name]:
                del self._names[node]
                self._refuse(node, complaint)

    def _refuse(self, node: int, reason: str) -> None:
        if node not in self.refused:
            _log.warning("node %d is refused: %s", node, reason)
        self.refused[node] = reason

    def _take_over(self) -> None:
        """Give every client a node; the first to claim a name has it while it is online."""
        for node, name in self._names.items():
            client = self.clients.get(name)
            if client is None or node == client.node or node not in self.online:
                continue
            if client.node in self.online:
                self._refuse(node, f"it claims to be client {name!r}, which node {client.node} is")
                continue
            client.node = node
            self.refused.pop(node, None)

    def leave(self, name: str) -> Client:
        """Take a client off the roster; its node is not asked again."""
        client = self.clients.pop(name)
        self.evicted.add(name)
        self.lives[name] = client.life + 1
        for node in [node for node, known in self._names.items() if known == name]:
            del self._names[node]
            self._refuse(node, f"client {name!r} was evicted")
        return client

    def lost(self, chosen: Collection[str], present: Collection[str]) -> list[str]:
        """Those who were to take part in a round and did not."""
        return [name for name in self.names if name in chosen and name not in present]


def _online(grid: Grid) -> dict[int, str | None]:
    """The nodes that are online, with the fingerprints of their keys.

    Nodes of a simulation have no keys, but random bytes in their place.
    """
    found = {}
    for node in grid.get_nodes():
        keyed = node.public_key.startswith(b"-----BEGIN PUBLIC KEY-----")
        found[node.node_id] = fingerprint(node.public_key) if keyed else None
    return found


def _introduction(reply: Message) -> tuple[str, int]:
    if reply.has_error():
        raise PayloadError(str(reply.error.reason))
    name = str(entry(reply.content, "name", str))
    samples = int(entry(reply.content, "samples", int))
    if not name or len(name) > 200 or samples < 1:
        raise PayloadError(
            f"it must have a name of at most 200 characters and samples, got {name[:300]!r} and "
            f"{samples}"
        )
    return name, samples
