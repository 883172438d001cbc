"""Newton-Schulz for many matrices at once: `algorithms.nsisa.newton_schulz`, batched by shape.

An iteration is X <- P X with P = a I + b A + c A A and A = X X^T. A and P are symmetric, so half of
each suffices: for large matrices a GPU computes it by `kernels/triton/symmetric.py`, a CPU strip by
strip.

Where a matrix is long, several iterations are taken on its short side (`_by_gram_matrix`): the next
A is P A P, since all of these are polynomials in the first A and commute, and X is multiplied once,
by the product of the P's. Rounding errors in A grow twelvefold per iteration in directions of small
singular values, so after three of them A is computed from X again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from torchpisa.algorithms.nsisa import COEFFICIENTS
from torchpisa.kernels.optional import without_triton
from torchpisa.torch_private import cpu_multiplies_bfloat16

__all__ = [
    "CHUNK_BYTES",
    "Chunk",
    "chunks",
    "dtype_for",
    "fast_dtype",
    "iterate",
    "orthogonalize",
    "workspace",
]

# Bound on the temporaries of the orthogonalisation; a single matrix that needs more goes alone.
CHUNK_BYTES = 256 * 2**20
# On a CPU batches spare small matrices the overhead of calls, as long as they stay in the cache.
_CPU_CHUNK_BYTES = 4 * 2**20

# Elements from which on bfloat16 pays on a CPU; small matrices lose more by conversions.
_CPU_BFLOAT16_LEAST = 2**20

# Iterations on the short side before its matrix is computed anew. With three, the result is as
# accurate as without the short side, in float16 and in bfloat16; with five it is not.
_SEGMENT = 3
# Columns per row from which on the short side is cheaper.
_LONG = 2
# Columns per row from which on the next X has room for all but one of its matrices.
_ROOMY = 3

# On a GPU from so many rows on, skipping the tiles above the diagonal saves more than Triton loses
# to cuBLAS.
_HALVED_ROWS = 256
# On a CPU, rows of a strip for two threads; fewer would leave threads without work.
_STRIP_ROWS = 128

# x, the next x, and one or two n x n matrices for each; see `_squares`.
Buffers = tuple[Tensor, Tensor, Tensor]
# One iteration: reads x, writes the next x and the squares.
_Step = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Chunk:
    """Matrices that are orthogonalised together, as n x k with n <= k.

    Attributes:
        indexes: where they are in the caller's list.
        n: the smaller of rows and columns.
        k: the larger one.
    """

    indexes: tuple[int, ...]
    n: int
    k: int


def chunks(
    shapes: Sequence[tuple[int, int]], itemsize: int, most: int | None = None
) -> list[Chunk]:
    """Return groups of one shape up to transposition, within a bound on their buffers.

    Args:
        shapes: rows and columns of each matrix.
        itemsize: bytes of a number in the products.
        most: the bound in bytes; `CHUNK_BYTES` by default.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for index, (rows, cols) in enumerate(shapes):
        alike.setdefault((min(rows, cols), max(rows, cols)), []).append(index)
    cut = []
    for (n, k), indexes in alike.items():
        each = (2 * k + _squares(n, k) * n) * n * itemsize
        largest = max(1, (CHUNK_BYTES if most is None else most) // each)
        # As even as possible: a small rest would leave a GPU half empty.
        parts = math.ceil(len(indexes) / largest)
        bounds = [len(indexes) * part // parts for part in range(parts + 1)]
        for start, stop in pairwise(bounds):
            cut.append(Chunk(tuple(indexes[start:stop]), n, k))
    return cut


def fast_dtype(params: Sequence[Tensor]) -> torch.dtype | None:
    """Return a short dtype if all devices multiply it natively, it pays, and nobody has float64.

    That is float16 on GPUs: everything in the iteration is of the order of one or smaller, and it
    has three more binary digits than bfloat16, which is what CPUs have instructions for. The
    iteration itself leaves singular values between about 0.7 and 1.2; rounding adds errors in
    directions whose singular values are small beside the largest.
    """
    devices = {param.device.type for param in params}
    if not params or torch.float64 in {param.dtype for param in params}:
        return None
    if devices == {"cuda"}:
        return torch.float16
    much = sum(map(Tensor.numel, params)) >= _CPU_BFLOAT16_LEAST
    known = devices <= {"cuda", "cpu"}
    return torch.bfloat16 if much and known and _cpu_has_bfloat16() else None


def dtype_for(asked: torch.dtype | str | None, params: Sequence[Tensor]) -> torch.dtype | None:
    """Return the dtype of the products; None for that of the state. `"auto"` is `fast_dtype`."""
    return fast_dtype(params) if isinstance(asked, str) else asked


@cache
def _cpu_has_bfloat16() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and cpu_multiplies_bfloat16()


def workspace(chunks: Sequence[Chunk], like: Tensor) -> Callable[[Chunk], Buffers]:
    """Allocate memory for any of `chunks`; return a function that cuts it up for one of them."""
    sizes = [
        len(chunk.indexes) * (2 * chunk.k + _squares(chunk.n, chunk.k) * chunk.n) * chunk.n
        for chunk in chunks
    ]
    memory = like.new_empty(max(sizes, default=0))

    def cut(chunk: Chunk) -> Buffers:
        c, n, k = len(chunk.indexes), chunk.n, chunk.k
        sizes = [c * n * k, c * n * k, _squares(n, k) * c * n * n]
        x, following, squares = torch.split(memory[: sum(sizes)], sizes)
        return x.view(c, n, k), following.view(c, n, k), squares.view(-1, c, n, n)

    return cut


def _squares(n: int, k: int) -> int:
    """Return how many n x n matrices are needed beside an n x k matrix and the next one.

    One is read by the last product, which writes the next X. The others lie in the memory of the
    next X until then, as many as it has room for.
    """
    return 2 if _LONG * n <= k < _ROOMY * n else 1


def iterate(
    x: Tensor,
    steps: int,
    spare: Sequence[Tensor] | None = None,
    *,
    halves: bool | None = None,
) -> Tensor:
    """Take the quintic iteration on matrices that are already normalised.

    Args:
        x: (c, n, k) with n <= k; overwritten.
        steps: number of iterations.
        spare: the other two of x's buffers, see `workspace`.
        halves: whether the symmetric products are Triton's; by default where that is faster.

    Returns:
        The result, in `x` or in the first of `spare`.
    """
    c, n, k = x.shape
    following, squares = spare or (torch.empty_like(x), x.new_empty(_squares(n, k), c, n, n))
    step = _step(x, halves)
    # In float32 the plain iteration is kept to the last digits.
    most = _SEGMENT if step is _by_halves and x.itemsize == 2 and k >= _LONG * n else 1
    while steps > 0:
        taken = min(most, steps)
        if taken > 1:
            _by_gram_matrix(taken, x, following, squares)
        else:
            step(x, following, squares)
        x, following = following, x
        steps -= taken
    return x


@torch.no_grad()
def orthogonalize(
    bs: Sequence[Tensor], steps: int = 5, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return `algorithms.nsisa.newton_schulz` of each matrix; they share device and dtype.

    The results are contiguous and the caller's to write to.
    """
    if not bs:
        return []
    first = bs[0]
    dtype = dtype or first.dtype
    # The wider of the two dtypes, since what is normalised is still of the first.
    itemsize = max(dtype.itemsize, first.dtype.itemsize)
    most = _CPU_CHUNK_BYTES if first.device.type == "cpu" else CHUNK_BYTES
    os: list[Tensor] = [first] * len(bs)
    for chunk in chunks([(b.size(0), b.size(1)) for b in bs], itemsize, most):
        members = [bs[index] for index in chunk.indexes]
        x = iterate(_normalized(members, dtype), steps)
        for index, b, o in zip(chunk.indexes, members, x.unbind(), strict=True):
            os[index] = torch.empty(b.shape, dtype=b.dtype, device=b.device)
            os[index].copy_(o.mT if _tall(b) else o)
    return os


def _tall(b: Tensor) -> bool:
    return b.size(-2) > b.size(-1)


def _normalized(bs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the matrices in one batch of `dtype`, divided as in `newton_schulz`."""
    x = bs[0].unsqueeze(0)
    if len(bs) > 1:
        x = torch.stack([b.mT if _tall(b) else b for b in bs])
    if x.dtype == torch.float64:
        largest = x.abs().amax(dim=(-2, -1), keepdim=True)
        x = x / largest.clamp_min_(torch.finfo(x.dtype).tiny)
        norm = torch.linalg.matrix_norm(x, keepdim=True).clamp_min_(1)
    else:  # squares that would leave the range of float32 are well within that of float64
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)
        norm = norm.to(x.dtype).clamp_min_(torch.finfo(x.dtype).tiny)
    x = torch.div(x, norm, out=torch.empty_like(x, dtype=dtype))
    # Transposing comes last, when the numbers are shorter.
    return (x.mT if _tall(x) else x).contiguous()


def _step(x: Tensor, halves: bool | None) -> _Step:
    c, n, k = x.shape
    if halves is None:
        halves = (
            x.is_cuda
            and x.dtype in (torch.bfloat16, torch.float16)
            and n >= _HALVED_ROWS
            and n % 8 == k % 8 == 0  # rows that start on 16 bytes
            and torch.cuda.get_device_capability(x.device) >= (8, 0)
            and without_triton() is None
        )
    if halves:
        return _by_halves
    strip = _STRIP_ROWS * max(1, torch.get_num_threads() // 2)
    if x.device.type == "cpu" and c == 1 and n >= 3 * strip:
        return partial(_by_strips, strip)
    return _whole


def _by_halves(x: Tensor, following: Tensor, squares: Tensor) -> None:
    from torchpisa.kernels.triton.symmetric import symmetric_product

    (gram,) = _inside(following, 1)
    symmetric_product(x, gram)
    _polynomial(gram, squares[0])
    torch.bmm(squares[0], x, out=following)


def _by_gram_matrix(steps: int, x: Tensor, following: Tensor, squares: Tensor) -> None:
    """Take two iterations or more as one product with X, by halves."""
    from torchpisa.kernels.triton.symmetric import symmetric_product

    # X is not multiplied before the end: until then the memory of the next X is free. It has room
    # for three matrices, or for two, and then `squares` has two.
    polynomial, *other = squares
    product, spare, gram = *_inside(following, 3 - len(other)), *other
    symmetric_product(x, gram)
    _polynomial(gram, product)
    symmetric_product(product, polynomial, other=gram)
    symmetric_product(polynomial, gram, other=product)
    for _ in range(steps - 2):
        _polynomial(gram, polynomial)
        symmetric_product(polynomial, spare, other=gram)
        symmetric_product(spare, gram, other=polynomial)
        symmetric_product(polynomial, spare, other=product)
        product, spare = spare, product
    _polynomial(gram, spare)
    symmetric_product(spare, polynomial, other=product)
    torch.bmm(polynomial, x, out=following)


def _inside(following: Tensor, count: int) -> Tensor:
    """Return the memory of (c, n, k) as `count` times (c, n, n)."""
    c, n, _ = following.shape
    return following.view(-1)[: count * c * n * n].view(count, c, n, n)


def _polynomial(gram: Tensor, out: Tensor) -> None:
    """Write a I + b A + c A A to `out`, by halves."""
    from torchpisa.kernels.triton.symmetric import symmetric_product

    linear, cubic, quintic = COEFFICIENTS
    # a I is added before anything is rounded, so it costs no accuracy, and X is read once less than
    # for a X + (b A + c A A) X.
    symmetric_product(gram, out, addend=gram, alpha=quintic, beta=cubic, diagonal=linear)


def _whole(x: Tensor, following: Tensor, squares: Tensor) -> None:
    linear, cubic, quintic = COEFFICIENTS
    (gram,), polynomial = _inside(following, 1), squares[0]
    torch.bmm(x, x.mT, out=gram)
    torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic, out=polynomial)
    torch.baddbmm(x, polynomial, x, beta=linear, out=following)


def _by_strips(rows: int, x: Tensor, following: Tensor, squares: Tensor) -> None:
    """Iterate on one matrix: strips of `rows` rows up to the diagonal, and their mirror images."""
    linear, cubic, quintic = COEFFICIENTS
    ((gram,),), (polynomial,) = _inside(following, 1), squares[0]
    bounds = [(start, start + rows) for start in range(0, x.size(1), rows)]
    for start, stop in bounds:
        here = gram[start:stop, :stop]
        torch.mm(x[0, start:stop], x[0, :stop].T, out=here)
        gram[:start, start:stop] = here[:, :start].T
    for start, stop in bounds:
        here = polynomial[start:stop, :stop]
        left = gram[start:stop, :stop]
        torch.addmm(left, gram[start:stop], gram[:, :stop], beta=cubic, alpha=quintic, out=here)
        polynomial[:start, start:stop] = here[:, :start].T
    torch.addmm(x[0], polynomial, x[0], beta=linear, out=following[0])
