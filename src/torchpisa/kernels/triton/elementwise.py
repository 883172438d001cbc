"""Elementwise rules, SISA's and Identity: the local step and the consensus, one launch each.

One program handles one block of one parameter; the table says which and where. The arithmetic is
that of `algorithms/pisa.py` and `algorithms/sisa.py`, in float32.
"""

import triton
import triton.language as tl

from torchpisa.kernels.triton.memory import (
    COLUMNS,
    DUAL,
    GRAD,
    LEVEL,
    MEMORY,
    PARAM,
    PENDING,
    SIGMA,
    SIZE,
    STEP,
    address,
    gradient,
    read,
    span,
    write,
)

__all__ = [
    "bias_correction",
    "consensus_kernel",
    "find_nonfinite",
    "finish_step",
    "local_step_kernel",
    "measure_kernel",
    "nonfinite_kernel",
    "sigma_kernel",
    "store_square",
    "total_square",
]


@triton.jit
def bias_correction(table, tensor, log_beta):
    """Return 1 - beta^step, which corrects the bias of an average, without cancellation.

    A parameter that has never been stepped counts as stepped once, so that the result is not zero.
    """
    counter = address(table, tensor, STEP, tl.float32, False)
    x = tl.maximum(tl.load(counter), 1.0) * log_beta
    # The series of 1 - exp(x), nested; at x = -1/2 the next term is below 1e-8.
    series = 1.0 + x / 8.0
    for k in tl.static_range(7, 1, -1):
        series = 1.0 + x / k * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def find_nonfinite(g, nonfinite, tensor, SEARCH: tl.constexpr):
    """Return which entries are finite; with `SEARCH`, flag a parameter that has others."""
    good = tl.abs(g) < float("inf")
    if SEARCH:
        # Only lanes that found something write, so the search costs no memory traffic.
        tl.store(nonfinite + tensor + tl.zeros_like(g).to(tl.int32), 1, mask=~good)
    return good


@triton.jit
def finish_step(
    pi,
    delta,
    w,
    good,
    params,
    duals,
    pendings,
    scale,
    weight,
    dual_decay,
    consensus_decay,
    random,
    mask,
    MASKED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MOVES: tl.constexpr,
    FRESH: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Take (2.14), then (2.9) if the step `MOVES` the weights, else add u to the pending sum.

    A `FRESH` sum is overwritten. If `CHECKED`, entries that are not `good` are left out.
    """
    random_dual, random_weight = random
    if CHECKED:  # what is left out contributes its dual, and keeps it
        delta = tl.where(good, delta, 0.0)
    dual = pi + delta
    u = dual + delta
    dual = dual * dual_decay
    if CHECKED:
        dual = tl.where(good, dual, pi)
    write(duals, dual, random_dual, mask, MASKED, STOCHASTIC)
    if MOVES:
        moved = w + scale * (u - consensus_decay * w)
        if CHECKED:
            moved = tl.where(good, moved, w)
        write(params, moved, random_weight, mask, MASKED, STOCHASTIC)
    else:
        total = weight * u
        if not FRESH:
            total += read(pendings, mask, MASKED)
        write(pendings, total, random_weight, mask, MASKED, STOCHASTIC)


@triton.jit
def _local_step(
    params,
    grads,
    duals,
    moments,
    pendings,
    left,
    tensor,
    correction,
    nonfinite,
    keep,
    grad_scale,
    clip_scale,
    seed,
    ratio,
    scale,
    weight,
    weight_decay,
    dual_decay,
    beta,
    complement,
    eta,
    eps,
    consensus_decay,
    SCHEME: tl.constexpr,
    MOVES: tl.constexpr,
    FRESH: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECAYS: tl.constexpr,
    CAPS: tl.constexpr,
    SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    mask = lane < left
    pi = read(duals + lane, mask, MASKED)
    g = read(grads + lane, mask, MASKED)
    w = pi
    if MOVES or DECAYS:
        w = read(params + lane, mask, MASKED)
    CHECKED: tl.constexpr = SEARCH or keep is not None
    good = find_nonfinite(g, nonfinite, tensor, SEARCH)
    if keep is not None:
        good = good & tl.load(keep)
    r = pi + gradient(g, w, grad_scale, weight_decay, MAXIMIZE, DECAYS)
    if clip_scale is not None:
        r = r * tl.load(clip_scale)
    random_dual, random_moment, random_weight = lane, lane, lane
    if STOCHASTIC:
        random_dual, random_moment, random_weight, _ = tl.randint4x(
            tl.load(seed) + tl.program_id(0), lane
        )
    if SCHEME == "identity":
        delta = -r / (1 + ratio)
    else:
        moment = read(moments + lane, mask, MASKED)
        new = moment + r * r if SCHEME == "adagrad" else beta * moment + complement * (r * r)
        root = tl.sqrt(new)
        if SCHEME == "adam":
            root = root / correction
        if CAPS:
            root = tl.minimum(root, eta)
        delta = -r / (1 + ratio * (root + eps))
        if CHECKED:
            new = tl.where(good, new, moment)
        write(moments + lane, new, random_moment, mask, MASKED, STOCHASTIC)
    finish_step(
        pi,
        delta,
        w,
        good,
        params + lane,
        duals + lane,
        pendings + lane,
        scale,
        weight,
        dual_decay,
        consensus_decay,
        (random_dual, random_weight),
        mask,
        MASKED,
        STOCHASTIC,
        MOVES,
        FRESH,
        CHECKED,
    )


@triton.jit
def local_step_kernel(
    table,
    tensor_of,
    nonfinite,
    keep,
    grad_scale,
    clip_scale,
    seed,
    ratio,
    scale,
    weight,
    weight_decay,
    dual_decay,
    beta,
    complement,
    log_beta,
    eta,
    eps,
    consensus_decay,
    SCHEME: tl.constexpr,
    MOVES: tl.constexpr,
    FRESH: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECAYS: tl.constexpr,
    CAPS: tl.constexpr,
    SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    SIGMA_FOLLOWS: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take one batch's local step, with the consensus (`MOVES`) or into the pending sum.

    `ratio` is rho/sigma and `scale` lr/(S + lr lambda): numbers, or pointers if `ON_DEVICE`, to one
    number each or, with `SIGMA_FOLLOWS`, to one per parameter. `keep`, if False, leaves the whole
    batch out; `SEARCH` leaves out entries that are not finite.
    """
    tensor, start, left = span(table, tensor_of, BLOCK)
    params = address(table, tensor, PARAM, PARAM_DTYPE, ALIGNED) + start
    grads = address(table, tensor, GRAD, GRAD_DTYPE, ALIGNED) + start
    duals = address(table, tensor, DUAL, STATE_DTYPE, ALIGNED) + start
    moments = address(table, tensor, MEMORY, STATE_DTYPE, ALIGNED) + start
    pendings = address(table, tensor, PENDING, STATE_DTYPE, ALIGNED) + start
    correction = 1.0
    if SCHEME == "adam":
        correction = tl.sqrt(bias_correction(table, tensor, log_beta))
    if SIGMA_FOLLOWS:
        ratio += tensor
        scale += tensor
    if ON_DEVICE:
        ratio = tl.load(ratio)
        scale = tl.load(scale)
    if left >= BLOCK:
        _local_step(
            params, grads, duals, moments, pendings, left, tensor, correction, nonfinite, keep,
            grad_scale, clip_scale, seed, ratio, scale, weight, weight_decay, dual_decay, beta,
            complement, eta, eps, consensus_decay, SCHEME, MOVES, FRESH, MAXIMIZE, DECAYS, CAPS,
            SEARCH, STOCHASTIC, False, BLOCK,
        )  # fmt: skip
    else:
        _local_step(
            params, grads, duals, moments, pendings, left, tensor, correction, nonfinite, keep,
            grad_scale, clip_scale, seed, ratio, scale, weight, weight_decay, dual_decay, beta,
            complement, eta, eps, consensus_decay, SCHEME, MOVES, FRESH, MAXIMIZE, DECAYS, CAPS,
            SEARCH, STOCHASTIC, True, BLOCK,
        )  # fmt: skip


@triton.jit
def consensus_kernel(
    table,
    tensor_of,
    keep,
    seed,
    scale,
    consensus_decay,
    STOCHASTIC: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take equation (2.9) from the pending sum; nothing moves if `keep` is False."""
    tensor, start, left = span(table, tensor_of, BLOCK)
    params = address(table, tensor, PARAM, PARAM_DTYPE, ALIGNED) + start
    pendings = address(table, tensor, PENDING, STATE_DTYPE, ALIGNED) + start
    lane = tl.arange(0, BLOCK)
    mask = lane < left
    if ON_DEVICE:
        scale = tl.load(scale)
    if keep is not None:
        left = tl.where(tl.load(keep), left, 0)
        mask = lane < left
    random = lane
    if STOCHASTIC:
        random = tl.randint(tl.load(seed) + tl.program_id(0), lane)
    if left >= BLOCK:
        w = read(params + lane, mask, False)
        total = read(pendings + lane, mask, False)
        moved = w + scale * (total - consensus_decay * w)
        write(params + lane, moved, random, mask, False, STOCHASTIC)
    else:
        w = read(params + lane, mask, True)
        total = read(pendings + lane, mask, True)
        moved = w + scale * (total - consensus_decay * w)
        write(params + lane, moved, random, mask, True, STOCHASTIC)


@triton.jit
def nonfinite_kernel(
    table,
    tensor_of,
    found,
    GRAD_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set `found` if any gradient is not finite."""
    tensor, start, left = span(table, tensor_of, BLOCK)
    grads = address(table, tensor, GRAD, GRAD_DTYPE, ALIGNED) + start
    lane = tl.arange(0, BLOCK)
    mask = lane < left
    if left >= BLOCK:
        find_nonfinite(read(grads + lane, mask, False), found, 0, True)
    else:
        find_nonfinite(read(grads + lane, mask, True), found, 0, True)


@triton.jit
def store_square(x, largest, squares):
    """Write the largest |x| of a block, and the sum of squares relative to it.

    Two numbers, so that the squares of tiny entries do not underflow; see `total_square`.
    """
    peak = tl.max(tl.abs(x), 0)
    scaled = x / tl.where(peak > 0, peak, 1.0)
    tl.store(largest + tl.program_id(0), peak)
    tl.store(squares + tl.program_id(0), tl.sum(scaled * scaled, 0))


@triton.jit
def measure_kernel(
    table,
    tensor_of,
    largest,
    squares,
    grad_scale,
    clip_scale,
    weight_decay,
    MAXIMIZE: tl.constexpr,
    DECAYS: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Measure r_i block by block, for its norm; entries that are not finite do not count."""
    tensor, start, left = span(table, tensor_of, BLOCK)
    lane = tl.arange(0, BLOCK)
    mask = lane < left
    pi = read(address(table, tensor, DUAL, STATE_DTYPE, ALIGNED) + start + lane, mask, True)
    g = read(address(table, tensor, GRAD, GRAD_DTYPE, ALIGNED) + start + lane, mask, True)
    good = mask & (tl.abs(g) < float("inf"))
    w = pi
    if DECAYS:
        w = read(address(table, tensor, PARAM, PARAM_DTYPE, ALIGNED) + start + lane, mask, True)
    r = pi + gradient(g, w, grad_scale, weight_decay, MAXIMIZE, DECAYS)
    if clip_scale is not None:
        r = r * tl.load(clip_scale)
    store_square(tl.where(good, r, 0.0), largest, squares)


@triton.jit
def sigma_kernel(
    table,
    largest,
    squares,
    first_block,
    ratios,
    scales,
    keep,
    rho,
    lr,
    consensus_decay,
    beta,
    complement,
    log_beta,
    tiny,
    SCHEME: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the sigma of every parameter by `algorithms.sisa.followed`.

    Write rho/sigma and lr/(sigma + lr lambda) for `local_step_kernel`.
    """
    tensor = tl.program_id(0)
    peak, total = total_square(largest, squares, first_block, tensor, BLOCK)
    size = tl.maximum(tl.load(table + tensor * COLUMNS + SIZE), 1)
    rms = peak * tl.sqrt(total / size)
    levels = address(table, tensor, LEVEL, tl.float32, False)
    sigmas = address(table, tensor, SIGMA, tl.float32, False)
    old_level, old_sigma = tl.load(levels), tl.load(sigmas)
    if SCHEME == "adagrad":
        level = old_level + rms * rms
    else:
        level = beta * old_level + complement * (rms * rms)
    root = tl.sqrt(level)
    if SCHEME == "adam":
        root = root / tl.sqrt(bias_correction(table, tensor, log_beta))
    sigma = tl.maximum(tl.maximum(old_sigma, root), tiny)
    if keep is not None:
        present = tl.load(keep)
        level = tl.where(present, level, old_level)
        sigma = tl.where(present, sigma, tl.maximum(old_sigma, tiny))
    tl.store(levels, level)
    tl.store(sigmas, sigma)
    if ON_DEVICE:
        rho = tl.load(rho)
        lr = tl.load(lr)
    tl.store(ratios + tensor, rho / sigma)
    tl.store(scales + tensor, lr / (sigma + lr * consensus_decay))


@triton.jit
def total_square(largest, squares, first_block, tensor, BLOCK: tl.constexpr):
    """Return the largest |x| of a tensor, 1 for zeros, and the sum of squares relative to it."""
    first, last = tl.load(first_block + tensor), tl.load(first_block + tensor + 1)
    lane = tl.arange(0, BLOCK)
    peak = tl.zeros([BLOCK], tl.float32)
    for block in range(first, last, BLOCK):
        where = block + lane
        peak = tl.maximum(peak, tl.load(largest + where, mask=where < last, other=0.0))
    top = tl.max(peak, 0)
    divisor = tl.where(top > 0, top, 1.0)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(first, last, BLOCK):
        where = block + lane
        share = tl.load(largest + where, mask=where < last, other=0.0) / divisor
        total += share * share * tl.load(squares + where, mask=where < last, other=0.0)
    return divisor, tl.sum(total, 0)
