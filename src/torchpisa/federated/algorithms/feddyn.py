"""FedDyn: local objectives that are regularised by what clients remember of their gradients."""

from dataclasses import dataclass, replace

from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.checks import check_range
from torchpisa.federated.algorithms.averaging import LocalSGD
from torchpisa.federated.algorithms.base import Fields, Message, ServerState, Tensors, zeros

__all__ = ["FedDyn"]


@dataclass(frozen=True, kw_only=True)
class FedDyn(LocalSGD):
    r"""Dynamic regularisation (Acar et al., 2021, Algorithm 1).

    Client k takes SGD steps from \(\theta^{t-1}\) on

    \[
    L_k(\theta) - \langle \nabla L_k(\theta_k^{t-1}), \theta \rangle
    + \frac{\alpha}{2} \|\theta - \theta^{t-1}\|^2,
    \]

    then \(\nabla L_k(\theta_k^t) = \nabla L_k(\theta_k^{t-1}) - \alpha (\theta_k^t -
    \theta^{t-1})\), from zero; that of an absent client stays. With \(p_k\), the share of client k
    in all samples, in place of the paper's 1/m, the server has

    \[
    h^t = h^{t-1} - \alpha \sum_{k \in P_t} p_k (\theta_k^t - \theta^{t-1}), \qquad
    \theta^t = \frac{\sum_{k \in P_t} p_k \theta_k^t}{\sum_{k \in P_t} p_k}
    - \frac{1}{\alpha} h^t.
    \]

    With everybody present this is `PISA` with `Identity()`, \(\sigma = \alpha\) and
    \(\rho = 1/\mathrm{lr} - \alpha\).

    Args:
        alpha: \(\alpha > 0\).
        lr: the clients' learning rate.
        weight_decay: an L2 term inside every client's objective.
        lr_decay: `lr` is multiplied by it after every round; or a function of the round, such as
            `LinearDecay`, that returns the factor on `lr`.
        local: the local work of a client; one epoch by default.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("alpha", self.alpha, 0, low_open=True, high_open=True)

    def start(self, weights: Tensors) -> ServerState:
        return replace(super().start(weights), memory={"h": zeros(weights)})

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        moved = total.tensors["moved"]
        h = {name: h - self.alpha * moved[name] for name, h in server.memory["h"].items()}
        weights = {
            name: w + moved[name] / present - h[name] / self.alpha
            for name, w in server.weights.items()
        }
        return replace(server, weights=weights, memory={"h": h}, iteration=server.iteration + 1)

    def contribution(self, update: Message) -> Fields:
        return {"h": {name: -self.alpha * m for name, m in update.tensors["moved"].items()}}

    def remember(self, weights: Tensors) -> Fields:
        return {"h": zeros(weights)}

    def corrected(self, down: Message, memory: Fields, carry: Fields, grad: Tensors) -> Tensors:
        return {
            name: g - memory["h"][name] + self.alpha * carry["moved"][name]
            for name, g in grad.items()
        }

    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        h = {name: h - self.alpha * carry["moved"][name] for name, h in memory["h"].items()}
        return Message({"moved": carry["moved"]}, {}), {"h": h}
