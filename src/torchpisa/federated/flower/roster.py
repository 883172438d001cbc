"""The roster of a training: clients by name, and the nodes behind them."""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from torchpisa.federated.flower.checkpoint import ClientRecord
from torchpisa.federated.flower.exchange import Inbox, PullError, in_requests, send
from torchpisa.federated.flower.records import PayloadError, fingerprint, read_entry

__all__ = ["Admission", "Client", "Roster"]

_log = logging.getLogger("flwr.torchpisa")

_INTRODUCTION = 1024 * 1024
"""Bytes that an introduction may have."""


@dataclass
class Client(ClientRecord):
    """A client in this run, as the server sees it.

    Attributes:
        name: its name, which does not depend on its node.
        node: its node, if one has registered for it in this run.
    """

    name: str = ""
    node: int | None = None

    @property
    def record(self) -> ClientRecord:
        """Return the record of the client for a checkpoint."""
        return ClientRecord(self.samples, self.accepted, self.life, self.key, self.counted)


@dataclass(frozen=True)
class Admission:
    """Rules for admitting clients.

    Attributes:
        samples: the number of samples of each admitted client; others are refused. None admits
            all clients and believes their numbers, within `max_share`.
        max_share: the largest share of all samples that one of three or more clients may report.
        bind_names: True if a name belongs to the key that first registered it.
    """

    samples: Mapping[str, int] | None = None
    max_share: float = 0.5
    bind_names: bool = True


class Roster:
    """The registered clients, and the nodes that were asked to register.

    Args:
        patience: seconds after which a node that has not registered is asked again.
        on_join: called with a new client before it is registered.
        admission: rules for admission.

    Attributes:
        clients: the clients, by name.
        online: the nodes that are online.
        refused: reasons for refusing nodes, by node.
        failures: reasons for which nodes could not introduce themselves at the last try, by node.
        evicted: names that are refused.
        lives: the next `life` of clients that have left.
        put_aside: reasons for not asking clients again in this run, by name.
        started: True once training has begun. Before that, shares are unknown.
        largest_count: the number of samples that a client counts with at most; see `limit_counts`.
    """

    def __init__(
        self,
        patience: float,
        on_join: Callable[[Client], None],
        admission: Admission | None = None,
    ) -> None:
        self.clients: dict[str, Client] = {}
        self.online: set[int] = set()
        self.refused: dict[int, str] = {}
        self.failures: dict[int, str] = {}
        self.evicted: set[str] = set()
        self.lives: dict[str, int] = {}
        self.put_aside: dict[str, str] = {}
        self.started = False
        self.largest_count = math.inf
        self._patience = patience
        self._on_join = on_join
        self._admission = Admission() if admission is None else admission
        self._asked: dict[int, tuple[str | None, float]] = {}
        self._names: dict[int, str] = {}  # of the nodes that have introduced themselves
        self._keys: dict[int, str | None] = {}
        self._inbox = Inbox(_INTRODUCTION)

    @property
    def samples(self) -> int:
        """Return the number of samples of all clients, absent ones included."""
        return sum(client.samples for client in self.clients.values())

    @property
    def weight(self) -> float:
        """Return the number of samples that count, of all clients, absent ones included."""
        return sum(client.weight for client in self.clients.values())

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of every client."""
        total = self.weight
        return {name: client.weight / total for name, client in self.clients.items()}

    def limit_counts(self, largest: float) -> None:
        """Limit the samples that count for a client, unless the operator has given its number."""
        if self._admission.samples is None:
            self.largest_count = largest
            for client in self.clients.values():
                client.counted = self._counted(client.samples)

    def _counted(self, samples: int) -> float | None:
        return self.largest_count if samples > self.largest_count else None

    @property
    def names(self) -> list[str]:
        """Return the names of all clients, numbers in numerical order."""
        return sorted(self.clients, key=lambda name: (len(name), name))

    @property
    def reachable(self) -> list[Client]:
        """Return the clients whose node is online, in the order of their names."""
        candidates = (self.clients[name] for name in self.names if name not in self.put_aside)
        return [client for client in candidates if client.node in self.online]

    @property
    def problems(self) -> dict[str, str]:
        """Return the reasons for which nodes that are online are not clients, by node."""
        reasons = {**self.failures, **self.refused}
        return {f"node {node}": why for node, why in reasons.items() if node in self.online}

    def update(self, grid: Grid) -> None:
        """Find nodes, ask new ones to register, and read replies, without waiting."""
        self._keys = _online(grid)
        self.online = set(self._keys)
        self._asked = {node: asked for node, asked in self._asked.items() if node in self.online}
        # A node that was offline may have been repaired.
        self.refused = {node: why for node, why in self.refused.items() if node in self.online}
        now = time.monotonic()
        for node in sorted(self.online - self._names.keys() - self.refused.keys()):
            if node in self._asked and now < self._asked[node][1] + self._patience:
                continue
            question = Message(RecordDict(), node, MessageType.QUERY, ttl=self._patience + 60)
            self._asked[node] = send(grid, question), now
        order = sorted(self._asked.items())
        questions = {question: node for node, (question, _) in order if question is not None}
        for group in in_requests(list(questions)):
            try:
                replies = self._inbox.pull(grid, group)
            except PullError as error:
                for name in group:
                    self._note_failure(questions[name], error)
                continue
            replied = {reply.metadata.reply_to_message_id: reply for reply in replies}
            for name in group:  # in the order of nodes, not of arrival
                if name in replied:
                    self._read_introduction(questions[name], replied[name])
        self._assign_nodes()
        if not self.started:
            self._drop_largest_claims()

    def _read_introduction(self, node: int, reply: Message) -> None:
        try:
            introduction = _introduction(reply)
        except PayloadError as error:
            self._note_failure(node, error)
            return
        self._asked[node] = None, self._asked[node][1]
        self.failures.pop(node, None)
        self._register(node, *introduction)

    def _note_failure(self, node: int, error: Exception) -> None:
        """Record that a node has failed to register; it is asked again later."""
        self._asked[node] = None, self._asked[node][1]
        self.failures[node] = str(error)
        _log.warning("node %d has not introduced itself: %s", node, error)

    def _register(self, node: int, name: str, claimed: int) -> None:
        samples = self._sample_count(node, name, claimed)
        if samples is None:
            return
        client, key = self.clients.get(name), self._keys[node]
        if client is None:
            if self.started and not self._may_join(node, name, samples):
                return
            life, counted = self.lives.get(name, 0), self._counted(samples)
            client = Client(samples, life=life, key=key, counted=counted, name=name)
            self._on_join(client)
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

    def _sample_count(self, node: int, name: str, claimed: int) -> int | None:
        """Return the number of samples that count for a client, or None if it is refused."""
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
        if len(self.clients) < 2 or not self._exceeds_share(samples, total):
            return True
        self._refuse(node, self._share_complaint(name, samples, total))
        return False

    def _exceeds_share(self, samples: int, total: int) -> bool:
        by_operator = self._admission.samples is not None
        return not by_operator and samples > self._admission.max_share * total

    def _share_complaint(self, name: str, samples: int, total: int) -> str:
        return (
            f"client {name!r} claims {samples} of {total} samples, more than "
            f"max_share={self._admission.max_share:g} of them: raise max_share or list it in "
            "samples if that is true"
        )

    def _drop_largest_claims(self) -> None:
        """Remove clients that report too large a share, before training starts."""
        while len(self.clients) >= 3:
            largest = max(self.clients.values(), key=lambda client: client.samples)
            if not self._exceeds_share(largest.samples, self.samples):
                return
            complaint = self._share_complaint(largest.name, largest.samples, self.samples)
            del self.clients[largest.name]
            for node in [node for node, name in self._names.items() if name == largest.name]:
                del self._names[node]
                self._refuse(node, complaint)

    def _refuse(self, node: int, reason: str) -> None:
        if node not in self.refused:
            _log.warning("node %d is refused: %s", node, reason)
        self.refused[node] = reason

    def _assign_nodes(self) -> None:
        """Give every client a node; the first to claim a name keeps it while it is online."""
        for node, name in self._names.items():
            client = self.clients.get(name)
            if client is None or node == client.node or node not in self.online:
                continue
            if client.node in self.online:
                self._refuse(node, f"it claims to be client {name!r}, which node {client.node} is")
                continue
            client.node = node
            self.refused.pop(node, None)

    def evict(self, name: str) -> Client:
        """Remove a client for good and return it; its node is not asked again."""
        client = self.clients.pop(name)
        self.evicted.add(name)
        self.lives[name] = client.life + 1
        for node in [node for node, known in self._names.items() if known == name]:
            del self._names[node]
            self._refuse(node, f"client {name!r} was evicted")
        return client

    def absent(self, chosen: Collection[str], present: Collection[str]) -> list[str]:
        """Return the chosen clients that were not present."""
        return [name for name in self.names if name in chosen and name not in present]


def _online(grid: Grid) -> dict[int, str | None]:
    """Return the nodes that are online, with the fingerprints of their keys.

    Nodes of a simulation have no keys, but random bytes in their place.
    """
    keys = {}
    for node in grid.get_nodes():
        has_key = node.public_key.startswith(b"-----BEGIN PUBLIC KEY-----")
        keys[node.node_id] = fingerprint(node.public_key) if has_key else None
    return keys


def _introduction(reply: Message) -> tuple[str, int]:
    if reply.has_error():
        raise PayloadError(str(reply.error.reason))
    name = str(read_entry(reply.content, "name", str))
    samples = int(read_entry(reply.content, "samples", int))
    if not name or len(name) > 200 or samples < 1:
        raise PayloadError(
            f"it must have a name of at most 200 characters and samples, got {name[:300]!r} and "
            f"{samples}"
        )
    return name, samples
