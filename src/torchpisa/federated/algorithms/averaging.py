"""The paper's baselines: FedAvg, FedProx, FedNova and Scaffold. All run SGD on their clients."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.checks import check_choice, check_range
from torchpisa.federated.algorithms.base import (
    Algorithm,
    Fields,
    Message,
    ServerState,
    Tensors,
    scalars,
    zeros,
)
from torchpisa.federated.clients.local_work import Epochs, LocalWork, check_local
from torchpisa.federated.schedules import Schedule, check_schedule, factor

__all__ = ["FedAvg", "FedNova", "FedProx", "LocalSGD", "Scaffold"]


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Algorithm):
    """Local SGD on the clients; what the server does with their movements is left open."""

    lr: float
    weight_decay: float = 0.0
    lr_decay: Schedule = 1.0
    local: LocalWork = field(default_factory=Epochs)

    def __post_init__(self) -> None:
        check_range("lr", self.lr, 0, low_open=True, high_open=True)
        check_range("weight_decay", self.weight_decay, 0, high_open=True)
        check_schedule("lr_decay", self.lr_decay)
        check_local(self.local)

    def start(self, weights: Tensors) -> ServerState:
        return ServerState(weights, {}, {"lr": self.lr})

    def open(self, server: ServerState) -> ServerState:
        decay = factor("lr_decay", self.lr_decay, server.iteration)
        return replace(server, numbers={"lr": self.lr * decay})

    def broadcast(self, server: ServerState) -> Message:
        return Message({"weights": server.weights}, server.numbers)

    def begin(self, down: Message, memory: Fields) -> Fields:
        return {"moved": zeros(down.tensors["weights"])}

    def step(
        self, down: Message, memory: Fields, carry: Fields, grad: Tensors, point: Tensors
    ) -> Fields:
        grad = self.corrected(down, memory, carry, self.decayed(grad, point))
        lr = down.numbers["lr"]
        return {"moved": {name: moved - lr * grad[name] for name, moved in carry["moved"].items()}}

    def corrected(self, down: Message, memory: Fields, carry: Fields, grad: Tensors) -> Tensors:
        """Return the gradient plus what the algorithm adds to it."""
        return grad

    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        return Message({"moved": carry["moved"]}, {}), memory


@dataclass(frozen=True, kw_only=True)
class MeanMovement(LocalSGD):
    """Local SGD on the clients, and a server that moves by the mean of their movements."""

    server_lr: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("server_lr", self.server_lr, 0, low_open=True, high_open=True)

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        weights = {
            name: w + (self.server_lr / present) * total.tensors["moved"][name]
            for name, w in server.weights.items()
        }
        return replace(server, weights=weights, iteration=server.iteration + 1)


@dataclass(frozen=True, kw_only=True)
class FedAvg(MeanMovement):
    r"""Federated averaging (McMahan et al., 2017).

    Clients run SGD from \(w\); the server takes the mean of their weights, by their numbers of
    samples. With `local=FullGradient()` this is FedSGD, gradient descent on all data.

    Args:
        lr: the clients' learning rate.
        momentum: the momentum of the clients' SGD; the buffer starts at zero in every round.
        weight_decay: an L2 term inside every client's objective.
        server_lr: factor on the mean movement; 1 takes the mean itself.
        lr_decay: `lr` is multiplied by it after every round; or a function of the round, such as
            `LinearDecay`, that returns the factor on `lr`.
        local: the local work of a client; one epoch by default.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("momentum", self.momentum, 0, 1, high_open=True)

    def begin(self, down: Message, memory: Fields) -> Fields:
        carry = super().begin(down, memory)
        return {**carry, "buffer": zeros(carry["moved"])} if self.momentum else carry

    def step(
        self, down: Message, memory: Fields, carry: Fields, grad: Tensors, point: Tensors
    ) -> Fields:
        if not self.momentum:
            return super().step(down, memory, carry, grad, point)
        grad = self.corrected(down, memory, carry, self.decayed(grad, point))
        lr = down.numbers["lr"]
        buffer = {name: self.momentum * b + grad[name] for name, b in carry["buffer"].items()}
        moved = {name: m - lr * buffer[name] for name, m in carry["moved"].items()}
        return {"moved": moved, "buffer": buffer}


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    r"""FedAvg with a proximal term (Li et al., 2020).

    Every client minimises \(F_i(y) + \frac{\mu}{2} \|y - w\|^2\) instead of \(F_i(y)\).

    Args:
        mu: \(\mu \ge 0\); 0 is FedAvg.
        lr: the clients' learning rate; all other arguments are those of `FedAvg`.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("mu", self.mu, 0, high_open=True)

    def corrected(self, down: Message, memory: Fields, carry: Fields, grad: Tensors) -> Tensors:
        return {name: g + self.mu * carry["moved"][name] for name, g in grad.items()}


@dataclass(frozen=True, kw_only=True)
class FedNova(FedAvg):
    r"""Normalised averaging (Wang et al., 2020).

    FedAvg favours clients that take more steps. Here a client's movement is divided by
    \(\|a_i\|_1\), the sum of the weights that its gradients had in it (the number of steps
    \(\tau_i\), if there is no momentum), and the mean of these directions is multiplied by the
    mean of the \(\|a_i\|_1\): \(\tau_{\mathrm{eff}} = \sum_i p_i \|a_i\|_1\).

    Args:
        lr: the clients' learning rate; all other arguments are those of `FedAvg`.
    """

    def numbers_after(self, steps: Tensor) -> dict[str, Scalar]:
        norm = steps
        if self.momentum:
            # The gradient of step k enters every later buffer, times a power of the momentum.
            geometric = (1 - self.momentum**steps) / (1 - self.momentum)
            norm = (steps - self.momentum * geometric) / (1 - self.momentum)
        return {"norm": norm}

    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        numbers = self.numbers_after(steps)
        moved = {name: m / numbers["norm"] for name, m in carry["moved"].items()}
        return Message({"moved": moved}, numbers), memory

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        effective = total.numbers["norm"] / present
        moved = {name: effective * d for name, d in total.tensors["moved"].items()}
        return super().close(server, Message({"moved": moved}, {}), present)


@dataclass(frozen=True, kw_only=True)
class Scaffold(MeanMovement):
    r"""Stochastic controlled averaging (Karimireddy et al., 2020), Option II.

    Local gradients are corrected by the difference of two control variates,
    \(g - c_i + c\). They start at zero; after its \(K\) local steps a client sets
    \(c_i^+ = c_i - c + (w - y_i) / (K \eta)\), and the server adds the changes to
    \(c = \sum_i \alpha_i c_i\), absent clients staying in the sum. Where `lr_decay` has brought
    \(\eta\) to zero, \(c_i\) stays. A round costs twice the traffic of FedAvg.

    The theory wants control variates that start at the clients' gradients. With `warm_start` a
    client spends its first round on that: it does not move, and sets \(c_i\) to the mean of the
    gradients of its \(K\) local steps, all taken at \(w\).

    Args:
        lr: \(\eta\), the clients' learning rate.
        weight_decay: an L2 term inside every client's objective.
        server_lr: \(\eta_g\), factor on the mean movement.
        lr_decay: `lr` is multiplied by it after every round; or a function of the round, such as
            `LinearDecay`, that returns the factor on `lr`.
        local: the local work of a client; one epoch by default.
        warm_start: start control variates at the clients' gradients instead of zero.
    """

    warm_start: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("warm_start", self.warm_start, (True, False))

    def start(self, weights: Tensors) -> ServerState:
        return replace(super().start(weights), memory={"control": zeros(weights)})

    def broadcast(self, server: ServerState) -> Message:
        return Message({"weights": server.weights, **server.memory}, server.numbers)

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        change = total.tensors["control"]
        control = {name: c + change[name] for name, c in server.memory["control"].items()}
        return replace(super().close(server, total, present), memory={"control": control})

    def contribution(self, update: Message) -> Fields:
        return {"control": update.tensors["control"]}

    def standing(
        self, server: ServerState, update: Message, known: Fields, steps: Tensor
    ) -> Fields:
        # The movement is compared as the control variate that it implies.
        scale = steps * server.numbers["lr"]
        change = _control_change(server.memory["control"], update.tensors["moved"], scale)
        implied = Message({"control": change}, {})
        return {
            "control": super().standing(server, update, known, steps)["control"],
            "moved": super().standing(server, implied, known, steps)["control"],
        }

    def remember(self, weights: Tensors) -> Fields:
        memory = {"control": zeros(weights)}
        if self.warm_start:
            memory["warm"] = scalars(weights, warm=0.0)
        return memory

    def begin(self, down: Message, memory: Fields) -> Fields:
        carry = super().begin(down, memory)
        return {**carry, "sum": zeros(carry["moved"])} if self.warm_start else carry

    def step(
        self, down: Message, memory: Fields, carry: Fields, grad: Tensors, point: Tensors
    ) -> Fields:
        new = super().step(down, memory, carry, grad, point)
        if not self.warm_start:
            return new
        # Zero keeps a client where it is in its first round.
        moved = {name: memory["warm"]["warm"] * m for name, m in new["moved"].items()}
        grad = self.decayed(grad, point)
        return {"moved": moved, "sum": {name: s + grad[name] for name, s in carry["sum"].items()}}

    def corrected(self, down: Message, memory: Fields, carry: Fields, grad: Tensors) -> Tensors:
        local, common = memory["control"], down.tensors["control"]
        return {name: g - local[name] + common[name] for name, g in grad.items()}

    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        scale = steps * down.numbers["lr"]
        change = _control_change(down.tensors["control"], carry["moved"], scale)
        new: Fields = {}
        if self.warm_start:
            warm = memory["warm"]["warm"]
            mean = {name: s / steps for name, s in carry["sum"].items()}
            change = {name: torch.where(warm > 0, c, mean[name]) for name, c in change.items()}
            new["warm"] = {"warm": torch.ones_like(warm)}
        control = {name: c + change[name] for name, c in memory["control"].items()}
        up = Message({"moved": carry["moved"], "control": change}, {})
        return up, {"control": control, **new}


def _control_change(common: Tensors, moved: Tensors, scale: Tensor) -> Tensors:
    r"""Return \(c_i^+ - c_i\); zero at a rate of zero, at which a movement tells nothing.

    Args:
        common: \(c\).
        moved: \(y_i - w\).
        scale: \(K \eta\).
    """
    return {
        name: torch.where(scale < torch.finfo(m.dtype).tiny, 0.0, -common[name] - m / scale)
        for name, m in moved.items()
    }
