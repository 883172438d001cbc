"""Newton-Schulz for many matrices at once: `algorithms.nsisa.newton_schulz`, batched by shape.

One iteration is X <- P X with P = a I + b A + c A A and the Gram matrix A = X X^T. `iterate` has
four ways to take it:

- `_by_full_products` computes these products as they stand.
- `_by_halves` and `_by_strips` use that A and P are symmetric: about half of each is computed and
  mirrored, on a GPU tile by tile in `kernels/triton/symmetric.py`, on a CPU strip by strip.
- `_by_gram_matrix` takes several iterations on A alone, which is cheaper for a matrix much longer
  than high. All P's are polynomials in the first A and commute, so the next A is P A P, and X is
  multiplied once, by the product of the P's. Rounding errors in A grow twelvefold per iteration in
  directions of small singular values, so after three iterations A is computed from X again.
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

# Bound on the buffers of a chunk; a single matrix that needs more is a chunk of its own.
CHUNK_BYTES = 256 * 2**20
# Smaller on a CPU, where a chunk must stay in the cache to save small matrices the cost of calls.
_CPU_CHUNK_BYTES = 4 * 2**20

# Elements from which bfloat16 pays on a CPU; converting fewer costs more than their products save.
_MIN_CPU_BFLOAT16_ELEMENTS = 2**17

# Iterations on the Gram matrix before it is computed from X again. With three the result is as
# accurate as without this, in float16 and in bfloat16; with five it is not.
_GRAM_MAX_STEPS = 3
# Columns per row from which on iterations on the Gram matrix are cheaper.
_GRAM_MIN_RATIO = 2
# Columns per row from which on the memory of the next X holds three n x n matrices.
_GRAM_ROOMY_RATIO = 3

# On a GPU, rows from which on it saves more to skip the tiles above the diagonal than Triton loses
# to cuBLAS.
_MIN_ROWS_FOR_HALVES = 256
# On a CPU, rows of a strip for two threads; fewer would leave threads without work.
_STRIP_ROWS = 128

# x, (c, n, k); the next x, (c, n, k); and squares, (1 or 2, c, n, n), see `_square_count`.
Buffers = tuple[Tensor, Tensor, Tensor]
# One iteration: reads x and writes next_x, with squares as working memory.
_Iteration = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Chunk:
    """Matrices that are orthogonalised together, as n x k with n <= k.

    Attributes:
        indexes: their positions in the caller's list.
        n: the smaller of rows and columns.
        k: the larger one.
    """

    indexes: tuple[int, ...]
    n: int
    k: int


def chunks(
    shapes: Sequence[tuple[int, int]], itemsize: int, max_bytes: int | None = None
) -> list[Chunk]:
    """Group matrices of one shape, up to transposition, within a bound on their buffers.

    Args:
        shapes: rows and columns of each matrix.
        itemsize: bytes of a number in the products.
        max_bytes: the bound; `CHUNK_BYTES` by default.
    """
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, (rows, cols) in enumerate(shapes):
        by_shape.setdefault((min(rows, cols), max(rows, cols)), []).append(index)
    result = []
    for (n, k), indexes in by_shape.items():
        matrix_bytes = (2 * k + _square_count(n, k) * n) * n * itemsize
        largest = max(1, (CHUNK_BYTES if max_bytes is None else max_bytes) // matrix_bytes)
        # As even as possible: a small last chunk would leave a GPU half empty.
        count = math.ceil(len(indexes) / largest)
        bounds = [len(indexes) * part // count for part in range(count + 1)]
        for start, stop in pairwise(bounds):
            result.append(Chunk(tuple(indexes[start:stop]), n, k))
    return result


def fast_dtype(params: Sequence[Tensor]) -> torch.dtype | None:
    """Return a 16-bit dtype for the products if it is faster on all devices, else None.

    float16 on GPUs: no number in the iteration is much larger than one, and float16 has three more
    binary digits than bfloat16. CPUs have instructions for bfloat16 only. The iteration itself
    leaves singular values between about 0.7 and 1.2; rounding adds errors in directions whose
    singular values are small beside the largest. None also if a parameter is float64.
    """
    devices = {param.device.type for param in params}
    if not params or torch.float64 in {param.dtype for param in params}:
        return None
    if devices == {"cuda"}:
        return torch.float16
    large = sum(map(Tensor.numel, params)) >= _MIN_CPU_BFLOAT16_ELEMENTS
    known = devices <= {"cuda", "cpu"}
    return torch.bfloat16 if large and known and _cpu_has_bfloat16() else None


def dtype_for(asked: torch.dtype | str | None, params: Sequence[Tensor]) -> torch.dtype | None:
    """Return the dtype of the products, None for that of the state; `"auto"` asks `fast_dtype`."""
    return fast_dtype(params) if isinstance(asked, str) else asked


@cache
def _cpu_has_bfloat16() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and cpu_multiplies_bfloat16()


def workspace(chunks: Sequence[Chunk], like: Tensor) -> Callable[[Chunk], Buffers]:
    """Allocate memory that fits any one of `chunks`; return a function that gives its buffers."""
    sizes = [
        len(chunk.indexes) * (2 * chunk.k + _square_count(chunk.n, chunk.k) * chunk.n) * chunk.n
        for chunk in chunks
    ]
    memory = like.new_empty(max(sizes, default=0))

    def buffers(chunk: Chunk) -> Buffers:
        c, n, k = len(chunk.indexes), chunk.n, chunk.k
        sizes = [c * n * k, c * n * k, _square_count(n, k) * c * n * n]
        x, next_x, squares = torch.split(memory[: sum(sizes)], sizes)
        return x.view(c, n, k), next_x.view(c, n, k), squares.view(-1, c, n, n)

    return buffers


def _square_count(n: int, k: int) -> int:
    """Return how many n x n buffers a matrix needs beside x and next_x.

    The last product of an iteration reads one and writes next_x. Until then next_x is free and
    holds the other n x n matrices: for `_by_gram_matrix` three of them, or two where it is smaller.
    """
    return 2 if _GRAM_MIN_RATIO * n <= k < _GRAM_ROOMY_RATIO * n else 1


def iterate(
    x: Tensor,
    steps: int,
    buffers: Sequence[Tensor] | None = None,
    *,
    halves: bool | None = None,
) -> Tensor:
    """Take iterations on matrices that are already normalised.

    Args:
        x: (c, n, k) with n <= k; overwritten.
        steps: number of iterations.
        buffers: the next x and the squares, the rest of what `workspace` gives for a chunk.
        halves: use Triton's symmetric products; by default where they are faster.

    Returns:
        The result, in the memory of `x` or of the next x.
    """
    c, n, k = x.shape
    next_x, squares = buffers or (torch.empty_like(x), x.new_empty(_square_count(n, k), c, n, n))
    iteration = _fastest_iteration(x, halves)
    # Not in float32, which is expected to agree with the plain iteration to the last digits.
    uses_gram = iteration is _by_halves and x.itemsize == 2 and k >= _GRAM_MIN_RATIO * n
    while steps > 0:
        taken = min(_GRAM_MAX_STEPS, steps) if uses_gram else 1
        if taken > 1:
            _by_gram_matrix(taken, x, next_x, squares)
        else:
            iteration(x, next_x, squares)
        x, next_x = next_x, x
        steps -= taken
    return x


@torch.no_grad()
def orthogonalize(
    bs: Sequence[Tensor], steps: int = 5, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return `algorithms.nsisa.newton_schulz` of matrices that share device and dtype.

    The results are contiguous, in new memory.
    """
    if not bs:
        return []
    first = bs[0]
    dtype = dtype or first.dtype
    # The wider of the two dtypes, since matrices are normalised in theirs.
    itemsize = max(dtype.itemsize, first.dtype.itemsize)
    max_bytes = _CPU_CHUNK_BYTES if first.device.type == "cpu" else CHUNK_BYTES
    os: list[Tensor] = [first] * len(bs)
    for chunk in chunks([(b.size(0), b.size(1)) for b in bs], itemsize, max_bytes):
        matrices = [bs[index] for index in chunk.indexes]
        x = iterate(_normalized(matrices, dtype), steps)
        for index, b, o in zip(chunk.indexes, matrices, x.unbind(), strict=True):
            os[index] = torch.empty(b.shape, dtype=b.dtype, device=b.device)
            os[index].copy_(o.mT if _is_tall(b) else o)
    return os


def _is_tall(b: Tensor) -> bool:
    return b.size(-2) > b.size(-1)


def _normalized(bs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return matrices divided by their norms, in one batch of `dtype`, with n <= k."""
    x = bs[0].unsqueeze(0)
    if len(bs) > 1:
        x = torch.stack([b.mT if _is_tall(b) else b for b in bs])
    if x.dtype == torch.float64:
        largest = x.abs().amax(dim=(-2, -1), keepdim=True)
        x = x / largest.clamp_min_(torch.finfo(x.dtype).tiny)
        norm = torch.linalg.matrix_norm(x, keepdim=True).clamp_min_(1)
    else:  # squares that would leave the range of float32 are well within that of float64
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)
        norm = norm.to(x.dtype).clamp_min_(torch.finfo(x.dtype).tiny)
    x = torch.div(x, norm, out=torch.empty_like(x, dtype=dtype))
    # Transposed last, when `dtype` may have made the numbers shorter.
    return (x.mT if _is_tall(x) else x).contiguous()


def _fastest_iteration(x: Tensor, halves: bool | None) -> _Iteration:
    """Return the fastest way to take one iteration; `halves`, if given, asks for `_by_halves`."""
    c, n, k = x.shape
    if halves is None:
        halves = (
            x.is_cuda
            and x.dtype in (torch.bfloat16, torch.float16)
            and n >= _MIN_ROWS_FOR_HALVES
            and n % 8 == k % 8 == 0  # rows that start on 16 bytes
            and torch.cuda.get_device_capability(x.device) >= (8, 0)
            and without_triton() is None
        )
    if halves:
        return _by_halves
    strip = _STRIP_ROWS * max(1, torch.get_num_threads() // 2)
    if x.device.type == "cpu" and c == 1 and n >= 3 * strip:
        return partial(_by_strips, strip)
    return _by_full_products


def _by_halves(x: Tensor, next_x: Tensor, squares: Tensor) -> None:
    """Take one iteration with Triton's symmetric products."""
    from torchpisa.kernels.triton.symmetric import symmetric_product

    (gram,) = _square_views(next_x, 1)
    symmetric_product(x, gram)
    _polynomial(gram, squares[0])
    torch.bmm(squares[0], x, out=next_x)


def _by_gram_matrix(steps: int, x: Tensor, next_x: Tensor, squares: Tensor) -> None:
    """Take two iterations or more on the Gram matrix, and one product with X."""
    from torchpisa.kernels.triton.symmetric import symmetric_product

    # The last product writes next_x, so until then its memory holds three of the matrices, or two
    # of them if `squares` has two. `product` is that of all polynomials so far.
    polynomial, *extra = squares
    product, scratch, gram = *_square_views(next_x, 3 - len(extra)), *extra
    symmetric_product(x, gram)
    _polynomial(gram, product)
    symmetric_product(product, polynomial, other=gram)
    symmetric_product(polynomial, gram, other=product)
    for _ in range(steps - 2):
        _polynomial(gram, polynomial)
        symmetric_product(polynomial, scratch, other=gram)
        symmetric_product(scratch, gram, other=polynomial)
        symmetric_product(polynomial, scratch, other=product)
        product, scratch = scratch, product
    _polynomial(gram, scratch)
    symmetric_product(scratch, polynomial, other=product)
    torch.bmm(polynomial, x, out=next_x)


def _square_views(next_x: Tensor, count: int) -> Tensor:
    """Return the memory of next_x as `count` batches of n x n matrices, (count, c, n, n)."""
    c, n, _ = next_x.shape
    return next_x.view(-1)[: count * c * n * n].view(count, c, n, n)


def _polynomial(gram: Tensor, out: Tensor) -> None:
    """Write P = a I + b A + c A A to `out`."""
    from torchpisa.kernels.triton.symmetric import symmetric_product

    linear, cubic, quintic = COEFFICIENTS
    # a I is added before rounding, so it costs no accuracy, and X is read once less than for
    # a X + (b A + c A A) X.
    symmetric_product(gram, out, addend=gram, alpha=quintic, beta=cubic, diagonal=linear)


def _by_full_products(x: Tensor, next_x: Tensor, squares: Tensor) -> None:
    """Take one iteration with products of whole matrices."""
    linear, cubic, quintic = COEFFICIENTS
    (gram,), polynomial = _square_views(next_x, 1), squares[0]
    torch.bmm(x, x.mT, out=gram)
    torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic, out=polynomial)
    torch.baddbmm(x, polynomial, x, beta=linear, out=next_x)


def _by_strips(rows: int, x: Tensor, next_x: Tensor, squares: Tensor) -> None:
    """Take one iteration on one matrix, in strips of `rows` rows up to the diagonal, mirrored."""
    linear, cubic, quintic = COEFFICIENTS
    ((gram,),), (polynomial,) = _square_views(next_x, 1), squares[0]
    bounds = [(start, start + rows) for start in range(0, x.size(1), rows)]
    for start, stop in bounds:
        strip = gram[start:stop, :stop]
        torch.mm(x[0, start:stop], x[0, :stop].T, out=strip)
        gram[:start, start:stop] = strip[:, :start].T
    for start, stop in bounds:
        strip = polynomial[start:stop, :stop]
        addend, rows_of_gram = gram[start:stop, :stop], gram[start:stop]
        torch.addmm(addend, rows_of_gram, gram[:, :stop], beta=cubic, alpha=quintic, out=strip)
        polynomial[:start, start:stop] = strip[:, :start].T
    torch.addmm(x[0], polynomial, x[0], beta=linear, out=next_x[0])
