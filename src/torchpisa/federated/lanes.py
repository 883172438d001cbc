"""Gradients of all data of several clients at one point, on a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchpisa.federated.algorithms.base import Tensors
from torchpisa.federated.objective import Objective
from torchpisa.federated.replay import Replay

__all__ = ["Lanes", "worthwhile"]

LANES = 2  # a third gains nothing: memory-bound kernels of one run beside compute-bound of another
LARGE = 512  # samples of a client from which on its own kernels fill the device
MANY = 64  # clients, each of which is recorded once


def worthwhile(device: torch.device, sizes: Sequence[int]) -> bool:
    """Whether clients are better run side by side than stacked."""
    return device.type == "cuda" and len(sizes) <= MANY and sum(sizes) >= LARGE * len(sizes)


class Lanes:
    """Clients take turns in a few streams, each recorded as a CUDA graph.

    Stacking them (`torch.vmap`) would pad all to the size of the largest, and per-client gradients
    of convolutions have slow kernels.

    Args:
        objective: the model and the loss.
        data: inputs and targets of each client, on the device.
        chunk: samples in memory at once, in each stream.
    """

    def __init__(
        self, objective: Objective, data: Sequence[tuple[Tensor, Tensor]], chunk: int
    ) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(LANES)]  # type: ignore[no-untyped-call]
        pools = [torch.cuda.graph_pool_handle() for _ in range(LANES)]

        def recorded(client: int, x: Tensor, y: Tensor) -> Replay:
            def mean(weights: Tensors) -> Tensors:
                total: Tensors = {}
                for own in zip(torch.split(x, chunk), torch.split(y, chunk), strict=True):
                    grad = objective.gradient(weights, *own)
                    total = {k: total[k] + g for k, g in grad.items()} if total else grad
                return {name: g / len(y) for name, g in total.items()}

            return Replay(mean, pools[client % LANES])

        self._clients = [recorded(i, x, y) for i, (x, y) in enumerate(data)]

    def gradients(self, weights: Tensors, clients: Sequence[int]) -> Tensors:
        """The mean gradients of `clients`, stacked."""
        current = torch.cuda.current_stream()
        rows: list[Tensors] = []
        for client in clients:
            stream = self._streams[client % LANES]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                rows.append(Replay.keep(self._clients[client](weights)))
        for stream in self._streams:
            current.wait_stream(stream)
        return {name: torch.stack([row[name] for row in rows]) for name in weights}
