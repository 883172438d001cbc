"""Local work: the samples that each local step of a client uses."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchpisa.checks import check_count, check_range
from torchpisa.data import permutation

__all__ = ["Epochs", "FullGradient", "LocalWork", "Minibatches", "check_local"]

Key = tuple[int, str]
"""Seed and name of the client: what its shuffles depend on, besides the round."""


@runtime_checkable
class LocalWork(Protocol):
    """The local steps of a round, each with the samples that its gradient averages over."""

    @property
    def chunk(self) -> int:
        """Return the number of samples in memory at once; a larger gradient is accumulated."""
        ...

    def plan(self, samples: int, key: Key, iteration: int) -> list[Tensor]:
        """Return the indices of the samples for each local step of round `iteration`, from 0.

        A pure function of its arguments: a round that is repeated repeats exactly, and nothing
        needs saving.
        """
        ...


@dataclass(frozen=True)
class FullGradient:
    """The gradient over all data of the client, in every local step.

    Args:
        steps: local steps per round; 1 in the paper.
        chunk: samples in memory at once. It changes rounding, nothing else.
    """

    steps: int = 1
    chunk: int = 8192

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_count("chunk", self.chunk)

    def plan(self, samples: int, key: Key, iteration: int) -> list[Tensor]:
        return [torch.arange(samples, device="cpu")] * self.steps


@dataclass(frozen=True)
class Minibatches:
    """A few mini-batches per round, which continue through shuffled passes over the data.

    Every mini-batch is full: one that reaches the end of a pass is filled from the next, and a
    client with fewer samples than `batch_size` uses all of them.

    Args:
        steps: local steps per round; 1 is the stochastic algorithm as the paper prints it.
        batch_size: samples in each.
        chunk: samples in memory at once.
    """

    steps: int = 1
    batch_size: int = 64
    chunk: int = 8192

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_count("batch_size", self.batch_size)
        check_count("chunk", self.chunk)

    def plan(self, samples: int, key: Key, iteration: int) -> list[Tensor]:
        size = min(self.batch_size, samples)
        return _continued(samples, key, iteration, self.steps * size, size)


@dataclass(frozen=True)
class Epochs:
    """Shuffled passes over the data in mini-batches: clients with more data take more steps.

    Args:
        epochs: passes per round. Of a fraction, the next round goes on where the last one ended.
        batch_size: samples in a mini-batch; the last one of a round may be smaller.
        chunk: samples in memory at once.
    """

    epochs: float = 1
    batch_size: int = 64
    chunk: int = 8192

    def __post_init__(self) -> None:
        check_range("epochs", self.epochs, 0, low_open=True, high_open=True)
        check_count("batch_size", self.batch_size)
        check_count("chunk", self.chunk)

    def plan(self, samples: int, key: Key, iteration: int) -> list[Tensor]:
        wanted = max(1, round(self.epochs * samples))
        return _continued(samples, key, iteration, wanted, self.batch_size)


def check_local(local: Any) -> None:
    """Raise TypeError unless `local` is a plan of local work."""
    if isinstance(local, type) or not isinstance(local, LocalWork):
        raise TypeError(f"local must be FullGradient, Minibatches or Epochs, got {local!r}")


def _continued(samples: int, key: Key, iteration: int, wanted: int, size: int) -> list[Tensor]:
    """Return a round's mini-batches, `wanted` samples of an endless row of shuffled passes."""
    first = iteration * wanted
    start, stop = first // samples, -(-(first + wanted) // samples)
    passes = [permutation(samples, "client", *key, number) for number in range(start, stop)]
    offset = first - start * samples
    return list(torch.split(torch.cat(passes)[offset : offset + wanted], size))
