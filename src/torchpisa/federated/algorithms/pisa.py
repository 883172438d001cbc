r"""Federated PISA, SISA (Algorithms 1 and 2) and MISA (ours): batch i is the data of client i.

A client keeps its dual and the state of its preconditioner, and sends \(\delta_i = \sigma d_i\).
The server keeps \(w\) and \(\Pi = \sum_i \alpha_i \pi_i\). An absent client stays in both sums
with its dual, as in the paper's consensus with \(w_i = w\), and continues from that dual later.
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from torchpisa.algorithms import pisa
from torchpisa.algorithms.pisa import Scalar
from torchpisa.algorithms.sisa import Scheme
from torchpisa.checks import check_range, warn
from torchpisa.federated.algorithms.base import (
    Algorithm,
    Fields,
    Message,
    ServerState,
    Tensors,
    zeros,
)
from torchpisa.federated.clients.local_work import (
    FullGradient,
    LocalWork,
    Minibatches,
    check_local,
)
from torchpisa.federated.schedules import Schedule
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

__all__ = ["MISA", "PISA", "SISA", "LocalMISA"]


_LEAST_SIGMA = 1e-12
"""Lower bound of sigma if the first gradients vanish; zero means that sigma is not known yet."""

_SIGMA_PER_GRADIENT, _RHO_PER_ROOT, _FIRST_SHARE = 2.0, 1.3, 0.3
"""Factors for SISA's sigma (on norms of gradients) and rho (on the root of the number of weights),
and the part of the first gradients that enters the duals: all of it would be too much for noisy
gradients. `benchmarks/first_round.py` measures them."""

_NOT_STATE = {"moved", "delta", "step", "before"}
"""Variables of a local run that are not state of the preconditioner."""


@dataclass(frozen=True, kw_only=True)
class Penalised(Algorithm):
    r"""Base class of PISA, SISA and MISA: penalty, duals and consensus."""

    _optional: ClassVar[frozenset[str]] = frozenset()  # what may be None, and is found in training

    sigma: float
    rho: float
    lr: Schedule = 1.0
    gamma: Gamma = 1.0
    weight_decay: float = 0.0
    consensus_decay: float = 0.0
    local: LocalWork = field(default_factory=FullGradient)

    def __post_init__(self) -> None:
        for name, low_open in (("sigma", True), ("rho", False)):
            value = getattr(self, name)
            if value is not None or name not in self._optional:
                check_range(name, value, 0, low_open=low_open, high_open=True)
        if not callable(self.lr):
            check_range("lr", self.lr, 0, high_open=True)
            if 0 < self.lr < 0.1:
                warn(
                    f"lr={self.lr:g} is relative here: it multiplies the step that sigma and rho "
                    "give. Leave it out; the rate of torchpisa.MISA is 1 / rho of federated.MISA"
                )
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
        # Zero stands for a sigma that the first round determines.
        return ServerState(weights, {"dual": zeros(weights)}, {"sigma": self.sigma or 0.0})

    def open(self, server: ServerState) -> ServerState:
        """Grow sigma by equation (2.12)."""
        gamma = self.gamma(server.iteration) if callable(self.gamma) else self.gamma
        check_range("gamma", gamma, 0, 1, low_open=True)
        return replace(server, numbers={"sigma": float(grown(server.numbers["sigma"], gamma))})

    def broadcast(self, server: ServerState) -> Message:
        numbers = {**server.numbers, "rho": self.rho, "lr": self.relative_lr(server)}
        return Message({"weights": server.weights}, numbers)

    def relative_lr(self, server: ServerState) -> float:
        """Return the learning rate of the round."""
        lr = self.lr(server.iteration) if callable(self.lr) else self.lr
        check_range("lr", lr, 0, high_open=True)
        return lr

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        """Compute equation (2.9); all clients share sigma, and the alphas add up to one."""
        weights, duals = {}, {}
        proximal = self.solver().proximal
        numbers = server.numbers["sigma"], self.consensus_decay, self.relative_lr(server)
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
        `delta`, the term \(\sigma (w_i - w)\) of the augmented Lagrangian. The relative learning
        rate divides sigma and multiplies \(w_i - w\), so `delta` is free of it.
        """
        solver = self.solver()
        sigma, rho = down.numbers["sigma"], down.numbers["rho"]
        count: Scalar = carry["step"]["step"] + 1 if "step" in carry else 1
        grad = self.decayed(grad, point)
        kinds = [kind for kind in carry if kind not in _NOT_STATE]
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
            states.append({kind: carry[kind][name] for kind in kinds})
        solved = dict(zip(grad, solve_for_deltas(solver, problems, states), strict=True))
        deltas = {name: carry["delta"][name] + delta for name, (delta, _) in solved.items()}
        new = {"moved": self.moved(down, carry["moved"], deltas), "delta": deltas}
        for kind in kinds:
            new[kind] = {name: state[kind] for name, (_, state) in solved.items()}
        if "step" in carry:
            new["step"] = {"step": cast(Tensor, count)}
        return new

    def moved(self, down: Message, moved: Tensors, deltas: Tensors) -> Tensors:
        r"""Return \(w_i - w\) after a local step.

        Args:
            down: the message of the server.
            moved: \(w_i - w\) before the step.
            deltas: \(\sigma d_i\) after the step.
        """
        scale = down.numbers["lr"] / down.numbers["sigma"]
        return {name: scale * delta for name, delta in deltas.items()}

    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        """Compute equation (2.14)."""
        duals, deltas = {}, {}
        for name, delta in carry["delta"].items():
            local = pisa.local_step_of_delta(memory["dual"][name], delta)
            duals[name], deltas[name] = local.dual, local.delta
        state = {kind: tensors for kind, tensors in carry.items() if kind not in ("moved", "delta")}
        tensors = {"delta": deltas}
        return Message(tensors, self.numbers_of(tensors, steps)), {"dual": duals, **state}


@dataclass(frozen=True, kw_only=True)
class PISA(Penalised):
    r"""Preconditioned Inexact Stochastic ADMM (Algorithm 1) with any preconditioner.

    Args:
        preconditioner: \(Q_i\), one for all parameters. With one that needs the loss
            (`Hessian`) clients run one after the other, with all samples of a local step in memory.
        sigma: \(\sigma^0 > 0\), the penalty, the same for all clients.
        rho: \(\rho \ge 0\), the weight of the preconditioner.
        lr: relative learning rate, a number or a function of the round such as `LinearDecay`: it
            divides sigma and rho alike, and so multiplies the step.
        gamma: growth of the penalty per round, a number in (0, 1] or a rule of `torchpisa.penalty`.
        weight_decay: \(\mu - \lambda\), an L2 term inside every client's objective.
        consensus_decay: \(\lambda\), an L2 term that the server meets at the consensus.
        local: the local work of a client; one full local gradient by default. Several local
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
            with. Too small a value diverges, too large a one is slow. It is on the scale of the
            loss. None takes twice the root mean square, over the clients of the first round, of
            the norms of their gradients. In that round a client's update is a part of its
            gradient. Every update has its own squared norm beside it, so that sums are enough.
        rho: \(\rho \ge 0\), the weight of the second moment. None takes 1.3 times the root of the
            number of weights.
        lr: relative learning rate, a number or a function of the round such as `LinearDecay`: it
            divides sigma and rho alike, and so multiplies the step.
        gamma: growth of the penalty per round, a number in (0, 1] or a rule of `torchpisa.penalty`.
        weight_decay: \(\mu - \lambda\), an L2 term inside every client's objective.
        consensus_decay: \(\lambda\), an L2 term that the server meets at the consensus.
        local: the local work of a client; one full local gradient by default. Several local
            steps are our extension, see `PISA`.
        scheme: `"adagrad"`, `"rmsprop"` or `"adam"`: Schemes I, II and III of equation (4.4).
        beta: \(\beta_i\) of Schemes II and III.
        eta: \(\eta_i\), cap of \(\sqrt{m_i}\), equation (4.3).
        eps: added to \(\sqrt{m_i}\); 0 in the paper.
    """

    _optional: ClassVar[frozenset[str]] = frozenset({"sigma", "rho"})

    sigma: float | None = 5.0  # type: ignore[assignment]
    rho: float | None = 1.0  # type: ignore[assignment]
    scheme: Scheme = "adam"
    beta: float = 0.999
    eta: float = math.inf
    eps: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.solver()  # checks scheme, beta, eta and eps

    def solver(self) -> SecondMoment:
        return SecondMoment(self.scheme, self.beta, self.eta, self.eps)

    @property
    def clippable(self) -> bool:
        return self.sigma is not None  # clipped updates would not tell the size of gradients

    # The server: with sigma=None its sigma is 0 until clients have told the size of their
    # gradients. Until then nobody moves, and part of the gradient enters the duals.

    def broadcast(self, server: ServerState) -> Message:
        tensors, numbers = super().broadcast(server)
        if self.rho is None:
            count = sum(w.numel() for w in server.weights.values())
            numbers = {**numbers, "rho": _RHO_PER_ROOT * math.sqrt(count)}
        if self.sigma is None:
            known = server.numbers["sigma"] > 0
            first = {"sigma": 1.0, "rho": 0.0, "lr": 0.0, "share": _FIRST_SHARE}
            numbers = {**numbers, "share": 1.0} if known else first
        return Message(tensors, numbers)

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        if server.numbers["sigma"] == 0:
            mean_square = float(total.numbers["square"]) / float(present)
            if mean_square == 0:  # the next round may tell
                return self.skip(server)
            sigma = _SIGMA_PER_GRADIENT / _FIRST_SHARE * math.sqrt(mean_square)
            server = replace(server, numbers={"sigma": sigma})
        return super().close(server, total, present)

    def numbers_of(self, tensors: Fields, steps: Tensor) -> dict[str, Scalar]:
        if self.sigma is not None:
            return {}
        squares = [delta.double().square().sum() for delta in tensors["delta"].values()]
        return {"square": torch.stack(squares).sum()}

    # A client

    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        if self.sigma is None:
            share = down.numbers["share"]
            carry = {**carry, "delta": {n: share * delta for n, delta in carry["delta"].items()}}
        return super().finish(down, memory, carry, steps)


@dataclass(frozen=True, kw_only=True)
class MISA(Penalised):
    r"""Matrix-preconditioned Inexact Stochastic ADMM: ours, not the paper's.

    A client's dual is an average of its gradients, and the server preconditions what the clients
    sum up to: a singular value \(s\) of it becomes \(s / (\sigma + \rho s)\), so that large ones
    are treated as by Muon and small ones as by gradient descent. What clients disagree on has
    cancelled out before. Vectors count as matrices of one column, unlike in `torchpisa.MISA`.

    Clients stay at \(w\): several local gradients of a round are averaged. `LocalMISA` moves.

    Args:
        sigma: \(\sigma^0 > 0\), the penalty: 1/sigma is the step where singular values are small.
            It is on the scale of the loss. None, the default, takes `damping` times rho times the
            norm of the mean gradient, which the server learns from the first round's sum; nothing
            is sent for it.
        rho: \(\rho \ge 0\): a round moves the entries of a matrix by at most 0.2/rho and those of a
            vector by at most 1/rho, in root mean square. So 1/rho is the `lr` of `torchpisa.MISA`.
        momentum: \(\mu\), how much of the average is kept from one local gradient to the next.
        damping: singular values below this share of the first mean gradient's norm count as small.
        lr: relative learning rate, a number or a function of the round such as `LinearDecay`: it
            divides sigma and rho alike, and so multiplies the step.
        gamma: growth of the penalty per round, a number in (0, 1] or a rule of `torchpisa.penalty`.
        weight_decay: \(\mu - \lambda\), an L2 term inside every client's objective.
        consensus_decay: \(\lambda\), an L2 term that the server meets at the consensus.
        local: the local work of a client; one full local gradient by default.
        match_rms: False for steps of at most 1/rho in spectral norm, whatever the shape.
        method: the server's method of computing it; see `torchpisa.preconditioners.Spectral`.
            `"smooth"`, the default, is cheap and as rough as Muon.
    """

    _optional: ClassVar[frozenset[str]] = frozenset({"sigma"})

    sigma: float | None = None  # type: ignore[assignment]
    rho: float = 30.0
    momentum: float = 0.9
    damping: float = 0.003
    match_rms: bool = True
    method: Method = "smooth"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma is None:  # it will be a multiple of rho
            check_range("rho", self.rho, 0, low_open=True, high_open=True)
        check_range("damping", self.damping, 0, low_open=True, high_open=True)
        self.solver()  # checks momentum, match_rms and method

    def solver(self) -> SpectralConsensus:
        spectral = Spectral(match_rms=self.match_rms, method=self.method)
        return SpectralConsensus(self.momentum, spectral)

    # The server: its sigma is 0 until the first round with clients has told the scale. Until then
    # clients must not move, and are told a learning rate of zero.

    def broadcast(self, server: ServerState) -> Message:
        down = super().broadcast(server)
        if server.numbers["sigma"] > 0:
            return down
        return Message(down.tensors, {**down.numbers, "sigma": 1.0, "lr": 0.0})

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        if server.numbers["sigma"] == 0:
            server = replace(server, numbers={"sigma": self._first_sigma(total)})
        return super().close(server, total, present)

    def _first_sigma(self, total: Message) -> float:
        """Return sigma by the norm of the mean gradient, for duals that were all zero."""
        deltas = total.tensors["delta"].values()
        squares = sum(float(delta.double().square().sum()) for delta in deltas)
        mean_gradient = math.sqrt(squares) / float(total.numbers["weight"])
        return max(self.damping * self.rho * mean_gradient, _LEAST_SIGMA)

    # A client

    def numbers_after(self, steps: Tensor) -> dict[str, Scalar]:
        """Return the weight of a round's gradients in the average, together."""
        return {"weight": 1 - self.momentum**steps}

    def moved(self, down: Message, moved: Tensors, deltas: Tensors) -> Tensors:
        return moved


@dataclass(frozen=True, kw_only=True)
class LocalMISA(MISA):
    r"""MISA whose clients move between two exchanges: for when rounds are expensive. Ours.

    With every local gradient a client updates its average \(p_i\), from \(\pi_i\), as in `MISA`,
    and moves by

    \[
    y_i \leftarrow y_i + \mathrm{lr}\, (\sigma I + \rho P_i)^{-1} V_i, \qquad
    V_i = \Pi + p_i - \pi_i,
    \]

    from \(y_i = w\), with \(P_i = (V_i V_i^\top)^{1/2}\): \(V_i\) is the server's sum as it would
    be if this client's news were everybody's. The last gradient of a round moves nobody. The server
    adds the movements, each times its client's share, and then takes MISA's step with the new
    duals, so with one local gradient per round this is `MISA`.

    Where \(\Pi = 0\) and every \(\pi_i = -\nabla F_i(w)\), every \(V_i\) is zero and nobody moves:
    local steps do not shift the solution, however different the clients. A round costs twice the
    traffic of MISA. An absent client does not move, and its dual stays in \(\Pi\). While sigma is
    not known, in the first round, nobody moves.

    Args:
        sigma: \(\sigma^0 > 0\), the penalty; all arguments are those of `MISA`.
        rho: \(\rho \ge 0\): bounds every local step, as it bounds a round of `MISA`.
        local: the local work of a client; ten mini-batches by default.
    """

    local: LocalWork = field(default_factory=lambda: Minibatches(steps=10))

    def broadcast(self, server: ServerState) -> Message:
        weights, numbers = super().broadcast(server)
        return Message({**weights, **server.memory}, numbers)

    def close(self, server: ServerState, total: Message, present: Scalar) -> ServerState:
        closed = super().close(server, total, present)
        moved = total.tensors["moved"]
        return replace(closed, weights={n: w + moved[n] for n, w in closed.weights.items()})

    def begin(self, down: Message, memory: Fields) -> Fields:
        carry = super().begin(down, memory)
        return {**carry, "before": carry["moved"]}  # without the move after the last gradient

    def step(
        self, down: Message, memory: Fields, carry: Fields, grad: Tensors, point: Tensors
    ) -> Fields:
        new = super().step(down, memory, carry, grad, point)
        return {**new, "before": carry["moved"]}

    def moved(self, down: Message, moved: Tensors, deltas: Tensors) -> Tensors:
        sigma, rho, lr = (down.numbers[name] for name in ("sigma", "rho", "lr"))
        consensus = self.solver().spectral.consensus
        return {
            name: consensus(moved[name], dual + deltas[name], rho, sigma, lr=lr)
            for name, dual in down.tensors["dual"].items()
        }

    def finish(
        self, down: Message, memory: Fields, carry: Fields, steps: Tensor
    ) -> tuple[Message, Fields]:
        rest = {kind: tensors for kind, tensors in carry.items() if kind != "before"}
        update, new = super().finish(down, memory, rest, steps)
        return Message({**update.tensors, "moved": carry["before"]}, update.numbers), new
