"""Rounds in which one client runs after the other, for models and data that cannot be batched."""

from collections.abc import Sequence

from torch import Tensor

from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, Tensors, add
from torchpisa.federated.clients.data import Data
from torchpisa.federated.clients.local_round import RoundWork, local_round
from torchpisa.federated.clients.objective import Objective

__all__ = ["SequentialClients"]


class SequentialClients:
    """Memory and data of all clients.

    Args:
        algorithm: the algorithm.
        objective: the model and the loss.
        data: the data of each client.
        weights: the initial weights.
        seed: decides the shuffles.
        alphas: the clients' shares.
    """

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
    ) -> tuple[Message, int, RoundWork]:
        """Return the weighted sum of the updates, the bytes that clients sent, and the work."""
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
        return total, sent, RoundWork(gradients, samples)
