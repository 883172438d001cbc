"""The interface of a task: something to train, and a number that says how well it went."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

__all__ = ["TASKS", "Half", "Problem", "Task", "Update", "fit", "task"]

Half = Literal["choose", "judge"]
Batch = tuple[Tensor, ...]


class Update(Protocol):
    """A function that takes one optimizer step down a loss, on the weights of one module."""

    def __call__(self, loss: Tensor, module: int = 0) -> None: ...


@dataclass
class Problem:
    """A training that has not begun.

    Attributes:
        modules: the modules to train, each with an optimizer of its own.
        step: does one step of training; calls what it is given once per loss.
        measure: the task's metric on "validation" or "test", less is better. Draws no random
            numbers that training draws.
        trivial: the metric of a model that knows nothing about the inputs.
        samples: per split, rows that tell its samples apart; no row is in two splits.
    """

    modules: list[nn.Module]
    step: Callable[[Update], None]
    measure: Callable[[str], float]
    trivial: float
    samples: dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """A problem by name.

    Attributes:
        name: its name.
        half: the use of the task, choosing settings or judging them.
        metric: the meaning of `Problem.measure`.
        steps: steps of training.
        averaged: whether the mean of measurements over the training counts, not the last one.
            For trainings that go up and down, or are over as soon as they succeed.
        make: makes the problem, from a seed for initial weights and batches. Data and splits are
            the same for every seed.
    """

    name: str
    half: Half
    metric: str
    steps: int
    averaged: bool
    make: Callable[[int], Problem]

    @property
    def about(self) -> str:
        """Describe the task in one sentence."""
        return (self.make.__doc__ or "").partition("\n")[0]


TASKS: dict[str, Task] = {}


def task(
    half: Half, metric: str, steps: int, averaged: bool = False
) -> Callable[[Callable[[int], Problem]], Callable[[int], Problem]]:
    """Register a function that makes a problem from a seed, under its own name."""

    def register(make: Callable[[int], Problem]) -> Callable[[int], Problem]:
        name = make.__name__
        TASKS[name] = Task(name, half, metric, steps, averaged, make)
        return make

    return register


def fit(
    seed: int,
    model: nn.Module,
    splits: dict[str, Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    *,
    trivial: float,
    batch_size: int = 64,
    augment: Callable[[Batch, torch.Generator], Batch] | None = None,
    measure: Callable[[nn.Module, Batch], Tensor | float] | None = None,
    samples: dict[str, Tensor] | None = None,
) -> Problem:
    """Return the problem of lowering a loss over random batches.

    Args:
        seed: seed of the batches.
        model: the model.
        splits: tensors of the same length, for "train", "validation" and "test".
        loss: loss of the model on a batch.
        trivial: see `Problem`.
        batch_size: samples per step.
        augment: a transformation of batches, in training only.
        measure: the metric on a split; the loss by default.
        samples: see `Problem`; the first tensors of `splits` by default.
    """
    random = torch.Generator().manual_seed(seed)
    train = splits["train"]

    def step(update: Update) -> None:
        index = torch.randint(len(train[0]), (batch_size,), generator=random)
        batch = tuple(tensor[index] for tensor in train)
        update(loss(model, augment(batch, random) if augment else batch))

    def measure_split(split: str) -> float:
        return evaluate(model, lambda: (measure or loss)(model, splits[split]))

    inputs = {split: tensors[0] for split, tensors in splits.items()}
    return Problem([model], step, measure_split, trivial, inputs if samples is None else samples)


@torch.no_grad()
def evaluate(model: nn.Module, measure: Callable[[], Any]) -> float:
    """Return a measurement of the model in evaluation mode."""
    model.eval()
    value = float(measure())
    model.train()
    return value
