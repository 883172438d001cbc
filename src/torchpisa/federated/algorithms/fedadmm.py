"""FedADMM: consensus ADMM whose absent clients stay in the mean with what they sent last."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.checks import check_choice, check_range
from torchpisa.federated.algorithms.averaging import LocalSGD
from torchpisa.federated.algorithms.base import (
    Fields,
    Message,
    ServerState,
    Tensors,
    scalars,
    zeros,
)

__all__ = ["AdaptiveFedADMM", "FedADMM"]


@dataclass(frozen=True, kw_only=True)
class FedADMM(LocalSGD):
    r"""Federated ADMM (Gong et al., 2022; Wang et al., 2022).

    A client that is present takes SGD steps on the augmented Lagrangian

    \[
    f_i(w_i) + \langle y_i, w_i - \theta^t \rangle + \frac{\rho}{2} \|w_i - \theta^t\|^2,
    \]

    sets \(y_i \leftarrow y_i + \rho (w_i - \theta^t)\), from zero, and sends by how much
    \(\rho w_i + y_i\) has changed. The server takes the mean of \(w_i + y_i / \rho\) over all
    clients, weighted by their shares. Those absent are in it with what they sent last, which is
    \(\theta^0\) before their first round. In the letters of Gong et al. that is a server
    step of \(\eta = |S_t| / m\), the one that they prove to converge.

    Args:
        rho: \(\rho > 0\), the penalty.
        lr: the clients' learning rate.
        start_from: the start of local steps: `"server"` at \(\theta^t\), `"client"` at the client's
            last \(w_i\), in its first round at \(\theta^t\).
        weight_decay: an L2 term inside every client's objective.
        lr_decay: `lr` is multiplied by it after every round; or a function of the round, such as
            `LinearDecay`, that returns the factor on `lr`.
        local: the local work of a client; one epoch by default.
    """

    rho: float = 0.1
    start_from: Literal["server", "client"] = "server"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("rho", self.rho, 0, low_open=True, high_open=True)
        check_choice("start_from", self.start_from, ("server", "client"))

    @property
    def starts_at_weights(self) -> bool:
        return self.start_from == "server"

    @property
    def clippable(self) -> bool:
        return False  # the first update of a client holds its weights

    # The server: N = sum of alpha_i (rho_i w_i + y_i), with the sum of alpha_i rho_i and the share
    # of those clients that were ever present. The others count with rho and the first weights.

    def start(self, weights: Tensors) -> ServerState:
        memory = {"anchor": zeros(weights), "penalty": scalars(weights, penalty=0.0, seen=0.0)}
        origin = {name: w.clone() for name, w in weights.items()}
        return replace(super().start(weights), memory=memory, buffers={"origin": origin})

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        memory = {
            kind: {name: t + total.tensors[kind][name] for name, t in tensors.items()}
            for kind, tensors in server.memory.items()
        }
        unseen = (1 - memory["penalty"]["seen"]) * self.rho
        penalty = memory["penalty"]["penalty"] + unseen
        origin = server.buffers["origin"]
        weights = {
            name: (n + unseen * origin[name]) / penalty for name, n in memory["anchor"].items()
        }
        return replace(server, weights=weights, memory=memory, iteration=server.iteration + 1)

    def admit(self, server: ServerState, before: float, after: float) -> ServerState:
        """Make room for a client that joins late, which counts with the weights of this moment."""
        unseen = before * (1 - server.memory["penalty"]["seen"])
        joined = after - before
        origin = {
            name: (unseen * server.buffers["origin"][name] + joined * w) / (unseen + joined)
            for name, w in server.weights.items()
        }
        return replace(super().admit(server, before, after), buffers={"origin": origin})

    def contribution(self, update: Message) -> Fields:
        return update.tensors

    def standing(
        self, server: ServerState, update: Message, known: Fields, steps: Tensor
    ) -> Fields:
        # Judged by w_i + y_i / rho_i, because penalties may differ.
        new = super().standing(server, update, known, steps)
        return {
            "anchor": {name: n / new["penalty"]["penalty"] for name, n in new["anchor"].items()}
        }

    # A client

    def remember(self, weights: Tensors) -> Fields:
        return {
            "anchor": zeros(weights),
            "penalty": scalars(weights, penalty=0.0, seen=0.0),
            "local": zeros(weights),
        }

    def begin(self, down: Message, memory: Fields) -> Fields:
        if self.starts_at_weights:
            return super().begin(down, memory)
        last, weights = self.last_weights(down, memory), down.tensors["weights"]
        return {"moved": {name: w_i - weights[name] for name, w_i in last.items()}}

    def last_weights(self, down: Message, memory: Fields) -> Tensors:
        r"""Return the \(w_i\) of a client's last round, \(\theta^t\) in its first."""
        local, seen = memory["local"], memory["penalty"]["seen"]
        weights = down.tensors["weights"]
        return {name: torch.where(seen > 0, local[name], w) for name, w in weights.items()}

    def duals(self, memory: Fields) -> Tensors:
        r"""Return \(y_i\) of a client; zero before its first round."""
        penalty, local = memory["penalty"]["penalty"], memory["local"]
        return {name: n - penalty * local[name] for name, n in memory["anchor"].items()}

    def current_penalty(self, memory: Fields) -> Scalar:
        r"""Return the \(\rho_i\) of this round."""
        return self.rho

    def corrected(self, down: Message, memory: Fields, carry: Fields, grad: Tensors) -> Tensors:
        rho, y = self.current_penalty(memory), self.duals(memory)
        return {name: g + y[name] + rho * carry["moved"][name] for name, g in grad.items()}

    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        rho, y = self.current_penalty(memory), self.duals(memory)
        old, moved = memory["penalty"], carry["moved"]
        local = {name: w + moved[name] for name, w in down.tensors["weights"].items()}
        anchor = {name: rho * local[name] + y[name] + rho * m for name, m in moved.items()}
        penalty = {
            "penalty": torch.ones_like(old["penalty"]) * rho,
            "seen": torch.ones_like(old["seen"]),
        }
        new = {"anchor": anchor, "penalty": penalty, "local": local}
        change = {
            kind: {name: t - memory[kind][name] for name, t in new[kind].items()}
            for kind in ("anchor", "penalty")
        }
        return Message(change, {}), new


@dataclass(frozen=True, kw_only=True)
class AdaptiveFedADMM(FedADMM):
    r"""FedADMM with a penalty of its own for every client (FedADMM-InSa, Song et al., 2024).

    After a round a client compares \(r = \|w_i - \theta^t\|\) with
    \(s = \rho_i \|w_i - w_i^{\mathrm{old}}\|\), the change since its last round: if
    \(r > \mu s\) its \(\rho_i\) is multiplied by \(\tau\), if \(s > \mu r\) divided by it. The
    server's mean is \(\sum_i \alpha_i (\rho_i w_i + y_i) / \sum_i \alpha_i \rho_i\), each
    \(\rho_i\) being that of the round in which \(w_i\) was sent.

    A client's \(\rho_i\) is its weight in that mean, so clients must be trusted.

    Of the paper this is the self-adaptive part. Its other part, local steps until a criterion is
    met, is not here: the number of local steps is what `local` says.

    Args:
        rho: \(\rho > 0\), every client's first penalty.
        lr: the clients' learning rate; all other arguments are those of `FedADMM`.
        mu: \(\mu \ge 1\), how unequal the residuals may be.
        tau: \(\tau \ge 1\), the factor; 1 is `FedADMM`.
    """

    mu: float = 5.0
    tau: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("mu", self.mu, 1, high_open=True)
        check_range("tau", self.tau, 1, high_open=True)

    def remember(self, weights: Tensors) -> Fields:
        return {**super().remember(weights), "next": scalars(weights, penalty=self.rho)}

    def current_penalty(self, memory: Fields) -> Scalar:
        return memory["next"]["penalty"]

    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        update, new = super().finish(down, memory, carry, steps)
        rho = memory["next"]["penalty"]
        r = _norm(carry["moved"])
        last = self.last_weights(down, memory)
        s = rho * _norm({name: w - last[name] for name, w in new["local"].items()})
        down_or_same = torch.where(s > self.mu * r, rho / self.tau, rho)
        adapted = torch.where(r > self.mu * s, rho * self.tau, down_or_same)
        return update, {**new, "next": {"penalty": adapted}}


def _norm(tensors: Tensors) -> Tensor:
    return torch.stack([t.square().sum() for t in tensors.values()]).sum().sqrt()
