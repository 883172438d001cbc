"""The product x x^T by halves; Triton's interpreter computes it where there is no GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from torchpisa.kernels.triton import symmetric
from torchpisa.kernels.triton.symmetric import TileLaunch, symmetric_product

LAUNCHES = [
    TileLaunch(16, 16, 16),
    TileLaunch(16, 32, 16),
    TileLaunch(16, 16, 16, tma=True),
    TileLaunch(16, 32, 16, tma=True),
]
# Less than a tile, whole tiles, and remainders in either direction.
SHAPES = [(1, 1, 1), (2, 7, 24), (2, 32, 48), (2, 41, 40), (1, 50, 19)]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    assert os.environ.get("TRITON_INTERPRET") == "1"  # by conftest.py
    return "cpu"


def dtypes() -> list[torch.dtype]:
    """The interpreter has no products in bfloat16."""
    return [d for d in TOLERANCE if d != torch.bfloat16 or torch.cuda.is_available()]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(device(), dtype)


def nans(c: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory in which an entry that is read or not written shows."""
    return torch.full((c, n, n), float("nan"), dtype=dtype, device=device())


def relative(value: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((value.double() - wanted).norm() / wanted.norm())


def assert_mirrored(out: torch.Tensor, how: TileLaunch) -> None:
    """Tiles below the diagonal are copied; one on it has its two halves multiplied apart.

    Whether these agree to the last bit depends on the library that the interpreter multiplies with.
    """
    number = torch.arange(out.size(-1), device=out.device)
    rows, cols = number // how.rows * how.rows, number // how.cols * how.cols + how.cols
    copied = cols <= rows[:, None]
    assert torch.equal(out[:, copied], out.mT[:, copied])
    assert relative(out, out.mT.double()) < TOLERANCE[out.dtype]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("how", LAUNCHES, ids=str)
def test_product(how, dtype, shape):
    c, n, k = shape
    x, addend = random(c, n, k, dtype=dtype), random(c, n, n, dtype=dtype)
    addend = addend + addend.mT
    exact = x.double() @ x.double().mT
    out = symmetric_product(x, nans(c, n, dtype), how=how)
    assert relative(out, exact) < TOLERANCE[dtype]
    assert_mirrored(out, how)
    exact = 0.5 * exact - 2 * addend.double() + 3 * torch.eye(n, device=x.device)
    how_much = {"alpha": 0.5, "beta": -2.0, "diagonal": 3.0}
    out = symmetric_product(x, nans(c, n, dtype), addend=addend, **how_much, how=how)
    assert relative(out, exact) < TOLERANCE[dtype]
    assert_mirrored(out, how)
    symmetric_product(x, addend, addend=addend, **how_much, how=how)
    assert torch.equal(out, addend)


@pytest.mark.parametrize(("n", "k"), [(3, 5), (65, 64), (130, 72)])
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_launch_by_default(dtype, n, k):
    x = random(2, n, k, dtype=dtype)
    out = symmetric_product(x, nans(2, n, dtype))
    assert relative(out, x.double() @ x.double().mT) < TOLERANCE[dtype]


@pytest.mark.parametrize("how", LAUNCHES, ids=str)
def test_matrices_of_a_batch_keep_apart(how):
    """Tiles at the edge read rows of the neighbour or wrap around; neither may show."""
    x = random(3, 21, 32, dtype=torch.float32)
    x[1] = float("nan")
    out = symmetric_product(x, nans(3, 21, torch.float32), how=how)
    assert out[[0, 2]].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (16, 32), (16, 64)])
@pytest.mark.parametrize("n", [1, 16, 17, 95, 96, 97, 500])
def test_number_of_tiles(n, rows, cols):
    touching = [
        (i, j) for i in range(0, n, rows) for j in range(0, n, cols) if j < min(i + rows, n)
    ]
    assert symmetric._tiles(n, rows, cols) == len(touching)


def test_wrong_memory_is_refused():
    x = random(2, 4, 6, dtype=torch.float32)
    out = nans(2, 4, torch.float32)
    for name, arguments in {
        "x": (x.mT.contiguous().mT, out, None),
        "out": (x, out[:1], None),
        "addend": (x, out, out.half()),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} must be contiguous"):
            symmetric_product(*arguments[:2], addend=arguments[2])
