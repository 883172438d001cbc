"""Algorithms 1, 2 and 3 exactly as the paper prints them, in float64 NumPy.

Nothing is shared with the package: every batch stores its own w_i, the preconditioned step inverts
the full matrix, and a matrix parameter is vectorised. Slow, and meant to be read beside the paper.
"""

from collections.abc import Callable, Sequence

import numpy as np

Array = np.ndarray
Gradient = Callable[[int, int, Array], Array]  # (iteration, batch, w) -> gradient of F_i


def pisa(
    w0: Array,
    gradient: Gradient,
    choose_q: Callable[[int, int, Array, Array, Array], Array],
    iterations: int,
    alpha: Sequence[float],
    sigma0: Sequence[float],
    rho: Sequence[float],
    gamma: Callable[[int, int], float],
    lam: float,
) -> list[Array]:
    """w^1, w^2, ...; `choose_q(l, i, pi, g, w)` is the preconditioning matrix of (2.11)."""
    m = len(alpha)
    identity = np.eye(len(w0))
    w_i = [w0.copy() for _ in range(m)]
    pi = [np.zeros_like(w0) for _ in range(m)]
    sigma = list(sigma0)
    iterates = []
    for l in range(iterations):  # noqa: E741
        w = sum(alpha[i] * (sigma[i] * w_i[i] + pi[i]) for i in range(m))
        w = w / (sum(alpha[i] * sigma[i] for i in range(m)) + lam)
        iterates.append(w)
        for i in range(m):
            g = gradient(l, i, w)
            q = choose_q(l, i, pi[i], g, w)
            sigma[i] = sigma[i] / gamma(l, i)
            w_i[i] = w - np.linalg.inv(sigma[i] * identity + rho[i] * q) @ (pi[i] + g)
            pi[i] = pi[i] + sigma[i] * (w_i[i] - w)
    return iterates


def second_moment(
    scheme: str, m: int, size: int, beta: float, eta: float
) -> Callable[[int, int, Array, Array, Array], Array]:
    """Q of Algorithm 2: Diag(sqrt(m_i)) by Scheme "I", "II" or "III"."""
    kept = [np.zeros(size) for _ in range(m)]

    def choose(l: int, i: int, pi: Array, g: Array, w: Array) -> Array:  # noqa: E741
        square = (pi + g) * (pi + g)
        if scheme == "I":
            kept[i] = kept[i] + square
            tilde = kept[i]
        elif scheme == "II":
            kept[i] = beta * kept[i] + (1 - beta) * square
            tilde = kept[i]
        else:
            kept[i] = beta * kept[i] + (1 - beta) * square
            tilde = kept[i] / (1 - beta ** (l + 1))
        return np.diag(np.sqrt(np.minimum(tilde, eta**2)))

    return choose


def nsisa(
    w0: Array,
    gradient: Gradient,
    iterations: int,
    alpha: Sequence[float],
    sigma0: Sequence[float],
    rho: Sequence[float],
    gamma: Callable[[int, int], float],
    lam: float,
    momentum: float,
    epsilon: float,
    nesterov: bool = False,
) -> list[Array]:
    """Algorithm 3 for one matrix parameter."""
    m = len(alpha)
    w_i = [w0.copy() for _ in range(m)]
    pi = [np.zeros_like(w0) for _ in range(m)]
    b = [np.zeros_like(w0) for _ in range(m)]
    sigma = list(sigma0)
    iterates = []
    for l in range(iterations):  # noqa: E741
        w = sum(alpha[i] * (sigma[i] * w_i[i] + pi[i]) for i in range(m))
        w = w / (sum(alpha[i] * sigma[i] for i in range(m)) + lam)
        iterates.append(w)
        for i in range(m):
            g = gradient(l, i, w)
            b[i] = momentum * b[i] + g
            o = newton_schulz(g + momentum * b[i] if nesterov else b[i])
            sigma[i] = sigma[i] / gamma(l, i)
            v = (pi[i] + o == 0).astype(float)
            second = (pi[i] + o) * (pi[i] + o)
            step = (pi[i] + o + epsilon ** (l + 1) * v) / (sigma[i] + rho[i] * np.sqrt(second))
            w_i[i] = w - step
            pi[i] = pi[i] + sigma[i] * (w_i[i] - w)
    return iterates


def newton_schulz(g: Array, steps: int = 5) -> Array:
    """Newton-Schulz of Jordan et al. (2024)."""
    x = g / np.linalg.norm(g) if np.any(g) else g
    if g.shape[0] > g.shape[1]:
        x = x.T
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x
