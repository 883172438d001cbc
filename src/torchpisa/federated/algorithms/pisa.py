r"""PISA, SISA and MISA with clients: Algorithms 1 and 2 and ours, a batch being a client's data.

A client keeps its dual and what its preconditioner remembers, and sends
\(\delta_i = \sigma d_i\). The server keeps \(w\) and \(\Pi = \sum_i \alpha_i \pi_i\). A client that
is absent stays in both sums with its dual, as the paper's consensus has it with \(w_i = w\); one
that comes back goes on from the dual it has.
"""

import math
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from torchpisa.algorithms import pisa
from torchpisa.algorithms.pisa import Scalar
from torchpisa.algorithms.sisa import Scheme
from torchpisa.checks import check_range
from torchpisa.federated.algorithms.base import (
    Algorithm,
    Fields,
    Message,
    ServerState,
    Tensors,
    zeros,
)
from torchpisa.federated.clients.local_work import FullGradient, LocalWork, check_local
from torchpisa.penalty import Gamma, grown
from torchpisa.preconditioners import (
    Hessian,
    LocalProblem,
    Preconditioner,
    SecondMoment,
    Spectral,
    SpectralConsensus,
)
from torchpisa.preconditioners.base import initial_state, solve_for_deltas
from torchpisa.preconditioners.spectral import Method

__all__ = ["MISA", "PISA", "SISA"]


@dataclass(frozen=True, kw_only=True)
class Penalised(Algorithm):
    r"""PISA, SISA and MISA as far as they are alike: penalty, duals and consensus."""

    sigma: float
    rho: float
    gamma: Gamma = 1.0
    weight_decay: float = 0.0
    consensus_decay: float = 0.0
    local: LocalWork = field(default_factory=FullGradient)

    def __post_init__(self) -> None:
        check_range("sigma", self.sigma, 0, low_open=True, high_open=True)
        check_range("rho", self.rho, 0, high_open=True)
        if not callable(self.gamma):
            check_range("gamma", self.gamma, 0, 1, low_open=True)
        check_range("weight_decay", self.weight_decay, 0, high_open=True)
        check_range("consensus_decay", self.consensus_decay, 0, high_open=True)
        check_local(self.local)

    def solver(self) -> Preconditioner:
        """Return the preconditioner that solves the local problem."""
        raise NotImplementedError

    # The server

    def start(self, weights: Tensors) -> ServerState:
        if not self.needs_loss:
            self.solver().check(list(weights.values()))
        return ServerState(weights, {"dual": zeros(weights)}, {"sigma": self.sigma})

    def open(self, server: ServerState) -> ServerState:
        """Grow sigma by equation (2.12)."""
        gamma = self.gamma(server.iteration) if callable(self.gamma) else self.gamma
        check_range("gamma", gamma, 0, 1, low_open=True)
        return replace(server, numbers={"sigma": float(grown(server.numbers["sigma"], gamma))})

    def broadcast(self, server: ServerState) -> Message:
        return Message({"weights": server.weights}, {**server.numbers, "rho": self.rho})

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        """Compute equation (2.9), for one sigma of all clients and alphas that add up to one."""
        weights, duals = {}, {}
        proximal = self.solver().proximal
        numbers = server.numbers["sigma"], self.consensus_decay
        for name, w in server.weights.items():
            dual, delta = server.memory["dual"][name], total.tensors["delta"][name]
            if proximal is None:
                weights[name], duals[name] = pisa.consensus_of_deltas(w, dual, delta, *numbers)
            else:
                duals[name] = dual + delta
                weights[name] = proximal.consensus(w, duals[name] + delta, self.rho, *numbers)
        memory = {"dual": duals}
        return replace(server, weights=weights, memory=memory, iteration=server.iteration + 1)

    def contribution(self, update: Message) -> Fields:
        return {"dual": update.tensors["delta"]}

    # A client

    def remember(self, weights: Tensors) -> Fields:
        solver = self.solver()
        states = {name: initial_state(solver, w) for name, w in weights.items()}
        memory = {"dual": zeros(weights)}
        for kind in {kind: None for state in states.values() for kind in state}:
            memory[kind] = {name: state[kind] for name, state in states.items()}
        if len(memory) > 1:
            first = next(iter(weights.values()))
            # In float64, because 1 - beta^step loses half its digits in float32.
            count = torch.zeros((), dtype=torch.float64, device=first.device)
            memory["step"] = {"step": count}
        return memory

    def begin(self, down: Message, memory: Fields) -> Fields:
        state = {kind: tensors for kind, tensors in memory.items() if kind != "dual"}
        start = zeros(down.tensors["weights"])
        return {"moved": start, "delta": start, **state}

    def step(
        self, down: Message, memory: Fields, carry: Fields, grad: Tensors, point: Tensors
    ) -> Fields:
        r"""Compute equation (2.13).

        In the first local step \(w_i = w\), and \(d_i\) is the whole step. A later one also has
        `delta`, the term \(\sigma (w_i - w)\) of the augmented Lagrangian.
        """
        solver = self.solver()
        sigma, rho = down.numbers["sigma"], down.numbers["rho"]
        count: Scalar = carry["step"]["step"] + 1 if "step" in carry else 1
        grad = self.decayed(grad, point)
        problems, states = [], []
        for name, g in grad.items():
            dual = memory["dual"][name]
            residual = pisa.residual(dual, g) + carry["delta"][name]
            problems.append(
                LocalProblem(
                    param=point[name],
                    grad=g,
                    dual=dual,
                    residual=residual,
                    sigma=sigma,
                    rho=rho,
                    weight_decay=self.weight_decay,
                    step=count,
                )
            )
            kinds = carry.keys() - {"moved", "delta", "step"}
            states.append({kind: carry[kind][name] for kind in kinds})
        solved = dict(zip(grad, solve_for_deltas(solver, problems, states), strict=True))
        deltas = {name: carry["delta"][name] + delta for name, (delta, _) in solved.items()}
        new = {"delta": deltas, "moved": {name: d / sigma for name, d in deltas.items()}}
        for kind in carry.keys() - {"moved", "delta", "step"}:
            new[kind] = {name: state[kind] for name, (_, state) in solved.items()}
        if "step" in carry:
            new["step"] = {"step": cast(Tensor, count)}
        return {kind: new[kind] for kind in carry}

    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        """Compute equation (2.14)."""
        duals, deltas = {}, {}
        for name, delta in carry["delta"].items():
            local = pisa.local_step_of_delta(memory["dual"][name], delta)
            duals[name], deltas[name] = local.dual, local.delta
        state = {kind: tensors for kind, tensors in carry.items() if kind not in ("moved", "delta")}
        return Message({"delta": deltas}, {}), {"dual": duals, **state}


@dataclass(frozen=True, kw_only=True)
class PISA(Penalised):
    r"""Preconditioned Inexact Stochastic ADMM (Algorithm 1) with any preconditioner.

    Args:
        preconditioner: \(Q_i\), one for all parameters. One that needs the loss (`Hessian`) sees
            it; its clients run in turn, with all samples of a local step in memory at once.
        sigma: \(\sigma^0 > 0\), the penalty, the same for all clients.
        rho: \(\rho \ge 0\), the weight of the preconditioner.
        gamma: growth of the penalty per round, a number in (0, 1] or a rule of `torchpisa.penalty`.
        weight_decay: \(\mu - \lambda\), an L2 term inside every client's objective.
        consensus_decay: \(\lambda\), an L2 term that the server meets at the consensus.
        local: what a client does in a round; one full local gradient by default. Several local
            steps are our extension: they go on minimising the client's augmented Lagrangian,
            from \(w_i\) instead of \(w\), before the dual is updated once. The fixed points stay.
    """

    preconditioner: Preconditioner

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.preconditioner, Preconditioner):
            raise TypeError(
                "preconditioner must be one of torchpisa.preconditioners, or your own subclass of "
                f"Preconditioner, got {self.preconditioner!r}"
            )

    def solver(self) -> Preconditioner:
        return self.preconditioner

    @property
    def needs_loss(self) -> bool:
        return isinstance(self.preconditioner, Hessian)

    def observe(self, loss: Tensor, outputs: Tensor) -> None:
        if isinstance(self.preconditioner, Hessian):
            self.preconditioner.observe(loss, outputs)


@dataclass(frozen=True, kw_only=True)
class SISA(Penalised):
    r"""Second moment-based Inexact Stochastic ADMM (Algorithm 2).

    PISA with \(Q_i = \mathrm{Diag}(\sqrt{m_i})\), \(m_i\) being the second moment of
    \(\pi_i + g_i\).

    Args:
        sigma: \(\sigma^0 > 0\), the penalty: 1/sigma is the step that a constant gradient ends up
            with. Too small a value diverges, too large a one is slow.
        rho: \(\rho \ge 0\), the weight of the second moment.
        gamma: growth of the penalty per round, a number in (0, 1] or a rule of `torchpisa.penalty`.
        weight_decay: \(\mu - \lambda\), an L2 term inside every client's objective.
        consensus_decay: \(\lambda\), an L2 term that the server meets at the consensus.
        local: what a client does in a round; one full local gradient by default. Several local
            steps are our extension, see `PISA`.
        scheme: `"adagrad"`, `"rmsprop"` or `"adam"`: Schemes I, II and III of equation (4.4).
        beta: \(\beta_i\) of Schemes II and III.
        eta: \(\eta_i\), cap of \(\sqrt{m_i}\), equation (4.3).
        eps: added to \(\sqrt{m_i}\); 0 in the paper.
    """

    sigma: float = 5.0
    rho: float = 1.0
    scheme: Scheme = "adam"
    beta: float = 0.999
    eta: float = math.inf
    eps: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.solver()  # checks scheme, beta, eta and eps

    def solver(self) -> SecondMoment:
        return SecondMoment(self.scheme, self.beta, self.eta, self.eps)


@dataclass(frozen=True, kw_only=True)
class MISA(Penalised):
    r"""Matrix-preconditioned Inexact Stochastic ADMM: ours, not the paper's.

    A client's dual is an average of its gradients, and the server preconditions what the clients
    sum up to: a singular value \(s\) of it becomes \(s / (\sigma + \rho s)\), so that large ones
    are treated as by Muon and small ones as by gradient descent. What clients disagree on has
    cancelled out before. Vectors count as matrices of one column, unlike in `torchpisa.MISA`.

    Args:
        sigma: \(\sigma^0 > 0\), the penalty: 1/sigma is the step where singular values are small.
        rho: \(\rho \ge 0\): a round moves a matrix by at most 1/rho in spectral norm.
        momentum: \(\mu\), how much of the average is kept from round to round.
        gamma: growth of the penalty per round, a number in (0, 1] or a rule of `torchpisa.penalty`.
        weight_decay: \(\mu - \lambda\), an L2 term inside every client's objective.
        consensus_decay: \(\lambda\), an L2 term that the server meets at the consensus.
        local: what a client does in a round; one full local gradient by default. Several local
            steps are our extension, see `PISA`.
        aspect_scaling: let tall matrices move \(\sqrt{\mathrm{rows}/\mathrm{cols}}\) times further.
        method: how the server computes it; see `torchpisa.preconditioners.Spectral`.
            `"smooth"`, the default, is cheap and as rough as Muon.
    """

    sigma: float = 0.1
    rho: float = 10.0
    momentum: float = 0.95
    aspect_scaling: bool = False
    method: Method = "smooth"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.solver()  # checks momentum, aspect_scaling and method

    def solver(self) -> SpectralConsensus:
        spectral = Spectral(aspect_scaling=self.aspect_scaling, method=self.method)
        return SpectralConsensus(self.momentum, spectral)
