"""Rounds of clients one after the other, for models and data that cannot run at once."""

from collections.abc import Sequence

from torch import Tensor

from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, Tensors, add
from torchpisa.federated.client import Work, local_round
from torchpisa.federated.objective import Data, Objective

__all__ = ["InTurn"]


class InTurn:
    """Memory and data of all clients; see `Together` for the arguments."""

    def __init__(
        self,
        algorithm: Algorithm,
        objective: Objective,
        data: Sequence[Data],
        weights: Tensors,
        seed: int,
        alphas: Tensor,
    ) -> None:
        self._algorithm = algorithm
        self._objective = objective
        self._data = data
        self._seed = seed
        self._alphas: list[float] = alphas.tolist()
        self.memory: list[Fields] = [algorithm.remember(weights) for _ in data]

    def round(
        self, down: Message, present: Sequence[int], iteration: int
    ) -> tuple[Message, int, Work]:
        """The weighted sum of the updates of those present, its bytes on the wire, and the work."""
        total: Message | None = None
        sent, gradients, samples = 0, 0, 0
        for client in present:
            update, self.memory[client], work = local_round(
                self._algorithm,
                self._objective,
                self._data[client],
                down,
                self.memory[client],
                key=(self._seed, str(client)),
                iteration=iteration,
            )
            sent += update.bytes
            gradients += work.gradients
            samples += work.samples
            total = add(total, update, self._alphas[client])
        assert total is not None
        return total, sent, Work(gradients, samples)
