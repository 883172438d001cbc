"""Launches: call the Triton kernels with the numbers of a job and the table of a `Launch`."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchpisa.algorithms import misa
from torchpisa.algorithms.pisa import Scalar
from torchpisa.kernels import newton_schulz
from torchpisa.kernels.job import TINY, Consensus, LocalJob
from torchpisa.kernels.misa import ConsensusJob
from torchpisa.kernels.triton import elementwise, orthogonal
from torchpisa.kernels.triton import misa as misa_kernels
from torchpisa.kernels.triton.table import BLOCK, Launch
from torchpisa.preconditioners import NewtonSchulz, SecondMoment

__all__ = [
    "any_nonfinite",
    "local_step",
    "misa_norm",
    "misa_step",
    "residual_norm",
    "take_consensus",
]

# Side of a square tile of a matrix.
_TILE = 64
# Rows and columns of a tile of `misa.rows_kernel`.
_ROWS, _COLS = 16, 128

_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def local_step(job: LocalJob, launch: Launch) -> None:
    """Take one batch's local step over the parameters of a launch."""
    if isinstance(job.preconditioner, NewtonSchulz):
        _newton_schulz_step(job, launch, job.preconditioner)
    else:
        _elementwise_step(job, launch)


def take_consensus(consensus: Consensus, keep: Tensor | None, launch: Launch) -> None:
    """Take equation (2.9) from the pending sums."""
    scale, on_device = _numbers(launch, _scale(consensus))
    elementwise.consensus_kernel[(launch.blocks,)](
        launch.table,
        launch.tensor_of,
        _on_device_of(keep, launch),
        _seed(consensus.stochastic_rounding, launch),
        *scale,
        consensus.consensus_decay,
        STOCHASTIC=consensus.stochastic_rounding,
        ON_DEVICE=on_device,
        PARAM_DTYPE=_DTYPES[launch.kind.param],
        STATE_DTYPE=_DTYPES[launch.kind.state],
        ALIGNED=launch.aligned,
        BLOCK=BLOCK,
    )


def any_nonfinite(launch: Launch) -> Tensor:
    """Return whether a gradient of the launch is not finite."""
    flag = torch.zeros((), dtype=torch.int32, device=launch.kind.device)
    elementwise.nonfinite_kernel[(launch.blocks,)](
        launch.table,
        launch.tensor_of,
        flag,
        GRAD_DTYPE=_DTYPES[launch.kind.grad],
        ALIGNED=launch.aligned,
        BLOCK=BLOCK,
    )
    return flag > 0


def residual_norm(job: LocalJob, launch: Launch) -> Tensor:
    """Return the norm of r over all parameters of a launch."""
    largest, squares = _measure_residual(
        launch, job.grad_scale, None, job.weight_decay, job.maximize
    )
    return (largest.square() * squares).sum().sqrt()


def misa_norm(job: ConsensusJob, launch: Launch) -> Tensor:
    """Return the norm of MISA's r over all parameters of a launch."""
    largest, squares = _measure_residual(launch, job.grad_scale, None, 0.0, job.maximize)
    return (largest.square() * squares).sum().sqrt()


def _measure_residual(
    launch: Launch,
    grad_scale: Tensor | None,
    clip_scale: Tensor | None,
    weight_decay: float,
    maximize: bool,
) -> tuple[Tensor, Tensor]:
    """Return the largest |r| in each block, and the sum of squares of r relative to it."""
    largest, squares = launch.of_blocks
    elementwise.measure_kernel[(launch.blocks,)](
        launch.table,
        launch.tensor_of,
        largest,
        squares,
        _on_device_of(grad_scale, launch),
        _factor(clip_scale, launch),
        weight_decay,
        MAXIMIZE=maximize,
        DECAYS=weight_decay != 0,
        **_dtypes(launch),
        BLOCK=BLOCK,
    )
    return largest, squares


def misa_step(job: ConsensusJob, launch: Launch) -> None:
    """Take MISA's consensus over the parameters of a launch."""
    if not launch.blocks:
        return
    _count(launch, _on_device_of(job.keep, launch))
    (lr,), on_device = _numbers(launch, job.lr)
    if job.matrix:
        _move_matrices(job, launch, lr, on_device)
    else:
        _move_entries(job, launch, lr, on_device)


def _move_entries(job: ConsensusJob, launch: Launch, lr: Scalar, on_device: bool) -> None:
    settings = job.settings
    stochastic_rounding = settings["stochastic_rounding"]
    misa_kernels.entries_kernel[(launch.blocks,)](
        launch.table,
        launch.tensor_of,
        launch.nonfinite,
        _on_device_of(job.keep, launch),
        *_misa_scales(job, launch),
        _seed(stochastic_rounding, launch),
        lr,
        job.weight_decay,
        settings["momentum"],
        settings["look_ahead"],
        settings["beta"],
        1 - settings["beta"],
        math.log(settings["beta"]),
        settings["eps"],
        MAXIMIZE=job.maximize,
        SEARCH=job.search,
        STOCHASTIC=stochastic_rounding,
        ON_DEVICE=on_device,
        **_dtypes(launch),
        BLOCK=BLOCK,
    )


def _move_matrices(job: ConsensusJob, launch: Launch, lr: Scalar, on_device: bool) -> None:
    settings, device, tensors = job.settings, launch.kind.device, len(launch.order)
    keep, seed = _on_device_of(job.keep, launch), _seed(settings["stochastic_rounding"], launch)
    scales = _misa_scales(job, launch)
    numbers = settings["momentum"], settings["look_ahead"]
    rounding = {"STOCHASTIC": settings["stochastic_rounding"]}
    reads: dict[str, Any] = {"MAXIMIZE": job.maximize, "SEARCH": job.search, **_dtypes(launch)}
    param_dtype = reads.pop("PARAM_DTYPE")
    largest, squares = launch.of_blocks
    peaks, norms = launch.of_rows
    misa_kernels.measure_kernel[(launch.blocks,)](
        launch.table, launch.tensor_of, largest, squares, launch.nonfinite, keep, *scales, *numbers,
        **reads, BLOCK=BLOCK,
    )  # fmt: skip
    orthogonal.norm_kernel[(tensors,)](
        largest, squares, peaks, norms, launch.first_block, BLOCK=BLOCK
    )
    beta = settings["row_beta"]
    first = 0
    dtype = newton_schulz.dtype_for(settings["ns_dtype"], [job.members[0].param])
    memory = torch.empty(0, dtype=dtype or torch.float32, device=device)
    buffers = newton_schulz.workspace(launch.chunks, memory)
    for chunk in launch.chunks:
        n, k, count = chunk.n, chunk.k, len(chunk.indexes)
        grid = (triton.cdiv(n, _TILE) * triton.cdiv(k, _TILE), count)
        x, *other_buffers = buffers(chunk)
        misa_kernels.gather_kernel[grid](
            launch.table, launch.tall, peaks, norms, x, first, n, k, keep, *scales, seed, *numbers,
            **rounding, **reads, TILE=_TILE, num_warps=8,
        )  # fmt: skip
        o = newton_schulz.iterate(x, settings["ns_steps"], other_buffers)
        factors = None
        if beta is not None:
            factors = torch.empty(count * k, dtype=torch.float32, device=device)
            misa_kernels.rows_kernel[(triton.cdiv(k, _ROWS), count)](
                launch.table, launch.tall, o, factors, first, n, k, keep, seed, beta, 1 - beta,
                math.log(beta) if beta else -math.inf, settings["eps"], **rounding,
                STATE_DTYPE=reads["STATE_DTYPE"], ALIGNED=launch.aligned, ROWS=_ROWS, COLS=_COLS,
            )  # fmt: skip
        misa_kernels.move_kernel[grid](
            launch.table, launch.tall, o, factors, first, n, k, keep, seed, lr, job.weight_decay,
            misa.RMS * k**0.5, **rounding, ON_DEVICE=on_device, PARAM_DTYPE=param_dtype,
            ALIGNED=launch.aligned, TILE=_TILE, num_warps=8,
        )  # fmt: skip
        first += count


def _misa_scales(job: ConsensusJob, launch: Launch) -> tuple[Tensor | None, Tensor | None]:
    """Return the scale of the gradients and the factor on r."""
    return _on_device_of(job.grad_scale, launch), _factor(job.clip_scale, launch)


def _elementwise_step(job: LocalJob, launch: Launch) -> None:
    rule = job.preconditioner
    settings = rule if isinstance(rule, SecondMoment) else SecondMoment()
    scheme = rule.scheme if isinstance(rule, SecondMoment) else "identity"
    keep = _on_device_of(job.keep, launch)
    _count(launch, keep)
    sigma_follows = job.sigma is None
    if sigma_follows:
        numbers, on_device = _update_sigmas(job, launch, settings), True
    else:
        numbers, on_device = _numbers(launch, job.rho / job.penalty, _scale(job.consensus))
    elementwise.local_step_kernel[(launch.blocks,)](
        launch.table,
        launch.tensor_of,
        launch.nonfinite,
        keep,
        _on_device_of(job.grad_scale, launch),
        _factor(job.clip_scale, launch),
        _seed(job.stochastic_rounding, launch),
        *numbers,
        job.weight,
        job.weight_decay,
        job.dual_decay,
        settings.beta,
        1 - settings.beta,
        math.log(settings.beta),
        settings.eta,
        settings.eps,
        job.consensus.consensus_decay if job.consensus else 0.0,
        SCHEME=scheme,
        CAPS=settings.eta < math.inf,
        SEARCH=job.search,
        SIGMA_FOLLOWS=sigma_follows,
        **_gradient_flags(job),
        **_finish_flags(job, launch, on_device),
        **_dtypes(launch),
        BLOCK=BLOCK,
    )


def _update_sigmas(job: LocalJob, launch: Launch, rule: SecondMoment) -> list[Scalar]:
    """Update each parameter's sigma; return rho/sigma and lr/(S + lr lambda), one per parameter."""
    ratios, scales = launch.of_rows
    largest, squares = _measure_residual(
        launch, job.grad_scale, job.clip_scale, job.weight_decay, job.maximize
    )
    numbers, on_device = _numbers(launch, job.rho, job.consensus.lr if job.consensus else 0.0)
    elementwise.sigma_kernel[(len(launch.order),)](
        launch.table,
        largest,
        squares,
        launch.first_block,
        ratios,
        scales,
        _on_device_of(job.keep, launch),
        *numbers,
        job.consensus.consensus_decay if job.consensus else 0.0,
        rule.beta,
        1 - rule.beta,
        math.log(rule.beta),
        TINY,
        SCHEME=rule.scheme,
        ON_DEVICE=on_device,
        BLOCK=BLOCK,
    )
    return [ratios, scales]


def _newton_schulz_step(job: LocalJob, launch: Launch, rule: NewtonSchulz) -> None:
    device = launch.kind.device
    tensors = len(launch.order)
    keep, grad_scale = _on_device_of(job.keep, launch), _on_device_of(job.grad_scale, launch)
    seed = _seed(job.stochastic_rounding, launch)
    _count(launch, keep)
    largest, squares = launch.of_blocks
    peaks, norms = launch.of_rows
    gradient = _gradient_flags(job)
    dtypes = _dtypes(launch)
    search = {"NESTEROV": rule.nesterov, "SEARCH": job.search}
    orthogonal.momentum_kernel[(launch.blocks,)](
        launch.table, launch.tensor_of, largest, squares, launch.nonfinite, keep, grad_scale, seed,
        job.weight_decay, rule.momentum, STOCHASTIC=job.stochastic_rounding, **gradient, **search,
        **dtypes, BLOCK=BLOCK,
    )  # fmt: skip
    orthogonal.norm_kernel[(tensors,)](
        largest, squares, peaks, norms, launch.first_block, BLOCK=BLOCK
    )
    numbers, on_device = _numbers(launch, job.rho / job.penalty, _scale(job.consensus))
    flags = _finish_flags(job, launch, on_device)
    del dtypes["GRAD_DTYPE"]
    log_perturbation = math.log(rule.perturbation) if rule.perturbation else -math.inf
    first = 0
    dtype = rule.dtype or torch.float32
    buffers = newton_schulz.workspace(launch.chunks, torch.empty(0, dtype=dtype, device=device))
    for chunk in launch.chunks:
        n, k, count = chunk.n, chunk.k, len(chunk.indexes)
        grid = (triton.cdiv(n, _TILE) * triton.cdiv(k, _TILE), count)
        x, *other_buffers = buffers(chunk)
        orthogonal.gather_kernel[grid](
            launch.table, launch.tall, peaks, norms, x, first, n, k, grad_scale, job.weight_decay,
            rule.momentum, **gradient, **search, **dtypes,
            GRAD_DTYPE=_DTYPES[launch.kind.grad], TILE=_TILE, num_warps=8,
        )  # fmt: skip
        o = newton_schulz.iterate(x, rule.ns_steps, other_buffers)
        orthogonal.finish_kernel[grid](
            launch.table, launch.tall, o, first, n, k, rule.scale(k, n), log_perturbation, keep,
            seed, *numbers, job.weight, job.dual_decay,
            job.consensus.consensus_decay if job.consensus else 0.0, **flags, **dtypes, TILE=_TILE,
            num_warps=8,
        )  # fmt: skip
        first += count


def _count(launch: Launch, keep: Tensor | None) -> None:
    """Count the step of every parameter, if `keep` says so."""
    if keep is None:
        torch._foreach_add_(launch.steps, 1)
    else:  # a list, because foreach would read the value of a single tensor on the host
        torch._foreach_add_(launch.steps, [keep.float()] * len(launch.steps))


def _scale(consensus: Consensus | None) -> Scalar:
    """Return lr / (S + lr lambda); 0 without a consensus, where it is not used."""
    return consensus.scale() if consensus else 0.0


def _numbers(launch: Launch, *values: Scalar) -> tuple[list[Scalar], bool]:
    """Return values as floats or, if one is on a device, all as tensors there, and whether so."""
    if not any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values):
        return [float(value) for value in values], False
    # Filled on the device: a copy from the host could not be captured in a CUDA graph.
    return [
        value.to(launch.kind.device, torch.float32)
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=torch.float32, device=launch.kind.device)
        for value in values
    ], True


def _on_device_of(number: Tensor | None, launch: Launch) -> Tensor | None:
    return None if number is None else number.to(launch.kind.device)


def _factor(clip_scale: Tensor | None, launch: Launch) -> Tensor | None:
    """Return the factor on r in float32; beside float64 parameters it is float64."""
    return None if clip_scale is None else clip_scale.to(launch.kind.device, torch.float32)


def _seed(stochastic: bool, launch: Launch) -> Tensor | None:
    """Return a seed drawn on the device, so that every replay of a CUDA graph draws another."""
    return torch.randint(2**62, (), device=launch.kind.device) if stochastic else None


def _gradient_flags(job: LocalJob) -> dict[str, Any]:
    return {"MAXIMIZE": job.maximize, "DECAYS": job.weight_decay != 0}


def _finish_flags(job: LocalJob, launch: Launch, on_device: bool) -> dict[str, Any]:
    return {
        "MOVES": job.consensus is not None,
        "FRESH": launch.kind.fresh,
        "STOCHASTIC": job.stochastic_rounding,
        "ON_DEVICE": on_device,
    }


def _dtypes(launch: Launch) -> dict[str, Any]:
    return {
        "PARAM_DTYPE": _DTYPES[launch.kind.param],
        "GRAD_DTYPE": _DTYPES[launch.kind.grad],
        "STATE_DTYPE": _DTYPES[launch.kind.state],
        "ALIGNED": launch.aligned,
    }
