"""Gradients of several clients over all their data, computed one by one on a GPU."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchpisa.federated.algorithms.base import Tensors
from torchpisa.federated.clients.cuda_graphs import GraphedFunction
from torchpisa.federated.clients.local_round import mean_gradient
from torchpisa.federated.clients.objective import Objective

__all__ = ["FullGradients", "faster_one_by_one"]

LARGE_CLIENT = 512  # samples with which a single client keeps a GPU busy
MAX_RECORDED = 8  # groups of clients with a graph, each of which holds a backward pass's memory
MAX_COUNTED = 1024  # groups of clients whose calls are counted


def faster_one_by_one(device: torch.device, sizes: Sequence[int]) -> bool:
    """Return True if clients run faster one after the other than stacked.

    Stacking pads all clients to the largest, and per-client gradients of convolutions have slow
    kernels. But small batches leave a GPU idle.
    """
    return device.type == "cuda" and sum(sizes) >= LARGE_CLIENT * len(sizes)


class FullGradients:
    """Mean gradients of clients, recorded as a CUDA graph when the same clients return.

    Args:
        objective: the model and the loss.
        data: inputs and targets of each client, on the device.
        chunk: samples in memory at once.
    """

    def __init__(
        self, objective: Objective, data: Sequence[tuple[Tensor, Tensor]], chunk: int
    ) -> None:
        self._objective = objective
        self._data = data
        self._chunk = chunk
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._recorded: dict[tuple[int, ...], GraphedFunction] = {}

    def __call__(self, weights: Tensors, clients: Sequence[int]) -> Tensors:
        """Return the gradients of `clients`, stacked. The next call may overwrite them."""
        key = tuple(clients)
        self._seen[key] += 1
        if key not in self._recorded and self._seen[key] > 1 and len(self._recorded) < MAX_RECORDED:
            self._recorded[key] = GraphedFunction(partial(self._stacked, key))
        if len(self._seen) > MAX_COUNTED:  # every round draws other clients
            self._seen.clear()
        if key in self._recorded:
            return self._recorded[key](weights)  # type: ignore[no-any-return]
        return self._stacked(key, weights)

    def _stacked(self, clients: Sequence[int], weights: Tensors) -> Tensors:
        rows = [
            mean_gradient(self._objective, weights, *self._data[client], self._chunk)
            for client in clients
        ]
        return {name: torch.stack([row[name] for row in rows]) for name in weights}
