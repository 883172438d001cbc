"""MISA's consensus over lists of tensors: the plain loop, and many parameters per call.

`LOOP` is the specification, `FOREACH` the same with one call per operation; on a GPU
`kernels/triton/plan.py` has a third. All take parameters that are all matrices to be
orthogonalised, or none of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from torchpisa.algorithms import misa, nsisa
from torchpisa.algorithms.pisa import Scalar
from torchpisa.kernels import newton_schulz
from torchpisa.kernels.foreach import (
    Tensors,
    blocks,
    leave_out_nonfinite,
    like,
    scalars,
    write_back,
)
from torchpisa.kernels.job import FindsNonfinite, Member, compute_dtype, real
from torchpisa.kernels.rounding import store
from torchpisa.preconditioners.consensus import Stage

__all__ = [
    "FOREACH",
    "LOOP",
    "ConsensusJob",
    "ConsensusKernel",
    "block_shape",
    "gradients",
    "is_stack",
]

# State that is rounded when it is stored.
_LARGE = ("dual", "rows", "moment")


@dataclass(slots=True)
class ConsensusJob:
    """A consensus over some parameters of a group, all matrices or none of them.

    Attributes:
        members: the parameters, on one device and of one dtype.
        grads: their gradients, or those of several batches added up; not to be written to.
        matrix: whether they are orthogonalised.
        settings: their group.
        lr: the learning rate.
        weight_decay: what of it they have.
        round: rounds that are done, known to the host.
        keep: nothing changes if this is False; None for True.
        maximize: negate the gradients.
        grad_scale: what the gradients were multiplied by (GradScaler), or None.
        clip_scale: factor on the residual, or None.
        search: count entries of gradients that are not finite as zero, and note whose they are; for
            kernels that search while they work.
        flags: numbers on the device, one per member, to raise where a gradient is not finite, which
            then counts as zero; None to not look.
    """

    members: list[Member]
    grads: list[Tensor]
    matrix: bool
    settings: Mapping[str, Any]
    lr: Scalar
    weight_decay: float
    round: int
    keep: Tensor | None
    maximize: bool = False
    grad_scale: Tensor | None = None
    clip_scale: Tensor | None = None
    search: bool = False
    flags: Sequence[Tensor] | None = None


class ConsensusKernel(FindsNonfinite, Protocol):
    """A way to compute MISA's consensus; `kernels.dispatch` chooses among them."""

    def consensus_step(self, job: ConsensusJob) -> None:
        """Update duals, preconditioners and weights."""

    def residual_norms(self, job: ConsensusJob) -> list[Tensor]:
        """Return norms of r, as 0-d tensors, over some of the members each."""


class Loop:
    """One parameter after the other; see `ConsensusKernel`."""

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


class Foreach(Loop):
    """Many parameters per call; see `ConsensusKernel`."""

    takes_flags: ClassVar[bool] = True

    def consensus_step(self, job: ConsensusJob) -> None:
        """Take the consensus."""
        if job.keep is None:
            _foreach_step(job)
        else:
            _loop_step(job)


LOOP, FOREACH = Loop(), Foreach()


def gradients(job: ConsensusJob) -> list[Tensor]:
    """Return the gradients in the dtype to compute in, clipped; not to be written to."""
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
    # pi + this is s (pi + g).
    return [scale * grad + (scale - 1) * pi for grad, pi in zip(grads, duals, strict=True)]


def _loop_step(job: ConsensusJob) -> None:
    settings = job.settings
    for member, grad in zip(job.members, gradients(job), strict=True):
        keep = job.keep if job.keep is None else job.keep.to(grad.device)
        stored = {key: real(member.state[key]) for key in _LARGE if key in member.state}
        state = {key: value.to(grad.dtype) for key, value in stored.items()}
        step = _count(member, keep)
        r = state["dual"] + grad
        delta = misa.average(r, settings["momentum"])
        u = misa.look_ahead(state["dual"], delta, settings["look_ahead"])
        new = {"dual": state["dual"] + delta}
        if not job.matrix:
            p, new["moment"] = misa.scale_entries(
                u, r, state["moment"], step, settings["beta"], settings["eps"]
            )
        else:
            if settings["before"] is not None:
                (staged,), of_stage = _through_stage(job, [member], [u], [grad])
                u = staged
                for key, (value,) in of_stage.items():
                    stored[key], new[key] = member.state[key], value
                    state[key] = stored[key].to(value.dtype)
            (o,) = _orthogonalized(settings, [member], [u])
            if settings["row_beta"] is None:
                p = misa.match_rms(o, *block_shape(member.origin, settings["blocks"]))
            else:
                rows = state["rows"].reshape(-1, 1)
                numbers = settings["row_beta"], settings["eps"]
                p, rows = misa.normalize_rows(o, _row_squares(job, o, member), rows, step, *numbers)
                new["rows"] = rows.view_as(state["rows"])
            p = p.view_as(u)
        w = real(member.param)
        new["param"] = misa.move(w.to(grad.dtype), p, job.lr, job.weight_decay)
        stored["param"], state["param"] = w, w.to(grad.dtype)
        for key, value in new.items():
            chosen = value if keep is None else torch.where(keep, value, state[key])
            store(stored[key], chosen, settings["stochastic_rounding"])


def _foreach_step(job: ConsensusJob) -> None:
    steps = [member.state["step"] for member in job.members]
    torch._foreach_add_(steps, scalars(1.0, steps[0]))
    counts = [step.item() for step in steps] if steps[0].device.type == "cpu" else steps
    columns = [
        [real(member.param) for member in job.members],
        [real(member.state["dual"]) for member in job.members],
        gradients(job),
    ]
    if job.matrix:
        _matrices(job, columns, counts)
        return
    beta = job.settings["beta"]
    roots = [(1 - beta**count) ** 0.5 for count in counts]
    columns.append([real(member.state["moment"]) for member in job.members])
    for indexes, (params, duals, grads, moments) in blocks(columns):
        rs, us = _average(job, duals, grads)
        moved = like(moments, rs[0].dtype)
        torch._foreach_mul_(moved, scalars(beta, moved[0]))
        torch._foreach_addcmul_(moved, rs, rs, 1 - beta)
        write_back(moments, moved, job.settings["stochastic_rounding"])
        scales = torch._foreach_sqrt(moved)
        torch._foreach_div_(scales, scalars([roots[index] for index in indexes], scales[0]))
        torch._foreach_add_(scales, scalars(job.settings["eps"], scales[0]))
        torch._foreach_div_(us, scales)
        _move(job, params, us, 1.0)


def _matrices(job: ConsensusJob, columns: list[list[Tensor]], counts: Sequence[Scalar]) -> None:
    params, duals, grads = columns
    settings, members = job.settings, job.members
    _, us = _average(job, duals, grads)
    if settings["before"] is not None:
        us = _staged(job, us, grads)
    os = _orthogonalized(settings, members, us)
    shaped = [o.view_as(u) for o, u in zip(os, us, strict=True)]
    if settings["row_beta"] is None:
        shapes = [block_shape(member.origin, settings["blocks"]) for member in members]
        torch._foreach_mul_(shaped, [max(shape) ** 0.5 for shape in shapes])
        _move(job, params, shaped, misa.RMS)
        return
    beta = settings["row_beta"]
    rows = [real(member.state["rows"]) for member in members]
    squares = [
        _row_squares(job, o, member).view_as(row)
        for o, member, row in zip(os, members, rows, strict=True)
    ]
    averages = like(rows, us[0].dtype)
    torch._foreach_mul_(averages, scalars(beta, averages[0]))
    torch._foreach_add_(averages, squares, alpha=1 - beta)
    write_back(rows, averages, settings["stochastic_rounding"])
    roots = torch._foreach_sqrt(averages)
    torch._foreach_div_(roots, scalars([(1 - beta**count) ** 0.5 for count in counts], roots[0]))
    torch._foreach_add_(roots, scalars(settings["eps"], roots[0]))
    torch._foreach_div_(shaped, roots)
    _move(job, params, shaped, misa.RMS)


def _staged(job: ConsensusJob, us: Tensors, grads: Tensors) -> Tensors:
    """Return what the stage before the orthogonalisation makes of U, and update its state."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, member in enumerate(job.members):
        alike.setdefault(tuple(sorted(block_shape(member.origin))), []).append(index)
    staged = list(us)
    for (n, k), indexes in alike.items():
        state = [job.members[indexes[0]].state[name] for name in job.settings["before"].names]
        # Matrices, what they become on the way, and for each part of the state about four more.
        numbers = 6 * n * k + 4 * sum(part.numel() for part in state)
        most = max(1, newton_schulz.CHUNK_BYTES // (numbers * us[0].element_size()))
        for start in range(0, len(indexes), most):
            chunk = indexes[start : start + most]
            members = [job.members[index] for index in chunk]
            tensors = ([column[index] for index in chunk] for column in (us, grads))
            results, new = _through_stage(job, members, *tensors)
            for index, result in zip(chunk, results, strict=True):
                staged[index] = result
            for key, values in new.items():
                stored = [member.state[key] for member in members]
                write_back(stored, list(values), job.settings["stochastic_rounding"])
    return staged


def _through_stage(
    job: ConsensusJob, members: Sequence[Member], us: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Apply the stage to matrices of one shape up to transposition.

    Returns:
        What it makes of each U, and what is new in their state, stacked.
    """
    stage: Stage = job.settings["before"]
    matrices = [u.flatten(1) for u in us]
    tall = [matrix.size(0) > matrix.size(1) for matrix in matrices]

    def stacked(tensors: Iterable[Tensor]) -> Tensor:
        pairs = zip(tensors, tall, strict=True)
        return torch.stack([each.mT if is_tall else each for each, is_tall in pairs])

    state = {name: torch.stack([member.state[name] for member in members]) for name in stage.names}
    batch = stacked(matrices), stacked(grad.flatten(1) for grad in grads)
    changed, new = stage.apply(*batch, state, job.round)
    pairs = zip(us, changed, tall, strict=True)
    return [(x.mT if is_tall else x).reshape(u.shape) for u, x, is_tall in pairs], new


def _average(job: ConsensusJob, duals: Tensors, grads: Tensors) -> tuple[Tensors, Tensors]:
    """Update the duals, and return r and U."""
    kept = job.settings["momentum"]
    moved = like(duals, grads[0].dtype)
    rs = torch._foreach_add(moved, grads)
    us = torch._foreach_add(moved, rs, alpha=job.settings["look_ahead"] * (kept - 1))
    torch._foreach_add_(moved, rs, alpha=kept - 1)
    write_back(duals, moved, job.settings["stochastic_rounding"])
    return rs, us


def _move(job: ConsensusJob, params: Tensors, ps: Tensors, scale: float) -> None:
    """Decay the weights, and move them by lr times `scale` times P."""
    ws, lr = like(params, ps[0].dtype), job.lr
    if job.weight_decay:
        torch._foreach_mul_(ws, scalars(1 - lr * job.weight_decay, ws[0]))
    if isinstance(lr, Tensor):
        torch._foreach_mul_(ps, lr * scale)
        torch._foreach_add_(ws, ps)
    else:
        torch._foreach_add_(ws, ps, alpha=lr * scale)
    write_back(params, ws, job.settings["stochastic_rounding"])


def _orthogonalized(
    settings: Mapping[str, Any], members: list[Member], us: Sequence[Tensor]
) -> list[Tensor]:
    """Return U V^T for each matrix U S V^T, as matrices; of sharded ones, the rows held here.

    A parameter that is several matrices, `blocks`, comes back as one, with all of their rows.
    """
    origins = [member.origin for member in members]
    count = settings["blocks"]
    dtype = newton_schulz.dtype_for(settings["ns_dtype"], origins)

    def orthogonalize(matrices: Sequence[Tensor]) -> list[Tensor]:
        if settings["foreach"] is False:
            return [nsisa.newton_schulz(each, settings["ns_steps"], dtype) for each in matrices]
        return newton_schulz.orthogonalize(matrices, settings["ns_steps"], dtype)

    def solve(matrices: Sequence[Tensor]) -> list[Tensor]:
        if not settings["damping"]:
            return orthogonalize(matrices)
        damped = orthogonalize([misa.damp(each, settings["damping"]) for each in matrices])
        pairs = zip(damped, matrices, strict=True)
        return [o[: u.size(0), : u.size(1)].contiguous() for o, u in pairs]

    def solve_blocks(matrices: Sequence[Tensor]) -> list[Tensor]:
        if count == 1:
            return solve(matrices)
        os = solve([block for matrix in matrices for block in matrix.chunk(count)])
        return [torch.cat(os[start : start + count]) for start in range(0, len(os), count)]

    if members[0].whole is not None:
        from torchpisa.distributed import dtensor

        return [o.flatten(1) for o in dtensor.solve(us, origins, solve_blocks)]
    columns = [block_shape(origin, count)[1] for origin in origins]
    return solve_blocks([u.reshape(-1, k) for u, k in zip(us, columns, strict=True)])


def block_shape(param: Tensor, blocks: int = 1) -> tuple[int, int]:
    """Return rows and columns of each of the matrices that a parameter consists of.

    Blocks are of consecutive rows, or the entries of a stack: a parameter of three dimensions or
    more, the first of which is `blocks`.
    """
    if is_stack(param, blocks):
        return param.size(1), param.numel() // (param.size(0) * param.size(1))
    return param.size(0) // blocks, param.numel() // param.size(0)


def is_stack(param: Tensor, blocks: int) -> bool:
    """Return whether the blocks of a parameter are its entries, as experts' matrices are."""
    return blocks > 1 and param.dim() >= 3 and param.size(0) == blocks


def _row_squares(job: ConsensusJob, o: Tensor, member: Member) -> Tensor:
    """Return the mean square of each row, (rows, 1), also where columns are elsewhere."""
    squares: Tensor = torch.linalg.vector_norm(o, dim=1, keepdim=True).square()
    if member.whole is not None:
        from torchpisa.distributed import dtensor

        squares = dtensor.summed(squares, dtensor.groups_of_columns(member.whole))
    return squares / block_shape(member.origin, job.settings["blocks"])[1]


def _count(member: Member, keep: Tensor | None) -> Scalar:
    """Count the step and return how many there were."""
    step: Tensor = member.state["step"]
    if keep is None:
        step.add_(1)
        return step.item() if step.device.type == "cpu" else step
    if step.device != keep.device:
        step = member.state["step"] = step.to(keep.device)
    # One that has been skipped from the start has nothing to correct for.
    return step.add_(keep).clamp(min=1)
