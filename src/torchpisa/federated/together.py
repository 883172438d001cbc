"""Rounds of many clients at once: `torch.vmap` over the functions that one client runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, Tensors
from torchpisa.federated.client import Work
from torchpisa.federated.local_work import FullGradient, Key
from torchpisa.federated.objective import Data, LossError, Objective, trainable
from torchpisa.federated.replay import Replay
from torchpisa.federated.whole import WholeGradients, worthwhile

__all__ = ["Together", "obstacle"]


def obstacle(algorithm: Algorithm, objective: Objective, data: Sequence[Data]) -> str | None:
    """Why these clients cannot run at once, or None."""
    if algorithm.needs_loss:
        return "the preconditioner needs the loss of each client"
    if not all(isinstance(own, tuple) for own in data):
        return "the data are not tensors"
    tensors = cast(Sequence[tuple[Tensor, Tensor]], data)
    for column in zip(*tensors, strict=True):
        if len({(t.shape[1:], t.dtype) for t in column}) > 1:
            return "the clients' samples differ in shape or dtype"
    if sum(len(targets) for _, targets in tensors) < 2:
        return "there is only one sample"
    weights = trainable(objective.model)
    device = next(iter(weights.values())).device
    # From two clients, if there are two: a client's samples may be alike.
    first = tensors[0] if len(tensors) > 1 else tuple(t[:-1] for t in tensors[0])
    pair = [torch.cat([a[:1], b[-1:]]).to(device) for a, b in zip(first, tensors[-1], strict=True)]
    objective.model.train()
    try:
        return _mixing(objective, weights, *pair) or _unmappable(objective, weights, *pair)
    except LossError:  # is none in turn either
        raise
    except ValueError as error:  # such as that of a BatchNorm that is shown a single sample
        return f"the model does not take single samples ({error})"


def _mixing(objective: Objective, weights: Tensors, x: Tensor, y: Tensor) -> str | None:
    """Batches are padded, so a sample must not feel its neighbours; nor may a model be random."""
    with torch.no_grad():
        both, single = objective.losses(weights, x, y), objective.losses(weights, x[:1], y[:1])
    if torch.allclose(both[:1], single, rtol=1e-3, atol=1e-5):
        return None
    return "the loss of a sample depends on the others or on chance"


def _unmappable(objective: Objective, weights: Tensors, x: Tensor, y: Tensor) -> str | None:
    stacked = {name: torch.stack([w, w]) for name, w in weights.items()}
    ones = torch.ones(2, 1, device=x.device)
    try:
        torch.vmap(partial(_summed_gradient, objective))(stacked, x[:, None], y[:, None], ones)
    except RuntimeError as error:  # what torch.vmap raises for what it does not know
        return f"torch.vmap cannot run the model ({error})"
    return None


@dataclass(frozen=True)
class Plan:
    """Who takes which samples in a round.

    Attributes:
        who: the clients.
        index: samples of each step and client, padded to one number.
        mask: one where a sample counts, zero where it is padding.
        steps: local steps of each client.
        work: what it costs.
    """

    who: Tensor
    index: Tensor
    mask: Tensor
    steps: Tensor
    work: Work


class Together:
    """Memory and data of all clients, stacked.

    Args:
        algorithm: the algorithm.
        objective: the model and the loss.
        data: inputs and targets of each client.
        weights: the initial weights.
        seed: decides the shuffles.
        alphas: the clients' shares.
        at_once: how many clients run at once, at most.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        objective: Objective,
        data: Sequence[tuple[Tensor, Tensor]],
        weights: Tensors,
        seed: int,
        alphas: Tensor,
        at_once: int,
    ) -> None:
        self._algorithm = algorithm
        self._objective = objective
        self._device = next(iter(weights.values())).device
        self._sizes = [len(targets) for _, targets in data]
        self._offsets = list(accumulate(self._sizes, initial=0))
        self._data = [
            torch.cat([tensor.to(self._device) for tensor in column])
            for column in zip(*data, strict=True)
        ]
        self._fixed: tuple[list[int], Plan] | None = None
        self._keys: list[Key] = [(seed, str(client)) for client in range(len(data))]
        self._alphas = alphas.to(self._device)
        self._at_once = at_once
        self._whole: WholeGradients | None = None
        if isinstance(algorithm.local, FullGradient) and worthwhile(self._device, self._sizes):
            x, y = (torch.split(t, self._sizes) for t in self._data)
            own = list(zip(x, y, strict=True))
            self._whole = WholeGradients(objective, own, algorithm.local.chunk)
        memory = algorithm.remember(weights)
        self.memory: Fields = tree_map(lambda t: t.expand(len(data), *t.shape).clone(), memory)
        self._vmapped: dict[str, Any] = {
            "begin": torch.vmap(self._begin, in_dims=(None, 0, 0)),
            "first": Replay(torch.vmap(self._first, in_dims=(None, 0, 0, 0, 0, 0))),
            "later": Replay(torch.vmap(self._later, in_dims=(None, 0, 0, 0, 0, 0))),
            "gradient": Replay(torch.vmap(self._gradient, in_dims=(None, 0, 0, 0, 0))),
            "apply": Replay(torch.vmap(self._apply, in_dims=(None, 0, 0, 0, 0))),
            "finish": torch.vmap(algorithm.finish, in_dims=(None, 0, 0, 0)),
        }

    def round(
        self, down: Message, present: Sequence[int], iteration: int
    ) -> tuple[Message, int, Work]:
        """The weighted sum of the updates of those present, its bytes on the wire, and the work."""
        self._objective.model.train()
        numbers = {  # filled in on the device: for a copy the host would wait
            name: torch.full((), float(value), dtype=torch.float64, device=self._device)
            for name, value in down.numbers.items()
        }
        down = Message(down.tensors, numbers)
        total: Message | None = None
        sent, gradients, samples = 0, 0, 0
        for start in range(0, len(present), self._at_once):
            group = list(present[start : start + self._at_once])
            plan = self._plan(group, iteration)
            gradients += plan.work.gradients
            samples += plan.work.samples
            update = self._run(down, group, plan)
            sent += update.bytes
            summed = self._weigh(update, self._alphas[plan.who])
            total = summed if total is None else tree_map(torch.add, total, summed)
        assert total is not None
        return total, sent, Work(gradients, samples)

    def _plan(self, clients: list[int], iteration: int) -> Plan:
        """The plan of a round; that of full gradients stays while the clients do."""
        if not isinstance(self._algorithm.local, FullGradient):
            return self._padded(clients, iteration)
        if self._fixed is None or self._fixed[0] != clients:
            self._fixed = clients, self._padded(clients, iteration)
        return self._fixed[1]

    def _padded(self, clients: list[int], iteration: int) -> Plan:
        local = self._algorithm.local
        plans = [local.plan(self._sizes[c], self._keys[c], iteration) for c in clients]
        steps = torch.tensor([len(plan) for plan in plans], device="cpu")
        width = max(len(batch) for plan in plans for batch in plan)
        shape = (int(steps.max()), len(clients), width)
        index = torch.zeros(shape, dtype=torch.int64, device="cpu")
        mask = torch.zeros(shape, device="cpu")
        for column, (client, plan) in enumerate(zip(clients, plans, strict=True)):
            lengths = torch.tensor([len(batch) for batch in plan], device="cpu")
            own = torch.arange(width, device="cpu") < lengths[:, None]
            mask[: len(plan), column] = own.to(mask.dtype)
            index[: len(plan), column][own] = torch.cat(plan) + self._offsets[client]
        work = Work(int(steps.sum()), sum(len(batch) for plan in plans for batch in plan))
        who = torch.tensor(clients, device="cpu")
        device = self._device
        return Plan(
            who.to(device), index.to(device), mask.to(device), steps.double().to(device), work
        )

    def _run(self, down: Message, clients: list[int], plan: Plan) -> Message:
        who = plan.who
        memory: Fields = tree_map(lambda t: t[who], self.memory)
        carry = self._vmapped["begin"](down, memory, who)
        width = max(1, self._algorithm.local.chunk // len(clients))
        for step, (own, counted) in enumerate(zip(plan.index, plan.mask, strict=True)):
            if step == 0 and self._whole is not None:
                grad = self._whole(down.tensors["weights"], clients)
                carry = self._vmapped["apply"](down, memory, carry, grad, torch.ones_like(who))
            elif own.shape[1] <= width:
                name = "first" if step == 0 else "later"
                batch = *(t[own] for t in self._data), counted
                carry = self._vmapped[name](down, memory, carry, *batch)
            else:
                carry = self._accumulate(down, memory, carry, own, counted, width)
        carry = Replay.keep(carry)
        finished = self._vmapped["finish"](down, memory, carry, plan.steps)
        update, memory = cast(tuple[Message, Fields], finished)
        for kind, tensors in memory.items():
            for name, tensor in tensors.items():
                self.memory[kind][name][who] = tensor
        return update

    def _accumulate(
        self, down: Message, memory: Fields, carry: Fields, own: Tensor, counted: Tensor, width: int
    ) -> Fields:
        carry = Replay.keep(carry)
        total: Tensors = {}
        parts = zip(torch.split(own, width, 1), torch.split(counted, width, 1), strict=True)
        for part, weight in parts:
            batch = *(t[part] for t in self._data), weight
            grad = self._vmapped["gradient"](down, carry["moved"], *batch)
            total = {k: total[k] + g for k, g in grad.items()} if total else Replay.keep(grad)
        return cast(Fields, self._vmapped["apply"](down, memory, carry, total, counted.sum(1)))

    # Functions of one client, which are mapped over all. `mask` has ones where samples count.

    def _begin(self, down: Message, memory: Fields, who: Tensor) -> Fields:
        return self._algorithm.begin(down, memory)

    def _first(
        self, down: Message, memory: Fields, carry: Fields, x: Tensor, y: Tensor, mask: Tensor
    ) -> Fields:
        """All clients are still at w: one set of weights for all is faster than one for each."""
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
        # A client that is through with its data waits for the others.
        return cast(Fields, tree_map(lambda a, b: torch.where(count > 0, a, b), new, carry))

    @staticmethod
    def _weigh(update: Message, alphas: Tensor) -> Message:
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
