"""The stages of MISA's consensus as their formulas say, in float64 NumPy.

Nothing is shared with the package: roots by eigenvalues, orthogonal iteration by Householder's QR
decomposition. For one matrix that is no taller than wide.
"""

import numpy as np

Array = np.ndarray


def refreshes(every: int) -> set[int]:
    """Return the rounds, below 100, in which something is refreshed that is so every few rounds."""
    early = {2**i for i in range(7) if 2**i < every}
    return early | set(range(0, 100, every))


def whiten(
    us: list[Array], gs: list[Array], power: float, beta: float, every: int, eps: float
) -> list[Array]:
    """Return R U for every round; U and g come by round."""
    n = len(us[0])
    c = np.zeros((n, n))
    r = np.eye(n)
    results = []
    for t, (u, g) in enumerate(zip(us, gs, strict=True)):
        c = beta * c + (1 - beta) * g @ g.T
        if t in refreshes(every):
            values, vectors = np.linalg.eigh(n * (c / np.trace(c) + eps * np.eye(n)))
            r = vectors @ np.diag(values**-power) @ vectors.T
        results.append(r @ u)
    return results


class Side:
    """The eigenvectors of one side: A, Q and how they change."""

    def __init__(self, size: int, beta: float, every: int) -> None:
        self.a, self.q = np.zeros((size, size)), np.eye(size)
        self.beta, self.every = beta, every

    def update(self, g: Array, t: int) -> Array:
        """Return which of the old eigenvectors each of the new ones was."""
        self.a = self.beta * self.a + (1 - self.beta) * g @ g.T
        order = np.arange(len(g))
        if t in refreshes(self.every):
            for _ in range(4 if t <= self.every else 1):
                values = np.diag(self.q.T @ self.a @ self.q)
                largest_first = np.argsort(-values)
                self.q, order = self.q[:, largest_first], order[largest_first]
                ridge = 2.0**-20 * values.max() * np.eye(len(g))
                q, triangle = np.linalg.qr((self.a + ridge) @ self.q)
                self.q = q * np.sign(np.diag(triangle))
        return order


def eigenbasis_moment(
    us: list[Array], gs: list[Array], both: bool, beta: float, every: int, eps: float
) -> list[Array]:
    """Return Q ((Q^T U S) / sqrt(V)) S^T for every round; S = I for one side."""
    n, k = us[0].shape
    left, right = Side(n, beta, every), Side(k, beta, every)
    v = np.zeros((n, k))
    results = []
    for t, (u, g) in enumerate(zip(us, gs, strict=True)):
        v = v[left.update(g, t)]
        if both:
            v = v[:, right.update(g.T, t)]
        v = beta * v + (1 - beta) * (left.q.T @ g @ right.q) ** 2
        scaled = (left.q.T @ u @ right.q) / np.sqrt(v + eps * v.mean())
        results.append(left.q @ scaled @ right.q.T)
    return results
