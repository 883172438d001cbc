r"""FedAvg with an optimizer on the server (Reddi et al., 2021, Algorithms 1 and 2), and Muon there.

The mean movement of the clients, \(\Delta_t\), takes the place of a negative gradient.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torchpisa.algorithms.nsisa import momentum_step
from torchpisa.algorithms.pisa import Scalar
from torchpisa.checks import check_choice, check_count, check_range
from torchpisa.federated.algorithms.averaging import FedAvg
from torchpisa.federated.algorithms.base import Fields, Message, ServerState, Tensors, zeros
from torchpisa.federated.clients.local_work import FullGradient, LocalWork
from torchpisa.federated.schedules import Schedule, check_schedule, factor
from torchpisa.preconditioners import NewtonSchulz

__all__ = ["FedAdagrad", "FedAdam", "FedAvgM", "FedYogi", "ServerMuon"]


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(FedAvg):
    """The clients of FedAvg, and a server that treats their mean movement as a gradient."""

    server_lr_decay: Schedule = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_schedule("server_lr_decay", self.server_lr_decay)

    def start(self, weights: Tensors) -> ServerState:
        return replace(super().start(weights), buffers=self.initial_buffers(weights))

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        mean = {name: moved / present for name, moved in total.tensors["moved"].items()}
        step, buffers = self.server_step(mean, server.buffers)
        decay = factor("server_lr_decay", self.server_lr_decay, server.iteration)
        weights = {name: w + decay * step[name] for name, w in server.weights.items()}
        return replace(server, weights=weights, buffers=buffers, iteration=server.iteration + 1)

    @abstractmethod
    def initial_buffers(self, weights: Tensors) -> Fields:
        """Return the server's buffers before the first round."""

    @abstractmethod
    def server_step(self, mean: Tensors, buffers: Fields) -> tuple[Tensors, Fields]:
        """Return what is added to the weights, times `server_lr_decay`, and the new buffers."""


@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerOptimizer):
    r"""FedAvg with momentum on the server (Hsu et al., 2019).

    \(v \leftarrow \beta v + \Delta_t\), then \(x \leftarrow x + \eta v\).

    Args:
        lr: the clients' learning rate; all other arguments are those of `FedAvg`.
        server_lr: \(\eta\).
        server_lr_decay: `server_lr` is multiplied by it after every round; or a function of the
            round, such as `LinearDecay`, that returns the factor on `server_lr`.
        server_momentum: \(\beta\); 0 is FedAvg.
    """

    server_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("server_momentum", self.server_momentum, 0, 1, high_open=True)

    def initial_buffers(self, weights: Tensors) -> Fields:
        return {"momentum": zeros(weights)}

    def server_step(self, mean: Tensors, buffers: Fields) -> tuple[Tensors, Fields]:
        v = {name: self.server_momentum * v + mean[name] for name, v in buffers["momentum"].items()}
        return {name: self.server_lr * tensor for name, tensor in v.items()}, {"momentum": v}


@dataclass(frozen=True, kw_only=True)
class AdaptiveServer(ServerOptimizer):
    r"""Algorithm 2 of Reddi et al. (2021) but for the rule of \(v_t\).

    As printed there is no bias correction, \(m_{-1} = 0\) and \(v_{-1} = \tau^2\).
    """

    server_lr: float = 0.1
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta1", self.beta1, 0, 1, high_open=True)
        check_range("tau", self.tau, 0, low_open=True, high_open=True)

    def initial_buffers(self, weights: Tensors) -> Fields:
        v = {name: torch.full_like(w, self.tau**2) for name, w in weights.items()}
        return {"momentum": zeros(weights), "second": v}

    def server_step(self, mean: Tensors, buffers: Fields) -> tuple[Tensors, Fields]:
        step, momentum, second = {}, {}, {}
        for name, delta in mean.items():
            m = self.beta1 * buffers["momentum"][name] + (1 - self.beta1) * delta
            v = self.second_moment(buffers["second"][name], delta.square())
            step[name] = self.server_lr * m / (v.sqrt() + self.tau)
            momentum[name], second[name] = m, v
        return step, {"momentum": momentum, "second": second}

    @abstractmethod
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        r"""Return \(v_t\) from \(v_{t-1}\) and \(\Delta_t^2\)."""


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(AdaptiveServer):
    r"""FedAvg with Adagrad on the server (Reddi et al., 2021).

    \(m_t = \beta_1 m_{t-1} + (1 - \beta_1) \Delta_t\), \(v_t = v_{t-1} + \Delta_t^2\) and
    \(x_{t+1} = x_t + \eta\, m_t / (\sqrt{v_t} + \tau)\).

    Args:
        lr: \(\eta_l\), the clients' learning rate; all other arguments are those of `FedAvg`.
        server_lr: \(\eta\).
        server_lr_decay: decay of `server_lr` by round, as in `FedAvgM`.
        beta1: \(\beta_1\); 0 in the paper's experiments with Adagrad.
        tau: \(\tau\), how adaptive it is: entries that move by much less are not normalised.
    """

    beta1: float = 0.0

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True, kw_only=True)
class FedAdam(AdaptiveServer):
    r"""FedAvg with Adam on the server (Reddi et al., 2021).

    `FedAdagrad` with \(v_t = \beta_2 v_{t-1} + (1 - \beta_2) \Delta_t^2\).

    Args:
        lr: \(\eta_l\), the clients' learning rate; all other arguments are those of `FedAvg`.
        server_lr: \(\eta\).
        server_lr_decay: decay of `server_lr` by round, as in `FedAvgM`.
        beta1: \(\beta_1\).
        beta2: \(\beta_2\).
        tau: \(\tau\), how adaptive it is: entries that move by much less are not normalised.
    """

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta2", self.beta2, 0, 1, high_open=True)

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    r"""FedAvg with Yogi on the server (Reddi et al., 2021).

    `FedAdagrad` with \(v_t = v_{t-1} - (1 - \beta_2) \Delta_t^2\,
    \mathrm{sign}(v_{t-1} - \Delta_t^2)\).

    Args:
        lr: \(\eta_l\), the clients' learning rate; all other arguments are those of `FedAdam`.
    """

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()


@dataclass(frozen=True, kw_only=True)
class ServerMuon(ServerOptimizer):
    r"""Muon (Jordan et al., 2024) on the server, by default on FedSGD.

    With \(G = -\Delta_t\), matrices follow \(B \leftarrow \mu B + G\) and move by
    \(-\eta \sqrt{\max(1, \mathrm{rows}/\mathrm{cols})}\, \mathtt{NewtonSchulz}(G + \mu B)\);
    a convolution counts as a matrix with a row per filter. Vectors are left to Adam, as usual.
    The direction does not depend on the scale of \(\Delta_t\): with one full gradient per round
    the clients' `lr` only matters to Adam's `eps`.

    Args:
        lr: the clients' learning rate; all other arguments are those of `FedAvg`.
        server_lr: \(\eta\), how far a round moves a matrix in spectral norm.
        server_lr_decay: decay of `server_lr` and `vector_lr` by round, as in `FedAvgM`.
        server_momentum: \(\mu\).
        nesterov: orthogonalise \(G + \mu B\); \(B\) if False.
        ns_steps: Newton-Schulz iterations.
        vector_lr: Adam's learning rate, for vectors.
        betas: Adam's.
        eps: Adam's.
        local: the local work of a client; one gradient of all its data by default.
    """

    lr: float = 1.0
    local: LocalWork = field(default_factory=FullGradient)
    server_lr: float = 0.02
    server_momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    vector_lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("server_momentum", self.server_momentum, 0, 1, high_open=True)
        check_choice("nesterov", self.nesterov, (True, False))
        check_count("ns_steps", self.ns_steps, high=100)
        check_range("vector_lr", self.vector_lr, 0, low_open=True, high_open=True)
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas!r}")
        for beta in self.betas:
            check_range("betas", beta, 0, 1, high_open=True)
        check_range("eps", self.eps, 0, high_open=True)

    def initial_buffers(self, weights: Tensors) -> Fields:
        vectors = {name: w for name, w in weights.items() if w.dim() < 2}
        # On the CPU, because it is only read by the host.
        step = torch.zeros((), dtype=torch.float64, device="cpu")
        return {"momentum": zeros(weights), "second": zeros(vectors), "step": {"step": step}}

    def server_step(self, mean: Tensors, buffers: Fields) -> tuple[Tensors, Fields]:
        count = buffers["step"]["step"] + 1
        orthogonalize = NewtonSchulz(ns_steps=self.ns_steps, aspect_scaling=True).orthogonalize
        step, momentum, second = {}, {}, {}
        for name, moved in mean.items():
            grad, b = -moved, buffers["momentum"][name]
            if name not in buffers["second"]:
                momentum[name], b = momentum_step(b, grad, self.server_momentum, self.nesterov)
                step[name] = -self.server_lr * orthogonalize(b)
                continue
            beta1, beta2 = self.betas
            momentum[name] = m = beta1 * b + (1 - beta1) * grad
            second[name] = v = beta2 * buffers["second"][name] + (1 - beta2) * grad.square()
            m_hat, v_hat = m / (1 - beta1 ** float(count)), v / (1 - beta2 ** float(count))
            step[name] = -self.vector_lr * m_hat / (v_hat.sqrt() + self.eps)
        return step, {"momentum": momentum, "second": second, "step": {"step": count}}
