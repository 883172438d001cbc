"""The plain loop's mathematics with one call per operation for all parameters of a kind.

On a CPU tensors are cut into pieces, and small ones put together, so that a block is still in the
cache when the next operation comes to it. Where many small ones have one shape, calls cost more
than the work, and copies of them are stepped in one tensor.
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
    Consensus,
    Kernel,
    LocalJob,
    Member,
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
    "Block",
    "Foreach",
    "add_one",
    "blocks",
    "knows",
    "leave_out_nonfinite",
    "like",
    "one_if_equal",
    "scalars",
    "write_back",
]

# What foreach functions take: they return tuples.
Tensors = list[Tensor] | tuple[Tensor, ...]

# Elements of a block on a CPU; half a dozen float32 tensors of this size fit in a cache, and more
# pieces would cost more calls than that saves.
_CPU_BLOCK = 2**16

# Elements up to which tensors of one shape are stacked on a CPU, where to copy them costs less than
# the calls that this saves; and how many it takes for that.
_SMALL = 2**10
_FEWEST_STACKED = 10

# Blocks whose residuals are kept instead of being computed twice.
_KEPT_BLOCKS = 2

_ONE = torch.ones((), dtype=torch.float32, device="cpu")

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
            add_one(steps)
            if type(job.preconditioner) in _ELEMENTWISE:
                _elementwise_step(job, members, keys)
            else:
                _matrix_step(job, members, keys)
            if job.consensus is None:
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
    def take_consensus(
        self, members: list[Member], consensus: Consensus, keep: Tensor | None
    ) -> None:
        """Take the consensus, see `Kernel`; for `keep` None."""
        assert keep is None
        check_shapes(members, ("pending",))
        for alike in _alike(members, "pending"):
            params = [real(member.param) for member in alike]
            totals = [real(member.state["pending"]) for member in alike]
            scales = _scales(consensus, alike)
            if consensus.proximal is not None:
                _take_consensus(consensus, alike, params, totals, scales)
                continue
            for block in blocks([totals, params], stack=False):  # for one or two operations
                sums, some = block.pieces
                _take_consensus(consensus, alike, some, sums, *block.pick(scales))


FOREACH = Foreach()


# Element by element: blocks of pieces


def _elementwise_step(job: LocalJob, members: list[Member], keys: SlotKeys) -> None:
    """Step parameters whose rule takes each coordinate by itself."""
    rule, consensus = job.preconditioner, job.consensus
    duals, moments, targets, steps = [], [], [], []
    for param, _, state, _ in members:
        duals.append(state[keys.dual])
        steps.append(state[keys.step])
        if isinstance(rule, SecondMoment):
            moments.append(state[keys.moment])
        if consensus is not None:
            targets.append(param)
        else:
            if not state["arrived"]:
                state["pending"].zero_()
            targets.append(state["pending"])
    param = members[0].param
    dtype = torch.float32
    if not param.dtype == duals[0].dtype == dtype:
        dtype = compute_dtype(real(param), real(duals[0]))
    columns = [_gradients(job, members, dtype), duals, targets]
    if moments:
        columns.append(moments)
    if param.is_complex():
        columns = [[real(tensor) for tensor in column] for column in columns]
    whole = consensus is not None and consensus.proximal is not None
    cut = [Block(range(len(members)), columns)] if whole else blocks(columns)
    counts: Any = steps
    if steps[0].is_cpu:
        counts = one_if_equal(list(map(Tensor.item, steps)))
    ratios: Any
    scale: Any = None
    gathered: list[Any] = []
    if job.sigma is None:
        sigma, gathered = _follow(job, members, keys, cut, counts)
        ratios = job.rho * sigma.reciprocal()
        if consensus is not None:
            scale = consensus.scale(sigma)
    else:
        ratios = job.rho / job.sigma
        if consensus is not None:
            scale = consensus.scale()
    factors: tuple[Any, ...] = ()
    if isinstance(rule, SecondMoment):
        factors = _root_factors(rule, ratios, counts)
    numbers = _in_dtype([scale, *factors], dtype, cut)
    for number, block in enumerate(cut):
        of_block, rs = gathered[number] if gathered else (block.gather(), None)
        grads, stored, some, *others = of_block
        pis = stored if stored[0].dtype == dtype else like(stored, dtype)
        if rs is None:
            rs = _residuals(job, pis, grads)
        scale, *of_roots = block.pick(*numbers)
        if isinstance(rule, SecondMoment):
            _divide_by_roots(rule, rs, others[0], _RootFactors(*of_roots), job.stochastic_rounding)
        elif isinstance(rule, SpectralConsensus):
            torch._foreach_mul_(rs, rule.momentum - 1)
        else:
            torch._foreach_mul_(rs, -1 / (1 + ratios))
        # What rs holds now is delta; u = pi + 2 delta is the new dual plus delta.
        torch._foreach_add_(pis, rs)
        torch._foreach_add_(rs, pis)
        if consensus is None:
            _accumulate(job, some, rs)
        else:
            _take_consensus(consensus, members, some, rs, scale, ours=True)
        if job.dual_decay != 1:
            torch._foreach_mul_(pis, job.dual_decay)
        if pis is not stored:
            write_back(stored, pis, job.stochastic_rounding)
        block.store(of_block)


class _RootFactors(NamedTuple):
    """What a root of the second moment becomes: delta = r / (scale min(root, cap) + shift).

    Each is one number, or one for each parameter in a list or a tensor.
    """

    scale: Any
    shift: Any
    cap: Any


def _root_factors(rule: SecondMoment, ratios: Any, counts: Any) -> _RootFactors:
    """Return delta = -r / (1 + (rho / sigma)(sqrt(m) + eps)) in terms of the uncorrected root.

    Args:
        rule: the preconditioner.
        ratios: rho / sigma, a number or a tensor with one for each parameter.
        counts: how often moments were updated: a number, or a list with one for each parameter.
    """
    # The bias correction of Scheme III goes into the numbers instead of over the tensors.
    adam = rule.scheme == "adam"
    correction: Any
    if isinstance(ratios, Tensor) and ratios.dim() == 1:
        steps = _in_one_tensor(counts, ratios)
        correction = (1 - rule.beta**steps) ** 0.5 if adam else 1.0
        return _RootFactors(
            scale=ratios / -correction,
            shift=-1.0 if rule.eps == 0 else -(1 + ratios * rule.eps),
            cap=math.inf if rule.eta == math.inf else rule.eta * correction + 0 * ratios,
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
    if like_this.is_cpu:
        return torch.tensor(counts, dtype=like_this.dtype, device="cpu")
    # Filled where it is: a copy from the host would wait for the device.
    return torch.stack([like_this.new_full((), count) for count in counts])


def _in_dtype(numbers: Sequence[Any], dtype: torch.dtype, cut: Sequence["Block"]) -> list[Any]:
    """Return numbers, or tensors of one for each member, as `Block.pick` is fastest with.

    In the dtype of what they are combined with, so that foreach need not convert each of them.
    """
    ready: list[Any] = []
    for values in numbers:
        if isinstance(values, Tensor) and values.dim() == 1:
            values = values.to(dtype)
            if not cut[-1].stacks:  # those that do come first
                values = list(values.unbind())
        ready.append(values)
    return ready


def add_one(steps: list[Tensor]) -> None:
    """Count a step."""
    if steps[0].is_cpu:  # where a list of tensors takes a third of the time of a number
        torch._foreach_add_(steps, [_ONE] * len(steps))
    else:
        torch._foreach_add_(steps, 1.0)


def scalars(values: Any, tensors: Tensors) -> Any:
    """Return numbers as foreach is fastest with: for several tensors on a CPU, in tensors.

    It would make them of each number anew.
    """
    if len(tensors) == 1 or not tensors[0].is_cpu or isinstance(values, Tensor):
        return values
    if not isinstance(values, list):
        return torch.tensor(values, dtype=tensors[0].dtype, device="cpu")
    if isinstance(values[0], Tensor):
        return values
    return list(torch.tensor(values, dtype=tensors[0].dtype, device="cpu").unbind())


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
        torch._foreach_mul_(moments, scalars(rule.beta, moments))
        torch._foreach_addcmul_(moments, rs, rs, 1 - rule.beta)
    if moments is not stored:
        write_back(stored, moments, stochastic_rounding)
    roots = torch._foreach_sqrt(moments)
    if rule.eta < math.inf:
        caps = factors.cap if isinstance(factors.cap, list) else [factors.cap] * len(roots)
        for root, cap in zip(roots, caps, strict=True):
            root.clamp_(max=cap)
    torch._foreach_mul_(roots, scalars(factors.scale, roots))
    torch._foreach_add_(roots, scalars(factors.shift, roots))
    torch._foreach_div_(rs, roots)


def _follow(
    job: LocalJob, members: list[Member], keys: SlotKeys, cut: Sequence["Block"], counts: Any
) -> tuple[Tensor, list[tuple[Sequence[Tensors], tuple[Tensor, ...]]]]:
    """Let the sigma of every parameter follow its gradients.

    Returns:
        All of them in one tensor; and what the blocks gathered, with the residuals, if that is
        little enough to be kept.
    """
    rule = job.preconditioner
    assert isinstance(rule, SecondMoment)
    few = len(cut) <= _KEPT_BLOCKS
    owners: list[int] = []
    norms, gathered = [], []
    for block in cut:
        columns = block.gather() if few else block.pieces
        grads, stored, *_ = columns
        rs = _residuals(job, like(stored, grads[0].dtype), grads)
        norms.append(block.norms(rs))
        owners += block.indexes
        if few:
            gathered.append((columns, rs))
    sizes, old_sigmas, old_levels = [], [], []
    for param, _, state, whole in members:
        sizes.append((param if whole is None else whole).numel())
        old_sigmas.append(state[keys.sigma])
        old_levels.append(state[keys.level])
    norm = _of_members(norms, owners, len(members))
    if members[0].whole is not None:
        from torchpisa.distributed import dtensor

        groups = dtensor.groups_of_parts(members[0].origin)
        norm = dtensor.summed(norm.square(), groups).sqrt()
    parts = 2 if members[0].param.is_complex() else 1
    roots = [max(1, parts * size) ** 0.5 for size in sizes]
    if norm.is_cpu:
        rms = norm / torch.tensor(roots, dtype=norm.dtype, device="cpu")
    else:  # a copy from the host would wait for the device
        rms = torch.stack(torch._foreach_div(norm.unbind(), roots))
    sigma, level = torch.stack(old_sigmas), torch.stack(old_levels)
    steps = _in_one_tensor(counts, level)
    new, level = sisa.followed(sigma, level, rms.to(level.dtype), steps, rule.scheme, rule.beta)
    new = new.clamp_(min=TINY)
    torch._foreach_copy_(old_levels, level.unbind())
    # It grows in few of the steps; a device would have to be waited for to know.
    if not sigma.is_cpu or not torch.equal(sigma, new):
        torch._foreach_copy_(old_sigmas, new.unbind())
    return new, gathered


def _of_members(norms: Sequence[Tensor], owners: list[int], count: int) -> Tensor:
    """Return the norms of `count` members from those of their pieces, by block."""
    if owners == list(range(count)):
        return norms[0] if len(norms) == 1 else torch.cat(norms)  # type: ignore[arg-type]
    squares = torch.cat(norms).square()  # type: ignore[arg-type]
    indexes = torch.tensor(owners, device=squares.device)
    return squares.new_zeros(count).index_add_(0, indexes, squares).sqrt()


def _residuals(job: LocalJob, duals: Tensors, grads: Tensors) -> tuple[Tensor, ...]:
    rs = torch._foreach_add(duals, grads)
    if job.clip_scale is not None:
        torch._foreach_mul_(rs, job.clip_scale.to(rs[0].device))
    return rs


class Block(NamedTuple):
    """Corresponding pieces of the tensors of some members, in columns.

    Attributes:
        indexes: whose the pieces are.
        pieces: the columns, such as gradients and parameters; the first is only read.
        stacks: whether the pieces are so small that it pays to compute with copies of them in one
            tensor; they have one shape then.
    """

    indexes: Sequence[int]
    pieces: Sequence[Tensors]
    stacks: bool = False

    def gather(self) -> Sequence[Tensors]:
        """Return the columns to compute with."""
        return [[torch.stack(column)] for column in self.pieces] if self.stacks else self.pieces

    def store(self, columns: Sequence[Tensors]) -> None:
        """Write back what `gather` returned, if these are copies, all but the first column."""
        if self.stacks:
            for pieces, (stack,) in zip(self.pieces[1:], columns[1:], strict=True):
                torch._foreach_copy_(pieces, stack.unbind())

    def norms(self, column: Tensors) -> Tensor:
        """Return the norm of each piece of a column, gathered or not."""
        if len(column) == len(self.indexes):
            return torch.stack(torch._foreach_norm(column))
        norms: Tensor = torch.linalg.vector_norm(column[0].unsqueeze(-1).flatten(1), dim=1)
        return norms

    def pick(self, *numbers: Any) -> list[Any]:
        """Return the block's of several numbers, each as foreach takes it with a column.

        Args:
            numbers: each one for all members, or a list or tensor of one for each of them.
        """
        picked: list[Any] = []
        for values in numbers:
            if isinstance(values, list):
                if len(self.indexes) < len(values):
                    values = [values[index] for index in self.indexes]
                if self.stacks:
                    values = torch.stack(scalars(values, self.pieces[0]))
            elif (
                isinstance(values, Tensor) and values.dim() > 0 and len(self.indexes) < len(values)
            ):
                values = values[list(self.indexes)]
            if self.stacks and isinstance(values, Tensor) and values.dim() == 1:
                values = [values.view(-1, *[1] * self.pieces[0][0].dim())]
            picked.append(values)
        return picked


def blocks(columns: Sequence[Tensors], stack: bool = True) -> list[Block]:
    """Return the tensors in all columns, or corresponding pieces of them, in blocks.

    Those that stack come first.

    Args:
        columns: gradients, parameters and so on, in the same order; of one device. The first is
            only read.
        stack: whether small ones may be stacked, which pays for half a dozen operations.
    """
    first = columns[0]
    sizes = list(map(Tensor.numel, first))
    few = len(first) < _FEWEST_STACKED and sum(sizes) <= _CPU_BLOCK
    if few or not first[0].is_cpu:
        return [Block(range(len(first)), columns)]
    others: list[int] = []
    by_shape: dict[torch.Size, list[int]] = {}
    for index, tensor in enumerate(first):
        if stack and sizes[index] <= _SMALL:
            by_shape.setdefault(tensor.shape, []).append(index)
        else:
            others.append(index)
    cut: list[Block] = []
    for alike in by_shape.values():
        if len(alike) < _FEWEST_STACKED:
            others += alike
            continue
        for indexes in _runs(alike, sizes):
            cut.append(Block(indexes, [[c[i] for i in indexes] for c in columns], stacks=True))
    uncut = []
    for index in others:
        row = [column[index] for column in columns]
        if sizes[index] > _CPU_BLOCK and all(tensor.is_contiguous() for tensor in row):
            pieces = (torch.split(tensor.view(-1), _CPU_BLOCK) for tensor in row)
            cut += [Block([index], [[t] for t in piece]) for piece in zip(*pieces, strict=True)]
        else:
            uncut.append(index)
    for indexes in _runs(uncut, sizes):
        cut.append(Block(indexes, [[column[i] for i in indexes] for column in columns]))
    return cut


def _runs(indexes: list[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield indexes in lists, each of one tensor or of no more elements than a block has."""
    run: list[int] = []
    elements = 0
    for index in indexes:
        if run and elements + sizes[index] > _CPU_BLOCK:
            yield run
            run, elements = [], 0
        run.append(index)
        elements += sizes[index]
    if run:
        yield run


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
    if job.consensus is not None:
        _take_consensus(job.consensus, members, params, deltas, _scales(job.consensus, members))
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


def _scales(consensus: Consensus, members: list[Member]) -> Any:
    """Return lr / (S + lr lambda): one number, or one per member where sigma follows gradients."""
    if isinstance(consensus.total_sigma, float | Tensor):
        return consensus.scale()
    return [consensus.scale(consensus.total(member)) for member in members]


def _take_consensus(
    consensus: Consensus,
    members: list[Member],
    stored: Tensors,
    totals: Tensors,
    scales: Any,
    ours: bool = False,
) -> None:
    """Take the consensus.

    Args:
        consensus: its numbers.
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
    if consensus.consensus_decay != 0:
        totals = list(torch._foreach_add(totals, ws, alpha=-consensus.consensus_decay))
    if consensus.proximal is not None:
        assert isinstance(consensus.total_sigma, float | Tensor)
        sigma = consensus.total_sigma + consensus.lr * consensus.consensus_decay
        ys = _resolvents(members, totals, consensus.proximal, sigma, consensus.rho)
        totals = [y.reshape(total.shape) for y, total in zip(ys, totals, strict=True)]
        scales = consensus.lr
    if isinstance(scales, float | int):
        torch._foreach_add_(ws, totals, alpha=scales)
    else:
        if isinstance(scales, Tensor):
            scales = scales.to(ws[0].device)
        elif isinstance(scales[0], Tensor):
            device, dtype = ws[0].device, ws[0].dtype
            if scales[0].device != device or scales[0].dtype != dtype:
                scales = [scale.to(device, dtype) for scale in scales]
        scales = scalars(scales, ws)
        if ours:
            torch._foreach_mul_(totals, scales)
        else:
            totals = torch._foreach_mul(totals, scales)
        torch._foreach_add_(ws, totals)
    if ws is not stored:
        write_back(stored, ws, consensus.stochastic_rounding)


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


def one_if_equal(values: list[Any]) -> Any:
    """Return a list of numbers, or the number itself if they are all the same."""
    return values[0] if values.count(values[0]) == len(values) else values
