"""The checkpoint of a server, and a lock against two runs with the same one."""

import json
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchpisa.federated import durable_files
from torchpisa.federated.algorithms.base import Algorithm, Fields, ServerState, Tensors
from torchpisa.federated.flower.screen import Sizes

try:
    import fcntl
except ImportError:  # Windows, where only the generation number tells of a second writer
    fcntl = None  # type: ignore[assignment]

__all__ = ["Checkpoint", "ClientRecord", "InUseError", "load", "locked", "read", "save", "write"]


class InUseError(RuntimeError):
    """Raised if another run is using the checkpoint."""


@dataclass
class ClientRecord:
    """The part of a client that outlives a run.

    Attributes:
        samples: the number of its samples.
        accepted: iteration of the last update taken from it, -1 before the first.
        life: the number of times it was restarted with an empty memory.
        key: fingerprint of the public key of its node.
        counted: the number of samples for its share, if it is not `samples`.
    """

    samples: int
    accepted: int = -1
    life: int = 0
    key: str | None = None
    counted: float | None = None

    @property
    def weight(self) -> float:
        """Return the number of samples that the client's share is computed from."""
        return self.samples if self.counted is None else self.counted


@dataclass
class Checkpoint:
    """The state of a server between two rounds.

    Attributes:
        training: the id of the training.
        server: weights, memory and numbers.
        clients: the clients, by name.
        ledger: the contributions of each client to the server's memory; see `Ledger`.
        sizes: sizes of the updates of recent rounds, for the screen.
        evicted: clients that are not let in again.
        lives: the next `life` of clients that have left, which voids their memory.
        judge: the state of the `Judge`, if there is one.
        largest_count: the number of samples that a client counts with at most.
        spent: the privacy loss of each client; see `PrivacyAccount`.
        generation: the number of times that the checkpoint was written.
        run: Flower's id of the run that wrote it.
        setting: algorithm and seed, which must stay the same.
    """

    training: str
    server: ServerState
    clients: dict[str, ClientRecord] = field(default_factory=dict)
    ledger: dict[str, Fields] = field(default_factory=dict)
    sizes: list[list[Sizes]] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    lives: dict[str, int] = field(default_factory=dict)
    judge: dict[str, Any] | None = None
    largest_count: float = math.inf
    spent: dict[str, float] = field(default_factory=dict)
    generation: int = 0
    run: str = ""
    setting: dict[str, Any] = field(default_factory=dict)


def save(file: Path, algorithm: Algorithm, seed: int, checkpoint: Checkpoint) -> None:
    """Write a checkpoint. Once this returns, it survives a crash of the machine."""
    checkpoint.setting = {"algorithm": algorithm.fingerprint, "seed": seed}
    write(file, checkpoint)


def write(file: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint as the next generation.

    Raises:
        InUseError: the file is not of that generation any more.
    """
    on_disk = durable_files.generation(file) or 0
    if on_disk != checkpoint.generation:
        raise InUseError(
            f"{file} was generation {checkpoint.generation} when this run last had it and is "
            f"generation {on_disk} now: another run writes it. This run ends; nothing of it is "
            "saved."
        )
    checkpoint.generation += 1
    value = {
        **vars(checkpoint),
        "server": vars(checkpoint.server),
        "clients": {name: asdict(client) for name, client in checkpoint.clients.items()},
    }
    durable_files.save(file, value, checkpoint.generation)


def read(file: Path) -> Checkpoint | None:
    """Return the checkpoint in a file, or None if there is no file."""
    saved = durable_files.load(file)
    if saved is None:
        return None
    saved["server"] = ServerState(**saved["server"])
    saved["clients"] = {name: ClientRecord(**record) for name, record in saved["clients"].items()}
    return Checkpoint(**saved)


def load(file: Path, algorithm: Algorithm, seed: int, weights: Tensors) -> Checkpoint | None:
    """Return the checkpoint in a file, or None; it must be of this algorithm, seed and model."""
    saved = read(file)
    if saved is None:
        return None
    setting = {"algorithm": algorithm.fingerprint, "seed": seed}
    for name, current in setting.items():
        if saved.setting[name] != current:
            raise ValueError(
                f"{name} must be that of the training in {file}, {saved.setting[name]}, "
                f"got {current}"
            )
    saved_shapes = {name: tuple(w.shape) for name, w in saved.server.weights.items()}
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    if saved_shapes != shapes:
        raise ValueError(
            f"initial_arrays must be those of the model in {file}, {saved_shapes}, got {shapes}"
        )
    return saved


@contextmanager
def locked(file: Path, run: str) -> Iterator[None]:
    """Lock a checkpoint against other runs, at most until the process ends.

    Args:
        file: the checkpoint.
        run: Flower's id of this run, for the error message of others.

    Raises:
        InUseError: another run holds it.
    """
    durable_files.private_folder(file.parent)
    lock = file.with_name(file.name + ".lock")
    with open(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600), "r+") as stream:
        if fcntl is not None:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InUseError(_refusal(file, stream.read(), run)) from error
        stream.truncate(0)
        json.dump({"run": run, "process": os.getpid(), "host": socket.gethostname()}, stream)
        stream.flush()
        yield
        stream.seek(0)
        stream.truncate(0)


def _refusal(file: Path, text: str, run: str) -> str:
    try:
        holder = json.loads(text)
    except ValueError:
        holder = {}
    return (
        f"run {run} is refused: run {holder.get('run', 'unknown')} (process "
        f"{holder.get('process', 'unknown')} on {holder.get('host', 'unknown')}) trains with the "
        f"checkpoint {file}. Wait for it, stop it with `flwr stop`, or give this run another "
        "checkpoint."
    )
