"""MISA's consensus over lists of tensors.

`LOOP` steps one parameter after the other and is the specification. `FOREACH` makes one call per
operation for many parameters. For a GPU there is `kernels/triton/plan.py`. The parameters of a job
are either all matrices to orthogonalise, or none of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from torchpisa.algorithms import misa, nsisa
from torchpisa.algorithms.pisa import Scalar
from torchpisa.kernels import newton_schulz
from torchpisa.kernels.foreach import (
    Tensors,
    count,
    cut_into_blocks,
    leave_out_nonfinite,
    like,
    may_stack,
    one_if_equal,
    scalars,
    write_back,
)
from torchpisa.kernels.job import FindsNonfinite, Member, compute_dtype, real
from torchpisa.kernels.rounding import store
from torchpisa.preconditioners.consensus import Stage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "FOREACH",
    "LOOP",
    "ConsensusJob",
    "ConsensusKernel",
    "block_shape",
    "gradients",
    "is_stack",
]

# The state in the optimizer's state dtype: it is rounded when it is stored.
_ROUNDED_STATE = ("dual", "rows", "moment")


@dataclass(slots=True)
class ConsensusJob:
    """A consensus over parameters of one group: only matrices to orthogonalise, or only others.

    Attributes:
        members: the parameters, on one device and of one dtype.
        grads: their gradients, summed over the batches of the round; must not be modified.
        matrix: True if they are matrices to orthogonalise.
        settings: their group.
        lr: the learning rate.
        weight_decay: the decoupled weight decay.
        round: the number of rounds done before this one.
        keep: a 0-d bool tensor, False if nothing may change; None for True.
        maximize: negate the gradients.
        grad_scale: factor of a GradScaler on the gradients, or None.
        clip_scale: factor on the residual, or None.
        search: count single entries that are not finite as zero and flag their member; for kernels
            with `finds_nonfinite`.
        flags: numbers on the device, one per member, to set where a gradient is not finite, which
            then counts as zero; None to not check.
        replicas: processes that take the same step and share the orthogonalisation, or None.
    """

    members: list[Member]
    grads: list[Tensor]
    matrix: bool
    settings: Mapping[str, Any]
    lr: Scalar
    weight_decay: float
    round: int
    keep: Tensor | None = None
    maximize: bool = False
    grad_scale: Tensor | None = None
    clip_scale: Tensor | None = None
    search: bool = False
    flags: Sequence[Tensor] | None = None
    replicas: "ProcessGroup | None" = None

    @property
    def whole_here(self) -> bool:
        """True if this process holds whole matrices and orthogonalises all of them itself."""
        return self.members[0].whole is None and self.replicas is None


class ConsensusKernel(FindsNonfinite, Protocol):
    """A way to compute MISA's consensus; `kernels.dispatch` chooses among them."""

    def consensus_step(self, job: ConsensusJob) -> None:
        """Update duals, preconditioners and weights."""

    def residual_norms(self, job: ConsensusJob) -> list[Tensor]:
        """Return norms of r as 0-d tensors, each over one or more members."""


class ConsensusLoop:
    """The kernel that steps one parameter after the other; see `ConsensusKernel`."""

    finds_nonfinite: ClassVar[bool] = False
    takes_flags: ClassVar[bool] = False

    def consensus_step(self, job: ConsensusJob) -> None:
        """Take the consensus."""
        _loop_step(job)

    def residual_norms(self, job: ConsensusJob) -> list[Tensor]:
        """Return the norm of r for each member."""
        return [
            torch.linalg.vector_norm(real(member.state["dual"]).to(grad.dtype) + grad)
            for member, grad in zip(job.members, gradients(job), strict=True)
        ]


class ConsensusForeach(ConsensusLoop):
    """The kernel that steps many parameters per call; see `ConsensusKernel`."""

    takes_flags: ClassVar[bool] = True

    def consensus_step(self, job: ConsensusJob) -> None:
        """Take the consensus."""
        if job.keep is None:
            _foreach_step(job)
        else:
            _loop_step(job)


LOOP, FOREACH = ConsensusLoop(), ConsensusForeach()


def gradients(job: ConsensusJob) -> list[Tensor]:
    """Return g in the dtype to compute in, such that pi + g is the clipped residual.

    Do not modify the result, which may be the gradients themselves.
    """
    dtype = compute_dtype(real(job.members[0].param), real(job.members[0].state["dual"]))
    grads = [real(grad).to(dtype) for grad in job.grads]
    if job.grad_scale is not None:
        scale = job.grad_scale.to(grads[0].device)
        grads = [grad / scale for grad in grads]
    if job.maximize:
        grads = [-grad for grad in grads]
    if job.flags is not None:
        grads = leave_out_nonfinite(grads, job.flags)
    if job.clip_scale is None:
        return grads
    scale = job.clip_scale.to(grads[0].device, dtype)
    duals = [real(member.state["dual"]).to(dtype) for member in job.members]
    # pi + (s g + (s - 1) pi) = s (pi + g)
    return [scale * grad + (scale - 1) * pi for grad, pi in zip(grads, duals, strict=True)]


def _loop_step(job: ConsensusJob) -> None:
    settings, grads = job.settings, gradients(job)
    from_owners: list[tuple[Tensor, dict[str, Tensor]] | None] = [None] * len(grads)
    if job.matrix and not job.whole_here:  # all at once, so that every process has some to do
        pairs = zip(job.members, grads, strict=True)
        us = [_loop_average(job, member, grad)[1] for member, grad in pairs]
        from_owners = [*_by_owners(job, us, grads)]
    for member, grad, from_owner in zip(job.members, grads, from_owners, strict=True):
        keep = job.keep if job.keep is None else job.keep.to(grad.device)
        stored = {key: real(member.state[key]) for key in _ROUNDED_STATE if key in member.state}
        state = {key: value.to(grad.dtype) for key, value in stored.items()}
        step = _count(member, keep)
        r, u, dual = _loop_average(job, member, grad)
        new = {"dual": dual}
        if not job.matrix:
            p, new["moment"] = misa.scale_entries(
                u, r, state["moment"], step, settings["beta"], settings["eps"]
            )
        else:
            stage_state: dict[str, Tensor] = {}
            if from_owner is not None:
                o, stage_state = from_owner
            else:
                if settings["before"] is not None:
                    states = _stage_states(job, [member.state])
                    columns = (_split_blocks(job, [column]) for column in (u, grad))
                    changed, stacked = _apply_stage(job, states, *columns)
                    (u,) = _join_blocks(job, changed, [u])
                    stage_state = {
                        key: value[0] if len(value) == 1 else value.flatten(0, 1)
                        for key, value in stacked.items()
                    }
                (o,) = _orthogonalize(job, [each.origin for each in job.members], [u])
            for key, value in stage_state.items():
                stored[key], new[key] = member.state[key], value
                state[key] = stored[key].to(value.dtype)
            if settings["row_beta"] is None:
                p = misa.match_rms(o, *block_shape(member.origin, settings["blocks"]))
            else:
                row_averages, numbers = state["rows"], (settings["row_beta"], settings["eps"])
                (squares,) = _row_squares(job, [member], [o])
                squares = squares.view_as(row_averages)
                p, new["rows"] = misa.normalize_rows(o, squares, row_averages, step, *numbers)
        w = real(member.param)
        new["param"] = misa.move(w.to(grad.dtype), p, job.lr, job.weight_decay)
        stored["param"], state["param"] = w, w.to(grad.dtype)
        for key, value in new.items():
            chosen = value if keep is None else torch.where(keep, value, state[key])
            store(stored[key], chosen, settings["stochastic_rounding"])


def _loop_average(job: ConsensusJob, member: Member, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return r = pi + g, U = pi + c delta and the new dual pi + delta; delta = -(1 - mu) r."""
    dual = real(member.state["dual"]).to(grad.dtype)
    r = dual + grad
    delta = misa.average(r, job.settings["momentum"])
    return r, misa.look_ahead(dual, delta, job.settings["look_ahead"]), dual + delta


def _foreach_step(job: ConsensusJob) -> None:
    counts = count([member.state["step"] for member in job.members])
    params = [real(member.param) for member in job.members]
    duals = [real(member.state["dual"]) for member in job.members]
    if job.matrix:
        _foreach_step_matrices(job, params, duals, gradients(job), counts)
        return
    moments = [real(member.state["moment"]) for member in job.members]
    beta = job.settings["beta"]
    corrections = one_if_equal([(1 - beta**step) ** 0.5 for step in counts])
    columns_of_all = [gradients(job), params, duals, moments]
    for block in cut_into_blocks(columns_of_all, may_stack(job.members[0])):
        columns = block.gather()
        grads, ws, pis, stored = columns
        rs, us = _average(job, pis, grads)
        averages = like(stored, rs[0].dtype)
        torch._foreach_mul_(averages, scalars(beta, averages))
        torch._foreach_addcmul_(averages, rs, rs, 1 - beta)
        write_back(stored, averages, job.settings["stochastic_rounding"])
        roots = torch._foreach_sqrt(averages)
        torch._foreach_div_(roots, scalars(block.select(corrections)[0], roots))
        torch._foreach_add_(roots, scalars(job.settings["eps"], roots))
        torch._foreach_div_(us, roots)
        _move_weights(job, ws, block.spread(us), 1.0)
        block.store(columns)


def _foreach_step_matrices(
    job: ConsensusJob,
    params: Tensors,
    duals: Tensors,
    grads: Tensors,
    counts: Sequence[Scalar],
) -> None:
    settings, members = job.settings, job.members
    _, us = _average(job, duals, grads)
    if job.whole_here:
        if settings["before"] is not None:
            us = _foreach_apply_stage(job, us, grads)
        os = _orthogonalize(job, [member.origin for member in members], us)
    else:
        results = _by_owners(job, us, grads)
        os = [o for o, _ in results]
        for key in results[0][1]:
            stored = [member.state[key] for member in members]
            new = [state[key] for _, state in results]
            write_back(stored, new, settings["stochastic_rounding"])
    if settings["row_beta"] is None:
        shapes = [block_shape(member.origin, settings["blocks"]) for member in members]
        torch._foreach_mul_(os, [max(shape) ** 0.5 for shape in shapes])
        _move_weights(job, params, os, misa.RMS)
        return
    beta = settings["row_beta"]
    stored = [real(member.state["rows"]) for member in members]
    pairs = zip(_row_squares(job, members, os), stored, strict=True)
    squares = [square.view_as(average) for square, average in pairs]
    averages = like(stored, us[0].dtype)
    torch._foreach_mul_(averages, scalars(beta, averages))
    torch._foreach_add_(averages, squares, alpha=1 - beta)
    write_back(stored, averages, settings["stochastic_rounding"])
    roots = torch._foreach_sqrt(averages)
    torch._foreach_div_(roots, scalars([(1 - beta**step) ** 0.5 for step in counts], roots))
    torch._foreach_add_(roots, scalars(settings["eps"], roots))
    torch._foreach_div_(os, roots)
    _move_weights(job, params, os, misa.RMS)


def _foreach_apply_stage(job: ConsensusJob, us: Tensors, grads: Tensors) -> Tensors:
    """Return U changed by the stage before the orthogonalisation, and update its state."""
    states = _stage_states(job, [member.state for member in job.members])
    blocks = _split_blocks(job, us)
    columns = list(blocks), _split_blocks(job, grads)
    for indexes, results, new in _apply_stage_by_shape(job, states, *columns):
        for index, result in zip(indexes, results, strict=True):
            blocks[index] = result
        for key, values in new.items():
            stored = [states[index][key] for index in indexes]
            write_back(stored, list(values), job.settings["stochastic_rounding"])
    return _join_blocks(job, blocks, us)


def _split_blocks(job: ConsensusJob, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the matrices that parameters consist of, see `block_shape`."""
    count = job.settings["blocks"]
    matrices = [tensor.reshape(-1, block_shape(tensor, count)[1]) for tensor in tensors]
    return [block for matrix in matrices for block in matrix.chunk(count)]


def _join_blocks(job: ConsensusJob, blocks: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Join what `_split_blocks` has split, in the shapes of `like`."""
    count = job.settings["blocks"]
    if count > 1:
        blocks = [torch.cat(blocks[i : i + count]) for i in range(0, len(blocks), count)]
    return [block.view(tensor.shape) for block, tensor in zip(blocks, like, strict=True)]


def _stage_states(
    job: ConsensusJob, states: Sequence[Mapping[str, Any]]
) -> list[dict[str, Tensor]]:
    """Return views of the stage's state for each block; state of blocks is joined row-wise."""
    names, count = job.settings["before"].names, job.settings["blocks"]
    if count == 1:
        return [{name: state[name] for name in names} for state in states]
    return [
        dict(zip(names, parts, strict=True))
        for state in states
        for parts in zip(*(state[name].chunk(count) for name in names), strict=True)
    ]


def _apply_stage_by_shape(
    job: ConsensusJob,
    states: Sequence[Mapping[str, Any]],
    us: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> Iterator[tuple[list[int], list[Tensor], dict[str, Tensor]]]:
    """Apply the stage to matrices, as many of one shape at once as memory allows.

    Yields:
        The indexes of the matrices, each matrix after the stage, and the new state, stacked.
    """
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, u in enumerate(us):
        by_shape.setdefault(tuple(sorted(u.shape)), []).append(index)
    for (n, k), indexes in by_shape.items():
        state = [states[indexes[0]][name] for name in job.settings["before"].names]
        # For a matrix about six tensors of its size, and four for each tensor of its state.
        numbers = 6 * n * k + 4 * sum(part.numel() for part in state)
        most = max(1, newton_schulz.CHUNK_BYTES // (numbers * us[0].element_size()))
        for start in range(0, len(indexes), most):
            chunk = indexes[start : start + most]
            columns = ([column[index] for index in chunk] for column in (us, grads))
            results, new = _apply_stage(job, [states[index] for index in chunk], *columns)
            yield chunk, results, new


def _apply_stage(
    job: ConsensusJob,
    states: Sequence[Mapping[str, Any]],
    us: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Apply the stage to matrices of one shape up to transposition.

    Returns:
        Each U after the stage, and the new state, stacked.
    """
    stage: Stage = job.settings["before"]
    tall = [u.size(0) > u.size(1) for u in us]

    def stacked(tensors: Iterable[Tensor]) -> Tensor:
        pairs = zip(tensors, tall, strict=True)
        return torch.stack([matrix.mT if is_tall else matrix for matrix, is_tall in pairs])

    state = {name: torch.stack([each[name] for each in states]) for name in stage.names}
    changed, new = stage.apply(stacked(us), stacked(grads), state, job.round)
    pairs = zip(changed, tall, strict=True)
    return [(x.mT if is_tall else x).contiguous() for x, is_tall in pairs], new


def _average(job: ConsensusJob, duals: Tensors, grads: Tensors) -> tuple[Tensors, Tensors]:
    """Update the duals, and return r and U, see `_loop_average`."""
    momentum = job.settings["momentum"]
    pis = like(duals, grads[0].dtype)
    rs = torch._foreach_add(pis, grads)
    us = torch._foreach_add(pis, rs, alpha=job.settings["look_ahead"] * (momentum - 1))
    torch._foreach_add_(pis, rs, alpha=momentum - 1)
    write_back(duals, pis, job.settings["stochastic_rounding"])
    return rs, us


def _move_weights(job: ConsensusJob, params: Tensors, ps: Tensors, scale: float) -> None:
    """Update w = (1 - lr lambda) w + lr scale P; `ps` may be overwritten."""
    ws, lr = like(params, ps[0].dtype), job.lr
    if job.weight_decay:
        torch._foreach_mul_(ws, scalars(1 - lr * job.weight_decay, ws))
    if isinstance(lr, Tensor):
        torch._foreach_mul_(ps, lr * scale)
        torch._foreach_add_(ws, ps)
    else:
        torch._foreach_add_(ws, ps, alpha=lr * scale)
    write_back(params, ws, job.settings["stochastic_rounding"])


def _orthogonalize(
    job: ConsensusJob, origins: Sequence[Tensor], us: Sequence[Tensor]
) -> list[Tensor]:
    """Return A B^T for each U = A S B^T, in the shape of U; for each block if there are several."""
    return _join_blocks(job, _orthogonalize_whole(job, origins, _split_blocks(job, us)), us)


def _orthogonalize_whole(
    job: ConsensusJob, origins: Sequence[Tensor], matrices: Sequence[Tensor]
) -> list[Tensor]:
    """Orthogonalise whole matrices, with the damping of the job.

    Args:
        job: the consensus.
        origins: all parameters of the job, by which `ns_dtype="auto"` is decided.
        matrices: the matrices, which are not sharded.
    """
    settings = job.settings
    dtype = newton_schulz.dtype_for(settings["ns_dtype"], origins)
    damping = settings["damping"]
    us = [misa.damp(matrix, damping) for matrix in matrices] if damping else matrices
    if settings["foreach"] is False:
        os = [nsisa.newton_schulz(u, settings["ns_steps"], dtype) for u in us]
    else:
        os = newton_schulz.orthogonalize(us, settings["ns_steps"], dtype)
    if not damping:
        return os
    pairs = zip(os, matrices, strict=True)
    return [o[: matrix.size(0), : matrix.size(1)].contiguous() for o, matrix in pairs]


def _by_owners(
    job: ConsensusJob, us: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Let the owner of each matrix apply the stage and orthogonalise it.

    Returns:
        This process's part of each result, in the shape of U, and of the stage's new state.
    """
    from torchpisa.distributed import dtensor, owners

    stage: Stage | None = job.settings["before"]
    names = () if stage is None else stage.names
    origins = [member.origin for member in job.members]
    parts, wholes = [[u] for u in us], [[origin] for origin in origins]
    if names:
        for member, tensors, layouts, grad in zip(job.members, parts, wholes, grads, strict=True):
            # All are sent in one dtype, at least as precise as that of any state.
            tensors += [grad, *(member.state[name].to(grad.dtype) for name in names)]
            layouts += [member.origin, *(dtensor.whole_state(member, name) for name in names)]

    def as_matrix(block: Tensor) -> Tensor:
        is_stack_entry = job.settings["blocks"] > 1 and len(block) == 1
        return (block[0] if is_stack_entry else block).flatten(1)

    def solve(matrices: list[list[Tensor]]) -> list[list[Tensor]]:
        blocks = [as_matrix(tensors[0]) for tensors in matrices]
        states = [dict(zip(names, tensors[2:], strict=True)) for tensors in matrices]
        if names:
            columns = list(blocks), [as_matrix(tensors[1]) for tensors in matrices]
            for indexes, results, new in _apply_stage_by_shape(job, states, *columns):
                for position, index in enumerate(indexes):
                    blocks[index] = results[position]
                    states[index].update({key: values[position] for key, values in new.items()})
        os = _orthogonalize_whole(job, origins, blocks)
        return [
            [o.view(tensors[0].shape), *(state[name].to(o.dtype) for name in names)]
            for o, tensors, state in zip(os, matrices, states, strict=True)
        ]

    results = owners.by_owners(
        parts,
        wholes,
        solve,
        returned=[0, *range(2, 2 + len(names))],
        blocks=job.settings["blocks"],
        replicas=job.replicas,
    )
    return [(o, dict(zip(names, state, strict=True))) for o, *state in results]


def block_shape(param: Tensor, blocks: int = 1) -> tuple[int, int]:
    """Return the numbers of rows and columns of each matrix that a parameter consists of.

    A block is a range of rows or, in a stack, an entry: a parameter is a stack if it has at least
    three dimensions, and the first is `blocks`.
    """
    if is_stack(param, blocks):
        return param.size(1), param.numel() // (param.size(0) * param.size(1))
    return param.size(0) // blocks, param.numel() // param.size(0)


def is_stack(param: Tensor, blocks: int) -> bool:
    """Return whether a parameter is a stack of matrices, such as those of experts."""
    return blocks > 1 and param.dim() >= 3 and param.size(0) == blocks


def _row_squares(
    job: ConsensusJob, members: Sequence[Member], os: Sequence[Tensor]
) -> list[Tensor]:
    """Return the mean square of each row, over all processes that hold a part of it."""
    count = job.settings["blocks"]
    leading = [2 if is_stack(member.origin, count) else 1 for member in members]
    squares = [
        torch.linalg.vector_norm(o.flatten(dims), dim=-1).square()
        for o, dims in zip(os, leading, strict=True)
    ]
    if members[0].whole is not None:
        from torchpisa.distributed import dtensor

        pairs = zip(members, leading, strict=True)
        groups = [dtensor.groups_of_parts(member.origin, dims) for member, dims in pairs]
        squares = dtensor.summed_together(squares, groups)
    columns = [block_shape(member.origin, count)[1] for member in members]
    return list(torch._foreach_div(squares, columns))


def _count(member: Member, keep: Tensor | None) -> Scalar:
    """Count the step if `keep` says so, and return the number of steps, at least one."""
    step: Tensor = member.state["step"]
    if keep is None:
        step.add_(1)
        return step.item() if step.device.type == "cpu" else step
    if step.device != keep.device:
        step = member.state["step"] = step.to(keep.device)
    # A parameter that has never been stepped has no bias; one avoids a division by zero.
    return step.add_(keep).clamp(min=1)
