"""A client's memory, kept in two phases so that client and server never disagree about it.

A client's dual may only move if the server has taken the update that moved it, and the client
learns that in the next round at the earliest. So it keeps `committed`, the memory that goes with
the last update that the server is known to have taken, and `pending`, that of the last update it
has computed. Every train message says which update of this client the server took last.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from flwr.app import ArrayRecord, ConfigRecord, Context

from torchpisa.federated.algorithms.base import Fields
from torchpisa.federated.flower import files
from torchpisa.federated.flower.wire import PayloadError, arrays_of, tensors_of

__all__ = [
    "FolderStore",
    "Memory",
    "MemoryMismatchError",
    "RunStore",
    "Store",
    "training_folder",
]

NONE = -1
"""The iteration of no update at all."""


class MemoryMismatchError(RuntimeError):
    """Client and server do not agree about which updates were taken."""


@dataclass
class Memory:
    """Both phases.

    Attributes:
        committed: goes with update `taken`; None before the first.
        taken: iteration of the last update that the server is known to have taken.
        pending: goes with update `asked`, of which nothing is known yet.
        asked: iteration of the last update computed.
        life: how often the server has started this client anew.
    """

    committed: Fields | None = None
    taken: int = NONE
    pending: Fields | None = None
    asked: int = NONE
    life: int = 0

    def settle(self, accepted: int, iteration: int, life: int = 0) -> Fields | None:
        """The memory to go on from; None is that of a client before its first round.

        Args:
            accepted: iteration of the last update that the server took.
            iteration: of the update that it asks for now.
            life: how often the server has started this client anew. If it has done so since, it
                has taken out what this client had contributed, and the memory is void.
        """
        if life > self.life:
            self.committed, self.taken, self.pending, self.asked = None, NONE, None, NONE
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
            # This message was on its way for long. What it says about `accepted` is history:
            # going by it would drop an update that the server may have taken since.
            raise MemoryMismatchError(
                f"update {iteration} is asked for after update {self.asked} was computed"
            )
        if taken:
            self.committed, self.taken = self.pending, self.asked
        self.pending, self.asked = None, NONE
        return self.committed

    def wait(self, memory: Fields, iteration: int) -> None:
        """Keep the memory that goes with an update until the server has spoken."""
        self.pending, self.asked = memory, iteration


class Store(Protocol):
    """Where a client's memory is between messages."""

    def load(self) -> Memory:
        """The memory; a new one if there is none."""
        ...

    def save(self, memory: Memory) -> None:
        """Keep it; it is safe when this returns."""
        ...


class FolderStore:
    """A file per training and client: survives the SuperNode, and the run.

    Args:
        folder: of this SuperNode, or of several on one machine.
        training: the training, which the server has named.
        name: the client.
    """

    def __init__(self, folder: Path, training: str, name: str) -> None:
        self.file = training_folder(folder, training) / f"{_one_name(name)}.pt"

    def load(self) -> Memory:
        saved = files.load(self.file)
        return Memory() if saved is None else Memory(**saved)

    def save(self, memory: Memory) -> None:
        files.save(self.file, vars(memory))


def training_folder(folder: Path, training: str) -> Path:
    """Where the clients in a folder keep their memory of a training: always inside that folder."""
    return folder / _one_name(training)


def _one_name(text: str) -> str:
    """A text as the name of one file or folder, whatever is in it."""
    quoted = quote(text, safe="")
    # These are legal in names, but alone they mean another folder.
    return (quoted.replace(".", "%2E") or "%") if not quoted.strip(".") else quoted


class RunStore:
    """Flower's `context.state`: lives as long as the run and the SuperNode do.

    Args:
        context: of the message.
        like: the memory of a client before its first round.
    """

    _HEAD = "torchpisa.memory"

    def __init__(self, context: Context, like: Callable[[], Fields]) -> None:
        self._state = context.state
        self._like = like

    def load(self) -> Memory:
        head = self._state.config_records.get(self._HEAD)
        if head is None:
            return Memory()
        taken, asked, life = head["taken"], head["asked"], head["life"]
        if not (isinstance(taken, int) and isinstance(asked, int) and isinstance(life, int)):
            raise PayloadError(f"context.state holds {dict(head)}, not written by torchpisa")
        return Memory(self._fields("committed"), taken, self._fields("pending"), asked, life)

    def save(self, memory: Memory) -> None:
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
        kept = self._state.array_records
        return {kind: tensors_of(kept[f"torchpisa.{phase}.{kind}"]) for kind in self._like()}
