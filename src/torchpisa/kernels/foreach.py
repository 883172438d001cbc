"""The mathematics of `loop`, with one call per operation for many parameters.

On a CPU the tensors are divided into blocks that stay in the cache from one operation to the next:
large tensors are cut into pieces, small ones share a block. Where many small tensors have one
shape, calls cost more than the work, so they are stepped as rows of one tensor: their gradients are
copied into one, and the optimizer's own state stays in one.
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
    Rows,
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
    "as_rows",
    "count",
    "cut_into_blocks",
    "knows",
    "leave_out_nonfinite",
    "like",
    "may_stack",
    "one_if_equal",
    "rows_of",
    "scalars",
    "write_back",
]

# torch's foreach functions take lists and return tuples.
Tensors = list[Tensor] | tuple[Tensor, ...]

# Elements of a block on a CPU. Half a dozen float32 tensors of this size fit in a cache; smaller
# blocks would cost more calls than they save. torch gives a thread 2**15 elements or more, so
# blocks are larger where more than four threads share them.
_CPU_BLOCK = 2**17
_CPU_BLOCK_PER_THREAD = 2**15

# On a CPU, at least `_FEWEST_STACKED` tensors of one shape and at most `_MAX_STACKED_SIZE` elements
# each become rows of one tensor: this costs less than the calls that it saves.
_MAX_STACKED_SIZE = 2**10
_FEWEST_STACKED = 10

# Rows to remember; more, as when other parameters have gradients in every step, are forgotten.
_MOST_KNOWN = 256

# With so many blocks or fewer, residuals that give sigma are kept for the step.
_MAX_KEPT_BLOCKS = 2

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
        """Return whether the preconditioner is known, and the host knows that the batch counts."""
        return job.keep is None and knows(job.preconditioner)

    def local_step(self, job: LocalJob) -> None:
        """Take the local step, see `Kernel`."""
        keys = slot_keys(job.slot)
        check_shapes(job.members, keys_shaped_like_params(job.preconditioner, job.slot))
        for members in _by_dtype(job.members, keys.dual):
            counts = count([member.state[keys.step] for member in members], job.rows)
            if type(job.preconditioner) in _ELEMENTWISE:
                _elementwise_step(job, members, keys, one_if_equal(counts))
            else:
                _matrix_step(job, members, keys)
            if job.consensus is None:
                for member in members:
                    member.state["arrived"] |= 1 << job.slot

    def residual_norm(self, job: LocalJob) -> list[Tensor]:
        """Return the norm of r for each member."""
        keys = slot_keys(job.slot)
        norms: list[Tensor] = []
        for members in _by_dtype(job.members, keys.dual):
            duals = [real(member.state[keys.dual]) for member in members]
            dtype = compute_dtype(real(members[0].param), duals[0])
            rs = torch._foreach_add(like(duals, dtype), _gradients(job, members, dtype))
            norms += torch._foreach_norm(rs)
        return norms

    def take_consensus(
        self, members: list[Member], consensus: Consensus, keep: Tensor | None
    ) -> None:
        """Take the consensus, see `Kernel`; for `keep` None."""
        assert keep is None
        check_shapes(members, ("pending",))
        for same_dtype in _by_dtype(members, "pending"):
            params = [real(member.param) for member in same_dtype]
            totals = [real(member.state["pending"]) for member in same_dtype]
            scales = _scales(consensus, same_dtype)
            if consensus.proximal is not None:
                _take_consensus(consensus, same_dtype, params, totals, scales)
                continue
            for block in cut_into_blocks([totals, params]):
                total_pieces, param_pieces = block.pieces
                _take_consensus(
                    consensus, same_dtype, param_pieces, total_pieces, *block.select(scales)
                )


FOREACH = Foreach()


# Elementwise rules: step block by block


def _elementwise_step(job: LocalJob, members: list[Member], keys: SlotKeys, counts: Any) -> None:
    """Step parameters whose rule is elementwise."""
    rule, consensus = job.preconditioner, job.consensus
    duals, moments, targets = [], [], []
    for param, _, state, _ in members:
        duals.append(state[keys.dual])
        if isinstance(rule, SecondMoment):
            moments.append(state[keys.moment])
        if consensus is not None:
            targets.append(param)
    if consensus is None:
        targets = _pending_sums(members)
    param = members[0].param
    dtype = torch.float32
    if not param.dtype == duals[0].dtype == dtype:
        dtype = compute_dtype(real(param), real(duals[0]))
    columns = [_gradients(job, members, dtype), targets, duals]
    if moments:
        columns.append(moments)
    if param.is_complex():
        columns = [[real(tensor) for tensor in column] for column in columns]
    needs_whole_tensors = consensus is not None and consensus.proximal is not None
    if needs_whole_tensors:
        blocks = [Block(range(len(members)), columns)]
    else:
        blocks = cut_into_blocks(columns, may_stack(members[0]), job.rows)
    ratios: Any
    scale: Any = None
    kept: list[Any] = []
    if job.sigma is None:
        if isinstance(counts, list):
            counts = _as_one(counts, members[0].state[keys.level])
        sigma, kept = _update_sigmas(job, members, keys, blocks, counts)
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
    numbers = _in_dtype([scale, *factors], dtype, blocks)
    for index, block in enumerate(blocks):
        block_columns, rs = kept[index] if kept else (block.gather(job.rows), None)
        grads, target_pieces, stored, *moment_pieces = block_columns
        pis = stored if stored[0].dtype == dtype else like(stored, dtype)
        if rs is None:
            rs = _residuals(job, pis, grads)
        scale, *root_factors = block.select(*numbers)
        if isinstance(rule, SecondMoment):
            _divide_by_roots(
                rule, rs, moment_pieces[0], _RootFactors(*root_factors), job.stochastic_rounding
            )
        elif isinstance(rule, SpectralConsensus):
            torch._foreach_mul_(rs, rule.momentum - 1)
        else:
            torch._foreach_mul_(rs, -1 / (1 + ratios))
        # rs now holds delta; u = pi + 2 delta is the new dual plus delta.
        torch._foreach_add_(pis, rs)
        torch._foreach_add_(rs, pis)
        if consensus is None:
            _accumulate(job, target_pieces, block.spread(rs))
        else:
            if block.stacks and not isinstance(scale, float):
                if consensus.consensus_decay == 0:  # one call for all rows
                    torch._foreach_mul_(rs, scale)
                    scale = 1.0
                else:
                    scale = block.spread(scale)
            us = block.spread(rs)
            _take_consensus(consensus, members, target_pieces, us, scale, may_overwrite=True)
        if job.dual_decay != 1:
            torch._foreach_mul_(pis, job.dual_decay)
        if pis is not stored:
            write_back(stored, pis, job.stochastic_rounding)
        block.store(block_columns)


def _pending_sums(members: list[Member]) -> list[Tensor]:
    """Return the sums of the round; those that no batch has contributed to yet are zero."""
    for member in members:
        if not member.state["arrived"]:
            member.state["pending"].zero_()
    return [member.state["pending"] for member in members]


class _RootFactors(NamedTuple):
    """The numbers of delta = r / (scale min(root, cap) + shift), with root = sqrt(moment).

    Each is one number, or one per parameter in a list or a tensor.
    """

    scale: Any
    shift: Any
    cap: Any


def _root_factors(rule: SecondMoment, ratios: Any, counts: Any) -> _RootFactors:
    """Return the factors that give delta = -r / (1 + (rho / sigma)(min(root / c, eta) + eps)).

    c = sqrt(1 - beta^count) corrects the bias in Scheme III, else it is 1. As part of the factors
    it costs no pass over the tensors.

    Args:
        rule: the preconditioner.
        ratios: rho / sigma, a number or a tensor with one per parameter.
        counts: how often the moments were updated, a number or one per parameter: a tensor if
            `ratios` is one, else a list.
    """
    adam = rule.scheme == "adam"
    correction: Any
    if isinstance(ratios, Tensor) and ratios.dim() == 1:
        correction = (1 - rule.beta**counts) ** 0.5 if adam else 1.0
        return _RootFactors(
            scale=ratios / -correction,
            shift=-1.0 if rule.eps == 0 else -1 - ratios * rule.eps,
            cap=math.inf if rule.eta == math.inf else rule.eta * correction + 0 * ratios,
        )
    shift = -1 - ratios * rule.eps
    if not isinstance(counts, list) or not adam:
        correction = (1 - rule.beta**counts) ** 0.5 if adam else 1.0
        return _RootFactors(-ratios / correction, shift, rule.eta * correction)
    corrections = [(1 - rule.beta**count) ** 0.5 for count in counts]
    caps = [rule.eta * correction for correction in corrections]
    return _RootFactors([-ratios / correction for correction in corrections], shift, caps)


def _as_one(numbers: list[Any], like_this: Tensor) -> Tensor:
    """Return numbers as one tensor, of the dtype and on the device of another."""
    if isinstance(numbers[0], Tensor):
        return torch.stack(numbers).to(like_this)
    if like_this.is_cpu:
        return torch.tensor(numbers, dtype=like_this.dtype, device="cpu")
    # Filled on the device: a copy from the host would wait for it.
    return torch.stack([like_this.new_full((), number) for number in numbers])


def _in_dtype(numbers: Sequence[Any], dtype: torch.dtype, blocks: Sequence["Block"]) -> list[Any]:
    """Return numbers in the form in which `Block.select` and foreach are fastest.

    Args:
        numbers: each one number for all members, or a tensor with one per member.
        dtype: that of the tensors they are combined with; foreach need not convert then.
        blocks: the blocks.
    """
    ready: list[Any] = []
    for values in numbers:
        if isinstance(values, Tensor) and values.dim() == 1:
            values = values.to(dtype)
            if not blocks[-1].stacks:  # blocks that stack come first
                values = list(values.unbind())
        ready.append(values)
    return ready


def count(steps: list[Tensor], known: Rows | None = None) -> list[Any]:
    """Add one to each step counter; return the counts, as numbers if the host has them."""
    if not steps[0].is_cpu:
        torch._foreach_add_(steps, 1.0)
        return steps
    rows = rows_of(steps, True, known)
    write_rows(steps, rows, rows.add_(1))
    counts: list[float] = rows.tolist()
    return counts


def scalars(values: Any, tensors: Tensors) -> Any:
    """Return numbers in the form in which foreach is fastest: for tensors on a CPU, as tensors.

    foreach would convert a number once for each tensor.
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
    """Update the moments by (4.4), and turn r into delta, see `_RootFactors`."""
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
    shift = factors.shift
    if isinstance(shift, Tensor):  # the host would read the value of a single one
        shift = [shift] * len(roots)
    torch._foreach_add_(roots, scalars(shift, roots))
    torch._foreach_div_(rs, roots)


def _update_sigmas(
    job: LocalJob, members: list[Member], keys: SlotKeys, blocks: Sequence["Block"], counts: Any
) -> tuple[Tensor, list[tuple[Sequence[Tensors], tuple[Tensor, ...]]]]:
    """Update each parameter's sigma and level from its residual: `algorithms.sisa.followed`.

    Returns:
        The sigmas in one tensor; and for each block its gathered columns and residuals, or an empty
        list if there are too many blocks to keep them.
    """
    rule = job.preconditioner
    assert isinstance(rule, SecondMoment)
    keeps_residuals = len(blocks) <= _MAX_KEPT_BLOCKS
    owners: list[int] = []
    norms, kept = [], []
    for block in blocks:
        columns = block.gather(job.rows) if keeps_residuals else block.pieces
        grads, _, stored, *_ = columns
        rs = _residuals(job, like(stored, grads[0].dtype), grads)
        norms.append(block.norms(rs))
        owners += block.indexes
        if keeps_residuals:
            kept.append((columns, rs))
    norm = _norms_of_members(norms, owners, len(members))
    if members[0].whole is not None:
        from torchpisa.distributed import dtensor

        groups = dtensor.groups_of_parts(members[0].origin)
        norm = dtensor.summed(norm.square(), groups).sqrt()
    parts = 2 if members[0].param.is_complex() else 1
    sizes, old_sigmas, old_levels = [], [], []
    for param, _, state, whole in members:
        sizes.append((param if whole is None else whole).numel())
        old_sigmas.append(state[keys.sigma])
        old_levels.append(state[keys.level])
    if sizes.count(sizes[0]) == len(sizes):
        rms = norm / max(1, parts * sizes[0]) ** 0.5
    else:
        roots = [max(1, parts * size) ** 0.5 for size in sizes]
        if norm.is_cpu:
            rms = norm / torch.tensor(roots, dtype=norm.dtype, device="cpu")
        else:  # a copy from the host would wait for the device
            rms = torch.stack(torch._foreach_div(norm.unbind(), roots))
    sigma = rows_of(old_sigmas, norm.is_cpu, job.rows)
    level = rows_of(old_levels, norm.is_cpu, job.rows)
    new_sigma, new_level = sisa.followed(
        sigma, level, rms.to(level.dtype), counts, rule.scheme, rule.beta
    )
    new_sigma.clamp_(min=TINY)
    write_rows(old_sigmas, sigma, new_sigma)
    write_rows(old_levels, level, new_level)
    return new_sigma, kept


def _norms_of_members(norms: Sequence[Tensor], owners: list[int], count: int) -> Tensor:
    """Return one norm per member from the norms of its pieces.

    Args:
        norms: for each block, the norms of its pieces.
        owners: the member that each piece belongs to.
        count: the number of members.
    """
    if owners == list(range(count)):
        return norms[0] if len(norms) == 1 else torch.cat(norms)  # type: ignore[arg-type]
    squares = torch.cat(norms).square()  # type: ignore[arg-type]
    indexes = torch.tensor(owners, device=squares.device)
    return squares.new_zeros(count).index_add_(0, indexes, squares).sqrt()


def _residuals(job: LocalJob, duals: Tensors, grads: Tensors) -> tuple[Tensor, ...]:
    """Return r = pi + g, clipped."""
    rs = torch._foreach_add(duals, grads)
    if job.clip_scale is not None:
        torch._foreach_mul_(rs, job.clip_scale.to(rs[0].device))
    return rs


class Block(NamedTuple):
    """Tensors, or pieces of them, that are stepped together.

    Attributes:
        indexes: the member that each piece belongs to.
        pieces: columns of corresponding pieces: gradients, which are only read, what is updated
            last, such as parameters, and the optimizer's own state.
        stacks: True if the pieces have one shape and are so small that it pays to compute with
            them as rows of one tensor.
    """

    indexes: Sequence[int]
    pieces: Sequence[Tensors]
    stacks: bool = False

    def gather(self, known: Rows | None = None) -> Sequence[Tensors]:
        """Return the columns to compute with, see `rows_of`; the second column is as it was."""
        if not self.stacks:
            return self.pieces
        grads, targets, *state = self.pieces
        return [[torch.stack(grads)], targets, *([rows_of(c, True, known)] for c in state)]

    def spread(self, column: Any) -> Any:
        """Return the pieces, or numbers, of a column that was computed from gathered ones."""
        spreads = self.stacks and isinstance(column, list | tuple)
        return list(column[0].unbind()) if spreads else column

    def store(self, columns: Sequence[Tensors]) -> None:
        """Write state back if `gather` has returned copies."""
        if self.stacks:
            for pieces, (rows,) in zip(self.pieces[2:], columns[2:], strict=True):
                write_rows(pieces, rows, rows)

    def norms(self, column: Tensors) -> Tensor:
        """Return the norm of each piece of a column, gathered or not."""
        if len(column) == len(self.indexes):
            return torch.stack(torch._foreach_norm(column))
        norms: Tensor = torch.linalg.vector_norm(column[0].view(len(self.indexes), -1), dim=1)
        return norms

    def select(self, *numbers: Any) -> list[Any]:
        """Return numbers for the members of this block, as foreach takes them with a column.

        Args:
            numbers: each one number for all members, or a list or tensor with one per member.
        """
        selected: list[Any] = []
        for values in numbers:
            if isinstance(values, list):
                if len(self.indexes) < len(values):
                    values = [values[index] for index in self.indexes]
                if self.stacks:
                    values = _as_one(values, self.pieces[0][0])
            elif (
                isinstance(values, Tensor) and values.dim() > 0 and len(self.indexes) < len(values)
            ):
                values = values[list(self.indexes)]
            if self.stacks and isinstance(values, Tensor) and values.dim() == 1:
                values = [values.view(-1, *[1] * self.pieces[0][0].dim())]
            selected.append(values)
        return selected


def rows_of(tensors: Tensors, owned: bool, known: Rows | None = None) -> Tensor:
    """Return tensors of one shape as the rows of one tensor, a copy unless they are there already.

    Args:
        tensors: of one shape.
        owned: they are the optimizer's own: their memory is moved into the one tensor, so that it
            is no copy, neither now nor in further steps. They stay the same objects. Not moved are
            views, memory that processes share, and a part of the rows of an earlier call.
        known: the rows of earlier calls. They keep their memory alive, so tensors at the same
            addresses are the same rows.
    """
    if not owned:
        return torch.stack(tensors)
    rows = None if known is None else known.get(tuple(map(Tensor.data_ptr, tensors)))
    # `share_memory_()` moves the memory of rows; others may then come to be where they were.
    if rows is not None and rows.data_ptr() == tensors[0].data_ptr():
        return rows
    rows = as_rows(tensors)
    if rows is None:
        rows = torch.stack(tensors)
        if any(t.dtype != rows.dtype or _must_stay(t) for t in tensors) or _leave_some(tensors):
            return rows
        if known is not None:
            known.clear()  # it may hold the memory that they leave
        for tensor, row in zip(tensors, rows.unbind(), strict=True):
            tensor.set_(row)  # type: ignore[call-overload]
    if known is not None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[tuple(map(Tensor.data_ptr, tensors))] = rows
    return rows


def _must_stay(tensor: Tensor) -> bool:
    """Return whether memory may not be moved: that of a view, or of several processes."""
    if tensor._base is not None:
        return True
    # torch says of all CUDA memory that it is shared.
    return tensor.is_cpu and bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _leave_some(tensors: Tensors) -> bool:
    """Return whether other tensors would stay in the memory of these, and so keep all of it."""
    memories = map(Tensor.untyped_storage, tensors)
    sizes = {memory.data_ptr(): memory.nbytes() for memory in memories}
    return sum(sizes.values()) != sum(tensor.nbytes for tensor in tensors)


def may_stack(member: Member) -> bool:
    """Return whether memory of a parameter's state can be moved.

    What kernels get of complex and of sharded tensors are views: to move these moves no state.
    """
    return member.whole is None and not member.param.is_complex()


def as_rows(tensors: Tensors) -> Tensor | None:
    """Return the tensor of which `tensors` are the rows; None if they are not the rows of one."""
    first = tensors[0]
    start, size = first.data_ptr(), first.nbytes
    end = start + len(tensors) * size
    memory = first.untyped_storage()
    if (
        list(map(Tensor.data_ptr, tensors)) == list(range(start, end, size))
        and end <= memory.data_ptr() + memory.nbytes()
        and all(map(Tensor.is_contiguous, tensors))
    ):
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    return None


def write_rows(tensors: Tensors, rows: Tensor, values: Tensor) -> None:
    """Write `values` to tensors whose `rows_of` are `rows`, which may be `values` themselves."""
    if rows.data_ptr() != tensors[0].data_ptr():
        torch._foreach_copy_(tensors, values.unbind())
    elif values is not rows:
        rows.copy_(values)


def cut_into_blocks(
    columns: Sequence[Tensors], stack: bool = False, known: Rows | None = None
) -> list[Block]:
    """Divide tensors into blocks; those that stack come first.

    Args:
        columns: the columns of `Block.pieces`, in the same order and on one device.
        stack: allow stacking, which pays from half a dozen operations on; see `may_stack`.
        known: see `rows_of`.
    """
    first = columns[0]
    if stack and known:
        rows = known.get(tuple(map(Tensor.data_ptr, columns[2])))
        if rows is not None and rows.data_ptr() == columns[2][0].data_ptr():
            return [Block(range(len(first)), columns, stacks=True)]
    sizes = list(map(Tensor.numel, first))
    most = max(_CPU_BLOCK, _CPU_BLOCK_PER_THREAD * torch.get_num_threads())
    if not first[0].is_cpu or (len(first) < _FEWEST_STACKED and sum(sizes) <= most):
        return [Block(range(len(first)), columns)]
    unstacked: list[int] = []
    by_shape: dict[torch.Size, list[int]] = {}
    for index, tensor in enumerate(first):
        if stack and 0 < sizes[index] <= _MAX_STACKED_SIZE:
            by_shape.setdefault(tensor.shape, []).append(index)
        else:
            unstacked.append(index)
    blocks: list[Block] = []
    for same_shape in by_shape.values():
        if len(same_shape) < _FEWEST_STACKED:
            unstacked += same_shape
            continue
        for indexes in _runs(same_shape, sizes, most):
            pieces = columns
            if len(indexes) < len(first):
                pieces = [[column[i] for i in indexes] for column in columns]
            blocks.append(Block(indexes, pieces, stacks=True))
    uncut = []
    # In order, because `Block.select` takes a block of all members to be in order.
    for index in sorted(unstacked):
        row = [column[index] for column in columns]
        if sizes[index] > most and all(tensor.is_contiguous() for tensor in row):
            splits = (torch.split(tensor.view(-1), most) for tensor in row)
            blocks += [
                Block([index], [[t] for t in pieces]) for pieces in zip(*splits, strict=True)
            ]
        else:
            uncut.append(index)
    for indexes in _runs(uncut, sizes, most):
        blocks.append(Block(indexes, [[column[i] for i in indexes] for column in columns]))
    return blocks


def _runs(indexes: list[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the indexes in lists: tensors of `most` elements together, or one that has more."""
    run: list[int] = []
    elements = 0
    for index in indexes:
        if run and elements + sizes[index] > most:
            yield run
            run, elements = [], 0
        run.append(index)
        elements += sizes[index]
    if run:
        yield run


# Rules of matrices: step whole tensors


def _matrix_step(job: LocalJob, members: list[Member], keys: SlotKeys) -> None:
    """Step parameters whose rule needs whole matrices."""
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
        _accumulate(job, [real(total) for total in _pending_sums(members)], deltas)
    if job.dual_decay != 1:
        torch._foreach_mul_(duals, job.dual_decay)
    write_back(stored, duals, job.stochastic_rounding)


# Each solver returns delta = sigma d in new memory.


def _newton_schulz(
    job: LocalJob, members: list[Member], duals: Tensors, grads: Tensors, keys: SlotKeys
) -> Tensors:
    """Return delta = -(pi + o) / (1 + (rho / sigma) |pi + o|), equation (4.6)."""
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

    os = _solve_matrices(members, bs, orthogonalized)
    if rule.aspect_scaling:
        shapes = [member.origin.shape for member in members]
        scales = [rule.scale(shape[0], shape.numel() // shape[0]) for shape in shapes]
        torch._foreach_mul_(os, scales)
    sums = [o.view_as(b) for o, b in zip(os, bs, strict=True)]
    torch._foreach_add_(sums, duals)
    denominators = torch._foreach_abs(sums)
    dtype_info = torch.finfo(sums[0].dtype)
    smallest = dtype_info.tiny * dtype_info.eps
    for s, step in zip(sums, _steps(members, keys), strict=True):
        perturbation = rule.perturbation**step
        # It soon underflows; on a device it is a tensor, and the host does not know its value.
        if isinstance(perturbation, Tensor) or perturbation >= smallest:
            s.add_(perturbation * (s == 0))
    torch._foreach_mul_(denominators, -job.rho / job.penalty)
    torch._foreach_add_(denominators, -1.0)
    torch._foreach_div_(sums, denominators)
    return sums


def _spectral(
    job: LocalJob, members: list[Member], duals: Tensors, grads: Tensors, keys: SlotKeys
) -> Tensors:
    """Return delta = -(I + (rho / sigma) Q)^-1 r."""
    rule = job.preconditioner
    assert isinstance(rule, Spectral)
    rs = _residuals(job, duals, grads)
    # Not d, which is (sigma I + rho Q)^-1 r and underflows as sigma grows.
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


def _solve_matrices(
    members: list[Member], tensors: Tensors, solve: Callable[[Sequence[Tensor]], list[Tensor]]
) -> Tensors:
    """Apply `solve` to whole matrices; its owner applies it to a matrix that is sharded."""
    if members[0].whole is not None:
        from torchpisa.distributed import owners

        return owners.solve(tensors, [member.origin for member in members], solve)
    return solve([as_matrix(tensor) for tensor in tensors])


def _resolvents(
    members: list[Member], rs: Tensors, rule: Spectral, sigma: Scalar, rho: Scalar
) -> Tensors:
    """Return (sigma I + rho Q)^-1 r for the matrices of `members`."""
    return _solve_matrices(members, rs, lambda ms: resolvent.resolvents(ms, rule, sigma, rho))


# Shared by all rules


def _by_dtype(members: list[Member], key: str) -> list[list[Member]]:
    """Return the members in lists that share device and dtypes, as foreach is fastest with.

    Args:
        members: the parameters.
        key: the state whose dtype counts.
    """
    lists: dict[object, list[Member]] = {}
    last, alike = None, []
    for member in members:
        param, grad, state, whole = member
        grad_dtype = None if grad is None else grad.dtype
        shared = param.get_device(), param.dtype, state[key].dtype, grad_dtype, whole is None
        if shared != last:
            last, alike = shared, lists.setdefault(shared, [])
        alike.append(member)
    return list(lists.values())


def _gradients(job: LocalJob, members: list[Member], dtype: torch.dtype) -> Tensors:
    """Return g_i in `dtype`; do not modify the result, which may be the user's own gradient."""
    grads: Tensors
    if members[0].grad is None:
        grads = [torch.zeros_like(real(member.param), dtype=dtype) for member in members]
    else:
        stored: list[Any] = [member.grad for member in members]
        if stored[0].is_complex():
            stored = [real(grad) for grad in stored]
        grads = stored if stored[0].dtype == dtype else like(stored, dtype)
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
    """Return copies of gradients, zero where one has non-finite entries, and set its flag.

    The host does not wait for the device.
    """
    # A gradient so large that its square overflows counts as infinite.
    norms = torch._foreach_norm(grads)
    dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    finite = torch.stack([norm.to(dtype) for norm in norms]).isfinite()
    torch._foreach_add_(list(flags), finite.logical_not().to(torch.float32).unbind())
    return [torch.where(keep, g, 0) for keep, g in zip(finite.unbind(), grads, strict=True)]


def _accumulate(job: LocalJob, stored: Tensors, contributions: Tensors) -> None:
    """Add alpha_i u_i to the pending sum."""
    totals = like(stored, contributions[0].dtype)
    torch._foreach_add_(totals, contributions, alpha=job.weight)
    write_back(stored, totals, job.stochastic_rounding)


def _scales(consensus: Consensus, members: list[Member]) -> Any:
    """Return lr / (S + lr lambda): one number, or one per member if sigma follows gradients."""
    if isinstance(consensus.total_sigma, float | Tensor):
        return consensus.scale()
    return [consensus.scale(consensus.total(member)) for member in members]


def _take_consensus(
    consensus: Consensus,
    members: list[Member],
    stored: Tensors,
    totals: Tensors,
    scales: Any,
    may_overwrite: bool = False,
) -> None:
    """Take equation (2.9), w = w + lr (U - lambda w) / (S + lr lambda).

    Args:
        consensus: its numbers.
        members: the parameters, for a proximal term.
        stored: w, parameters or pieces of them.
        totals: U.
        scales: the quotient from `_scales`, one for all pieces or one for each.
        may_overwrite: allow writing to `totals`.
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
        if may_overwrite:
            torch._foreach_mul_(totals, scales)
        else:
            totals = torch._foreach_mul(totals, scales)
        torch._foreach_add_(ws, totals)
    if ws is not stored:
        write_back(stored, ws, consensus.stochastic_rounding)


def like(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Return tensors converted to `dtype`, or the same list if they have it already."""
    return tensors if tensors[0].dtype == dtype else [tensor.to(dtype) for tensor in tensors]


def write_back(stored: Tensors, computed: Tensors, stochastic_rounding: bool) -> None:
    """Copy results from a wider dtype to where they are stored, unless they are there already."""
    if stored is computed:
        return
    if stochastic_rounding:
        for target, value in zip(stored, computed, strict=True):
            store(target, value, stochastic_rounding)
    else:
        torch._foreach_copy_(stored, computed)


def _steps(members: list[Member], keys: SlotKeys) -> list[Scalar]:
    """Return the step count of each parameter, the current step included."""
    steps = [member.state[keys.step] for member in members]
    if steps[0].device.type == "cpu":
        return [step.item() for step in steps]
    return steps


def one_if_equal(values: list[Any]) -> Any:
    """Return the number that all entries of a list equal; the list if they differ, or are tensors.

    To compare tensors, the host would wait for their device.
    """
    if isinstance(values[0], Tensor) or values.count(values[0]) < len(values):
        return values
    return values[0]
