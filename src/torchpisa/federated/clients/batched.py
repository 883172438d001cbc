"""Rounds of many clients at once: `torch.vmap` over the functions of one client.

Clients that run at once are padded to the largest of them, so they are grouped by size.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, Tensors
from torchpisa.federated.clients.cuda_graphs import GraphedFunction, copy_tensors
from torchpisa.federated.clients.data import Data
from torchpisa.federated.clients.full_gradients import FullGradients, faster_one_by_one
from torchpisa.federated.clients.local_round import RoundResult, RoundWork
from torchpisa.federated.clients.local_work import FullGradient, Key
from torchpisa.federated.clients.memory import MemoryStore
from torchpisa.federated.clients.objective import (
    BufferChangeError,
    LossError,
    Objective,
    trainable,
)

__all__ = ["BatchedClients", "batching_obstacle", "group_by_cost"]

SMALL = 32  # samples that take less time than one more group
SMALL_ON_GPU = 512


def batching_obstacle(
    algorithm: Algorithm, objective: Objective, data: Sequence[Data]
) -> str | None:
    """Return the reason why these clients cannot run at once, or None if they can."""
    if algorithm.needs_loss:
        return "the preconditioner needs the loss of each client"
    if not all(isinstance(samples, tuple) for samples in data):
        return "the data are not tensors"
    tensors = cast(Sequence[tuple[Tensor, Tensor]], data)
    for column in zip(*tensors, strict=True):
        if len({(t.shape[1:], t.dtype) for t in column}) > 1:
            return "the clients' samples differ in shape or dtype"
    if sum(len(targets) for _, targets in tensors) < 2:
        return "there is only one sample"
    weights = trainable(objective.model)
    device = next(iter(weights.values())).device
    # One from each of two clients, if there are two: the samples of one client may all be alike.
    first = tensors[0] if len(tensors) > 1 else tuple(t[:-1] for t in tensors[0])
    pair = [torch.cat([a[:1], b[-1:]]).to(device) for a, b in zip(first, tensors[-1], strict=True)]
    objective.model.train()
    try:
        rng = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with objective.unchanged_buffers(), rng:
            coupled = _coupling_obstacle(objective, weights, *pair)
        return coupled or _vmap_obstacle(objective, weights, *pair)
    except (BufferChangeError, LossError):  # wrong in sequential rounds as well
        raise
    except ValueError as error:  # for example BatchNorm's for a single sample
        return f"the model does not take single samples ({error})"
    except (IndexError, RuntimeError) as error:
        inputs, targets = (f"{t.dtype} of shape {tuple(t.shape[1:])}" for t in pair)
        raise ValueError(
            f"clients must hold samples that model and loss take, got inputs of {inputs} and "
            f"targets of {targets}: {error}"
        ) from error


def _coupling_obstacle(objective: Objective, weights: Tensors, x: Tensor, y: Tensor) -> str | None:
    """Return a reason if a sample's loss depends on chance or on the batch, which is padded."""
    with torch.no_grad():
        both, single = objective.losses(weights, x, y), objective.losses(weights, x[:1], y[:1])
    if torch.allclose(both[:1], single, rtol=1e-3, atol=1e-5, equal_nan=True):
        return None
    return "the loss of a sample depends on the others or on chance"


def _vmap_obstacle(objective: Objective, weights: Tensors, x: Tensor, y: Tensor) -> str | None:
    """Return a reason if `torch.vmap` cannot run the model."""
    stacked = {name: torch.stack([w, w]) for name, w in weights.items()}
    ones = torch.ones(2, 1, device=x.device)
    try:
        torch.vmap(partial(_summed_gradient, objective))(stacked, x[:, None], y[:, None], ones)
    except RuntimeError as error:  # torch.vmap does not know an operation
        return f"torch.vmap cannot run the model ({error})"
    return None


def group_by_cost(costs: Mapping[int, int], small: int) -> list[list[int]]:
    """Group clients so that padding in a group at most doubles the samples of each.

    Args:
        costs: samples of each client in a round, its own padding included.
        small: clients with at most so many samples form one group.
    """
    groups: list[list[int]] = []
    largest = 0
    for client in sorted(costs, key=lambda client: -costs[client]):
        if not groups or (2 * costs[client] < largest and largest > small):
            groups.append([])
            largest = costs[client]
        groups[-1].append(client)
    return [sorted(group) for group in groups]


@dataclass(frozen=True)
class RoundPlan:
    """The samples of each client in each local step of a round.

    Attributes:
        clients: the indices of the clients, on the device.
        index: samples of each step and client, padded to one number.
        mask: one where a sample counts, zero where it is padding.
        steps: the number of local steps of each client.
        work: the cost of the round.
    """

    clients: Tensor
    index: Tensor
    mask: Tensor
    steps: Tensor
    work: RoundWork


class BatchedClients:
    """Runs many clients together under `torch.vmap`; see `SequentialClients` for one by one.

    Args:
        algorithm: the algorithm.
        objective: the model and the loss.
        data: inputs and targets of each client.
        memory: the memory of the clients.
        seed: seed of the shuffles.
        alphas: the shares of the clients.
        group_size: the largest number of clients that run together.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        objective: Objective,
        data: Sequence[tuple[Tensor, Tensor]],
        memory: MemoryStore,
        seed: int,
        alphas: Tensor,
        group_size: int,
    ) -> None:
        self._algorithm = algorithm
        self._objective = objective
        self._memory = memory
        self._device = next(iter(trainable(objective.model).values())).device
        self._sizes = [len(targets) for _, targets in data]
        self._offsets = list(accumulate(self._sizes, initial=0))
        self._data = [
            torch.cat([tensor.to(self._device) for tensor in column])
            for column in zip(*data, strict=True)
        ]
        self._cached_plans: tuple[list[int], list[tuple[list[int], RoundPlan]]] | None = None
        self._keys: list[Key] = [(seed, str(client)) for client in range(len(data))]
        self._alphas = alphas.to(self._device)
        self._group_size = group_size
        self._full_gradients: FullGradients | None = None
        one_by_one = faster_one_by_one(self._device, self._sizes)
        if isinstance(algorithm.local, FullGradient) and one_by_one:
            x, y = (torch.split(t, self._sizes) for t in self._data)
            per_client = list(zip(x, y, strict=True))
            self._full_gradients = FullGradients(objective, per_client, algorithm.local.chunk)
        self._vmapped: dict[str, Any] = {
            "begin": torch.vmap(self._begin, in_dims=(None, 0, 0)),
            "first": GraphedFunction(torch.vmap(self._first, in_dims=(None, 0, 0, 0, 0, 0))),
            "later": GraphedFunction(torch.vmap(self._later, in_dims=(None, 0, 0, 0, 0, 0))),
            "gradient": GraphedFunction(torch.vmap(self._gradient, in_dims=(None, 0, 0, 0, 0))),
            "apply": GraphedFunction(torch.vmap(self._apply, in_dims=(None, 0, 0, 0, 0))),
            "finish": torch.vmap(algorithm.finish, in_dims=(None, 0, 0, 0)),
        }

    def round(
        self, down: Message, present: Sequence[int], iteration: int, separate: Collection[int] = ()
    ) -> RoundResult:
        """Run the clients that are present, and sum up all updates but the `separate` ones."""
        self._objective.model.train()
        numbers = {  # torch.full, because the host would wait for a copy
            name: torch.full((), float(value), dtype=torch.float64, device=self._device)
            for name, value in down.numbers.items()
        }
        down = Message(down.tensors, numbers)
        total: Message | None = None
        separate_updates: dict[int, Message] = {}
        sent, gradients, samples = 0, 0, 0
        for group, plan in self._plans(present, iteration):
            gradients += plan.work.gradients
            samples += plan.work.samples
            update = self._run_group(down, group, plan)
            sent += update.bytes
            for row, client in enumerate(group):
                if client in separate:
                    separate_updates[client] = tree_map(lambda t, row=row: t[row].clone(), update)
            summed = self._weighted_sum(update, group, plan, separate)
            if summed is not None:
                total = summed if total is None else tree_map(torch.add, total, summed)
        return RoundResult(total, separate_updates, sent, RoundWork(gradients, samples))

    def _plans(
        self, present: Sequence[int], iteration: int
    ) -> Iterable[tuple[list[int], RoundPlan]]:
        """Return groups of clients and their plans, those of full gradients from a cache."""
        if not isinstance(self._algorithm.local, FullGradient):
            return self._make_plans(present, iteration)
        if self._cached_plans is None or self._cached_plans[0] != list(present):
            self._cached_plans = list(present), list(self._make_plans(present, iteration))
        return self._cached_plans[1]

    def _make_plans(
        self, present: Sequence[int], iteration: int
    ) -> Iterator[tuple[list[int], RoundPlan]]:
        local = self._algorithm.local
        plans = {c: local.plan(self._sizes[c], self._keys[c], iteration) for c in present}
        costs = {c: len(plan) * max(map(len, plan)) for c, plan in plans.items()}
        small = SMALL_ON_GPU if self._device.type == "cuda" else SMALL
        for alike in group_by_cost(costs, small):
            for start in range(0, len(alike), self._group_size):
                group = alike[start : start + self._group_size]
                yield group, self._make_plan(group, [plans[c] for c in group])

    def _make_plan(self, clients: list[int], plans: list[list[Tensor]]) -> RoundPlan:
        steps = torch.tensor([len(plan) for plan in plans], device="cpu")
        width = max(len(batch) for plan in plans for batch in plan)
        shape = (int(steps.max()), len(clients), width)
        index = torch.zeros(shape, dtype=torch.int64, device="cpu")
        mask = torch.zeros(shape, device="cpu")
        for column, (client, plan) in enumerate(zip(clients, plans, strict=True)):
            lengths = torch.tensor([len(batch) for batch in plan], device="cpu")
            used = torch.arange(width, device="cpu") < lengths[:, None]
            mask[: len(plan), column] = used.to(mask.dtype)
            own = torch.cat(plan) + self._offsets[client]
            # Padding is of the client's own data: zero times another's NaN would be NaN.
            index[:, column] = own[0]
            index[: len(plan), column][used] = own
        work = RoundWork(int(steps.sum()), sum(len(batch) for plan in plans for batch in plan))
        device = self._device
        return RoundPlan(
            torch.tensor(clients, device="cpu").to(device),
            index.to(device),
            mask.to(device),
            steps.double().to(device),
            work,
        )

    def _run_group(self, down: Message, clients: list[int], plan: RoundPlan) -> Message:
        memory = self._memory.load(clients)
        carry = self._vmapped["begin"](down, memory, plan.clients)
        width = max(1, self._algorithm.local.chunk // len(clients))
        for step, (index, mask) in enumerate(zip(plan.index, plan.mask, strict=True)):
            at_weights = step == 0 and self._algorithm.starts_at_weights
            if at_weights and self._full_gradients is not None:
                grad = self._full_gradients(down.tensors["weights"], clients)
                ones = torch.ones_like(plan.clients)
                carry = self._vmapped["apply"](down, memory, carry, grad, ones)
            elif index.shape[1] <= width:
                name = "first" if at_weights else "later"
                batch = *(t[index] for t in self._data), mask
                carry = self._vmapped[name](down, memory, carry, *batch)
            else:
                carry = self._step_in_chunks(down, memory, carry, index, mask, width)
        carry = copy_tensors(carry)
        finished = self._vmapped["finish"](down, memory, carry, plan.steps)
        update, memory = cast(tuple[Message, Fields], finished)
        self._memory.save(clients, memory)
        return update

    def _step_in_chunks(
        self, down: Message, memory: Fields, carry: Fields, index: Tensor, mask: Tensor, width: int
    ) -> Fields:
        carry = copy_tensors(carry)
        total: Tensors = {}
        parts = zip(torch.split(index, width, 1), torch.split(mask, width, 1), strict=True)
        for part, part_mask in parts:
            batch = *(t[part] for t in self._data), part_mask
            grad = self._vmapped["gradient"](down, carry["moved"], *batch)
            total = {k: total[k] + g for k, g in grad.items()} if total else copy_tensors(grad)
        return cast(Fields, self._vmapped["apply"](down, memory, carry, total, mask.sum(1)))

    # Functions of one client, mapped over all of them.

    def _begin(self, down: Message, memory: Fields, client: Tensor) -> Fields:
        # torch.vmap learns the number of clients from `client`: a memory may have no tensors.
        return self._algorithm.begin(down, memory)

    def _first(
        self, down: Message, memory: Fields, carry: Fields, x: Tensor, y: Tensor, mask: Tensor
    ) -> Fields:
        # All clients are still at w, and one set of weights for all is faster than one for each.
        grad = _summed_gradient(self._objective, down.tensors["weights"], x, y, mask)
        return self._apply(down, memory, carry, grad, mask.sum())

    def _later(
        self, down: Message, memory: Fields, carry: Fields, x: Tensor, y: Tensor, mask: Tensor
    ) -> Fields:
        grad = self._gradient(down, carry["moved"], x, y, mask)
        return self._apply(down, memory, carry, grad, mask.sum())

    def _gradient(
        self, down: Message, moved: Tensors, x: Tensor, y: Tensor, mask: Tensor
    ) -> Tensors:
        return _summed_gradient(self._objective, _point(down, moved), x, y, mask)

    def _apply(
        self, down: Message, memory: Fields, carry: Fields, grad: Tensors, count: Tensor
    ) -> Fields:
        mean = {name: g / count.clamp(min=1) for name, g in grad.items()}
        point = _point(down, carry["moved"])
        new = self._algorithm.step(down, memory, carry, mean, point)
        # A client that has no samples left waits for the others.
        return cast(Fields, tree_map(lambda a, b: torch.where(count > 0, a, b), new, carry))

    def _weighted_sum(
        self, update: Message, clients: list[int], plan: RoundPlan, separate: Collection[int]
    ) -> Message | None:
        alphas = self._alphas[plan.clients]
        summed = [row for row, client in enumerate(clients) if client not in separate]
        if not summed:
            return None
        if len(summed) < len(clients):
            rows = torch.tensor(summed, device="cpu").to(self._device)
            alphas, update = alphas[rows], tree_map(lambda t: t[rows], update)
        return cast(
            Message,
            tree_map(lambda t: torch.tensordot(alphas.to(t.dtype), t, dims=1), update),
        )


def _point(down: Message, moved: Tensors) -> Tensors:
    return {name: w + moved[name] for name, w in down.tensors["weights"].items()}


def _summed_gradient(
    objective: Objective, point: Tensors, x: Tensor, y: Tensor, mask: Tensor
) -> Tensors:
    def total(weights: Tensors) -> Tensor:
        return (objective.losses(weights, x, y) * mask).sum()

    return cast(Tensors, torch.func.grad(total)(point))
