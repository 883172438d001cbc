"""The plain loop's mathematics with one call per operation for all parameters of a kind.

On a CPU tensors are cut into pieces, and small ones put together, so that a block is still in the
cache when the next operation comes to it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchpisa.algorithms import sisa
from torchpisa.algorithms.pisa import Scalar
from torchpisa.kernels import newton_schulz, resolvent
from torchpisa.kernels.job import (
    TINY,
    Kernel,
    LocalJob,
    Member,
    Move,
    check_shapes,
    compute_dtype,
    keys_shaped_like_params,
    real,
)
from torchpisa.kernels.loop import LOOP
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
from torchpisa.state_keys import SlotKeys, slot_keys

__all__ = [
    "FOREACH",
    "Foreach",
    "blocks",
    "knows",
    "leave_out_nonfinite",
    "like",
    "scalars",
    "write_back",
]

# What foreach functions take: they return tuples.
Tensors = list[Tensor] | tuple[Tensor, ...]

# Elements of a block on a CPU; half a dozen float32 tensors of this size fit in a cache, and more
# pieces would cost more calls than that saves.
_CPU_BLOCK = 2**16

_ELEMENTWISE = (Identity, SecondMoment, SpectralConsensus)


def knows(preconditioner: Preconditioner) -> bool:
    """Return whether `preconditioner` is one of the package's own."""
    return type(preconditioner) in _ELEMENTWISE or type(preconditioner) in _MATRIX_SOLVERS


class Foreach:
    """The package's own preconditioners, many parameters per call; see `Kernel`."""

    finds_nonfinite: ClassVar[bool] = False
    takes_flags: ClassVar[bool] = True
    slower: ClassVar[Kernel | None] = LOOP

    def supports(self, job: LocalJob) -> bool:
        """Return whether the preconditioner is known, and the batch is known to take part."""
        return job.keep is None and knows(job.preconditioner)

    @torch.no_grad()
    def local_step(self, job: LocalJob) -> None:
        """Take the local step, see `Kernel`."""
        keys = slot_keys(job.slot)
        check_shapes(job.members, keys_shaped_like_params(job.preconditioner, job.slot))
        for members in _alike(job.members, keys.dual):
            steps = [member.state[keys.step] for member in members]
            torch._foreach_add_(steps, scalars(1.0, steps[0]))
            if type(job.preconditioner) in _ELEMENTWISE:
                _elementwise_step(job, members, keys)
            else:
                _matrix_step(job, members, keys)
            if job.move is None:
                for member in members:
                    member.state["arrived"] |= 1 << job.slot

    @torch.no_grad()
    def residual_norm(self, job: LocalJob) -> list[Tensor]:
        """Return the norm of r for each member."""
        keys = slot_keys(job.slot)
        norms: list[Tensor] = []
        for members in _alike(job.members, keys.dual):
            duals = [real(member.state[keys.dual]) for member in members]
            dtype = compute_dtype(real(members[0].param), duals[0])
            rs = torch._foreach_add(like(duals, dtype), _gradients(job, members, dtype))
            norms += torch._foreach_norm(rs)
        return norms

    @torch.no_grad()
    def consensus(self, members: list[Member], move: Move, keep: Tensor | None) -> None:
        """Take the consensus, see `Kernel`; for `keep` None."""
        assert keep is None
        check_shapes(members, ("pending",))
        for alike in _alike(members, "pending"):
            params = [real(member.param) for member in alike]
            totals = [real(member.state["pending"]) for member in alike]
            scales = _scales(move, alike)
            if move.proximal is not None:
                _move(move, alike, params, totals, scales)
                continue
            for indexes, (some, sums) in blocks([params, totals]):
                _move(move, alike, some, sums, _picked(scales, indexes))


FOREACH = Foreach()


# Element by element: blocks of pieces


def _elementwise_step(job: LocalJob, members: list[Member], keys: SlotKeys) -> None:
    """Step parameters whose rule takes each coordinate by itself."""
    rule, move = job.preconditioner, job.move
    params, duals, moments, pending, steps = [], [], [], [], []
    for param, _, state, _ in members:
        params.append(param)
        duals.append(state[keys.dual])
        steps.append(state[keys.step])
        if isinstance(rule, SecondMoment):
            moments.append(state[keys.moment])
        if move is None:
            if not state["arrived"]:
                state["pending"].zero_()
            pending.append(state["pending"])
    dtype = torch.float32
    if not params[0].dtype == duals[0].dtype == dtype:
        dtype = compute_dtype(real(params[0]), real(duals[0]))
    columns = [params, duals, _gradients(job, members, dtype)]
    if moments:
        columns.append(moments)
    if pending:
        columns.append(pending)
    if params[0].is_complex():
        columns = [[real(tensor) for tensor in column] for column in columns]
    whole = move is not None and move.proximal is not None
    cut = [(range(len(members)), columns)] if whole else list(blocks(columns))
    counts: Any = steps
    if steps[0].device.type == "cpu":
        counts = _same(list(map(Tensor.item, steps)))
    ratios: Any
    scales: Any = None
    residuals: tuple[Tensor, ...] | None = None
    if job.sigma is None:
        sigma, residuals = _follow(job, members, keys, cut, counts)
        ratios = job.rho / sigma
        if move is not None:
            scales = _listed(move.scale(sigma), dtype)
    else:
        ratios = job.rho / job.sigma
        if move is not None:
            scales = move.scale()
    factors = None
    if isinstance(rule, SecondMoment):
        factors = _root_factors(rule, ratios, counts, dtype)
    for indexes, (ws, stored, grads, *others) in cut:
        pis = stored if stored[0].dtype == dtype else like(stored, dtype)
        rs = _residuals(job, pis, grads) if residuals is None else residuals
        if isinstance(rule, SecondMoment):
            assert factors is not None
            if not isinstance(indexes, range):
                factors_here = _RootFactors(*(_picked(each, indexes) for each in factors))
            else:
                factors_here = factors
            _divide_by_roots(rule, rs, others[0], factors_here, job.stochastic_rounding)
        elif isinstance(rule, SpectralConsensus):
            torch._foreach_mul_(rs, rule.momentum - 1)
        else:
            torch._foreach_mul_(rs, -1 / (1 + ratios))
        # What rs holds now is delta; u = pi + 2 delta is the new dual plus delta.
        torch._foreach_add_(pis, rs)
        torch._foreach_add_(rs, pis)
        if move is None:
            _accumulate(job, others[-1], rs)
        else:
            some = scales if isinstance(indexes, range) else _picked(scales, indexes)
            _move(move, members, ws, rs, some, ours=True)
        if job.dual_decay != 1:
            torch._foreach_mul_(pis, job.dual_decay)
        if pis is not stored:
            write_back(stored, pis, job.stochastic_rounding)


class _RootFactors(NamedTuple):
    """What a root of the second moment becomes: delta = r / (scale min(root, cap) + shift).

    Each is one number, or a list with one for each parameter.
    """

    scale: Any
    shift: Any
    cap: Any


def _root_factors(rule: SecondMoment, ratios: Any, counts: Any, dtype: torch.dtype) -> _RootFactors:
    """Return delta = -r / (1 + (rho / sigma)(sqrt(m) + eps)) in terms of the uncorrected root.

    Args:
        rule: the preconditioner.
        ratios: rho / sigma, a number or a tensor with one for each parameter.
        counts: how often moments were updated: a number, or a list with one for each parameter.
        dtype: of the roots.
    """
    # The bias correction of Scheme III goes into the numbers instead of over the tensors.
    adam = rule.scheme == "adam"
    correction: Any
    if isinstance(ratios, Tensor) and ratios.dim() == 1:
        steps = _in_one_tensor(counts, ratios)
        correction = (1 - rule.beta**steps) ** 0.5 if adam else 1.0
        return _RootFactors(
            scale=_listed(-ratios / correction, dtype),
            shift=-1.0 if rule.eps == 0 else _listed(-(1 + ratios * rule.eps), dtype),
            cap=None
            if rule.eta == math.inf
            else _listed(rule.eta * correction + 0 * ratios, dtype),
        )
    shift = -(1 + ratios * rule.eps)
    if not isinstance(counts, list) or not adam:
        correction = (1 - rule.beta**counts) ** 0.5 if adam else 1.0
        return _RootFactors(-ratios / correction, shift, rule.eta * correction)
    corrections = [(1 - rule.beta**count) ** 0.5 for count in counts]
    caps = [rule.eta * correction for correction in corrections]
    return _RootFactors([-ratios / correction for correction in corrections], shift, caps)


def _in_one_tensor(counts: Any, like_this: Tensor) -> Any:
    """Return counters of several parameters in one tensor; one for all of them as it is."""
    if not isinstance(counts, list):
        return counts
    if isinstance(counts[0], Tensor):
        return torch.stack(counts).to(like_this)
    # Filled where it is: a copy from the host would wait for the device.
    return torch.stack([like_this.new_full((), count) for count in counts])


def _listed(numbers: Any, dtype: torch.dtype) -> list[Any]:
    """Return the numbers of a tensor as foreach takes them, without waiting for a device.

    In the dtype of what they are combined with, so that foreach need not convert each of them.
    """
    return list(numbers.to(dtype).unbind())


def _picked(values: Any, indexes: Sequence[int]) -> Any:
    """Return the entries of a list at `indexes`; what is no list serves all of them."""
    return [values[index] for index in indexes] if isinstance(values, list) else values


def scalars(values: Any, like_this: Tensor) -> Any:
    """Return numbers as foreach is fastest with: on a CPU tensors, which it need not make anew."""
    if like_this.device.type != "cpu" or isinstance(values, Tensor):
        return values
    if not isinstance(values, list):
        return torch.tensor(values, dtype=like_this.dtype)
    if isinstance(values[0], Tensor):
        return values
    return list(torch.tensor(values, dtype=like_this.dtype).unbind())


def _divide_by_roots(
    rule: SecondMoment,
    rs: tuple[Tensor, ...],
    stored: Tensors,
    factors: _RootFactors,
    stochastic_rounding: bool,
) -> None:
    """Update the moments, and divide r by what `factors` make of their roots."""
    moments = stored if stored[0].dtype == rs[0].dtype else like(stored, rs[0].dtype)
    if rule.scheme == "adagrad":
        torch._foreach_addcmul_(moments, rs, rs)
    else:
        torch._foreach_mul_(moments, scalars(rule.beta, moments[0]))
        torch._foreach_addcmul_(moments, rs, rs, 1 - rule.beta)
    if moments is not stored:
        write_back(stored, moments, stochastic_rounding)
    roots = torch._foreach_sqrt(moments)
    if rule.eta < math.inf:
        caps = factors.cap if isinstance(factors.cap, list) else [factors.cap] * len(roots)
        for root, cap in zip(roots, caps, strict=True):
            root.clamp_(max=cap)
    torch._foreach_mul_(roots, scalars(factors.scale, roots[0]))
    torch._foreach_add_(roots, scalars(factors.shift, roots[0]))
    torch._foreach_div_(rs, roots)


def _follow(
    job: LocalJob, members: list[Member], keys: SlotKeys, cut: list[Any], counts: Any
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """Let the sigma of every parameter follow its gradients.

    Returns:
        All of them in one tensor; and the residuals, if they are few enough to be kept.
    """
    rule = job.preconditioner
    assert isinstance(rule, SecondMoment)
    of_pieces: list[list[Tensor]] = [[] for _ in members]
    for indexes, (_, stored, grads, *_) in cut:
        rs = _residuals(job, like(stored, grads[0].dtype), grads)
        for index, norm in zip(indexes, torch._foreach_norm(rs), strict=True):
            of_pieces[index].append(norm)
    norms, sizes, old_sigmas, old_levels = [], [], [], []
    for (param, _, state, whole), pieces in zip(members, of_pieces, strict=True):
        norms.append(pieces[0] if len(pieces) == 1 else torch.stack(pieces).norm())
        elements = (param if whole is None else whole).numel()
        sizes.append(max(1, 2 * elements if param.is_complex() else elements) ** 0.5)
        old_sigmas.append(state[keys.sigma])
        old_levels.append(state[keys.level])
    if members[0].whole is not None:
        from torchpisa.distributed import dtensor

        groups = dtensor.groups_of_parts(members[0].origin)
        norms = list(dtensor.summed(torch.stack(norms).square(), groups).sqrt().unbind())
    sigma, level = torch.stack(old_sigmas), torch.stack(old_levels)
    rms = torch.stack(torch._foreach_div(norms, scalars(sizes, norms[0]))).to(level.dtype)
    steps = _in_one_tensor(counts, level)
    sigma, level = sisa.followed(sigma, level, rms, steps, rule.scheme, rule.beta)
    sigma = sigma.clamp_(min=TINY)
    torch._foreach_copy_(old_sigmas, sigma.unbind())
    torch._foreach_copy_(old_levels, level.unbind())
    return sigma, rs if len(cut) == 1 else None


def _residuals(job: LocalJob, duals: Tensors, grads: Tensors) -> tuple[Tensor, ...]:
    rs = torch._foreach_add(duals, grads)
    if job.clip_scale is not None:
        torch._foreach_mul_(rs, job.clip_scale.to(rs[0].device))
    return rs


def blocks(columns: Sequence[Tensors]) -> Iterator[tuple[Sequence[int], Sequence[Tensors]]]:
    """Yield corresponding pieces of the tensors in all columns, and whose they are.

    Args:
        columns: parameters, gradients and so on, in the same order; of one device.
    """
    first = columns[0]
    sizes = [tensor.numel() for tensor in first]
    if first[0].device.type != "cpu" or sum(sizes) <= _CPU_BLOCK:
        yield range(len(first)), columns
        return
    indexes: list[int] = []
    elements = 0
    for index, size in enumerate(sizes):
        row = [column[index] for column in columns]
        if size > _CPU_BLOCK and all(tensor.is_contiguous() for tensor in row):
            cut = (torch.split(tensor.view(-1), _CPU_BLOCK) for tensor in row)
            for piece in zip(*cut, strict=True):
                yield [index], [[tensor] for tensor in piece]
            continue
        if indexes and elements + size > _CPU_BLOCK:
            yield indexes, [[column[i] for i in indexes] for column in columns]
            indexes, elements = [], 0
        indexes.append(index)
        elements += size
    if indexes:
        yield indexes, [[column[i] for i in indexes] for column in columns]


# Whole matrices


def _matrix_step(job: LocalJob, members: list[Member], keys: SlotKeys) -> None:
    """Step parameters whose rule needs all of a matrix at once."""
    params = [real(member.param) for member in members]
    stored = [real(member.state[keys.dual]) for member in members]
    dtype = compute_dtype(params[0], stored[0])
    duals = like(stored, dtype)
    grads = _gradients(job, members, dtype)
    deltas = _MATRIX_SOLVERS[type(job.preconditioner)](job, members, duals, grads, keys)
    torch._foreach_add_(duals, deltas)
    torch._foreach_add_(deltas, duals)  # u = pi + 2 delta
    if job.move is not None:
        _move(job.move, members, params, deltas, _scales(job.move, members))
    else:
        for member in members:
            if not member.state["arrived"]:
                member.state["pending"].zero_()
        _accumulate(job, [real(member.state["pending"]) for member in members], deltas)
    if job.dual_decay != 1:
        torch._foreach_mul_(duals, job.dual_decay)
    write_back(stored, duals, job.stochastic_rounding)


# Each solver returns delta = sigma d, in memory that is the caller's.


def _newton_schulz(
    job: LocalJob, members: list[Member], duals: Tensors, grads: Tensors, keys: SlotKeys
) -> Tensors:
    rule = job.preconditioner
    assert isinstance(rule, NewtonSchulz)
    stored = [real(member.state[keys.momentum]) for member in members]
    momenta = like(stored, duals[0].dtype)
    torch._foreach_mul_(momenta, rule.momentum)
    torch._foreach_add_(momenta, grads)
    write_back(stored, momenta, job.stochastic_rounding)
    bs = momenta
    if rule.nesterov:
        bs = list(torch._foreach_add(grads, momenta, alpha=rule.momentum))

    def orthogonalized(matrices: Sequence[Tensor]) -> list[Tensor]:
        return newton_schulz.orthogonalize(matrices, rule.ns_steps, rule.dtype)

    os = _of_matrices(members, bs, orthogonalized)
    if rule.aspect_scaling:
        shapes = [member.origin.shape for member in members]
        scales = [rule.scale(shape[0], shape.numel() // shape[0]) for shape in shapes]
        torch._foreach_mul_(os, scales)
    sums = [o.view_as(b) for o, b in zip(os, bs, strict=True)]
    torch._foreach_add_(sums, duals)
    denominators = torch._foreach_abs(sums)
    kind = torch.finfo(sums[0].dtype)
    least = kind.tiny * kind.eps
    for s, step in zip(sums, _steps(members, keys), strict=True):
        perturbation = rule.perturbation**step
        # After a few steps nothing is left of it in the dtype, unless the device alone knows.
        if isinstance(perturbation, Tensor) or perturbation >= least:
            s.add_(perturbation * (s == 0))
    torch._foreach_mul_(denominators, -job.rho / job.penalty)
    torch._foreach_add_(denominators, -1.0)
    torch._foreach_div_(sums, denominators)
    return sums


def _spectral(
    job: LocalJob, members: list[Member], duals: Tensors, grads: Tensors, keys: SlotKeys
) -> Tensors:
    rule = job.preconditioner
    assert isinstance(rule, Spectral)
    rs = _residuals(job, duals, grads)
    # For sigma d at once: (sigma I + rho Q)^-1 r leaves the range of the dtype as sigma grows.
    ratio = job.rho / job.penalty
    ys: Tensors
    if rule.average:
        stored = [real(member.state[keys.average]) for member in members]
        matrices, steps = [r.flatten(1) for r in rs], _steps(members, keys)
        averages = like(stored, rs[0].dtype)
        ys, new = resolvent.averaged(matrices, averages, steps, rule, 1.0, ratio)
        write_back(stored, new, job.stochastic_rounding)
    else:
        ys = _resolvents(members, rs, rule, 1.0, ratio)
    # Into the memory of r, which is laid out like the dual.
    torch._foreach_copy_(rs, [y.reshape(r.shape) for y, r in zip(ys, rs, strict=True)])
    torch._foreach_neg_(rs)
    return rs


_MATRIX_SOLVERS: dict[
    type[Preconditioner],
    Callable[[LocalJob, list[Member], Tensors, Tensors, SlotKeys], Tensors],
] = {NewtonSchulz: _newton_schulz, Spectral: _spectral}


def _of_matrices(
    members: list[Member], tensors: Tensors, solve: Callable[[Sequence[Tensor]], list[Tensor]]
) -> Tensors:
    """Return what `solve` makes of whole matrices, also where they are spread over processes."""
    if members[0].whole is not None:
        from torchpisa.distributed import owners

        return owners.solve(tensors, [member.origin for member in members], solve)
    return solve([as_matrix(tensor) for tensor in tensors])


def _resolvents(
    members: list[Member], rs: Tensors, rule: Spectral, sigma: Scalar, rho: Scalar
) -> Tensors:
    """Return (sigma I + rho Q)^-1 r for matrices that belong to `members`."""
    return _of_matrices(members, rs, lambda ms: resolvent.resolvents(ms, rule, sigma, rho))


# What all rules share


def _alike(members: list[Member], key: str) -> list[list[Member]]:
    """Return members in lists that share devices and dtypes, as the fast routes want them.

    Args:
        members: the parameters.
        key: the state whose dtype counts.
    """
    kinds: dict[object, list[Member]] = {}
    for member in members:
        param, grad, state, whole = member
        dtype = None if grad is None else grad.dtype
        kind = param.device, param.dtype, state[key].dtype, dtype, whole is None
        kinds.setdefault(kind, []).append(member)
    return list(kinds.values())


def _gradients(job: LocalJob, members: list[Member], dtype: torch.dtype) -> Tensors:
    """Return g_i in `dtype`, never to be written to: it may be the user's own gradient."""
    grads: Tensors
    if members[0].grad is None:
        grads = [torch.zeros_like(real(member.param), dtype=dtype) for member in members]
    else:
        given = []
        for member in members:
            assert member.grad is not None
            given.append(member.grad if not member.grad.is_complex() else real(member.grad))
        grads = given if given[0].dtype == dtype else like(given, dtype)
        if job.flags is not None:
            pairs = zip(job.members, job.flags, strict=True)
            flags = {id(member.param): flag for member, flag in pairs}
            grads = leave_out_nonfinite(grads, [flags[id(member.param)] for member in members])
        if job.grad_scale is not None:
            grads = list(torch._foreach_div(grads, job.grad_scale.to(grads[0].device)))
    if job.maximize:
        grads = list(torch._foreach_neg(grads))
    if job.weight_decay != 0:
        params = like([real(member.param) for member in members], dtype)
        grads = list(torch._foreach_add(grads, params, alpha=job.weight_decay))
    return grads


def leave_out_nonfinite(grads: Tensors, flags: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of gradients, with zeros for those that are not finite, and raise their flags.

    Nobody waits for a device to know which.
    """
    # A gradient so large that its square overflows counts as infinite.
    norms = torch._foreach_norm(grads)
    dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    good = torch.stack([norm.to(dtype) for norm in norms]).isfinite()
    torch._foreach_add_(list(flags), good.logical_not().to(torch.float32).unbind())
    return [torch.where(keep, g, 0) for keep, g in zip(good.unbind(), grads, strict=True)]


def _accumulate(job: LocalJob, stored: Tensors, contributions: Tensors) -> None:
    """Add a_i u_i to the sum of the round."""
    totals = like(stored, contributions[0].dtype)
    torch._foreach_add_(totals, contributions, alpha=job.weight)
    write_back(stored, totals, job.stochastic_rounding)


def _scales(move: Move, members: list[Member]) -> Any:
    """Return lr / (S + lr lambda): one number, or one per member where sigma follows gradients."""
    if isinstance(move.total_sigma, float | Tensor):
        return move.scale()
    return [move.scale(move.total(member)) for member in members]


def _move(
    move: Move,
    members: list[Member],
    stored: Tensors,
    totals: Tensors,
    scales: Any,
    ours: bool = False,
) -> None:
    """Take the consensus.

    Args:
        move: its numbers.
        members: the parameters, for a proximal term.
        stored: what is moved, parameters or pieces of them.
        totals: U.
        scales: from `_scales`, of each piece or of all.
        ours: whether U may be written to.
    """
    ws = stored
    if stored[0].dtype != totals[0].dtype or stored[0].dtype.itemsize < 4:
        dtype = compute_dtype(stored[0], totals[0])
        ws, totals = like(stored, dtype), like(totals, dtype)
    if move.consensus_decay != 0:
        totals = list(torch._foreach_add(totals, ws, alpha=-move.consensus_decay))
    if move.proximal is not None:
        assert isinstance(move.total_sigma, float | Tensor)
        sigma = move.total_sigma + move.lr * move.consensus_decay
        ys = _resolvents(members, totals, move.proximal, sigma, move.rho)
        totals = [y.reshape(total.shape) for y, total in zip(ys, totals, strict=True)]
        scales = move.lr
    if isinstance(scales, float | int):
        torch._foreach_add_(ws, totals, alpha=scales)
    else:
        if isinstance(scales, Tensor):
            scales = scales.to(ws[0].device)
        elif isinstance(scales[0], Tensor):
            device, dtype = ws[0].device, ws[0].dtype
            if scales[0].device != device or scales[0].dtype != dtype:
                scales = [scale.to(device, dtype) for scale in scales]
        scales = scalars(scales, ws[0])
        if ours:
            torch._foreach_mul_(totals, scales)
        else:
            totals = torch._foreach_mul(totals, scales)
        torch._foreach_add_(ws, totals)
    if ws is not stored:
        write_back(stored, ws, move.stochastic_rounding)


def like(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Return tensors of one dtype in `dtype`: the same list if they have it already."""
    return tensors if tensors[0].dtype == dtype else [tensor.to(dtype) for tensor in tensors]


def write_back(stored: Tensors, computed: Tensors, stochastic_rounding: bool) -> None:
    """Write what was computed in a wider dtype, if it is not there already."""
    if stored is computed:
        return
    if stochastic_rounding:
        for target, value in zip(stored, computed, strict=True):
            store(target, value, stochastic_rounding)
    else:
        torch._foreach_copy_(stored, computed)


def _steps(members: list[Member], keys: SlotKeys) -> list[Scalar]:
    """Return how often each parameter was stepped, this time included."""
    steps = [member.state[keys.step] for member in members]
    if steps[0].device.type == "cpu":
        return [step.item() for step in steps]
    return steps


def _same(values: list[float]) -> Any:
    """Return a list of numbers, or the number itself if they are all the same."""
    return values[0] if values.count(values[0]) == len(values) else values
