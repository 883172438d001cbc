"""FedMuon: Muon on the clients, with control variates against its bias."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.checks import check_count, check_range
from torchpisa.federated.algorithms.base import (
    Algorithm,
    Fields,
    Message,
    ServerState,
    Tensors,
    zeros,
)
from torchpisa.federated.clients.local_work import Epochs, LocalWork, check_local
from torchpisa.federated.schedules import Schedule, check_schedule, factor
from torchpisa.preconditioners import NewtonSchulz

__all__ = ["FedMuon"]


@dataclass(frozen=True, kw_only=True)
class FedMuon(Algorithm):
    r"""Local Muon with bias correction (Takezawa et al., 2025, Algorithm 1).

    The mean of orthogonalised momenta is not the orthogonalised mean, so local Muon alone does
    not converge to a stationary point. Here a local step is

    \[
    M_i \leftarrow (1 - \alpha) M_i + \alpha \nabla F_i(X_i; \xi), \qquad
    X_i \leftarrow X_i - \eta\, \mathtt{NewtonSchulz}(M_i - C_i + C),
    \]

    from \(X_i = X\). After the last one \(C_i = M_i\), where the next round starts. The server adds
    the changes to \(C = \sum_i p_i C_i\) and the movements to \(X\), each times the client's
    share \(p_i\) of all samples: absent clients stay where they are. All \(C_i\) start at zero. A
    convolution counts as a matrix with a row per filter; vectors are divided by their norm. A round
    costs twice the traffic of FedAvg.

    Args:
        lr: \(\eta\), how far a local step moves a matrix in spectral norm.
        alpha: \(\alpha\), in (0, 1], the weight of the new gradient.
        ns_steps: Newton-Schulz iterations.
        weight_decay: an L2 term inside every client's objective.
        lr_decay: `lr` is multiplied by it after every round; or a function of the round, such as
            `LinearDecay`, that returns the factor on `lr`.
        local: the local work of a client; one epoch by default.
    """

    lr: float
    alpha: float = 0.1
    ns_steps: int = 5
    weight_decay: float = 0.0
    lr_decay: Schedule = 1.0
    local: LocalWork = field(default_factory=Epochs)

    def __post_init__(self) -> None:
        check_range("lr", self.lr, 0, low_open=True, high_open=True)
        check_range("alpha", self.alpha, 0, 1, low_open=True)
        check_count("ns_steps", self.ns_steps, high=100)
        check_range("weight_decay", self.weight_decay, 0, high_open=True)
        check_schedule("lr_decay", self.lr_decay)
        check_local(self.local)

    # The server

    def start(self, weights: Tensors) -> ServerState:
        return ServerState(weights, {"control": zeros(weights)}, {"lr": self.lr})

    def open(self, server: ServerState) -> ServerState:
        decay = factor("lr_decay", self.lr_decay, server.iteration)
        return replace(server, numbers={"lr": self.lr * decay})

    def broadcast(self, server: ServerState) -> Message:
        return Message({"weights": server.weights, **server.memory}, server.numbers)

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        moved, change = total.tensors["moved"], total.tensors["control"]
        weights = {name: w + moved[name] for name, w in server.weights.items()}
        control = {name: c + change[name] for name, c in server.memory["control"].items()}
        return replace(
            server,
            weights=weights,
            memory={"control": control},
            iteration=server.iteration + 1,
        )

    def contribution(self, update: Message) -> Fields:
        return {"control": update.tensors["control"]}

    def standing(
        self, server: ServerState, update: Message, known: Fields, steps: Tensor
    ) -> Fields:
        # Steps are normalised, so movements are comparable by themselves, per step.
        moved = {name: m / float(steps) for name, m in update.tensors["moved"].items()}
        return {**super().standing(server, update, known, steps), "moved": moved}

    # A client

    def remember(self, weights: Tensors) -> Fields:
        return {"control": zeros(weights)}

    def begin(self, down: Message, memory: Fields) -> Fields:
        return {"moved": zeros(down.tensors["weights"]), "momentum": memory["control"]}

    def step(
        self, down: Message, memory: Fields, carry: Fields, grad: Tensors, point: Tensors
    ) -> Fields:
        grad, lr = self.decayed(grad, point), down.numbers["lr"]
        momentum = {
            name: (1 - self.alpha) * m + self.alpha * grad[name]
            for name, m in carry["momentum"].items()
        }
        local, common = memory["control"], down.tensors["control"]
        moved = {
            name: m - lr * self._direction(momentum[name] - local[name] + common[name])
            for name, m in carry["moved"].items()
        }
        return {"moved": moved, "momentum": momentum}

    def _direction(self, corrected: Tensor) -> Tensor:
        if corrected.dim() > 1:
            return NewtonSchulz(ns_steps=self.ns_steps).orthogonalize(corrected)
        norm: Tensor = torch.linalg.vector_norm(corrected)
        return corrected / norm.clamp_min(torch.finfo(corrected.dtype).tiny)

    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        old, new = memory["control"], carry["momentum"]
        change = {name: c - old[name] for name, c in new.items()}
        return Message({"moved": carry["moved"], "control": change}, {}), {"control": new}
