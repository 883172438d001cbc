"""Batched Newton-Schulz equals the plain one, matrix by matrix, within its bound on memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchpisa.algorithms import nsisa
from torchpisa.kernels import newton_schulz
from torchpisa.kernels.newton_schulz import (
    CHUNK_BYTES,
    Chunk,
    chunks,
    fast_dtype,
    iterate,
    orthogonalize,
    workspace,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

sizes = st.integers(1, 12) | st.sampled_from([64, 768, 3072, 20000])
shapes = st.lists(st.tuples(sizes, sizes), max_size=60)


@given(shapes, st.sampled_from([2, 4, 8]), st.sampled_from([None, 1, 4096]))
def test_chunks_keep_to_the_bound(shapes, itemsize, most):
    cut = chunks(shapes, itemsize, most)
    assert sorted(index for chunk in cut for index in chunk.indexes) == list(range(len(shapes)))
    for chunk in cut:
        assert {tuple(sorted(shapes[index])) for index in chunk.indexes} == {(chunk.n, chunk.k)}
        assert list(chunk.indexes) == sorted(chunk.indexes)
        buffers = workspace([chunk], torch.empty(0, device="meta"))(chunk)
        memory = {part.untyped_storage().nbytes() // part.itemsize for part in buffers}
        assert memory == {sum(part.numel() for part in buffers)}
        assert memory.pop() * itemsize <= (most or CHUNK_BYTES) or len(chunk.indexes) == 1


def test_chunks_are_few_and_even():
    """Of 48 matrices at most 20 fit: three chunks of 16, not two of 20 and one of 8."""
    each = (2 * 768 * 3072 + 768**2) * 2
    cut = chunks([(768, 3072), (3072, 768)] * 24, 2, 20 * each + 1)
    assert [len(chunk.indexes) for chunk in cut] == [16, 16, 16]


def test_gpt2_is_orthogonalised_in_two_chunks():
    """All matrices of one shape at once, 124M parameters in float16: a GPU waits for launches."""
    shapes = ([(768, 768)] * 4 + [(768, 3072), (3072, 768)]) * 12
    assert [len(chunk.indexes) for chunk in chunks(shapes, 2)] == [48, 24]


def relative(value, wanted):
    return float((value - wanted).norm() / wanted.norm().clamp_min(1e-30))


def matrix(shape, scale, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, dtype=dtype, generator=generator)


matrices = st.lists(
    st.tuples(
        st.sampled_from([(1, 1), (1, 7), (7, 1), (5, 5), (5, 8), (8, 5), (3, 40), (33, 20)]),
        st.sampled_from([1.0, 0.0, 1e-30, 1e30, 1e-3]),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(matrices, st.sampled_from(list(TOLERANCE)), st.integers(0, 2**16))
def test_equals_the_plain_one_by_one(matrices, dtype, seed):
    bs = [matrix(*each, dtype, seed + place) for place, each in enumerate(matrices)]
    copies = [b.clone() for b in bs]
    os = orthogonalize(bs, 5)
    assert len(os) == len(bs)
    for b, copy, o in zip(bs, copies, os, strict=True):
        wanted = nsisa.newton_schulz(copy, 5)
        assert torch.equal(b, copy)
        assert o.shape == b.shape
        assert o.dtype == b.dtype
        assert o.is_contiguous()
        assert relative(o, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_large_matrices(device, dtype, threads, monkeypatch):
    """So large that a CPU computes strips, with a remainder; batched on a GPU."""
    monkeypatch.setattr(newton_schulz, "_STRIP_ROWS", 16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        bs = [matrix(shape, 1.0, dtype, 0).to(device) for shape in ((100, 130), (130, 100))]
        bs.append(bs[0][::2, ::2])
        for b, o in zip(bs, orthogonalize(bs, 5), strict=True):
            assert relative(o, nsisa.newton_schulz(b, 5)) < TOLERANCE[dtype]
    finally:
        torch.set_num_threads(before)


def test_fast_dtype(monkeypatch):
    """bfloat16 for much work on hardware that has it; never for who has float64."""
    monkeypatch.setattr(newton_schulz, "_cpu_has_bfloat16", lambda: True)
    large, small = torch.empty(1024, 1024), torch.empty(64, 64)
    assert fast_dtype([large, small]) == torch.bfloat16
    assert fast_dtype([small]) is None
    assert fast_dtype([large, small.double()]) is None
    assert fast_dtype([]) is None
    monkeypatch.setattr(newton_schulz, "_cpu_has_bfloat16", lambda: False)
    assert fast_dtype([large]) is None


def test_results_are_the_callers():
    bs = [matrix((4, 6), 1.0, torch.float32, seed) for seed in range(3)]
    os = orthogonalize(bs, 5)
    kept = os[1].clone()
    os[0].zero_()
    os[2].fill_(7.0)
    assert torch.equal(os[1], kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (256, 256), (320, 512)])
def test_bfloat16_is_as_accurate_as_the_plain_loop(device, shape):
    b = matrix(shape, 1e-4, torch.float32, 0).to(device)
    exact = nsisa.newton_schulz(b.double(), 5)
    (o,) = orthogonalize([b], 5, torch.bfloat16)
    assert o.dtype == torch.float32
    plain = nsisa.newton_schulz(b, 5, torch.bfloat16)
    assert relative(o.double(), exact) <= relative(plain.double(), exact)


def test_iterate_by_halves():
    pytest.importorskip("triton", minversion="3.3")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # else by Triton's interpreter
    x = torch.randn(2, 20, 40, device=device) / 28
    whole = iterate(x.clone(), 4, halves=False)
    assert relative(iterate(x.clone(), 4, halves=True), whole) < 1e-5


def given_memory(chunk, dtype, device="cpu"):
    """Return buffers for a chunk in which everything is NaN, and the memory that they lie in.

    There is more memory than they need, as if another chunk were larger.
    """
    larger = Chunk((*chunk.indexes, -1), chunk.n, chunk.k)
    cut = workspace([larger], torch.empty(0, dtype=dtype, device=device))
    whole = torch.as_strided(cut(larger)[0], (sum(map(torch.numel, cut(larger))),), (1,), 0)
    whole.fill_(math.nan)
    return cut(chunk), whole


# Square, a little and much longer than wide: on either side of all bounds on the memory.
RATIOS = [1.0, 1.5, 2.0, 2.5, 3.0, 4.5]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("steps", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("strips", [False, True], ids=["whole", "strips"])
def test_iterate_in_given_memory(steps, ratio, strips, monkeypatch):
    """Nothing is read before it is written, nor is anything written beyond the buffers."""
    monkeypatch.setattr(newton_schulz, "_STRIP_ROWS", 2 if strips else 1000)
    n, k = 8, int(8 * ratio)
    chunk = Chunk((0,) if strips else (0, 1, 2), n, k)
    (x, *spare), whole = given_memory(chunk, torch.float64)
    used = sum(part.numel() for part in (x, *spare))
    assert used < whole.numel()
    x.normal_()
    x /= torch.linalg.matrix_norm(x, keepdim=True)
    wanted = torch.stack([nsisa.newton_schulz(each, steps) for each in x])
    o = iterate(x, steps, spare)
    assert o.data_ptr() == (spare[0] if steps % 2 else x).data_ptr()
    assert relative(o, wanted) < 1e-12
    assert whole[used:].isnan().all()


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_iterate_by_halves_in_given_memory(steps, ratio):
    """Also where several iterations are taken on the short side."""
    pytest.importorskip("triton", minversion="3.3")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # else by Triton's interpreter
    chunk = Chunk((0, 1), 16, int(16 * ratio))
    (x, *spare), whole = given_memory(chunk, torch.float16, device)
    used = sum(part.numel() for part in (x, *spare))
    exact = torch.stack(
        [spectrum(16, chunk.k, torch.logspace(0, -end, 16, dtype=torch.float64)) for end in (1, 2)]
    )
    x.copy_(exact)
    o = iterate(x, steps, spare, halves=True)
    for each, start in zip(o, exact, strict=True):
        assert relative(each.double().cpu(), nsisa.newton_schulz(start, steps)) < 0.02
    assert whole[used:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [1.0, 1.25, 2.0, 2.5, 3.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [64, 256, 1024])  # cuBLAS; symmetric products; by Hopper's copies
def test_iterate_on_a_gpu_in_given_memory(n, dtype, ratio):
    """By whatever is chosen there; again in a CUDA graph, whose replays find NaN as well."""
    chunk = Chunk((0, 1), n, int(n * ratio))
    start = torch.randn(2, n, chunk.k, dtype=torch.float64, device="cuda")
    start /= torch.linalg.matrix_norm(start, keepdim=True)
    exact = [nsisa.newton_schulz(each, 5) for each in start]
    plain = [nsisa.newton_schulz(each.to(dtype), 5) for each in start]
    (x, *spare), whole = given_memory(chunk, dtype, "cuda")
    used = sum(part.numel() for part in (x, *spare))

    def check(o):
        for each, expected, rounded in zip(o, exact, plain, strict=True):
            bound = 2 * relative(rounded.double(), expected) + 1e-5
            assert relative(each.double(), expected) < bound
        assert whole[used:].isnan().all()

    x.copy_(start)
    check(iterate(x, 5, spare))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = iterate(x, 5, spare)
    for _ in range(2):
        whole.fill_(math.nan)
        x.copy_(start)
        graph.replay()
        check(o)


def spectrum(n, k, values):
    """Return a matrix with singular values in proportion to `values`, of norm one."""
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(k, n, dtype=torch.float64, generator=generator))
    x = (left * values) @ right.T
    return x / x.norm()


@pytest.mark.parametrize("columns", [56, 80])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7])
def test_short_side(steps, columns, monkeypatch):
    """Iterations on the Gram matrix give what iterations on the matrix give."""
    pytest.importorskip("triton", minversion="3.3")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # else by Triton's interpreter
    x = spectrum(24, columns, torch.logspace(0, -2, 24, dtype=torch.float64)).unsqueeze(0)
    exact = nsisa.newton_schulz(x[0], steps)
    short = x.to(device, torch.float16)
    calls = []
    monkeypatch.setattr(
        newton_schulz,
        "_by_gram_matrix",
        lambda *args, real=newton_schulz._by_gram_matrix: (calls.append(args[0]), real(*args)),
    )
    o = iterate(short.clone(), steps, halves=True)
    assert calls == {1: [], 2: [2], 3: [3], 4: [3], 5: [3, 2], 7: [3, 3]}[steps]
    plain = nsisa.newton_schulz(short[0], steps).double()
    error = relative(o[0].double().cpu(), exact)
    assert error < 2 * relative(plain.cpu(), exact) + 1e-3
    assert error < 0.02


def test_short_side_needs_its_memory():
    """A matrix that is not twice as long as wide has no room for the products."""
    pytest.importorskip("triton", minversion="3.3")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = spectrum(24, 40, torch.ones(24, dtype=torch.float64)).unsqueeze(0)
    o = iterate(x.to(device, torch.float16), 5, halves=True)
    assert relative(o[0].double().cpu(), nsisa.newton_schulz(x[0], 5)) < 0.02
