"""The interface of a federated algorithm: the server's half and the client's half."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torchpisa.algorithms.pisa import Scalar
from torchpisa.federated.clients.local_work import LocalWork

__all__ = ["Algorithm", "Fields", "Message", "ServerState", "Tensors", "add", "scalars", "zeros"]

Tensors = dict[str, Tensor]
"""Tensors by the name of the parameter that they belong to."""

Fields = dict[str, Tensors]
"""Sets of such tensors by kind: `"weights"`, `"dual"`, `"control"`."""


class Message(NamedTuple):
    """A message between server and client, in either direction.

    Attributes:
        tensors: its tensors, by kind and parameter.
        numbers: a few numbers.
    """

    tensors: Fields
    numbers: Mapping[str, Scalar]

    @property
    def bytes(self) -> int:
        """Return the size of the tensors in bytes; the numbers are too few to count."""
        return sum(
            tensor.numel() * tensor.element_size()
            for tensors in self.tensors.values()
            for tensor in tensors.values()
        )


@dataclass(frozen=True)
class ServerState:
    r"""The state that a server keeps between rounds.

    Attributes:
        weights: \(w\), the global weights.
        memory: sums over the clients, weighted by their shares, such as
            \(\Pi = \sum_i \alpha_i \pi_i\) under `"dual"`; adjusted when clients join or leave.
        numbers: numbers that change from round to round, such as \(\sigma\).
        iteration: the number of closed rounds, \(\ell\).
        buffers: tensors that belong to no client, such as the momentum of `FedAvgM`.
    """

    weights: Tensors
    memory: Fields = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    iteration: int = 0
    buffers: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A schedule may return NumPy's numbers, which cannot be read back from a checkpoint.
        numbers = {name: float(value) for name, value in self.numbers.items()}
        object.__setattr__(self, "numbers", numbers)


class Algorithm(ABC):
    r"""A federated algorithm: pure functions for the server and for a client.

    The caller keeps the state, so the same functions run in one process, on a GPU for all clients
    at once (every client function may run under `torch.vmap`), or on many machines. One round is

        server = algorithm.open(server)
        down = algorithm.broadcast(server)
        for each client i that is present:
            carry = algorithm.begin(down, memory_i)
            for each local step:
                g = gradient of F_i at down.tensors["weights"] + carry["moved"]
                carry = algorithm.step(down, memory_i, carry, g, point)
            update_i, memory_i = algorithm.finish(down, memory_i, carry, steps)
        server = algorithm.close(server, sum of alpha_i update_i, sum of alpha_i)

    with \(\alpha_i = n_i / n\), constant in time, over all clients, absent ones included. All that
    the server needs is the weighted sum of updates.
    """

    local: LocalWork
    weight_decay: float

    @property
    def fingerprint(self) -> str:
        """Return a text that identifies the settings, the same in every process."""
        # The repr of a function contains its address, which differs between processes.
        return re.sub(r" at 0x[0-9a-f]+", "", repr(self))

    # The server

    @abstractmethod
    def start(self, weights: Tensors) -> ServerState:
        """Return the state of the server before the first round."""

    def open(self, server: ServerState) -> ServerState:
        """Return the server at the beginning of a round, with numbers such as sigma updated."""
        return server

    @abstractmethod
    def broadcast(self, server: ServerState) -> Message:
        """Return the message that every client of the round receives."""

    @abstractmethod
    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        r"""Return the server after a round.

        Args:
            server: the server as `open` returned it.
            total: \(\sum_i \alpha_i\) times the update of client i, over the present clients.
            present: \(\sum_i \alpha_i\) over the present clients, greater than zero.
        """

    def skip(self, server: ServerState) -> ServerState:
        """Return the server after a round without clients, in which nothing moves."""
        return replace(server, iteration=server.iteration + 1)

    def admit(self, server: ServerState, before: float, after: float) -> ServerState:
        r"""Return the server after a client has joined, raising \(n\) from `before` to `after`.

        Its memory is zero. The \(\alpha_i\) of all others shrink by `before / after`, and so do
        the sums that are weighted by them.
        """
        memory = {
            name: {key: (before / after) * tensor for key, tensor in tensors.items()}
            for name, tensors in server.memory.items()
        }
        return replace(server, memory=memory)

    def contribution(self, update: Message) -> Fields:
        """Return the tensors that an update, times alpha, adds to the server's memory."""
        return {}

    def standing(
        self, server: ServerState, update: Message, known: Fields, steps: Tensor
    ) -> Fields:
        """Return the tensors by which `RobustSelection` compares clients.

        By default this is the client's part of the server's memory after the update, or the update
        itself if there is no such memory. The change alone would not do: it is small for clients
        that have converged, and large for a newcomer.

        Args:
            server: the server as `open` returned it.
            update: the update of one client.
            known: the client's part of the server's memory before; empty before its first update.
            steps: the number of local steps that the client has taken.
        """
        added = self.contribution(update)
        if not added:
            return update.tensors
        return {
            kind: {
                name: known[kind][name] + tensor if kind in known else tensor
                for name, tensor in tensors.items()
            }
            for kind, tensors in added.items()
        }

    def numbers_after(self, steps: Tensor) -> dict[str, Scalar]:
        """Return the numbers of an update after `steps` local steps, which a server can check."""
        return {}

    def numbers_of(self, tensors: Fields, steps: Tensor) -> dict[str, Scalar]:
        """Return the numbers of an update with these tensors, which a server can check."""
        return self.numbers_after(steps)

    # A client

    def remember(self, weights: Tensors) -> Fields:
        """Return the memory of a client before its first round."""
        return {}

    @abstractmethod
    def begin(self, down: Message, memory: Fields) -> Fields:
        """Return the initial variables of a local run; `"moved"` is the displacement from w."""

    @abstractmethod
    def step(
        self, down: Message, memory: Fields, carry: Fields, grad: Tensors, point: Tensors
    ) -> Fields:
        """Return the variables after a local step; `grad` is taken at `point`, w plus `"moved"`."""

    @abstractmethod
    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        """Return the update for the server after `steps` local steps, and the new memory."""

    @property
    def starts_at_weights(self) -> bool:
        """Return True if `begin` always returns a `"moved"` of zero, as most algorithms do."""
        return True

    @property
    def clippable(self) -> bool:
        """Return True if scaling an update down makes a smaller step of the same kind."""
        return True

    @property
    def needs_loss(self) -> bool:
        """Return True if every local step must be preceded by a call of `observe`."""
        return False

    def observe(self, loss: Tensor, outputs: Tensor) -> None:  # noqa: B027 (optional)
        """Receive the mean loss of a local step, with its graph."""

    def decayed(self, grad: Tensors, point: Tensors) -> Tensors:
        """Return the gradient with the L2 term."""
        if self.weight_decay == 0:
            return grad
        return {name: g + self.weight_decay * point[name] for name, g in grad.items()}


def scalars(like: Tensors, **values: float) -> Tensors:
    """Return numbers as tensors, in the dtype and on the device of the parameters."""
    first = next(iter(like.values()))
    return {
        name: torch.full((), value, dtype=first.dtype, device=first.device)
        for name, value in values.items()
    }


def zeros(like: Tensors) -> Tensors:
    """Return zeros of the same shapes."""
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def add(total: Message | None, update: Message, alpha: float) -> Message:
    """Return the running sum of updates, to which `update` is added with the weight `alpha`."""
    weighted: Message = tree_map(lambda value: alpha * value, update)
    if total is None:
        return weighted
    summed: Message = tree_map(lambda a, b: a + b, total, weighted)
    return summed
