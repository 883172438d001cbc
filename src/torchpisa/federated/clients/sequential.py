"""Rounds in which one client runs after the other, for models and data that cannot be batched."""

from collections.abc import Collection, Sequence

from torch import Tensor
from torch.utils._pytree import tree_map

from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, add
from torchpisa.federated.clients.data import Data
from torchpisa.federated.clients.local_round import RoundResult, RoundWork, local_round
from torchpisa.federated.clients.memory import MemoryStore
from torchpisa.federated.clients.objective import Objective

__all__ = ["SequentialClients"]


class SequentialClients:
    """Runs the clients of a round one after the other; see `BatchedClients` for many at a time.

    Args:
        algorithm: the algorithm.
        objective: the model and the loss.
        data: the data of each client.
        memory: the memory of the clients.
        seed: seed of the shuffles.
        alphas: the shares of the clients.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        objective: Objective,
        data: Sequence[Data],
        memory: MemoryStore,
        seed: int,
        alphas: Tensor,
    ) -> None:
        self._algorithm = algorithm
        self._objective = objective
        self._data = data
        self._seed = seed
        self._alphas: list[float] = alphas.tolist()
        self._memory = memory

    def round(
        self, down: Message, present: Sequence[int], iteration: int, separate: Collection[int] = ()
    ) -> RoundResult:
        """Run the clients that are present, and sum up all updates but the `separate` ones."""
        total: Message | None = None
        separate_updates: dict[int, Message] = {}
        sent, gradients, samples = 0, 0, 0
        for client in present:
            loaded: Fields = tree_map(lambda t: t[0], self._memory.load([client]))
            update, memory, work = local_round(
                self._algorithm,
                self._objective,
                self._data[client],
                down,
                loaded,
                key=(self._seed, str(client)),
                iteration=iteration,
            )
            self._memory.save([client], tree_map(lambda t: t[None], memory))
            sent += update.bytes
            gradients += work.gradients
            samples += work.samples
            if client in separate:
                separate_updates[client] = update
            else:
                total = add(total, update, self._alphas[client])
        return RoundResult(total, separate_updates, sent, RoundWork(gradients, samples))
