"""One client's round: its local steps, and what it sends."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from torchpisa.data import hashed
from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, Tensors
from torchpisa.federated.local_work import Key
from torchpisa.federated.objective import Data, Objective, size, take

__all__ = ["Work", "local_round", "mean_gradient"]


class Work(NamedTuple):
    """What a round cost its clients.

    Attributes:
        gradients: gradients evaluated, of a mini-batch or of all data.
        samples: gradients evaluated, of single samples.
    """

    gradients: int
    samples: int


def local_round(
    algorithm: Algorithm,
    objective: Objective,
    data: Data,
    down: Message,
    memory: Fields,
    *,
    key: Key,
    iteration: int,
) -> tuple[Message, Fields, Work]:
    """Run one client for one round.

    Args:
        algorithm: the algorithm.
        objective: the model, on the device of the tensors, and the loss.
        data: the client's data.
        down: what the server broadcast.
        memory: what the client remembers, at first `algorithm.remember(weights)`. Not modified.
        key: seed and the client's name, which decide how its data is shuffled.
        iteration: rounds closed before this one.

    Returns:
        What goes to the server, the new memory, and what it cost.
    """
    plan = algorithm.local.plan(size(data), key, iteration)
    objective.model.train()
    with _seeded(_device(down.tensors["weights"]), hashed("round", *key, iteration)):
        carry = _local_steps(algorithm, objective, data, down, memory, plan)
    steps = torch.tensor(float(len(plan)), dtype=torch.float64, device="cpu")
    up, memory = algorithm.finish(down, memory, carry, steps)
    return up, memory, Work(len(plan), sum(len(index) for index in plan))


def _local_steps(
    algorithm: Algorithm,
    objective: Objective,
    data: Data,
    down: Message,
    memory: Fields,
    plan: list[Tensor],
) -> Fields:
    weights = down.tensors["weights"]
    carry = algorithm.begin(down, memory)
    for index in plan:
        point = {name: w + carry["moved"][name] for name, w in weights.items()}
        if algorithm.needs_loss:
            batch = take(data, index, _device(weights))
            grad, point, evaluated = objective.graph(point, *batch)
            algorithm.observe(*evaluated)
        else:
            grad = _gradient(objective, point, data, index, algorithm.local.chunk)
        with torch.no_grad():
            carry = algorithm.step(down, memory, carry, grad, point)
    return carry


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """What is random in a model, such as dropout, is the same whenever a round is repeated."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def mean_gradient(
    objective: Objective, point: Tensors, inputs: Tensor, targets: Tensor, chunk: int
) -> Tensors:
    """The gradient of the mean loss, accumulated over chunks."""
    parts = zip(torch.split(inputs, chunk), torch.split(targets, chunk), strict=True)
    return _accumulated((objective.gradient(point, *part) for part in parts), len(targets))


def _gradient(
    objective: Objective, point: Tensors, data: Data, index: Tensor, chunk: int
) -> Tensors:
    """The same for samples that are fetched chunk by chunk."""
    parts = (take(data, part, _device(point)) for part in torch.split(index, chunk))
    return _accumulated((objective.gradient(point, *part) for part in parts), len(index))


def _accumulated(sums: Iterable[Tensors], count: int) -> Tensors:
    total: Tensors = {}
    for grad in sums:
        total = {name: total[name] + g for name, g in grad.items()} if total else grad
    return {name: g / count for name, g in total.items()}


def _device(weights: Tensors) -> torch.device:
    return next(iter(weights.values())).device
