"""What a server needs to go on after it was killed."""

from pathlib import Path
from typing import NamedTuple

from torchpisa.federated.algorithms.base import Algorithm, ServerState, Tensors
from torchpisa.federated.flower import files

__all__ = ["Checkpoint", "load", "save"]


class Checkpoint(NamedTuple):
    """A server between two rounds.

    Attributes:
        training: names the training, so that clients do not mix up two of them.
        server: weights, memory and numbers.
        clients: samples and iteration of the last update taken, by name.
    """

    training: str
    server: ServerState
    clients: dict[str, tuple[int, int]]


def save(file: Path, algorithm: Algorithm, seed: int, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; when this returns, it survives a crash of the machine."""
    files.save(
        file,
        {
            "setting": {"algorithm": algorithm.fingerprint, "seed": seed},
            "training": checkpoint.training,
            "server": vars(checkpoint.server),
            "clients": checkpoint.clients,
        },
    )


def load(file: Path, algorithm: Algorithm, seed: int, weights: Tensors) -> Checkpoint | None:
    """Read a checkpoint, if there is one, of this algorithm, seed and model."""
    saved = files.load(file)
    if saved is None:
        return None
    setting = {"algorithm": algorithm.fingerprint, "seed": seed}
    for name, here in setting.items():
        if saved["setting"][name] != here:
            raise ValueError(
                f"{name} must be that of the training in {file}, {saved['setting'][name]}, "
                f"got {here}"
            )
    server = ServerState(**saved["server"])
    there = {name: tuple(w.shape) for name, w in server.weights.items()}
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    if there != shapes:
        raise ValueError(
            f"initial_arrays must be those of the model in {file}, {there}, got {shapes}"
        )
    return Checkpoint(saved["training"], server, saved["clients"])
