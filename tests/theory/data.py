"""Small problems: least squares and logistic regression, dealt out evenly or sorted by label."""

import functools

import torch

from torchpisa.theory import LeastSquares, LogisticRegression

SIZES = (10, 14, 16)
N = 4


def batches(kind: str, skewed: bool, scale: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return three batches of unequal size; `skewed` sorts by target, so that they disagree."""
    generator = torch.Generator().manual_seed(0)
    total = sum(SIZES)
    a = torch.randn(total, N, generator=generator, dtype=torch.float64)
    truth = torch.randn(N, generator=generator, dtype=torch.float64)
    b = a @ truth + 0.5 * torch.randn(total, generator=generator, dtype=torch.float64)
    if kind == "logistic":
        b = b.sign()
    if skewed:
        order = b.argsort()
        a, b = a[order], b[order]
    return list(zip(a.split(SIZES), (scale * b).split(SIZES), strict=True))


@functools.cache
def problem(kind: str, skewed: bool = False) -> LeastSquares | LogisticRegression:
    kinds = {"least squares": LeastSquares, "logistic": LogisticRegression}
    return kinds[kind](batches(kind, skewed), weight_decay=0.02, consensus_decay=0.1)


RADIUS = 3.0


def ball(n, radius, count):
    v = torch.randn(count, n, dtype=torch.float64)
    return radius * torch.rand(count, 1, dtype=torch.float64) ** 0.3 * v / v.norm(dim=1)[:, None]


def gradient(p, i, w, samples=None):
    """Return the gradient of F_i on a mini-batch."""
    w = w.clone().requires_grad_()
    loss = p.loss(i, w, samples) + 0.5 * p.weight_decay * (w @ w)
    return torch.autograd.grad(loss, w)[0]


def subset(size):
    return torch.randperm(size)[: int(torch.randint(1, size + 1, ()))]
