"""Products of matrices that are known to be symmetric, at half of the work.

Newton-Schulz needs A = X X^T and products of polynomials in A, which are symmetric too. Only the
tiles on and below the diagonal are computed; each is written twice, as it is and mirrored.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

try:  # triton 3.4 and later
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None

__all__ = ["TileLaunch", "launch", "symmetric_product"]


@dataclass(frozen=True)
class TileLaunch:
    """The tiles of a launch: `rows` x `cols`, `depth` of the sum at a time.

    `cols` is a multiple of `rows`. With `tma` tiles are loaded by Hopper's copy engine instead of
    by the threads.
    """

    rows: int = 128
    cols: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 3
    tma: bool = False


def launch(n: int, k: int, dtype: torch.dtype) -> TileLaunch:
    """Return the launch for matrices of n rows and k columns."""
    if dtype == torch.float32:  # no tensor cores in full precision, and twice the memory
        return TileLaunch(64, 64, 32)
    if n <= 64:
        return TileLaunch(64, 64, 64)
    # Descriptors for the copy engine take the host longer than a small product takes the device.
    return TileLaunch(tma=True) if n >= 1024 else TileLaunch(warps=8)


def symmetric_product(
    x: Tensor,
    out: Tensor,
    *,
    other: Tensor | None = None,
    addend: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
    how: TileLaunch | None = None,
) -> Tensor:
    """Write alpha x other^T + beta addend + diagonal I to `out`, with sums in float32; return it.

    Args:
        x: c matrices, (c, n, k), of dtype bfloat16, float16 or float32.
        out: (c, n, n), other memory than `x` and `other`.
        other: like `x`, and such that x other^T is symmetric; `x` by default.
        addend: symmetric matrices, (c, n, n); may be `out`.
        alpha: factor of the product.
        beta: factor of the addend.
        diagonal: added to every entry on the diagonal.
        how: the tiles; `launch(n, k, x.dtype)` by default.
    """
    c, n, k = x.shape
    _check("x", x, (c, n, k), x.dtype)
    _check("out", out, (c, n, n), x.dtype)
    other = x if other is None else other
    _check("other", other, (c, n, k), x.dtype)
    if addend is not None:
        _check("addend", addend, (c, n, n), x.dtype)
    how = how or launch(n, k, x.dtype)
    tiles = _tiles(n, how.rows, how.cols)
    arguments: dict[str, Any] = {
        "out": out,
        "addend": out if addend is None else addend,
        "n": n,
        "k": k,
        "tiles": tiles,
        "alpha": alpha,
        "beta": beta,
        "diagonal": diagonal,
        "ADD": addend is not None,
        "ROWS": how.rows,
        "COLS": how.cols,
        "DEPTH": how.depth,
        "num_warps": how.warps,
        "num_stages": how.stages,
    }
    with torch.cuda.device(x.device if x.is_cuda else -1):
        if how.tma and _describable(x) and _describable(other):
            a = _descriptor(x.view(c * n, k), how.rows, how.depth)
            b = _descriptor(other.view(c * n, k), how.cols, how.depth)
            _by_descriptor[(c * tiles,)](a, b, **arguments)
        else:
            _by_pointer[(c * tiles,)](x, other, **arguments, EVEN=k % how.depth == 0)
    return out


def _check(name: str, tensor: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, of shape {shape} and {dtype}, got one of shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()} and {tensor.dtype}"
        )


def _tiles(n: int, rows: int, cols: int) -> int:
    """Count tiles that touch the lower triangle: row i of tiles has i // (cols / rows) + 1."""
    ratio = cols // rows
    bands, rest = divmod(-(-n // rows), ratio)
    return ratio * bands * (bands + 1) // 2 + rest * (bands + 1)


def _describable(x: Tensor) -> bool:
    """Return whether the copy engine can read `x`: its rows start at multiples of 16 bytes."""
    return (
        TensorDescriptor is not None
        and x.data_ptr() % 16 == 0
        and x.size(-1) * x.element_size() % 16 == 0
        and (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0))
    )


def _descriptor(flat: Tensor, rows: int, depth: int) -> Any:
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, depth])


@triton.jit
def _by_pointer(
    x,
    other,
    out,
    addend,
    n,
    k,
    tiles,
    alpha,
    beta,
    diagonal,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    batch = tl.program_id(0) // tiles
    i, j = lower_tile(tl.program_id(0) % tiles, COLS // ROWS)
    # Rows beyond the last wrap around instead of being masked: what they give is not stored.
    rows = ((i * ROWS + tl.arange(0, ROWS)) % n).to(tl.int64)
    cols = ((j * COLS + tl.arange(0, COLS)) % n).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    first = batch.to(tl.int64) * n * k
    a = x + first + rows[:, None] * k + depth[None, :]
    b = other + first + cols[:, None] * k + depth[None, :]
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, k, DEPTH):
        if EVEN:
            left = tl.load(a)
            right = tl.load(b)
        else:
            inside = depth[None, :] < k - start
            left = tl.load(a, mask=inside, other=0.0)
            right = tl.load(b, mask=inside, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        a += DEPTH
        b += DEPTH
    write(total, out, addend, batch, i, j, n, alpha, beta, diagonal, ADD, ROWS, COLS)


@triton.jit
def _by_descriptor(
    a,
    b,
    out,
    addend,
    n,
    k,
    tiles,
    alpha,
    beta,
    diagonal,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    batch = tl.program_id(0) // tiles
    i, j = lower_tile(tl.program_id(0) % tiles, COLS // ROWS)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    # A tile that ends beyond its matrix reads the next one's rows, and what they give is not
    # stored; beyond the last column the copy engine fills in zeros.
    row = batch * n + i * ROWS
    col = batch * n + j * COLS
    for start in range(0, k, DEPTH):
        left = a.load([row, start])
        right = b.load([col, start])
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    write(total, out, addend, batch, i, j, n, alpha, beta, diagonal, ADD, ROWS, COLS)


@triton.jit
def lower_tile(t, RATIO: tl.constexpr):
    """Return row and column of tile t of those that touch the lower triangle, counted by rows.

    Rows of tiles come in bands of RATIO, a tile being RATIO times as wide as high; band s has
    s + 1 tiles in each row, and RATIO s (s + 1) / 2 tiles come before it.
    """
    band = (0.5 * tl.sqrt(8.0 * t.to(tl.float32) / RATIO + 1.0) - 0.5).to(tl.int32)
    # The root is rounded, so the band may be off by one.
    band = tl.where(RATIO * band * (band + 1) // 2 > t, band - 1, band)
    band = tl.where(RATIO * (band + 1) * (band + 2) // 2 <= t, band + 1, band)
    place = t - RATIO * band * (band + 1) // 2
    return band * RATIO + place // (band + 1), place % (band + 1)


@triton.jit
def write(
    total,
    out,
    addend,
    batch,
    i,
    j,
    n,
    alpha,
    beta,
    diagonal,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write tile (i, j) of the result and, off the diagonal, its mirror image."""
    row = tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    inside_rows = row < n - i * ROWS
    inside_cols = col < n - j * COLS
    first = batch.to(tl.int64) * n * n
    # One long offset to the tile, short ones inside it.
    here = first + (i * ROWS).to(tl.int64) * n + j * COLS
    place = row[:, None] * n + col[None, :]
    inside = inside_rows[:, None] & inside_cols[None, :]
    total *= alpha
    if ADD:
        total += beta * tl.load(addend + here + place, mask=inside, other=0.0).to(tl.float32)
    # Of the rows and columns of this tile, those of the same number in the matrix.
    total += tl.where(i * ROWS + row[:, None] == j * COLS + col[None, :], diagonal, 0.0)
    tile = total.to(out.dtype.element_ty)
    tl.store(out + here + place, tile, mask=inside)
    # Tiles cut by the diagonal cover a square together, which holds its own mirror image.
    if (j + 1) * COLS <= i * ROWS:
        there = first + (j * COLS).to(tl.int64) * n + i * ROWS
        place_mirrored = col[:, None] * n + row[None, :]
        inside_mirrored = inside_cols[:, None] & inside_rows[None, :]
        tl.store(out + there + place_mirrored, tl.trans(tile), mask=inside_mirrored)
