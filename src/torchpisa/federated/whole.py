"""Gradients of all data of several clients at one point, one client after the other on a GPU."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchpisa.federated.algorithms.base import Tensors
from torchpisa.federated.client import mean_gradient
from torchpisa.federated.objective import Objective
from torchpisa.federated.replay import Replay

__all__ = ["WholeGradients", "worthwhile"]

LARGE = 512  # samples of a client from which on its own kernels fill the device
MOST = 8  # groups of clients that are recorded; each keeps the memory of a backward pass
REMEMBERED = 1024  # groups that are counted


def worthwhile(device: torch.device, sizes: Sequence[int]) -> bool:
    """Whether clients are better run one after the other than stacked.

    Stacking pads all to the size of the largest, and per-client gradients of convolutions have slow
    kernels; on the other hand small batches leave a GPU idle.
    """
    return device.type == "cuda" and sum(sizes) >= LARGE * len(sizes)


class WholeGradients:
    """Mean gradients of clients, recorded as one CUDA graph when the same clients come again.

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
        self._met: Counter[tuple[int, ...]] = Counter()
        self._recorded: dict[tuple[int, ...], Replay] = {}

    def __call__(self, weights: Tensors, clients: Sequence[int]) -> Tensors:
        """The gradients of `clients`, stacked; the next call may overwrite them."""
        key = tuple(clients)
        self._met[key] += 1
        if key not in self._recorded and self._met[key] > 1 and len(self._recorded) < MOST:
            self._recorded[key] = Replay(partial(self._stacked, key))
        if len(self._met) > REMEMBERED:  # other clients in every round
            self._met.clear()
        if key in self._recorded:
            return self._recorded[key](weights)  # type: ignore[no-any-return]
        return self._stacked(key, weights)

    def _stacked(self, clients: Sequence[int], weights: Tensors) -> Tensors:
        rows = [
            mean_gradient(self._objective, weights, *self._data[client], self._chunk)
            for client in clients
        ]
        return {name: torch.stack([row[name] for row in rows]) for name in weights}
