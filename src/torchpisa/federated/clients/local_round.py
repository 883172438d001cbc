"""One round of one client: its local steps and its update."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from torchpisa.data import hashed
from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, Tensors
from torchpisa.federated.clients.data import Data, sample_count, take_samples
from torchpisa.federated.clients.local_work import Key
from torchpisa.federated.clients.objective import Objective

__all__ = ["RoundResult", "RoundWork", "local_round", "mean_gradient"]


class RoundWork(NamedTuple):
    """The cost of a round, over all its clients.

    Attributes:
        gradients: the number of gradients evaluated, each of a mini-batch or of all data.
        samples: the number of samples in those gradients.
    """

    gradients: int
    samples: int


class RoundResult(NamedTuple):
    """The result of a round at its clients.

    Attributes:
        total: the sum of alpha times the update, over the clients that are not separate; None if
            all are.
        separate: the updates that are not in the sum, by client.
        sent: the bytes that all clients sent.
        work: the cost of the round.
    """

    total: Message | None
    separate: dict[int, Message]
    sent: int
    work: RoundWork


def local_round(
    algorithm: Algorithm,
    objective: Objective,
    data: Data,
    down: Message,
    memory: Fields,
    *,
    key: Key,
    iteration: int,
) -> tuple[Message, Fields, RoundWork]:
    """Run one client for one round.

    Args:
        algorithm: the algorithm.
        objective: the model, on the device of the tensors, and the loss.
        data: the client's data.
        down: the message of the server.
        memory: the client's memory, at first `algorithm.remember(weights)`; not modified.
        key: seed and name of the client, for its shuffles.
        iteration: the number of rounds before this one.

    Returns:
        The update for the server, the new memory, and the cost.
    """
    plan = algorithm.local.plan(sample_count(data), key, iteration)
    objective.model.train()
    seeded = _seeded(_device(down.tensors["weights"]), hashed("round", *key, iteration))
    with seeded, objective.unchanged_buffers():
        carry = _local_steps(algorithm, objective, data, down, memory, plan)
    steps = torch.tensor(float(len(plan)), dtype=torch.float64, device="cpu")
    update, memory = algorithm.finish(down, memory, carry, steps)
    return update, memory, RoundWork(len(plan), sum(len(index) for index in plan))


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
            batch = take_samples(data, index, _device(weights))
            grad, point, graph = objective.gradient_and_graph(point, *batch)
            algorithm.observe(*graph)
        else:
            grad = _gradient(objective, point, data, index, algorithm.local.chunk)
        with torch.no_grad():
            carry = algorithm.step(down, memory, carry, grad, point)
    return carry


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the random parts of a model, such as dropout, so that a round can be repeated."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # Not torch.manual_seed: it seeds every kind of device, which takes a millisecond.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def mean_gradient(
    objective: Objective, point: Tensors, inputs: Tensor, targets: Tensor, chunk: int
) -> Tensors:
    """Return the gradient of the mean loss, accumulated over chunks."""
    parts = zip(torch.split(inputs, chunk), torch.split(targets, chunk), strict=True)
    return _sum(objective.gradient(point, *part, len(targets)) for part in parts)


def _gradient(
    objective: Objective, point: Tensors, data: Data, index: Tensor, chunk: int
) -> Tensors:
    """Return the gradient of the mean loss over samples that are fetched chunk by chunk."""
    parts = (take_samples(data, part, _device(point)) for part in torch.split(index, chunk))
    return _sum(objective.gradient(point, *part, len(index)) for part in parts)


def _sum(parts: Iterable[Tensors]) -> Tensors:
    total: Tensors = {}
    for grad in parts:
        total = {name: total[name] + g for name, g in grad.items()} if total else grad
    return total


def _device(weights: Tensors) -> torch.device:
    return next(iter(weights.values())).device
