"""Least squares spread unevenly over batches, with the optimum known."""

import torch
from torch import Tensor

from torchpisa import SISA


class LeastSquares:
    """Batches i with A_i w = b_i of different sizes, different scales and different solutions."""

    def __init__(self, m: int = 10, n: int = 6, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.m, self.n = m, n
        self.sizes = [40 + 4 * i for i in range(m)]
        self.weights = [size / sum(self.sizes) for size in self.sizes]
        self.a, self.b = [], []
        for i, size in enumerate(self.sizes):
            a = torch.randn(size, n, generator=generator, dtype=torch.float64)
            self.a.append(a * (0.5 + i / m))
            w = torch.randn(n, generator=generator, dtype=torch.float64) + i
            self.b.append(self.a[-1] @ w)
        hessians = [a.T @ a / len(a) for a in self.a]
        self.curvature = max(float(torch.linalg.eigvalsh(h).max()) for h in hessians)
        total = sum(p * h for p, h in zip(self.weights, hessians, strict=True))
        slope = sum(
            p * a.T @ b / len(a) for p, a, b in zip(self.weights, self.a, self.b, strict=True)
        )
        self.optimum = torch.linalg.solve(total, slope)

    def loss(self, i: int, w: Tensor) -> Tensor:
        """F_i."""
        return 0.5 * (self.a[i] @ w - self.b[i]).square().mean()

    def error(self, w: Tensor) -> float:
        """Distance to the optimum."""
        return float((w.detach() - self.optimum).norm())

    def start(self) -> torch.nn.Parameter:
        """A parameter away from the optimum."""
        return torch.nn.Parameter(torch.ones(self.n, dtype=torch.float64))


PROBLEM = LeastSquares()


def sisa(w, **settings):
    """SISA as the rules are tested with: sigma at the curvature, everything else unequal."""
    chosen = {"sigma": PROBLEM.curvature, "rho": 1.0, "batches": PROBLEM.m, **settings}
    return SISA([w], weights=PROBLEM.weights, **chosen)


def step(opt, w, i, **kwargs):
    opt.zero_grad()
    PROBLEM.loss(i, w).backward()
    opt.step(batch=i, **kwargs)


def rounds(opt, w, count, present=lambda round_: range(PROBLEM.m), before=lambda round_: None):
    for k in range(count):
        before(k)
        for i in present(k):
            step(opt, w, i)
        opt.flush()
