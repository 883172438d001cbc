"""One client's round: its local steps, and what it sends."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, Tensors
from torchpisa.federated.local_work import Key
from torchpisa.federated.objective import Data, Objective, size, take

__all__ = ["Work", "local_round"]


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
    weights = down.tensors["weights"]
    plan = algorithm.local.plan(size(data), key, iteration)
    objective.model.train()
    carry = algorithm.begin(down, memory)
    for index in plan:
        point = {name: w + carry["moved"][name] for name, w in weights.items()}
        if algorithm.needs_loss:
            batch = take(data, index, _device(weights))
            grad, point, evaluated = objective.graph(point, *batch)
            algorithm.observe(*evaluated)
        else:
            grad = _mean_gradient(objective, point, data, index, algorithm.local.chunk)
        with torch.no_grad():
            carry = algorithm.step(down, memory, carry, grad, point)
    steps = torch.tensor(float(len(plan)), dtype=torch.float64, device="cpu")
    up, memory = algorithm.finish(down, memory, carry, steps)
    return up, memory, Work(len(plan), sum(len(index) for index in plan))


def _mean_gradient(
    objective: Objective, point: Tensors, data: Data, index: Tensor, chunk: int
) -> Tensors:
    total: Tensors = {}
    for part in torch.split(index, chunk):
        grad = objective.gradient(point, *take(data, part, _device(point)))
        total = {name: total[name] + g for name, g in grad.items()} if total else grad
    return {name: g / len(index) for name, g in total.items()}


def _device(weights: Tensors) -> torch.device:
    return next(iter(weights.values())).device
