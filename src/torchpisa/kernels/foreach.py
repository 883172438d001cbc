"""The plain loop's mathematics with one call per operation for all parameters of a kind.

`supports` says which jobs; everything else goes through the loop.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchpisa.algorithms import sisa
from torchpisa.algorithms.pisa import Scalar
from torchpisa.kernels import newton_schulz, resolvent, sharded
from torchpisa.kernels.job import (
    TINY,
    LocalJob,
    Member,
    Move,
    check_shapes,
    compute_dtype,
    own_sigma,
    real,
    shaped_alike,
    state_key,
)
from torchpisa.kernels.rounding import store
from torchpisa.preconditioners import (
    Identity,
    NewtonSchulz,
    Preconditioner,
    SecondMoment,
    Spectral,
    SpectralConsensus,
)
from torchpisa.preconditioners.spectral import as_matrix

__all__ = ["consensus", "knows", "leave_out_nonfinite", "local_step", "residual_norm", "supports"]

Tensors = list[Tensor]

# Elements; half a dozen float32 tensors of this size are a few megabytes.
_CPU_BLOCK = 2**18


def supports(job: LocalJob) -> bool:
    """Whether `local_step` takes this job: a known preconditioner, and nobody to leave out."""
    return knows(job.preconditioner) and job.keep is None


def knows(preconditioner: Preconditioner) -> bool:
    """Whether there is a solver for `preconditioner`."""
    return type(preconditioner) in _SOLVERS


@torch.no_grad()
def local_step(job: LocalJob) -> None:
    """See `Kernel`."""
    solve = _SOLVERS[type(job.preconditioner)]
    check_shapes(job.members, shaped_alike(job.preconditioner, job.slot))
    for members in _alike(job.members, job.slot):
        dtype = _dtype(members, job.slot)
        stored = _own(members, "dual", job.slot)
        duals = _as(stored, dtype)
        torch._foreach_add_(_own(members, "step", job.slot), 1)
        deltas = solve(job, members, duals, _gradients(job, members, dtype))
        torch._foreach_add_(duals, deltas)
        # u = pi + 2 delta is the new dual plus delta, which is not needed any more.
        contributions = deltas
        torch._foreach_add_(contributions, duals)
        if job.move is not None:
            _move(members, contributions, job.move)
        else:
            _accumulate(job, members, contributions)
        if job.dual_decay != 1:
            torch._foreach_mul_(duals, job.dual_decay)
        _write_back(stored, duals, job.stochastic_rounding)
        for member in members:
            member.state["arrived"] |= 1 << job.slot


@torch.no_grad()
def consensus(members: list[Member], move: Move, keep: Tensor | None) -> None:
    """See `Kernel`; for `keep` None."""
    assert keep is None
    check_shapes(members, ("pending",))
    for alike in _alike(members, 0):
        _move(alike, [real(member.state["pending"]) for member in alike], move)


@torch.no_grad()
def residual_norm(job: LocalJob) -> Tensors:
    """See `Kernel`."""
    norms: Tensors = []
    for members in _alike(job.members, job.slot):
        dtype = _dtype(members, job.slot)
        duals = _as(_own(members, "dual", job.slot), dtype)
        norms += torch._foreach_norm(torch._foreach_add(duals, _gradients(job, members, dtype)))
    return norms


# Each solver returns delta = sigma d = -r / (1 + (rho / sigma) q), in memory that is the caller's.


def _identity(job: LocalJob, members: list[Member], duals: Tensors, grads: Tensors) -> Tensors:
    rs = _residuals(job, duals, grads)
    torch._foreach_mul_(rs, -job.penalty / (job.penalty + job.rho))
    return rs


def _second_moment(job: LocalJob, members: list[Member], duals: Tensors, grads: Tensors) -> Tensors:
    own = job.preconditioner
    assert isinstance(own, SecondMoment)
    rs = _residuals(job, duals, grads)
    stored = _own(members, "moment", job.slot)
    moments = _as(stored, rs[0].dtype)
    if own.scheme == "adagrad":
        torch._foreach_addcmul_(moments, rs, rs)
    else:
        torch._foreach_mul_(moments, own.beta)
        torch._foreach_addcmul_(moments, rs, rs, 1 - own.beta)
    _write_back(stored, moments, job.stochastic_rounding)
    roots = list(torch._foreach_sqrt(moments))
    # The bias correction of Scheme III goes into the scalars instead of over the tensors.
    corrections: Any = [1.0] * len(roots)
    if own.scheme == "adam":
        corrections = [(1 - own.beta**step) ** 0.5 for step in _steps(job, members)]
    if own.eta < float("inf"):
        for root, c in zip(roots, corrections, strict=True):
            root.clamp_(max=own.eta * c)
    ratios: list[Any]
    if job.sigma is None:
        ratios = [job.rho / sigma for sigma in _follow(job, members, rs)]
    else:
        ratios = [job.rho / job.penalty] * len(roots)
    pairs = zip(ratios, corrections, strict=True)
    torch._foreach_mul_(roots, [-ratio / c for ratio, c in pairs])
    torch._foreach_add_(roots, [-(1 + ratio * own.eps) for ratio in ratios])
    torch._foreach_div_(rs, roots)
    return rs


def _follow(job: LocalJob, members: list[Member], rs: Tensors) -> list[Scalar]:
    """Let the sigma of every parameter follow its gradients, and return them."""
    own = job.preconditioner
    assert isinstance(own, SecondMoment)
    norms = torch.stack(torch._foreach_norm(rs))
    sizes = [r.numel() for r in rs]
    wholes = [member.whole for member in members if member.whole is not None]
    if wholes:
        norms = sharded.summed(norms.square(), sharded.groups(wholes)).sqrt()
        sizes = [real(whole).numel() for whole in wholes]
    key = state_key("sigma", job.slot), state_key("level", job.slot)
    rows = zip(members, norms.unbind(), sizes, _steps(job, members), strict=True)
    for member, norm, size, step in rows:
        sigma, level = (member.state[name] for name in key)
        rms = (norm / max(1, size) ** 0.5).to(level.device, level.dtype)
        new_sigma, new_level = sisa.followed(sigma, level, rms, step, own.scheme, own.beta)
        sigma.copy_(new_sigma.clamp(min=TINY))
        level.copy_(new_level)
    return [own_sigma(member, job.slot) for member in members]


def _newton_schulz(job: LocalJob, members: list[Member], duals: Tensors, grads: Tensors) -> Tensors:
    own = job.preconditioner
    assert isinstance(own, NewtonSchulz)
    stored = _own(members, "momentum", job.slot)
    momenta = _as(stored, duals[0].dtype)
    torch._foreach_mul_(momenta, own.momentum)
    torch._foreach_add_(momenta, grads)
    _write_back(stored, momenta, job.stochastic_rounding)
    bs = momenta
    if own.nesterov:
        bs = list(torch._foreach_add(grads, momenta, alpha=own.momentum))
    wholes = [member.whole for member in members if member.whole is not None]

    def orthogonalized(matrices: Sequence[Tensor]) -> Tensors:
        return newton_schulz.orthogonalize(matrices, own.ns_steps, own.dtype)

    if wholes:
        os = sharded.solve(bs, wholes, orthogonalized)
    else:
        os = orthogonalized([b.flatten(1) for b in bs])
    if own.aspect_scaling:
        shapes = [whole.shape for whole in wholes or bs]
        scales = [own.scale(shape[0], shape.numel() // shape[0]) for shape in shapes]
        torch._foreach_mul_(os, scales)
    sums = [o.view_as(b) for o, b in zip(os, bs, strict=True)]
    torch._foreach_add_(sums, duals)
    denominators = list(torch._foreach_abs(sums))
    kind = torch.finfo(sums[0].dtype)
    least = kind.tiny * kind.eps
    for s, step in zip(sums, _steps(job, members), strict=True):
        perturbation = own.perturbation**step
        # After a few steps nothing is left of it in the dtype, unless the device alone knows.
        if isinstance(perturbation, Tensor) or perturbation >= least:
            s.add_(perturbation * (s == 0))
    torch._foreach_mul_(denominators, -job.rho / job.penalty)
    torch._foreach_add_(denominators, -1.0)
    torch._foreach_div_(sums, denominators)
    return sums


def _spectral(job: LocalJob, members: list[Member], duals: Tensors, grads: Tensors) -> Tensors:
    own = job.preconditioner
    assert isinstance(own, Spectral)
    rs = _residuals(job, duals, grads)
    # For sigma d at once: (sigma I + rho Q)^-1 r leaves the range of the dtype as sigma grows.
    ratio = job.rho / job.penalty
    if own.average:
        stored = _own(members, "average", job.slot)
        averages = _as(stored, rs[0].dtype)
        matrices, steps = [r.flatten(1) for r in rs], _steps(job, members)
        ys, averages = resolvent.averaged(matrices, averages, steps, own, 1.0, ratio)
        _write_back(stored, averages, job.stochastic_rounding)
    else:
        ys = _resolvents(members, rs, own, 1.0, ratio)
    # Into the memory of r, which is laid out like the dual.
    torch._foreach_copy_(rs, [y.reshape(r.shape) for y, r in zip(ys, rs, strict=True)])
    torch._foreach_neg_(rs)
    return rs


def _resolvents(
    members: list[Member], rs: Tensors, own: Spectral, sigma: Scalar, rho: Scalar
) -> Tensors:
    """(sigma I + rho Q)^-1 r for matrices that belong to `members`; flattened if they are whole."""
    wholes = [member.whole for member in members if member.whole is not None]

    def solve(matrices: Sequence[Tensor]) -> Tensors:
        return resolvent.resolvents(matrices, own, sigma, rho)

    return sharded.solve(rs, wholes, solve) if wholes else solve([as_matrix(r) for r in rs])


def _averaging(job: LocalJob, members: list[Member], duals: Tensors, grads: Tensors) -> Tensors:
    own = job.preconditioner
    assert isinstance(own, SpectralConsensus)
    rs = _residuals(job, duals, grads)
    torch._foreach_mul_(rs, own.momentum - 1)
    return rs


_SOLVERS: dict[
    type[Preconditioner], Callable[[LocalJob, list[Member], Tensors, Tensors], Tensors]
] = {
    Identity: _identity,
    SecondMoment: _second_moment,
    NewtonSchulz: _newton_schulz,
    Spectral: _spectral,
    SpectralConsensus: _averaging,
}


def _alike(members: list[Member], slot: int) -> Iterator[list[Member]]:
    """Members in lists that share devices and dtypes, as foreach's fast routes want them.

    On a CPU a list is also cut where its tensors no longer fit in the cache together, because one
    operation after the other goes over all of them.
    """
    lists: dict[object, list[Member]] = {}
    for member in members:
        dual = member.state[state_key("dual", slot)]
        grad = None if member.grad is None else member.grad.dtype
        kind = (member.param.device, member.param.dtype, dual.dtype, grad)
        lists.setdefault(kind, []).append(member)
    for alike in lists.values():
        # Of sharded matrices all processes must exchange the same ones together.
        if alike[0].param.device.type != "cpu" or alike[0].whole is not None:
            yield alike
            continue
        block: list[Member] = []
        elements = 0
        for member in alike:
            if block and elements + member.param.numel() > _CPU_BLOCK:
                yield block
                block, elements = [], 0
            block.append(member)
            elements += member.param.numel()
        yield block


def _dtype(members: list[Member], slot: int) -> torch.dtype:
    first = members[0]
    return compute_dtype(real(first.param), real(first.state[state_key("dual", slot)]))


def _own(members: list[Member], name: str, slot: int) -> Tensors:
    key = state_key(name, slot)
    return [real(member.state[key]) for member in members]


def _as(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    if all(tensor.dtype == dtype for tensor in tensors):
        return tensors
    return [tensor.to(dtype) for tensor in tensors]


def _write_back(stored: Tensors, computed: Tensors, stochastic_rounding: bool) -> None:
    if stored is computed:
        return
    if stochastic_rounding:
        for target, value in zip(stored, computed, strict=True):
            store(target, value, stochastic_rounding)
    else:
        torch._foreach_copy_(stored, computed)


def _gradients(job: LocalJob, members: list[Member], dtype: torch.dtype) -> Tensors:
    """g_i in `dtype`, never to be written to: it may be the user's own gradient."""
    params = [real(member.param) for member in members]
    if members[0].grad is None:
        grads = [torch.zeros_like(param, dtype=dtype) for param in params]
    else:
        grads = _as([real(member.grad) for member in members if member.grad is not None], dtype)
        if job.flags is not None:
            pairs = zip(job.members, job.flags, strict=True)
            flags = {id(member.param): flag for member, flag in pairs}
            grads = leave_out_nonfinite(grads, [flags[id(member.param)] for member in members])
        if job.grad_scale is not None:
            grads = list(torch._foreach_div(grads, job.grad_scale.to(grads[0].device)))
    if job.maximize:
        grads = list(torch._foreach_neg(grads))
    if job.weight_decay != 0:
        grads = list(torch._foreach_add(grads, _as(params, dtype), alpha=job.weight_decay))
    return grads


def leave_out_nonfinite(grads: Tensors, flags: Sequence[Tensor]) -> Tensors:
    """Return copies of gradients, with zeros for those that are not finite, and raise their flags.

    Nobody waits for a device to know which.
    """
    # A gradient so large that its square overflows counts as infinite.
    norms = torch._foreach_norm(grads)
    dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    good = torch.stack([norm.to(dtype) for norm in norms]).isfinite()
    torch._foreach_add_(list(flags), good.logical_not().to(torch.float32).unbind())
    return [torch.where(keep, g, 0) for keep, g in zip(good.unbind(), grads, strict=True)]


def _residuals(job: LocalJob, duals: Tensors, grads: Tensors) -> Tensors:
    if job.flags is None:
        rs = list(torch._foreach_add(duals, grads))
    else:  # the gradients are copies, which are not needed any more
        rs = grads
        torch._foreach_add_(rs, duals)
    if job.clip_scale is not None:
        torch._foreach_mul_(rs, job.clip_scale.to(rs[0].device))
    return rs


def _steps(job: LocalJob, members: list[Member]) -> list[Scalar]:
    steps = [member.state[state_key("step", job.slot)] for member in members]
    return [step.item() if step.device.type == "cpu" else step for step in steps]


def _accumulate(job: LocalJob, members: list[Member], contributions: Tensors) -> None:
    """pending = sum of a_i u_i: started by the first batch of a round, added to by the others."""
    for member in members:
        if not member.state["arrived"]:
            member.state["pending"].zero_()
    stored = [real(member.state["pending"]) for member in members]
    totals = _as(stored, contributions[0].dtype)
    torch._foreach_add_(totals, contributions, alpha=job.weight)
    _write_back(stored, totals, job.stochastic_rounding)


def _move(members: list[Member], totals: Tensors, move: Move) -> None:
    params = [real(member.param) for member in members]
    dtype = compute_dtype(params[0], totals[0])
    ws, totals = _as(params, dtype), _as(totals, dtype)
    if move.consensus_decay != 0:
        totals = list(torch._foreach_add(totals, ws, alpha=-move.consensus_decay))
    if move.total_sigma is None or isinstance(move.total_sigma, Mapping):
        scales: Any = [move.scale(member) for member in members]
        if isinstance(scales[0], Tensor):
            scales = [scale.to(ws[0].dtype) for scale in scales]
        torch._foreach_add_(ws, list(torch._foreach_mul(totals, scales)))
        _write_back(params, ws, move.stochastic_rounding)
        return
    scale = move.scale()
    if move.proximal is not None:
        sigma = move.total_sigma + move.lr * move.consensus_decay
        ys = _resolvents(members, totals, move.proximal, sigma, move.rho)
        totals = [y.reshape(total.shape) for y, total in zip(ys, totals, strict=True)]
        scale = move.lr
    if isinstance(scale, Tensor):
        torch._foreach_add_(ws, torch._foreach_mul(totals, scale.to(ws[0].device)))
    else:
        torch._foreach_add_(ws, totals, alpha=scale)
    _write_back(params, ws, move.stochastic_rounding)
