"""The federated rivals as their papers print them, in float64 NumPy.

Nothing is shared with the package: every client keeps its own weights, and so does every one that
is absent. `p` are the clients' shares of all samples, where a paper has 1/m; `present(t)` are the
clients of round t, and a round without any changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


class Params(dict[str, Array]):
    """Arrays by name, with the arithmetic of one long vector."""

    def each(self, f: Callable[..., Any], *others: "Params") -> "Params":
        return Params({n: f(a, *(other[n] for other in others)) for n, a in self.items()})

    def __add__(self, other: "Params") -> "Params":
        return self.each(np.add, other)

    def __sub__(self, other: "Params") -> "Params":
        return self.each(np.subtract, other)

    def __rmul__(self, factor: float) -> "Params":
        return self.each(lambda a: factor * a)

    def __truediv__(self, other: "float | Params") -> "Params":
        if isinstance(other, Params):
            return self.each(np.divide, other)
        return self.each(lambda a: a / other)

    def __neg__(self) -> "Params":
        return self.each(np.negative)

    @property
    def zero(self) -> "Params":
        return self.each(np.zeros_like)

    @property
    def norm(self) -> float:
        return float(np.sqrt(sum(np.sum(a**2) for a in self.values())))


@dataclass(frozen=True)
class Task:
    """A federated problem: the clients, their gradients and who is present when.

    Attributes:
        x0: the first weights.
        p: the clients' shares, with the sum 1.
        gradient: of client i at x in local step k of round t: `gradient(t, i, k, x)`.
        steps: local steps of client i in round t: `steps(t, i)`.
        present: the clients of round t.
        rounds: how many.
    """

    x0: Params
    p: Sequence[float]
    gradient: Callable[[int, int, int, Params], Params]
    steps: Callable[[int, int], int]
    present: Callable[[int], Sequence[int]]
    rounds: int

    @property
    def clients(self) -> range:
        return range(len(self.p))

    @property
    def busy_rounds(self) -> list[int]:
        return [t for t in range(self.rounds) if self.present(t)]


def mean_movement(task: Task, t: int, x: Params, eta_l: float) -> Params:
    """K steps of SGD on every client from x, and the weighted mean of x_i^K - x."""
    total, weight = x.zero, 0.0
    for i in task.present(t):
        x_i = x
        for k in range(task.steps(t, i)):
            x_i = x_i - eta_l * task.gradient(t, i, k, x_i)
        total = total + task.p[i] * (x_i - x)
        weight += task.p[i]
    return total / weight


def fedavgm(task: Task, eta_l: float, eta: Callable[[int], float], beta: float) -> Params:
    """Hsu et al. (2019): v <- beta v + Delta; x <- x + eta v, with the eta of round t."""
    x, v = task.x0, task.x0.zero
    for t in task.busy_rounds:
        v = beta * v + mean_movement(task, t, x, eta_l)
        x = x + eta(t) * v
    return x


def fedopt(
    task: Task,
    rule: str,
    eta_l: float,
    eta: Callable[[int], float],
    beta1: float,
    beta2: float,
    tau: float,
) -> Params:
    """Reddi et al. (2021), Algorithm 2, with the eta of round t."""
    x, m = task.x0, task.x0.zero
    v = x.each(lambda a: np.full_like(a, tau**2))
    for t in task.busy_rounds:
        delta = mean_movement(task, t, x, eta_l)
        square = delta.each(np.square)
        m = beta1 * m + (1 - beta1) * delta
        if rule == "adagrad":
            v = v + square
        elif rule == "yogi":
            sign = (v - square).each(np.sign)
            v = v - (1 - beta2) * square.each(np.multiply, sign)
        elif rule == "adam":
            v = beta2 * v + (1 - beta2) * square
        x = x + eta(t) * m / v.each(lambda a: np.sqrt(a) + tau)
    return x


def newton_schulz(g: Array, steps: int = 5) -> Array:
    """Jordan et al. (2024): the quintic iteration on g / |g|_F, transposed if g is tall."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / np.linalg.norm(g)
    if g.shape[0] > g.shape[1]:
        x = x.T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def server_muon(
    task: Task,
    eta_l: float,
    eta: float,
    decay: float,
    mu: float,
    nesterov: bool,
    vector_lr: float,
    betas: tuple[float, float],
    eps: float,
) -> Params:
    """Muon for matrices and Adam for vectors, on the negative mean movement."""
    x, b, v = task.x0, task.x0.zero, task.x0.zero
    for count, t in enumerate(task.busy_rounds, start=1):
        g = -mean_movement(task, t, x, eta_l)
        scale = decay**t
        new = Params()
        for name in x:
            if x[name].ndim == 2:
                rows, cols = x[name].shape
                b[name] = mu * b[name] + g[name]
                o = newton_schulz(g[name] + mu * b[name] if nesterov else b[name])
                new[name] = x[name] - scale * eta * max(1, rows / cols) ** 0.5 * o
            else:
                b[name] = betas[0] * b[name] + (1 - betas[0]) * g[name]
                v[name] = betas[1] * v[name] + (1 - betas[1]) * g[name] ** 2
                m_hat = b[name] / (1 - betas[0] ** count)
                v_hat = v[name] / (1 - betas[1] ** count)
                new[name] = x[name] - scale * vector_lr * m_hat / (np.sqrt(v_hat) + eps)
        x = new
    return x


def feddyn(task: Task, lr: float, alpha: float) -> Params:
    """Acar et al. (2021), Algorithm 1; theta_k by SGD on the regularised local objective."""
    theta, h = task.x0, task.x0.zero
    grad_l = [theta.zero for _ in task.clients]
    for t in task.busy_rounds:
        theta_k = {}
        for k in task.present(t):
            y = theta
            for step in range(task.steps(t, k)):
                g = task.gradient(t, k, step, y)
                y = y - lr * (g - grad_l[k] + alpha * (y - theta))
            grad_l[k] = grad_l[k] - alpha * (y - theta)
            theta_k[k] = y
        mean, weight = theta.zero, sum(task.p[k] for k in theta_k)
        for k, y in theta_k.items():
            mean = mean + task.p[k] / weight * y
            h = h - alpha * task.p[k] * (y - theta)
        theta = mean - 1 / alpha * h
    return theta


def fedpd(task: Task, lr: float, eta: float) -> Params:
    """Zhang et al. (2021), p = 0, Oracle I; an absent client counts with x_i = x_0."""
    x_0 = task.x0
    x: dict[int, Params] = {}
    lam = [x_0.zero for _ in task.clients]
    for t in task.busy_rounds:
        for i in task.present(t):
            x.setdefault(i, x_0)
            for q in range(task.steps(t, i)):
                g = task.gradient(t, i, q, x[i])
                x[i] = x[i] - lr * (g + lam[i] + 1 / eta * (x[i] - x_0))
            lam[i] = lam[i] + 1 / eta * (x[i] - x_0)
        new = x_0.zero
        for i in task.clients:
            x_i = x[i] if i in task.present(t) else x_0
            new = new + task.p[i] * (x_i + eta * lam[i])
        x_0 = new
    return x_0


def fedadmm(
    task: Task, lr: float, rho: float, from_client: bool, mu: float = 1.0, tau: float = 1.0
) -> tuple[Params, list[float]]:
    """Gong et al. (2022); with tau > 1 the penalties of Song et al. (2024). Returns them, too."""
    theta = task.x0
    w = [theta for _ in task.clients]
    y = [theta.zero for _ in task.clients]
    sent = [rho for _ in task.clients]  # the penalty that went with w and y
    penalty = [rho for _ in task.clients]
    seen = [False for _ in task.clients]
    for t in task.busy_rounds:
        for i in task.present(t):
            old, sent[i] = w[i] if seen[i] else theta, penalty[i]
            seen[i] = True
            w[i] = old if from_client else theta
            for k in range(task.steps(t, i)):
                g = task.gradient(t, i, k, w[i])
                w[i] = w[i] - lr * (g + y[i] + sent[i] * (w[i] - theta))
            y[i] = y[i] + sent[i] * (w[i] - theta)
            r, s = (w[i] - theta).norm, sent[i] * (w[i] - old).norm
            if mu * s < r:
                penalty[i] = sent[i] * tau
            elif mu * r < s:
                penalty[i] = sent[i] / tau
        total = theta.zero
        for i in task.clients:
            total = total + task.p[i] * (sent[i] * w[i] + y[i])
        theta = total / sum(task.p[i] * sent[i] for i in task.clients)
    return theta, penalty


def fedmuon(task: Task, eta: float, alpha: float) -> Params:
    """Takezawa et al. (2025), Algorithm 1: absent clients count with X_i = X."""

    def lmo(g: Array) -> Array:
        return -newton_schulz(g) if g.ndim == 2 else -g / np.linalg.norm(g)

    x, c = task.x0, task.x0.zero
    m = [x.zero for _ in task.clients]
    c_i = [x.zero for _ in task.clients]
    for t in task.busy_rounds:
        x_i = [x for _ in task.clients]
        for i in task.present(t):
            for k in range(task.steps(t, i)):
                m[i] = (1 - alpha) * m[i] + alpha * task.gradient(t, i, k, x_i[i])
                x_i[i] = x_i[i] + eta * (m[i] - c_i[i] + c).each(lmo)
        for i in task.present(t):
            c = c + task.p[i] * (m[i] - c_i[i])
            c_i[i] = m[i]
        x = x.zero
        for i in task.clients:
            x = x + task.p[i] * x_i[i]
    return x


def warm_scaffold(task: Task, eta_l: float, eta_g: float) -> Params:
    """Karimireddy et al. (2020), Option II; in its first round a client sets c_i = g_i(x)."""
    x, c = task.x0, task.x0.zero
    c_i = [x.zero for _ in task.clients]
    warm = [False for _ in task.clients]
    for t in task.busy_rounds:
        delta_x, delta_c, weight = x.zero, x.zero, 0.0
        for i in task.present(t):
            steps, y = task.steps(t, i), x
            if not warm[i]:
                plus = x.zero
                for k in range(steps):
                    plus = plus + task.gradient(t, i, k, x) / steps
                warm[i] = True
            else:
                for k in range(steps):
                    y = y - eta_l * (task.gradient(t, i, k, y) - c_i[i] + c)
                plus = c_i[i] - c + (x - y) / (steps * eta_l)
            delta_x = delta_x + task.p[i] * (y - x)
            delta_c = delta_c + task.p[i] * (plus - c_i[i])
            c_i[i] = plus
            weight += task.p[i]
        x = x + eta_g * delta_x / weight
        c = c + delta_c
    return x


def local_misa(
    task: Task, sigma: float, rho: float, mu: float, decay: float, lr: Callable[[int], float]
) -> Params:
    """LocalMISA with copies of everything: duals, local averages and local weights."""

    def scaled_rho(v: Array) -> float:  # rho of a matrix or a vector, for entries of one size
        return rho / (0.2 * max(v.shape) ** 0.5 if v.ndim == 2 else v.size**0.5)

    def resolvent(v: Array) -> Array:
        u, s, vt = np.linalg.svd(v if v.ndim == 2 else v[:, None], full_matrices=False)
        return (u * (s / (sigma + scaled_rho(v) * s)) @ vt).reshape(v.shape)

    w = task.x0
    pi = [w.zero for _ in task.clients]
    for t in task.busy_rounds:
        total = sum((task.p[i] * pi[i] for i in task.clients), w.zero)  # Pi
        y = [w for _ in task.clients]
        new = list(pi)
        for i in task.present(t):
            steps = task.steps(t, i)
            for k in range(steps):
                new[i] = mu * new[i] - (1 - mu) * task.gradient(t, i, k, y[i])
                if k < steps - 1:
                    y[i] = y[i] + lr(t) * (total + new[i] - pi[i]).each(resolvent)
        # u_i = pi_i + 2 (new_i - pi_i): the paper's consensus, with w_i = w for those absent.
        u = sum((task.p[i] * (2 * new[i] - pi[i]) for i in task.clients), w.zero)
        moved = sum((task.p[i] * (y[i] - w) for i in task.clients), w.zero)
        pi = new
        pull = u - decay * w

        def consensus(v: Array, rate: float = lr(t)) -> Array:
            a, s, b = np.linalg.svd(v if v.ndim == 2 else v[:, None], full_matrices=False)
            scaled = rate * s / (sigma + rate * decay + scaled_rho(v) * s)
            return (a * scaled @ b).reshape(v.shape)

        w = w + pull.each(consensus) + moved
    return w
