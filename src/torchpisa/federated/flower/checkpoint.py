"""What a server needs to go on after it was killed, and the lock that keeps a second one out."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchpisa.federated.algorithms.base import Algorithm, Fields, ServerState, Tensors
from torchpisa.federated.flower import files
from torchpisa.federated.flower.screen import Sizes

try:
    import fcntl
except ImportError:  # Windows: the generation number is what is left
    fcntl = None  # type: ignore[assignment]

__all__ = ["Checkpoint", "ClientRecord", "InUseError", "load", "locked", "read", "save", "write"]


class InUseError(RuntimeError):
    """Another run is writing this checkpoint."""


@dataclass
class ClientRecord:
    """What outlives a run of a client.

    Attributes:
        samples: how many it has.
        accepted: iteration of the last update taken from it, -1 before the first.
        life: how often it was started anew.
        key: fingerprint of the public key of its node.
    """

    samples: int
    accepted: int = -1
    life: int = 0
    key: str | None = None


@dataclass
class Checkpoint:
    """A server between two rounds.

    Attributes:
        training: names the training, so that clients do not mix up two of them.
        server: weights, memory and numbers.
        clients: by name.
        ledger: what each client has added to the server's memory; see `Ledger`.
        sizes: of the updates of recent rounds, for the screen.
        evicted: clients that are not let in again.
        lives: of clients that have left: what they remember is void if they come back.
        generation: how often the checkpoint was written.
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
    generation: int = 0
    run: str = ""
    setting: dict[str, Any] = field(default_factory=dict)


def save(file: Path, algorithm: Algorithm, seed: int, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; when this returns, it survives a crash of the machine."""
    checkpoint.setting = {"algorithm": algorithm.fingerprint, "seed": seed}
    write(file, checkpoint)


def write(file: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint as the generation after the one it is of.

    Raises:
        InUseError: the file is not of that generation any more.
    """
    there = files.generation(file) or 0
    if there != checkpoint.generation:
        raise InUseError(
            f"{file} was generation {checkpoint.generation} when this run last had it and is "
            f"generation {there} now: another run writes it. This run ends; nothing of it is saved."
        )
    checkpoint.generation += 1
    value = {
        **vars(checkpoint),
        "server": vars(checkpoint.server),
        "clients": {name: asdict(client) for name, client in checkpoint.clients.items()},
    }
    files.save(file, value, checkpoint.generation)


def read(file: Path) -> Checkpoint | None:
    """Read a checkpoint, if there is one."""
    saved = files.load(file)
    if saved is None:
        return None
    saved["server"] = ServerState(**saved["server"])
    saved["clients"] = {name: ClientRecord(**kept) for name, kept in saved["clients"].items()}
    return Checkpoint(**saved)


def load(file: Path, algorithm: Algorithm, seed: int, weights: Tensors) -> Checkpoint | None:
    """Read a checkpoint, if there is one, of this algorithm, seed and model."""
    saved = read(file)
    if saved is None:
        return None
    setting = {"algorithm": algorithm.fingerprint, "seed": seed}
    for name, here in setting.items():
        if saved.setting[name] != here:
            raise ValueError(
                f"{name} must be that of the training in {file}, {saved.setting[name]}, got {here}"
            )
    there = {name: tuple(w.shape) for name, w in saved.server.weights.items()}
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    if there != shapes:
        raise ValueError(
            f"initial_arrays must be those of the model in {file}, {there}, got {shapes}"
        )
    return saved


@contextmanager
def locked(file: Path, run: str) -> Iterator[None]:
    """Keep other runs from a checkpoint; the lock ends with the process, however it ends.

    Args:
        file: the checkpoint.
        run: Flower's id of this run, which others are told.

    Raises:
        InUseError: another run holds it.
    """
    files.private_folder(file.parent)
    lock = file.with_name(file.name + ".lock")
    with open(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600), "r+") as stream:
        if fcntl is not None:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InUseError(_holder(file, stream.read(), run)) from error
        stream.truncate(0)
        json.dump({"run": run, "process": os.getpid(), "host": socket.gethostname()}, stream)
        stream.flush()
        yield
        stream.seek(0)
        stream.truncate(0)


def _holder(file: Path, text: str, run: str) -> str:
    try:
        held = json.loads(text)
    except ValueError:
        held = {}
    return (
        f"run {run} is refused: run {held.get('run', 'unknown')} (process "
        f"{held.get('process', 'unknown')} on {held.get('host', 'unknown')}) trains with the "
        f"checkpoint {file}. Wait for it, stop it with `flwr stop`, or give this run another "
        "checkpoint."
    )
