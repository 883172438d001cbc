"""NSISA's local step around the matrix products, with the arithmetic of `algorithms/nsisa.py`.

1. `momentum_kernel` and `norm_kernel` update the momentum and compute its norm.
2. `gather_kernel` writes the momentum, divided by its norm, into x.
3. `kernels/newton_schulz.py` orthogonalises x.
4. `finish_kernel` updates the dual, and the weights or the pending sum.

x is a batch of (n, k) matrices, n <= k: a parameter with more rows than columns ("tall") is
transposed on the way into x and back.
"""

import triton
import triton.language as tl

from torchpisa.kernels.triton.elementwise import (
    find_nonfinite,
    finish_step,
    store_square,
    total_square,
)
from torchpisa.kernels.triton.memory import (
    DUAL,
    GRAD,
    MEMORY,
    PARAM,
    PENDING,
    STEP,
    address,
    gradient,
    read,
    span,
    write,
)

__all__ = ["finish_kernel", "gather_kernel", "momentum_kernel", "norm_kernel", "tile"]


@triton.jit
def _momentum(
    params,
    grads,
    momenta,
    left,
    tensor,
    largest,
    squares,
    nonfinite,
    keep,
    grad_scale,
    seed,
    weight_decay,
    momentum,
    MAXIMIZE: tl.constexpr,
    DECAYS: tl.constexpr,
    NESTEROV: tl.constexpr,
    SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    mask = lane < left
    g = read(grads + lane, mask, MASKED)
    old = read(momenta + lane, mask, MASKED)
    w = g
    if DECAYS:
        w = read(params + lane, mask, MASKED)
    good = find_nonfinite(g, nonfinite, tensor, SEARCH)
    g = gradient(g, w, grad_scale, weight_decay, MAXIMIZE, DECAYS)
    if SEARCH:
        g = tl.where(good, g, 0.0)
    b = momentum * old + g
    if keep is not None:
        b = tl.where(tl.load(keep), b, old)
    random = lane
    if STOCHASTIC:
        random = tl.randint(tl.load(seed) + tl.program_id(0), lane)
    write(momenta + lane, b, random, mask, MASKED, STOCHASTIC)
    if NESTEROV:
        b = g + momentum * b
    store_square(b, largest, squares)


@triton.jit
def momentum_kernel(
    table,
    tensor_of,
    largest,
    squares,
    nonfinite,
    keep,
    grad_scale,
    seed,
    weight_decay,
    momentum,
    MAXIMIZE: tl.constexpr,
    DECAYS: tl.constexpr,
    NESTEROV: tl.constexpr,
    SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute b = momentum b + g, and measure it block by block, for `norm_kernel`."""
    tensor, start, left = span(table, tensor_of, BLOCK)
    params = address(table, tensor, PARAM, PARAM_DTYPE, ALIGNED) + start
    grads = address(table, tensor, GRAD, GRAD_DTYPE, ALIGNED) + start
    momenta = address(table, tensor, MEMORY, STATE_DTYPE, ALIGNED) + start
    if left >= BLOCK:
        _momentum(
            params, grads, momenta, left, tensor, largest, squares, nonfinite, keep, grad_scale,
            seed, weight_decay, momentum, MAXIMIZE, DECAYS, NESTEROV, SEARCH, STOCHASTIC, False,
            BLOCK,
        )  # fmt: skip
    else:
        _momentum(
            params, grads, momenta, left, tensor, largest, squares, nonfinite, keep, grad_scale,
            seed, weight_decay, momentum, MAXIMIZE, DECAYS, NESTEROV, SEARCH, STOCHASTIC, True,
            BLOCK,
        )  # fmt: skip


@triton.jit
def norm_kernel(
    largest,
    squares,
    peaks,
    norms,
    first_block,
    BLOCK: tl.constexpr,
):
    """Write the largest absolute entry of each matrix, and its norm relative to that."""
    tensor = tl.program_id(0)
    divisor, total = total_square(largest, squares, first_block, tensor, BLOCK)
    tl.store(peaks + tensor, divisor)
    tl.store(norms + tensor, tl.maximum(tl.sqrt(total), 1.0))


@triton.jit
def tile(k, TILE: tl.constexpr):
    """Return the rows and columns of x that this program's tile covers."""
    across = tl.cdiv(k, TILE)
    i = (tl.program_id(0) // across) * TILE + tl.arange(0, TILE)
    j = (tl.program_id(0) % across) * TILE + tl.arange(0, TILE)
    return i, j


@triton.jit
def _normalized(
    table,
    tensor,
    offsets,
    mask,
    peak,
    norm,
    grad_scale,
    weight_decay,
    momentum,
    MAXIMIZE: tl.constexpr,
    DECAYS: tl.constexpr,
    NESTEROV: tl.constexpr,
    SEARCH: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return the input of Newton-Schulz, divided by its norm."""
    b = read(address(table, tensor, MEMORY, STATE_DTYPE, ALIGNED) + offsets, mask, True)
    if NESTEROV:
        g = read(address(table, tensor, GRAD, GRAD_DTYPE, ALIGNED) + offsets, mask, True)
        good = tl.abs(g) < float("inf")
        w = g
        if DECAYS:
            w = read(address(table, tensor, PARAM, PARAM_DTYPE, ALIGNED) + offsets, mask, True)
        g = gradient(g, w, grad_scale, weight_decay, MAXIMIZE, DECAYS)
        if SEARCH:
            g = tl.where(good, g, 0.0)
        b = g + momentum * b
    return b / peak / norm


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
    grad_scale,
    weight_decay,
    momentum,
    MAXIMIZE: tl.constexpr,
    DECAYS: tl.constexpr,
    NESTEROV: tl.constexpr,
    SEARCH: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fill x with the normalised input of Newton-Schulz for matrices `first`, `first` + 1, ..."""
    batch = tl.program_id(1)
    tensor = first + batch
    i, j = tile(k, TILE)
    peak, norm = tl.load(peaks + tensor), tl.load(norms + tensor)
    if tl.load(tall + tensor):
        offsets = j[:, None] * n + i[None, :]
        mask = (j[:, None] < k) & (i[None, :] < n)
        b = _normalized(
            table, tensor, offsets, mask, peak, norm, grad_scale, weight_decay, momentum,
            MAXIMIZE, DECAYS, NESTEROV, SEARCH, PARAM_DTYPE, GRAD_DTYPE, STATE_DTYPE, ALIGNED,
        )  # fmt: skip
        b = tl.trans(b)
    else:
        offsets = i[:, None] * k + j[None, :]
        mask = (i[:, None] < n) & (j[None, :] < k)
        b = _normalized(
            table, tensor, offsets, mask, peak, norm, grad_scale, weight_decay, momentum,
            MAXIMIZE, DECAYS, NESTEROV, SEARCH, PARAM_DTYPE, GRAD_DTYPE, STATE_DTYPE, ALIGNED,
        )  # fmt: skip
    here = x + batch.to(tl.int64) * n * k + i[:, None] * k + j[None, :]
    tl.store(here, b.to(x.dtype.element_ty), mask=(i[:, None] < n) & (j[None, :] < k))


@triton.jit
def _finish(
    o,
    table,
    tensor,
    offsets,
    mask,
    perturbation,
    keep,
    seed,
    ratio,
    scale,
    weight,
    dual_decay,
    consensus_decay,
    MOVES: tl.constexpr,
    FRESH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    params = address(table, tensor, PARAM, PARAM_DTYPE, ALIGNED) + offsets
    duals = address(table, tensor, DUAL, STATE_DTYPE, ALIGNED) + offsets
    pendings = address(table, tensor, PENDING, STATE_DTYPE, ALIGNED) + offsets
    pi = read(duals, mask, True)
    w = pi
    if MOVES:
        w = read(params, mask, True)
    s = pi + o
    delta = -tl.where(s == 0, perturbation, s) / (1 + ratio * tl.abs(s))
    good = mask
    CHECKED: tl.constexpr = keep is not None
    if CHECKED:
        good = mask & tl.load(keep)
    random_dual, random_weight = offsets, offsets
    if STOCHASTIC:
        random_dual, random_weight, _, _ = tl.randint4x(tl.load(seed) + tensor, offsets)
    finish_step(
        pi, delta, w, good, params, duals, pendings, scale, weight, dual_decay, consensus_decay,
        (random_dual, random_weight), mask, True, STOCHASTIC, MOVES, FRESH, CHECKED,
    )  # fmt: skip


@triton.jit
def finish_kernel(
    table,
    tall,
    x,
    first,
    n,
    k,
    aspect,
    log_perturbation,
    keep,
    seed,
    ratio,
    scale,
    weight,
    dual_decay,
    consensus_decay,
    MOVES: tl.constexpr,
    FRESH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take equations (4.6), (2.14) and (2.9) for matrices whose orthogonalised momentum is in x.

    `aspect` multiplies o where the parameter has more rows than columns.
    """
    batch = tl.program_id(1)
    tensor = first + batch
    i, j = tile(k, TILE)
    if ON_DEVICE:
        ratio = tl.load(ratio)
        scale = tl.load(scale)
    counter = address(table, tensor, STEP, tl.float32, False)
    perturbation = tl.exp(tl.maximum(tl.load(counter), 1.0) * log_perturbation)
    here = x + batch.to(tl.int64) * n * k + i[:, None] * k + j[None, :]
    o = tl.load(here, mask=(i[:, None] < n) & (j[None, :] < k), other=0.0).to(tl.float32)
    if tl.load(tall + tensor):
        offsets = j[:, None] * n + i[None, :]
        mask = (j[:, None] < k) & (i[None, :] < n)
        _finish(
            tl.trans(o) * aspect, table, tensor, offsets, mask, perturbation, keep, seed, ratio,
            scale, weight, dual_decay, consensus_decay, MOVES, FRESH, STOCHASTIC, PARAM_DTYPE,
            STATE_DTYPE, ALIGNED,
        )  # fmt: skip
    else:
        offsets = i[:, None] * k + j[None, :]
        mask = (i[:, None] < n) & (j[None, :] < k)
        _finish(
            o, table, tensor, offsets, mask, perturbation, keep, seed, ratio, scale, weight,
            dual_decay, consensus_decay, MOVES, FRESH, STOCHASTIC, PARAM_DTYPE, STATE_DTYPE,
            ALIGNED,
        )  # fmt: skip
