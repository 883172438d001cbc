"""SISA's local step on a CPU, by the Adam kernel that torch has and in blocks that fit the cache.

With r = pi + g, c the bias correction and a = sigma / rho, Schemes II and III do

    n  <- beta n + (1 - beta) r^2
    pi <- pi - a r / (sqrt(n) / c + eps + a)

which is a step of Adam on pi: learning rate a, no momentum, L2 weight decay 1 to turn g into r, and
eps + a for epsilon. torch's kernel goes over memory once for it, where `foreach` does for every
operation. The contribution u = 2 pi_new - pi_old needs no memory of its own: what u is added to
gets -pi before the step and 2 pi after it.

Tensors are cut into pieces, and small ones put together, so that a block is still in the cache when
the next operation comes to it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchpisa.kernels import foreach
from torchpisa.kernels.foreach import consensus, residual_norm
from torchpisa.kernels.job import LocalJob, Member, state_key
from torchpisa.preconditioners import Preconditioner, SecondMoment

__all__ = ["consensus", "local_step", "obstacle", "residual_norm", "supports"]

# Of one tensor, per thread. A block takes part of five or six tensors; smaller ones stay in a
# faster cache, but then the calls themselves take longer than that saves.
_BLOCK_BYTES = 2**20

_DTYPES = (torch.float32, torch.float64)
# Of sigma / rho: what the step multiplies by it stays in the range of float32 as long as r^2 does.
_LEAST, _MOST = 1e-15, 1e15

# Corresponding pieces of a parameter's tensors, flat: the parameter, its gradient, dual and moment,
# and what the contribution is added to (the parameter or the pending sum); and its step counter. A
# plain tuple, since there are many of them and the time between operations is time lost.
_Piece = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]


class _Numbers(NamedTuple):
    """What is the same for all blocks of a job.

    Attributes:
        ratio: sigma / rho.
        grad_factor: what gradients are multiplied by.
        decay: what of the weights is added to them then.
        dual_factor: what duals are multiplied by in r; the clipping.
        scale: what contributions are multiplied by.
        shrink: share of the weights that the consensus takes away.
    """

    ratio: float
    grad_factor: float
    decay: float
    dual_factor: float
    scale: float
    shrink: float


def obstacle(params: Sequence[Tensor], preconditioner: Preconditioner) -> str | None:
    """Why parameters cannot be stepped here; None if they can."""
    if type(preconditioner) is not SecondMoment:
        return f"on a CPU there is no fused kernel for {type(preconditioner).__name__}"
    if preconditioner.scheme == "adagrad":
        return "on a CPU there is no fused kernel for the scheme 'adagrad'"
    if preconditioner.eta < math.inf:
        return "on a CPU there is no fused kernel for a finite eta"
    for param in params:
        if type(param) not in (Tensor, torch.nn.Parameter):
            return f"a parameter is a {type(param).__name__}, not a plain tensor"
        if param.dtype not in _DTYPES:
            return f"on a CPU parameters must be float32 or float64, got {param.dtype}"
    return None


def supports(job: LocalJob) -> bool:
    """Whether `local_step` takes this job."""
    return (
        obstacle([], job.preconditioner) is None
        and job.keep is None
        and not isinstance(job.sigma, Tensor)
        and not isinstance(job.rho, Tensor)
        and bool(job.rho * _LEAST <= job.penalty <= job.rho * _MOST)
        and any(_fits(member, job.slot) for member in job.members)
    )


@torch.no_grad()
def local_step(job: LocalJob) -> None:
    """See `Kernel`. Members that do not fit in here are left to `foreach`."""
    kinds: dict[torch.dtype, list[Member]] = {}
    rest = []
    for member in job.members:
        if _fits(member, job.slot):
            kinds.setdefault(member.param.dtype, []).append(member)
        else:
            rest.append(member)
    if rest:
        foreach.local_step(replace(job, members=rest))
    numbers = _numbers(job)
    for dtype, members in kinds.items():
        torch._foreach_add_([member.state[state_key("step", job.slot)] for member in members], 1)
        size = _BLOCK_BYTES // dtype.itemsize * torch.get_num_threads()
        size = max(1, min(size, sum(member.param.numel() for member in members)))
        scratch = torch.empty(2, size, dtype=dtype, device="cpu").unbind()
        for block in _blocks(job, members, size):
            _step(job, numbers, block, scratch)
        for member in members:
            member.state["arrived"] |= 1 << job.slot


def _fits(member: Member, slot: int) -> bool:
    """Whether a flat view of every tensor is possible, and all are of one kind that Adam takes."""
    param, grad, state, _ = member
    dtype = param.dtype
    if dtype not in _DTYPES:
        return False
    tensors = [param, state[state_key("dual", slot)], state[state_key("moment", slot)]]
    if grad is not None:
        tensors.append(grad)
    if "pending" in state:
        tensors.append(state["pending"])
    return all(
        tensor.dtype == dtype
        and tensor.shape == param.shape  # `foreach` says what is wrong
        and tensor.is_cpu
        and tensor.is_contiguous()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        for tensor in tensors
    )


def _numbers(job: LocalJob) -> _Numbers:
    clip = 1.0 if job.clip_scale is None else job.clip_scale.item()
    scale, shrink = job.weight, 0.0
    if job.move is not None:
        scale = float(job.move.scale())
        shrink = scale * job.move.consensus_decay
    return _Numbers(
        ratio=float(job.penalty / job.rho),
        grad_factor=clip if job.grad_scale is None else clip / job.grad_scale.item(),
        # Adam negates what it is given as a gradient when it maximizes.
        decay=clip * (-job.weight_decay if job.maximize else job.weight_decay),
        dual_factor=clip,
        scale=scale,
        shrink=shrink,
    )


def _blocks(job: LocalJob, members: list[Member], size: int) -> Iterator[list[_Piece]]:
    """Pieces of `members` in lists of at most `size` elements, and not much fewer."""
    block: list[_Piece] = []
    elements = 0
    for member in members:
        for piece in _pieces(job, member, size):
            own = piece[0].numel()
            if own == size:
                yield [piece]
                continue
            if elements + own > size:
                yield block
                block, elements = [], 0
            block.append(piece)
            elements += own
    if block:
        yield block


def _pieces(job: LocalJob, member: Member, size: int) -> Iterator[_Piece]:
    param, grad, state, _ = member
    if not param.numel():
        return
    params = _cut(param, size)
    grads = [None] * len(params) if grad is None else _cut(grad, size)
    duals = _cut(state[state_key("dual", job.slot)], size)
    moments = _cut(state[state_key("moment", job.slot)], size)
    targets = params if job.move is not None else _cut(state["pending"], size)
    step = state[state_key("step", job.slot)]
    first = job.move is None and not state["arrived"]
    for pieces in zip(params, grads, duals, moments, targets, strict=True):
        if first:
            pieces[-1].zero_()
        yield *pieces, step


def _cut(tensor: Tensor, size: int) -> Sequence[Tensor]:
    flat = tensor.view(-1)
    return torch.split(flat, size) if flat.numel() > size else (flat,)


def _step(job: LocalJob, numbers: _Numbers, block: list[_Piece], scratch: Sequence[Tensor]) -> None:
    own = job.preconditioner
    assert isinstance(own, SecondMoment)
    params, grads, duals, moments, targets, steps = map(list, zip(*block, strict=True))
    gradients = _gradients(numbers, params, grads, scratch[0])
    momenta = _rooms(params, scratch[1])
    if own.scheme == "rmsprop":
        # After so many steps there is no bias to correct.
        steps = [torch.tensor(1e18, dtype=torch.float32, device="cpu")] * len(steps)
    if numbers.shrink != 0:
        torch._foreach_add_(targets, targets, alpha=-numbers.shrink)
    torch._foreach_add_(targets, duals, alpha=-numbers.scale)
    # Adam multiplies its momentum by zero, so anything would do, except what is not finite.
    torch._foreach_zero_(momenta)
    torch._fused_adam_(
        duals,
        gradients,
        momenta,
        moments,
        [],
        steps,
        lr=numbers.ratio,
        beta1=0.0,
        beta2=own.beta,
        weight_decay=numbers.dual_factor,
        eps=own.eps + numbers.ratio,
        amsgrad=False,
        maximize=job.maximize,
    )
    torch._foreach_add_(targets, duals, alpha=2 * numbers.scale)
    if job.dual_decay != 1:
        torch._foreach_mul_(duals, job.dual_decay)


def _gradients(
    numbers: _Numbers, params: list[Tensor], grads: list[Tensor | None], scratch: Tensor
) -> list[Tensor]:
    """The user's own gradients, which are not written to, or what `numbers` make of them."""
    given = [grad for grad in grads if grad is not None]
    if len(given) == len(grads) and numbers.grad_factor == 1 and numbers.decay == 0:
        return given
    rooms = _rooms(params, scratch)
    for param, grad, room in zip(params, grads, rooms, strict=True):
        if grad is None:
            room.zero_()
        else:
            torch.mul(grad, numbers.grad_factor, out=room)
        if numbers.decay != 0:
            room.add_(param, alpha=numbers.decay)
    return rooms


def _rooms(params: list[Tensor], scratch: Tensor) -> list[Tensor]:
    """Parts of `scratch` of the sizes of `params`."""
    sizes = [param.numel() for param in params]
    if sizes == [scratch.numel()]:
        return [scratch]
    return list(torch.split(scratch[: sum(sizes)], sizes))
