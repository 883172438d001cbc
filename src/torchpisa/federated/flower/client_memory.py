"""A client's memory, kept in two phases so that client and server never disagree about it.

A client's dual may only move if the server has taken the update that moved it, and the client
learns that in the next round at the earliest. So it keeps `committed`, the memory that goes with
the last update that the server is known to have taken, and `pending`, that of the last update it
has computed. Every train message says which update of this client the server took last.

If the server also counts updates that are late, the client keeps the answer that goes with
`pending`, too: should it be lost on its way, because a process was killed, it is sent again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from flwr.app import ArrayRecord, ConfigRecord, Context

from torchpisa.federated import durable_files
from torchpisa.federated.algorithms.base import Fields
from torchpisa.federated.flower.records import PayloadError, arrays_of, tensors_of

__all__ = [
    "ClientMemory",
    "ClientMemoryStore",
    "FolderMemoryStore",
    "MemoryMismatchError",
    "RunMemoryStore",
    "training_folder",
]

NO_UPDATE = -1
"""Stands for the iteration of an update if there is none."""


class MemoryMismatchError(RuntimeError):
    """A disagreement of client and server about which updates were taken."""


@dataclass
class ClientMemory:
    """A client's memory in its two phases, committed and pending.

    Attributes:
        committed: goes with update `taken`; None before the first.
        taken: iteration of the last update that the server is known to have taken.
        pending: goes with update `asked`, of which nothing is known yet.
        asked: iteration of the last update computed.
        life: the number of times that the server has restarted this client.
        answer: the update that goes with `pending`, if it may be sent again.
    """

    committed: Fields | None = None
    taken: int = NO_UPDATE
    pending: Fields | None = None
    asked: int = NO_UPDATE
    life: int = 0
    answer: dict[str, Any] | None = None

    def unsettled_answer(
        self, accepted: int, iteration: int, life: int, oldest: int
    ) -> Mapping[str, Any] | None:
        """Return the last answer if the server has not taken it and still would, else None.

        Args:
            accepted: iteration of the last update that the server took.
            iteration: the iteration of the update that it requests.
            life: the number of times that the server has restarted this client.
            oldest: iteration of the oldest update that the server would take.
        """
        untaken = self.pending is not None and accepted == self.taken and life == self.life
        return self.answer if untaken and oldest <= self.asked <= iteration else None

    def resolve(self, accepted: int, iteration: int, life: int = 0) -> Fields | None:
        """Return the memory to continue from; None stands for that of a new client.

        Args:
            accepted: iteration of the last update that the server took.
            iteration: the iteration of the update that it requests.
            life: the number of times that the server has restarted this client. If it has grown,
                the server has taken out what this client contributed, and the memory is void.
        """
        if life > self.life:
            self.committed, self.taken, self.pending, self.asked = None, NO_UPDATE, None, NO_UPDATE
            self.life = life
        if life < self.life:
            raise MemoryMismatchError(
                f"this message is for life {life} of this client, which is in life {self.life}"
            )
        taken = self.pending is not None and accepted == self.asked
        if not taken and accepted != self.taken:
            computed = "none" if self.pending is None else str(self.asked)
            raise MemoryMismatchError(
                f"the server took update {accepted} of this client last, but its memory goes with "
                f"update {self.taken} (pending: {computed}; -1 is none): either its folder was "
                "lost, or the server was set back. This client stays out until the one that lost "
                "its state has it back, or until the operator of the server starts it anew: "
                "python -m torchpisa.federated.flower restart CHECKPOINT CLIENT."
            )
        if iteration < self.asked:
            # The message is old, and so is its `accepted`: relying on it would drop an update that
            # the server may have taken since.
            raise MemoryMismatchError(
                f"update {iteration} is asked for after update {self.asked} was computed"
            )
        if taken:
            self.committed, self.taken = self.pending, self.asked
        self.pending, self.asked, self.answer = None, NO_UPDATE, None
        return self.committed

    def set_pending(
        self, memory: Fields, iteration: int, answer: dict[str, Any] | None = None
    ) -> None:
        """Keep the memory that goes with an update until the server has taken or left it."""
        self.pending, self.asked, self.answer = memory, iteration, answer


class ClientMemoryStore(Protocol):
    """The place where a client's memory is kept between messages."""

    def load(self) -> ClientMemory:
        """Return the memory; a new one if none was saved."""
        ...

    def save(self, memory: ClientMemory) -> None:
        """Save the memory; it is safe once this returns."""
        ...


class FolderMemoryStore:
    """A file per training and client, which outlives the SuperNode and the run.

    Args:
        folder: the folder of this SuperNode, or of several on one machine.
        training: the training, which the server has named.
        name: the client.
    """

    def __init__(self, folder: Path, training: str, name: str) -> None:
        self.file = training_folder(folder, training) / f"{_quoted_name(name)}.pt"

    def load(self) -> ClientMemory:
        saved = durable_files.load(self.file)
        return ClientMemory() if saved is None else ClientMemory(**saved)

    def save(self, memory: ClientMemory) -> None:
        durable_files.save(self.file, vars(memory))


def training_folder(folder: Path, training: str) -> Path:
    """Return the folder of a training, which always lies inside `folder`."""
    return folder / _quoted_name(training)


def _quoted_name(text: str) -> str:
    """Return a text as the name of one file or folder, whatever characters it has."""
    quoted = quote(text, safe="")
    # "." and ".." are folders.
    return (quoted.replace(".", "%2E") or "%") if not quoted.strip(".") else quoted


class RunMemoryStore:
    """Flower's `context.state`, which lives as long as the run and the SuperNode.

    It keeps no answers: whoever could ask for one again has lost the rest as well.

    Args:
        context: the context of the message.
        like: the memory of a client before its first round.
    """

    _HEAD = "torchpisa.memory"

    def __init__(self, context: Context, like: Callable[[], Fields]) -> None:
        self._state = context.state
        self._like = like

    def load(self) -> ClientMemory:
        head = self._state.config_records.get(self._HEAD)
        if head is None:
            return ClientMemory()
        taken, asked, life = head["taken"], head["asked"], head["life"]
        if not (isinstance(taken, int) and isinstance(asked, int) and isinstance(life, int)):
            raise PayloadError(f"context.state holds {dict(head)}, not written by torchpisa")
        return ClientMemory(self._fields("committed"), taken, self._fields("pending"), asked, life)

    def save(self, memory: ClientMemory) -> None:
        for phase, fields in (("committed", memory.committed), ("pending", memory.pending)):
            for kind in self._like():
                key = f"torchpisa.{phase}.{kind}"
                self._state[key] = arrays_of(fields[kind]) if fields is not None else ArrayRecord()
        head = {"taken": memory.taken, "asked": memory.asked, "life": memory.life}
        head |= {"committed": memory.committed is not None, "pending": memory.pending is not None}
        self._state[self._HEAD] = ConfigRecord({name: int(value) for name, value in head.items()})

    def _fields(self, phase: str) -> Fields | None:
        if not self._state.config_records[self._HEAD][phase]:
            return None
        records = self._state.array_records
        return {kind: tensors_of(records[f"torchpisa.{phase}.{kind}"]) for kind in self._like()}
