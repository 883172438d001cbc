"""MISA in one file, for benchmarks of optimizers that allow no imports but torch.

The rule and its defaults are `torchpisa.MISA`'s; a test holds the two together. Written for the
optimization track of modded-nanogpt (fixed model, data and batch; fewest steps to a validation loss
of 3.28): copy the file into the "Optimizer" section of its `train_gpt_simple.py`, and in place of
its optimizers say

    optimizer = MISA(
        [
            dict(params=[p for p in model.blocks.parameters() if p.ndim == 2], before="whiten"),
            dict(params=[model.embed.weight], matrix=False, lr=0.3, weight_decay=0),
            dict(params=[model.proj.weight], matrix=False, lr=1 / 320, weight_decay=0),
            dict(params=[p for p in model.parameters() if p.ndim < 2], matrix=False, lr=0.01),
        ],
        lr=3.6e-3,
        momentum=0.85,
        weight_decay=0.17,
    )
    optimizers = [optimizer]

With this weight_decay a step takes as much from a matrix as the script's Muon does, 0.025 x 0.025.
The other three rates are the script's for AdamW: its embedding begins with a standard deviation of
1, on which a rate of 3.6e-3 would leave no mark in bfloat16. None of this has been tuned there.

Gradients must be the same on all ranks, as they are there after the all-reduce; their scale does
not matter. Each matrix is computed by one rank, which alone has its state, and sent to the others.

Read `MISA.update` first: it is the whole rule for one parameter.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

LIFT = (3.4445, -4.7750, 2.0315)
POLISH = ((2.084837, -1.60952, 0.518372), (1.875217, -1.250241, 0.375024), (1.875, -1.25, 0.375))


def orthogonalize(u: Tensor) -> Tensor:
    """Return about U V^T for a matrix U S V^T, by five Newton-Schulz steps."""
    wide = u.size(0) <= u.size(1)
    x = (u if wide else u.mT) / u.norm().clamp_min(torch.finfo(u.dtype).tiny)
    x = x.bfloat16() if x.is_cuda else x
    a, b, c = LIFT
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(u.dtype)


def is_due(round: int, every: int) -> bool:
    """Return whether a refresh is due: every few rounds, and in rounds 0, 1, 2, 4, ... at first."""
    return round % every == 0 or (round < every and round & (round - 1) == 0)


def in_full_precision(function):
    """Compute a function's products with all digits of float32, whatever the model may do."""

    def wrapped(*args):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            return function(*args)
        finally:
            torch.set_float32_matmul_precision(before)

    return wrapped


@in_full_precision
def square_roots(a: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return A^(1/2) and A^(-1/2) for A with eigenvalues in [least^2, 1]."""
    lifts = max(0, math.ceil(math.log(0.68 / least) / math.log(LIFT[0])))
    y, z = a, torch.eye(len(a), dtype=a.dtype, device=a.device)
    for linear, cubic, quintic in (*[LIFT] * lifts, *POLISH):
        zy = z @ y
        h = cubic * zy + quintic * zy @ zy
        h.diagonal().add_(linear)
        y, z = y @ h, h @ z
    return y, z


def whiten(
    u: Tensor, g: Tensor, state: dict, round: int, beta: float = 0.9, every: int = 10
) -> Tensor:
    """Return C^(-1/4) U for an average C of g g^T; for matrices that are no taller than wide."""
    n, eps = len(u), 1e-6
    if "gram" not in state:
        state["gram"] = torch.zeros(n, n, dtype=g.dtype, device=g.device)
        state["root"] = torch.eye(n, dtype=g.dtype, device=g.device)
    gram = state["gram"].mul_(beta).addmm_(g, g.mT, alpha=1 - beta)
    root = state["root"].to(u.dtype)
    if is_due(round, every):
        a = gram / gram.trace().clamp_min(torch.finfo(g.dtype).tiny)
        a.diagonal().add_(eps)
        half, _ = square_roots(a, eps**0.5)
        root = square_roots(half, eps**0.25)[1] * n**-0.25
        state["root"] = root if root.dtype == torch.float64 else root.bfloat16()
    return root @ u


@in_full_precision
def turned(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Take a step of orthogonal iteration; return the basis and the order of its old columns."""
    product = (gram / gram.trace().clamp_min(torch.finfo(gram.dtype).tiny)) @ basis
    values, order = (basis * product).sum(0).sort(descending=True)
    basis, product = basis[:, order], product[:, order]
    x = product + 2.0**-20 * values[0] * basis
    for _ in range(2):  # a QR decomposition by Cholesky's
        x = x / x.norm(dim=0)
        inner = x.mT @ x
        inner.diagonal().add_(4 * len(x) * torch.finfo(x.dtype).eps)
        triangle, _ = torch.linalg.cholesky_ex(inner)
        x = torch.linalg.solve_triangular(triangle, x.mT, upper=False).mT
    x = 1.5 * x - 0.5 * x @ (x.mT @ x)
    return torch.where(x.isfinite().all(), x, basis), order


def eigenbasis(
    u: Tensor, g: Tensor, state: dict, round: int, both: bool, beta: float = 0.95, every: int = 5
) -> Tensor:
    """Divide U by the root of the gradient's second moment in the eigenbasis of one or both sides.

    SOAP's rule (Vyas et al., 2024); for matrices that are no taller than wide.
    """
    if "squares" not in state:
        state["squares"] = torch.zeros_like(g)
        for side, size in (("left", g.size(0)), ("right", g.size(1)))[: 2 if both else 1]:
            state[f"{side}_gram"] = torch.zeros(size, size, dtype=g.dtype, device=g.device)
            state[f"{side}_basis"] = torch.eye(size, dtype=g.dtype, device=g.device)
    squares = state["squares"]
    for side in ("left", "right")[: 2 if both else 1]:
        x = g if side == "left" else g.mT
        gram = state[f"{side}_gram"].mul_(beta).addmm_(x, x.mT, alpha=1 - beta)
        if is_due(round, every):
            for _ in range(4 if round <= every else 1):
                state[f"{side}_basis"], order = turned(gram, state[f"{side}_basis"])
                squares = squares[order] if side == "left" else squares[:, order]
        q = state[f"{side}_basis"]
        u, g = (q.mT @ u, q.mT @ g) if side == "left" else (u @ q, g @ q)
    squares = state["squares"] = beta * squares + (1 - beta) * g * g
    floor = (1e-8 * squares.mean()).clamp_min(torch.finfo(squares.dtype).tiny)
    u = state["left_basis"] @ (u / (squares + floor).sqrt())
    return u @ state["right_basis"].mT if both else u


class MISA(torch.optim.Optimizer):
    """Gradients averaged in a dual, matrices orthogonalised, everything else scaled entry by entry.

    Args:
        params: groups, with `matrix=False` where nothing is to be orthogonalised.
        lr: in AdamW's terms, for everything.
        momentum: how much of the average is kept.
        weight_decay: as AdamW has it; not of vectors.
        look_ahead: 2 is ADMM's consensus, `1 + momentum` Nesterov momentum.
        row_beta: of the rows' mean squares.
        beta: of the second moment of what is not a matrix.
        before: None, "whiten", "eigenbasis" (of the smaller side) or "eigenbasis_both".
    """

    def __init__(
        self,
        params,
        lr=4e-3,
        momentum=0.9,
        weight_decay=0.1,
        look_ahead=2.0,
        row_beta=0.95,
        beta=0.99,
        eps=1e-8,
        before=None,
    ):
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, look_ahead=look_ahead)
        defaults |= dict(row_beta=row_beta, beta=beta, eps=eps, before=before, matrix=True, round=0)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:
        ranks, rank = 1, 0
        if dist.is_initialized():
            ranks, rank = dist.get_world_size(), dist.get_rank()
        sent = []
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if not group["matrix"]:
                    self.update(p, group)
                    continue
                if i % ranks == rank:
                    self.update(p, group)
                if ranks > 1:
                    sent.append(dist.broadcast(p, i % ranks, async_op=True))
            group["round"] += 1
        for each in sent:
            each.wait()

    def update(self, p: Tensor, group: dict) -> None:
        mu, state = group["momentum"], self.state[p]
        grad = p.grad.to(torch.promote_types(p.dtype, torch.float32))
        if "dual" not in state:
            state["dual"] = torch.zeros_like(grad)
            state["second"] = torch.zeros_like(grad[:, :1] if group["matrix"] else grad)
        step = group["round"] + 1
        r = state["dual"] + grad
        u = state["dual"] - group["look_ahead"] * (1 - mu) * r
        state["dual"].sub_(r, alpha=1 - mu)
        if group["matrix"]:
            beta = group["row_beta"]
            u = 0.2 * orthogonalize(self.precondition(u, grad, state, group))
            square = u.square().mean(1, keepdim=True) / 0.2**2
        else:
            beta, square = group["beta"], r * r
        state["second"].mul_(beta).add_(square, alpha=1 - beta)
        u = u / ((state["second"] / (1 - beta**step)).sqrt() + group["eps"])
        if group["weight_decay"] and p.ndim > 1:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(u.to(p.dtype), alpha=group["lr"])

    def precondition(self, u: Tensor, g: Tensor, state: dict, group: dict) -> Tensor:
        if group["before"] is None:
            return u
        tall = u.size(0) > u.size(1)
        u, g = (u.mT, g.mT) if tall else (u, g)
        both = {"eigenbasis": False, "eigenbasis_both": True}
        if group["before"] == "whiten":
            u = whiten(u, g, state, group["round"])
        else:
            u = eigenbasis(u, g, state, group["round"], both[group["before"]])
        return u.mT if tall else u
