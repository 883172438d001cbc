"""Differential privacy of a client, in a form that keeps the algorithms' sums right."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpisa.checks import check_range
from torchpisa.federated.algorithms.base import Algorithm, Fields, Message

__all__ = ["GaussianNoise", "check_mods"]


@dataclass(frozen=True)
class GaussianNoise:
    """Clipping and Gaussian noise for every update of a client, before it leaves the client.

    The client's memory moves by what is sent, noise included, so that the server's sum stays the
    sum of its clients' memories. The privacy loss follows from `noise` and the number of rounds by
    any accountant of the Gaussian mechanism; a round that is repeated after a crash counts twice.
    The noise comes from PyTorch's generator, which is not a cryptographic one. Numbers of samples
    are not protected.

    Args:
        clip: the norm, over all tensors of an update, that it is scaled down to.
        noise: the standard deviation of the noise in every entry, in units of `clip`.
    """

    clip: float
    noise: float

    def __post_init__(self) -> None:
        check_range("clip", self.clip, 0, low_open=True, high_open=True)
        check_range("noise", self.noise, 0, high_open=True)

    def apply(self, update: Message) -> Message:
        """Return the update as it may be sent."""
        tensors = [tensor for field in update.tensors.values() for tensor in field.values()]
        norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
        factor = min(1.0, self.clip / norm) if norm else 1.0
        # Not from the training's seed: everybody knows it and could subtract the noise.
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "big") >> 1)

        def with_noise(tensor: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            noise = noise.to(tensor.device, tensor.dtype)
            return factor * tensor + self.noise * self.clip * noise

        return Message(
            {
                kind: {name: with_noise(tensor) for name, tensor in field.items()}
                for kind, field in update.tensors.items()
            },
            update.numbers,
        )

    def protect(
        self, algorithm: Algorithm, update: Message, old: Fields, new: Fields
    ) -> tuple[Message, Fields]:
        """Return the update as it may be sent, and the memory that goes with it.

        Args:
            algorithm: what made them.
            update: what the client would send.
            old: its memory before the round.
            new: its memory after the round.
        """
        if not algorithm.clippable:
            raise ValueError(
                "algorithm must be one whose updates can be clipped, got "
                f"{type(algorithm).__name__}: the first update of a client holds its weights. Use "
                "FedDyn, FedPD or PISA with privacy=GaussianNoise(clip, noise)"
            )
        sent = self.apply(update)
        moved = {
            kind: {name: old[kind][name] + tensor for name, tensor in field.items()}
            for kind, field in algorithm.contribution(sent).items()
        }
        return sent, {**new, **moved}


_REFUSED = {
    "LocalDpMod": "privacy=GaussianNoise(clip, noise)",
    "fixedclipping_mod": "privacy=GaussianNoise(clip, noise)",
    "adaptiveclipping_mod": "privacy=GaussianNoise(clip, noise)",
    "secagg_mod": "TLS and a server that you trust",
    "secaggplus_mod": "TLS and a server that you trust",
}
"""Flower's mods that change the arrays of an answer, and what to use instead."""


def check_mods(mods: Sequence[Callable[..., Any]]) -> None:
    """Raise ValueError for a Flower mod that would corrupt what clients send."""
    for mod in mods:
        name = getattr(mod, "__name__", type(mod).__name__)
        if name in _REFUSED:
            raise ValueError(
                f"mods must not change the arrays of an answer, got {name}: it takes them for "
                "weights, but clients send updates that the server sums up and that their own "
                f"memory has to match. Use {_REFUSED[name]} instead."
            )
