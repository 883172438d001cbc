"""Stores of what clients remember between rounds, which begin with a client's first round."""

import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from torchpisa.federated import durable_files
from torchpisa.federated.algorithms.base import Fields

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["FileMemoryStore", "MemoryStore", "TensorMemoryStore"]

FILE = "clients.memory"
MAGIC = b"torchpisa-memory 1\n"
RUN_AT, PINNED_AT = 64, 128  # where the file says who wrote it, and if a state refers to it
FIRST_AT = 4096  # where records begin
ALIGNMENT = 64
HEAD = struct.Struct("<QQ")  # of a record: its client, and a number drawn when it was written


class MemoryStore(Protocol):
    """A store for the memories of all clients; a client starts with the initial memory.

    Attributes:
        changes: a number that grows with every change of a memory.
    """

    changes: int

    def load(self, clients: Sequence[int]) -> Fields:
        """Return a copy of the memory of each of `clients`, stacked in that order."""
        ...

    def save(self, clients: Sequence[int], memories: Fields) -> None:
        """Replace the memory of each of `clients` by the rows of `memories`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the entries for `load_state_dict`, which the caller must copy."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; raise ValueError, without a change, if that is not possible."""
        ...

    def release(self) -> None:
        """Free what only earlier states need; called once the last one has been written to disk."""
        ...


class TensorMemoryStore:
    """Memories stacked in tensors, on the device of the initial one.

    Args:
        initial: the memory of a client before its first round.
        clients: the largest number of clients.
    """

    def __init__(self, initial: Fields, clients: int) -> None:
        self.changes = 0
        self._initial = initial
        self._clients = clients
        self._slots: dict[int, int] = {}
        self._stacked: Fields = tree_map(lambda t: t.new_empty(0, *t.shape), initial)
        self._capacity = 0

    def load(self, clients: Sequence[int]) -> Fields:
        slots = [self._slots.get(client) for client in clients]
        if None not in slots:
            return self._at(cast(list[int], slots))
        known = [i for i, slot in enumerate(slots) if slot is not None]
        loaded: Fields = tree_map(lambda t: t.expand(len(slots), *t.shape).clone(), self._initial)
        if known:
            _assign(loaded, known, self._at([self._slots[clients[i]] for i in known]))
        return loaded

    def save(self, clients: Sequence[int], memories: Fields) -> None:
        self.changes += bool(self._initial)
        for client in clients:
            self._slots.setdefault(client, len(self._slots))
        self._reserve(len(self._slots))
        _assign(self._stacked, [self._slots[client] for client in clients], memories)

    def state_dict(self) -> dict[str, Any]:
        used = tree_map(lambda t: t[: len(self._slots)], self._stacked)
        return {"initial": self._initial, "clients": list(self._slots), "memories": used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "memories" not in state:
            raise ValueError(
                "memory must be the folder that the saved run kept its clients' memory in, got None"
            )
        device = next((t.device for t in tree_leaves(self._initial)), None)
        self._initial = tree_map(lambda t: t.to(device, copy=True), state["initial"])
        self._stacked = tree_map(lambda t: t.to(device, copy=True), state["memories"])
        self._slots = {client: slot for slot, client in enumerate(state["clients"])}
        self._capacity = len(self._slots)

    def release(self) -> None:
        pass

    def _at(self, slots: list[int]) -> Fields:
        index = _index(slots, self._stacked)
        return cast(Fields, tree_map(lambda t: t[index], self._stacked))

    def _reserve(self, needed: int) -> None:
        if needed <= self._capacity:
            return
        # Doubled, so that copying costs little, but never beyond the number of clients.
        self._capacity = max(needed, min(2 * self._capacity, self._clients))
        old = self._stacked
        self._stacked = tree_map(lambda t: t.new_empty(self._capacity, *t.shape), self._initial)
        for kind, tensors in old.items():
            for name, tensor in tensors.items():
                self._stacked[kind][name][: len(tensor)] = tensor


class FileMemoryStore:
    """Memories in a file; only those of the current clients are in RAM.

    The file holds records of one size. A record that a state refers to is never overwritten: a
    client that is saved again gets a new record, and the old one is free once `release` says that a
    later state is on disk. So a process can be killed at any time and continue from the last state.
    The file is not memory-mapped, because its pages would count as memory of the process.

    Args:
        initial: the memory of a client before its first round.
        folder: the folder of the file, made with the first record.
    """

    def __init__(self, initial: Fields, folder: str | os.PathLike[str]) -> None:
        self.changes = 0
        self._initial = initial
        self._folder = Path(folder)
        self._run = secrets.token_bytes(16)
        self._file: BinaryIO | None = None
        self._records: dict[int, tuple[int, int]] = {}  # slot and drawn number by client
        self._free: list[int] = []
        self._retired: list[int] = []  # replaced, but a state still refers to them
        self._fresh: set[int] = set()  # written since the last state
        self._slots = 0
        self._buffer = bytearray()  # kept, because new pages take as long as copying
        self._layout: list[tuple[str, str, int]] = []
        offset = ALIGNMENT
        for kind, tensors in initial.items():
            for name, tensor in tensors.items():
                self._layout.append((kind, name, offset))
                offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._size = offset

    def load(self, clients: Sequence[int]) -> Fields:
        known = [i for i, client in enumerate(clients) if client in self._records]
        stored = self._unpacked([self._records[clients[i]][0] for i in known])
        if len(known) == len(clients):
            return stored
        loaded: Fields = tree_map(lambda t: t.expand(len(clients), *t.shape).clone(), self._initial)
        _assign(loaded, known, stored)
        return loaded

    def save(self, clients: Sequence[int], memories: Fields) -> None:
        if not self._layout:
            return
        content = self._room(len(clients))
        for kind, name, column in self._columns(content):
            column.copy_(memories[kind][name].detach())
        self._opened()  # fails before anything has changed
        self.changes += 1
        for row, client in enumerate(clients):
            old = self._records[client][0] if client in self._records else None
            slot = old if old is not None and old in self._fresh else self._free_slot()
            drawn = secrets.randbits(63)
            record = content[row * self._size : (row + 1) * self._size]
            HEAD.pack_into(record, 0, client, drawn)
            self._write(self._position(slot), record)
            if old is not None and old != slot:
                self._retired.append(old)
            self._records[client] = slot, drawn
            self._fresh.add(slot)

    def state_dict(self) -> dict[str, Any]:
        if self._records:
            file = self._opened()
            self._write(PINNED_AT, memoryview(b"\1"))
            os.fsync(file.fileno())  # nothing may refer to records that are not on disk
        self._fresh.clear()
        records = [(client, slot, drawn) for client, (slot, drawn) in self._records.items()]
        table = torch.tensor(records, dtype=torch.int64, device="cpu").view(-1, 3)
        return {"initial": self._initial, "run": self._run.hex(), "records": table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "records" not in state:
            raise ValueError(
                "memory must be None, as in the saved run, whose checkpoint holds the clients' "
                f"memory, got {str(self._folder)!r}"
            )
        records = {client: (slot, drawn) for client, slot, drawn in state["records"].tolist()}
        if records and not self._path.exists():
            raise ValueError(
                f"memory must be the folder of the saved run, got {str(self._folder)!r}, which has "
                f"no file {FILE}"
            )
        before, self._run = self._run, bytes.fromhex(state["run"])
        self._close()
        try:
            for client, (slot, drawn) in records.items():
                self._check_record(client, slot, drawn)
        except BaseException:
            self._close()
            self._run = before
            raise
        device = next((t.device for t in tree_leaves(self._initial)), None)
        self._initial = tree_map(lambda t: t.to(device, copy=True), state["initial"])
        self._records = records
        used = {slot for slot, _ in records.values()}
        self._slots = max(used, default=-1) + 1
        self._free = [slot for slot in range(self._slots) if slot not in used]
        self._retired, self._fresh = [], set()

    def release(self) -> None:
        self._free += self._retired
        self._retired = []

    @property
    def _path(self) -> Path:
        return self._folder / FILE

    def _position(self, slot: int) -> int:
        return FIRST_AT + slot * self._size

    def _free_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._slots += 1
        return self._slots - 1

    def _unpacked(self, slots: Sequence[int]) -> Fields:
        loaded: Fields = {kind: {} for kind in self._initial}
        if not self._layout or not slots:
            return loaded
        content = self._room(len(slots))
        for row, slot in enumerate(slots):
            self._read(self._position(slot), content[row * self._size : (row + 1) * self._size])
        for kind, name, column in self._columns(content):
            like = self._initial[kind][name]
            loaded[kind][name] = column.to(
                like.device, copy=True, memory_format=torch.contiguous_format
            )
        return loaded

    def _room(self, records: int) -> memoryview:
        """Return a buffer for some records; the next call returns the same memory."""
        if len(self._buffer) < records * self._size:
            self._buffer = bytearray(records * self._size)
        return memoryview(self._buffer)[: records * self._size]

    def _columns(self, content: memoryview) -> Iterator[tuple[str, str, Tensor]]:
        """Yield kind, name and tensors of the records in `content`, stacked, as views of it."""
        records = torch.frombuffer(content, dtype=torch.uint8).view(-1, self._size)
        for kind, name, offset in self._layout:
            like = self._initial[kind][name]
            column = records[:, offset : offset + like.nbytes].view(like.dtype)
            yield kind, name, column.view(len(records), *like.shape)

    def _read(self, position: int, into: memoryview) -> None:
        file = self._opened()
        file.seek(position)
        done = 0
        while done < len(into):  # one call reads 2 GiB at most
            count = file.readinto(into[done:])  # type: ignore[attr-defined]
            if not count:
                end = position + len(into)
                raise ValueError(f"{self._path} is damaged: it ends before byte {end}")
            done += count

    def _write(self, position: int, content: memoryview) -> None:
        file = self._opened()
        file.seek(position)
        done = 0
        while done < len(content):
            done += file.write(content[done:])

    def _check_record(self, client: int, slot: int, drawn: int) -> None:
        head = bytearray(HEAD.size)
        self._read(self._position(slot), memoryview(head))
        if HEAD.unpack(head) != (client, drawn):
            raise ValueError(
                f"{self._path} no longer holds what client {client} remembered in the saved run: a "
                "later checkpoint has replaced it. Load the last one"
            )

    # The file: only one process has it open, and no run overwrites the records of another.

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = self._open_file()
            finalize(self, self._file.close)
            _in_use[str(self._path.resolve())] = self
        if self._file.closed:
            raise RuntimeError(
                f"another simulation of this process has taken over the folder {self._folder}"
            )
        return self._file

    def _open_file(self) -> BinaryIO:
        other = _in_use.get(str(self._path.resolve()))
        if other is not None and other._file is not None:
            other._file.close()
        durable_files.private_folder(self._folder)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        file = cast(BinaryIO, open(descriptor, "r+b", buffering=0))  # noqa: SIM115
        try:
            self._lock(file)
            first = file.read(PINNED_AT + 1)
            if not first:
                self._begin(file)
            elif not first.startswith(MAGIC):
                raise ValueError(
                    f"memory must be a folder for clients' memory, got {str(self._folder)!r}, "
                    f"whose file {FILE} is something else"
                )
            elif first[RUN_AT : RUN_AT + 16] != self._run:
                if first[PINNED_AT:] == b"\1":
                    raise ValueError(
                        f"memory must be a folder of this run alone, got {str(self._folder)!r}, "
                        "which holds the clients' memory of another: load the checkpoint that it "
                        "goes with, or remove the folder"
                    )
                self._begin(file)
        except BaseException:
            file.close()
            raise
        return file

    def _begin(self, file: BinaryIO) -> None:
        file.seek(0)
        file.truncate(0)
        file.write(MAGIC.ljust(RUN_AT, b"\0") + self._run.ljust(PINNED_AT - RUN_AT, b"\0") + b"\0")
        durable_files.sync_folder(self._folder)

    def _lock(self, file: BinaryIO) -> None:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(
                f"memory must be a folder of this process alone, got {str(self._folder)!r}, which "
                "another process works with: wait for it, or choose another folder"
            ) from error

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


_in_use: WeakValueDictionary[str, FileMemoryStore] = WeakValueDictionary()
"""The stores of this process with an open file, by path."""


def _index(rows: Sequence[int], fields: Fields) -> Tensor:
    """Return rows as an index, on the device of the tensors."""
    device = next((t.device for t in tree_leaves(fields)), None)
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)


def _assign(stacked: Fields, rows: Sequence[int], memories: Fields) -> None:
    index = _index(rows, stacked)
    for kind, tensors in memories.items():
        for name, tensor in tensors.items():
            stacked[kind][name][index] = tensor
