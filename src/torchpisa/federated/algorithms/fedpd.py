"""FedPD: the primal-dual method whose clients go on from their own weights."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar, consensus_of_deltas
from torchpisa.checks import check_range
from torchpisa.federated.algorithms.averaging import LocalSGD
from torchpisa.federated.algorithms.base import (
    Fields,
    Message,
    ServerState,
    Tensors,
    scalars,
    zeros,
)

__all__ = ["FedPD"]


@dataclass(frozen=True, kw_only=True)
class FedPD(LocalSGD):
    r"""Federated primal-dual (Zhang et al., 2021) with Oracle I.

    Client i takes SGD steps from its own \(x_i^r\), in its first round \(x_0^r\), on the augmented
    Lagrangian

    \[
    f_i(x_i) + \langle \lambda_i, x_i - x_0^r \rangle + \frac{1}{2 \eta} \|x_i - x_0^r\|^2,
    \]

    then \(\lambda_i^{r+1} = \lambda_i^r + (x_i^{r+1} - x_0^r) / \eta\), from zero. The server takes
    the mean of \(x_i^{r+1} + \eta \lambda_i^{r+1}\), weighted by the clients' shares.

    The paper has everybody present, and rounds that communicate with probability \(1 - p\). Here
    every round communicates, \(p = 0\), and an absent client stays in the mean with its
    \(\lambda_i\) and \(x_i = x_0^r\), as in `PISA`.

    While \(\eta\) is large beside `lr` times the local steps, \(\lambda_i\) grows by large factors
    from one round to the next, and Flower's `Screen` needs a larger `largest`.

    Args:
        eta: \(\eta > 0\), the inverse of a penalty.
        lr: \(\eta_1\), the clients' learning rate.
        weight_decay: an L2 term inside every client's objective.
        lr_decay: `lr` is multiplied by it after every round; or a function of the round, such as
            `LinearDecay`, that returns the factor on `lr`.
        local: the local work of a client; one epoch by default.
    """

    eta: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("eta", self.eta, 0, low_open=True, high_open=True)

    @property
    def starts_at_weights(self) -> bool:
        return False

    def start(self, weights: Tensors) -> ServerState:
        return replace(super().start(weights), memory={"dual": zeros(weights)})

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        weights, duals = {}, {}
        for name, w in server.weights.items():
            dual, delta = server.memory["dual"][name], total.tensors["moved"][name] / self.eta
            weights[name], duals[name] = consensus_of_deltas(w, dual, delta, 1 / self.eta)
        memory = {"dual": duals}
        return replace(server, weights=weights, memory=memory, iteration=server.iteration + 1)

    def contribution(self, update: Message) -> Fields:
        return {"dual": {name: m / self.eta for name, m in update.tensors["moved"].items()}}

    def remember(self, weights: Tensors) -> Fields:
        seen = scalars(weights, seen=0.0)
        return {"dual": zeros(weights), "local": zeros(weights), "seen": seen}

    def begin(self, down: Message, memory: Fields) -> Fields:
        weights, seen = down.tensors["weights"], memory["seen"]["seen"]
        return {"moved": {name: seen * (x - weights[name]) for name, x in memory["local"].items()}}

    def corrected(self, down: Message, memory: Fields, carry: Fields, grad: Tensors) -> Tensors:
        return {
            name: g + memory["dual"][name] + carry["moved"][name] / self.eta
            for name, g in grad.items()
        }

    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        moved, weights = carry["moved"], down.tensors["weights"]
        dual = {name: d + moved[name] / self.eta for name, d in memory["dual"].items()}
        local = {name: w + moved[name] for name, w in weights.items()}
        seen = {"seen": torch.ones_like(memory["seen"]["seen"])}
        return Message({"moved": moved}, {}), {"dual": dual, "local": local, "seen": seen}
