"""MISA's consensus: one launch for entries, several around the products for matrices.

The arithmetic is that of `algorithms/misa.py`, in float32. For matrices:

1. `measure_kernel` and `orthogonal.norm_kernel` compute the norm of U.
2. `gather_kernel` writes U, divided by its norm, into x, and updates the dual.
3. `kernels/newton_schulz.py` orthogonalises x.
4. `rows_kernel` averages the mean squares of its rows.
5. `move_kernel` updates the weights.

U is computed twice instead of being stored.
"""

import triton
import triton.language as tl

from torchpisa.algorithms import misa
from torchpisa.kernels.triton.elementwise import bias_correction, find_nonfinite, store_square
from torchpisa.kernels.triton.memory import (
    DUAL,
    GRAD,
    MEMORY,
    PARAM,
    address,
    gradient,
    read,
    span,
    write,
)
from torchpisa.kernels.triton.orthogonal import tile

__all__ = ["entries_kernel", "gather_kernel", "measure_kernel", "move_kernel", "rows_kernel"]

_RMS = tl.constexpr(misa.RMS)


@triton.jit
def _counted(g, good, keep, grad_scale, MAXIMIZE: tl.constexpr, SEARCH: tl.constexpr):
    """Return the gradient, zero where it is left out, since it may be infinite there."""
    g = gradient(g, g, grad_scale, 0.0, MAXIMIZE, False)
    if SEARCH:
        g = tl.where(good, g, 0.0)
    if keep is not None:
        g = tl.where(tl.load(keep), g, 0.0)
    return g


@triton.jit
def _look_ahead(pi, g, clip_scale, momentum, look_ahead):
    """Return r, delta and U = pi + c delta."""
    r = pi + g
    if clip_scale is not None:
        r = r * tl.load(clip_scale)
    delta = (momentum - 1) * r
    return r, delta, pi + look_ahead * delta


@triton.jit
def _entries(
    params,
    grads,
    duals,
    moments,
    left,
    tensor,
    correction,
    nonfinite,
    keep,
    grad_scale,
    clip_scale,
    seed,
    lr,
    decay,
    momentum,
    look_ahead,
    beta,
    complement,
    eps,
    MAXIMIZE: tl.constexpr,
    SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    mask = lane < left
    pi = read(duals + lane, mask, MASKED)
    g = read(grads + lane, mask, MASKED)
    moment = read(moments + lane, mask, MASKED)
    w = read(params + lane, mask, MASKED)
    good = find_nonfinite(g, nonfinite, tensor, SEARCH)
    g = _counted(g, good, keep, grad_scale, MAXIMIZE, SEARCH)
    r, delta, u = _look_ahead(pi, g, clip_scale, momentum, look_ahead)
    new = beta * moment + complement * (r * r)
    moved = decay * w + lr * (u / (tl.sqrt(new) / correction + eps))
    dual = pi + delta
    if keep is not None:
        present = tl.load(keep)
        dual = tl.where(present, dual, pi)
        new = tl.where(present, new, moment)
        moved = tl.where(present, moved, w)
    random_dual, random_moment, random_weight = lane, lane, lane
    if STOCHASTIC:
        random_dual, random_moment, random_weight, _ = tl.randint4x(
            tl.load(seed) + tl.program_id(0), lane
        )
    write(duals + lane, dual, random_dual, mask, MASKED, STOCHASTIC)
    write(moments + lane, new, random_moment, mask, MASKED, STOCHASTIC)
    write(params + lane, moved, random_weight, mask, MASKED, STOCHASTIC)


@triton.jit
def entries_kernel(
    table,
    tensor_of,
    nonfinite,
    keep,
    grad_scale,
    clip_scale,
    seed,
    lr,
    weight_decay,
    momentum,
    look_ahead,
    beta,
    complement,
    log_beta,
    eps,
    MAXIMIZE: tl.constexpr,
    SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take the consensus of parameters that are not matrices: `algorithms.misa.scale_entries`.

    `lr` is a number, or a pointer if `ON_DEVICE`. `keep`, if False, leaves everything as it is;
    `SEARCH` counts entries of gradients that are not finite as zero.
    """
    tensor, start, left = span(table, tensor_of, BLOCK)
    params = address(table, tensor, PARAM, PARAM_DTYPE, ALIGNED) + start
    grads = address(table, tensor, GRAD, GRAD_DTYPE, ALIGNED) + start
    duals = address(table, tensor, DUAL, STATE_DTYPE, ALIGNED) + start
    moments = address(table, tensor, MEMORY, STATE_DTYPE, ALIGNED) + start
    correction = tl.sqrt(bias_correction(table, tensor, log_beta))
    if ON_DEVICE:
        lr = tl.load(lr)
    decay = 1 - lr * weight_decay
    if left >= BLOCK:
        _entries(
            params, grads, duals, moments, left, tensor, correction, nonfinite, keep, grad_scale,
            clip_scale, seed, lr, decay, momentum, look_ahead, beta, complement, eps, MAXIMIZE,
            SEARCH, STOCHASTIC, False, BLOCK,
        )  # fmt: skip
    else:
        _entries(
            params, grads, duals, moments, left, tensor, correction, nonfinite, keep, grad_scale,
            clip_scale, seed, lr, decay, momentum, look_ahead, beta, complement, eps, MAXIMIZE,
            SEARCH, STOCHASTIC, True, BLOCK,
        )  # fmt: skip


@triton.jit
def measure_kernel(
    table,
    tensor_of,
    largest,
    squares,
    nonfinite,
    keep,
    grad_scale,
    clip_scale,
    momentum,
    look_ahead,
    MAXIMIZE: tl.constexpr,
    SEARCH: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Measure U block by block, for `orthogonal.norm_kernel`."""
    tensor, start, left = span(table, tensor_of, BLOCK)
    grads = address(table, tensor, GRAD, GRAD_DTYPE, ALIGNED) + start
    duals = address(table, tensor, DUAL, STATE_DTYPE, ALIGNED) + start
    lane = tl.arange(0, BLOCK)
    mask = lane < left
    if left >= BLOCK:
        g = read(grads + lane, mask, False)
        pi = read(duals + lane, mask, False)
    else:
        g = read(grads + lane, mask, True)
        pi = read(duals + lane, mask, True)
    good = find_nonfinite(g, nonfinite, tensor, SEARCH)
    g = _counted(g, good, keep, grad_scale, MAXIMIZE, SEARCH)
    _, _, u = _look_ahead(pi, g, clip_scale, momentum, look_ahead)
    store_square(u, largest, squares)


@triton.jit
def _gather(
    table,
    tensor,
    offsets,
    mask,
    peak,
    norm,
    keep,
    grad_scale,
    clip_scale,
    seed,
    momentum,
    look_ahead,
    MAXIMIZE: tl.constexpr,
    SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update the dual, and return U divided by its norm."""
    duals = address(table, tensor, DUAL, STATE_DTYPE, ALIGNED) + offsets
    pi = read(duals, mask, True)
    g = read(address(table, tensor, GRAD, GRAD_DTYPE, ALIGNED) + offsets, mask, True)
    good = tl.abs(g) < float("inf")
    g = _counted(g, good, keep, grad_scale, MAXIMIZE, SEARCH)
    _, delta, u = _look_ahead(pi, g, clip_scale, momentum, look_ahead)
    dual = pi + delta
    if keep is not None:
        dual = tl.where(tl.load(keep), dual, pi)
    random = offsets
    if STOCHASTIC:
        random = tl.randint(tl.load(seed) + tensor, offsets)
    write(duals, dual, random, mask, True, STOCHASTIC)
    return u / peak / norm


@triton.jit
def gather_kernel(
    table,
    tall,
    peaks,
    norms,
    x,
    first,
    n,
    k,
    keep,
    grad_scale,
    clip_scale,
    seed,
    momentum,
    look_ahead,
    MAXIMIZE: tl.constexpr,
    SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fill x with the normalised U of matrices `first`, `first` + 1, ... and update their duals."""
    batch = tl.program_id(1)
    tensor = first + batch
    i, j = tile(k, TILE)
    peak, norm = tl.load(peaks + tensor), tl.load(norms + tensor)
    if tl.load(tall + tensor):
        offsets = j[:, None] * n + i[None, :]
        mask = (j[:, None] < k) & (i[None, :] < n)
        u = _gather(
            table, tensor, offsets, mask, peak, norm, keep, grad_scale, clip_scale, seed,
            momentum, look_ahead, MAXIMIZE, SEARCH, STOCHASTIC, GRAD_DTYPE, STATE_DTYPE, ALIGNED,
        )  # fmt: skip
        u = tl.trans(u)
    else:
        offsets = i[:, None] * k + j[None, :]
        mask = (i[:, None] < n) & (j[None, :] < k)
        u = _gather(
            table, tensor, offsets, mask, peak, norm, keep, grad_scale, clip_scale, seed,
            momentum, look_ahead, MAXIMIZE, SEARCH, STOCHASTIC, GRAD_DTYPE, STATE_DTYPE, ALIGNED,
        )  # fmt: skip
    here = x + batch.to(tl.int64) * n * k + i[:, None] * k + j[None, :]
    tl.store(here, u.to(x.dtype.element_ty), mask=(i[:, None] < n) & (j[None, :] < k))


@triton.jit
def rows_kernel(
    table,
    tall,
    x,
    factors,
    first,
    n,
    k,
    keep,
    seed,
    beta,
    complement,
    log_beta,
    eps,
    STOCHASTIC: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Update the averages of the rows' mean squares, and write the factor of each row.

    The rows are those of the parameter, so columns of x where it is tall. `factors` has k numbers
    per matrix.
    """
    batch = tl.program_id(1)
    tensor = first + batch
    x += batch.to(tl.int64) * n * k
    here = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    along = tl.arange(0, COLS)
    total = tl.zeros([ROWS], tl.float32)
    is_tall = tl.load(tall + tensor) > 0
    count = tl.where(is_tall, k, n)
    length = tl.where(is_tall, n, k)
    if is_tall:
        for start in range(0, n, COLS):
            down = start + along
            mask = (down[:, None] < n) & (here[None, :] < k)
            o = tl.load(x + down[:, None] * k + here[None, :], mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(o * o, 0)
    else:
        for start in range(0, k, COLS):
            across = start + along
            mask = (here[:, None] < n) & (across[None, :] < k)
            o = tl.load(x + here[:, None] * k + across[None, :], mask=mask, other=0.0)
            o = o.to(tl.float32)
            total += tl.sum(o * o, 1)
    inside = here < count
    rows = address(table, tensor, MEMORY, STATE_DTYPE, ALIGNED) + here
    old = read(rows, inside, True)
    new = beta * old + complement * (total / length)
    correction = tl.sqrt(bias_correction(table, tensor, log_beta))
    factor = _RMS / (tl.sqrt(new) / correction + eps)
    if keep is not None:
        new = tl.where(tl.load(keep), new, old)
    random = here
    if STOCHASTIC:
        random = tl.randint(tl.load(seed) - 1 - tensor, here)
    write(rows, new, random, inside, True, STOCHASTIC)
    tl.store(factors + batch * k + here, factor, mask=inside)


@triton.jit
def _move(
    o,
    factor,
    table,
    tensor,
    offsets,
    mask,
    keep,
    seed,
    lr,
    decay,
    STOCHASTIC: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    params = address(table, tensor, PARAM, PARAM_DTYPE, ALIGNED) + offsets
    w = read(params, mask, True)
    moved = decay * w + lr * (factor * o)
    if keep is not None:
        moved = tl.where(tl.load(keep), moved, w)
    random = offsets
    if STOCHASTIC:
        _, random, _, _ = tl.randint4x(tl.load(seed) + tensor, offsets)
    write(params, moved, random, mask, True, STOCHASTIC)


@triton.jit
def move_kernel(
    table,
    tall,
    x,
    factors,
    first,
    n,
    k,
    keep,
    seed,
    lr,
    weight_decay,
    scale,
    STOCHASTIC: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Update the weights by x times the factors of its rows or, without factors, times `scale`."""
    batch = tl.program_id(1)
    tensor = first + batch
    i, j = tile(k, TILE)
    if ON_DEVICE:
        lr = tl.load(lr)
    decay = 1 - lr * weight_decay
    here = x + batch.to(tl.int64) * n * k + i[:, None] * k + j[None, :]
    o = tl.load(here, mask=(i[:, None] < n) & (j[None, :] < k), other=0.0).to(tl.float32)
    if tl.load(tall + tensor):
        offsets = j[:, None] * n + i[None, :]
        mask = (j[:, None] < k) & (i[None, :] < n)
        factor = tl.full([TILE], 1.0, tl.float32) * scale
        if factors is not None:
            factor = tl.load(factors + batch * k + j, mask=j < k, other=0.0)
        _move(
            tl.trans(o), factor[:, None], table, tensor, offsets, mask, keep, seed, lr, decay,
            STOCHASTIC, PARAM_DTYPE, ALIGNED,
        )  # fmt: skip
    else:
        offsets = i[:, None] * k + j[None, :]
        mask = (i[:, None] < n) & (j[None, :] < k)
        factor = tl.full([TILE], 1.0, tl.float32) * scale
        if factors is not None:
            factor = tl.load(factors + batch * k + i, mask=i < n, other=0.0)
        _move(
            o, factor[:, None], table, tensor, offsets, mask, keep, seed, lr, decay, STOCHASTIC,
            PARAM_DTYPE, ALIGNED,
        )  # fmt: skip
