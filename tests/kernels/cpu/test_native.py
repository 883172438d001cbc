"""The C kernel equals the plain loop, with any number of threads, and is missed where it is not."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.kernels.given import SISA
from tests.kernels.test_foreach import SHAPES, pisa, sisa
from tests.kernels.test_foreach import common as any_settings
from torchpisa import NSISA
from torchpisa.kernels.cpu import native
from torchpisa.kernels.loop import Loop

needs_compiler = pytest.mark.skipif(native._library() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True, scope="module")
def _for_small_models():
    """Threads for few elements too."""
    patch = pytest.MonkeyPatch()
    patch.setattr(native, "_MIN_FOR_THREADS", 1)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def threads():
    """Set by tests, back to what it was after them."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(cls, tensors, seed, fused, **settings):
    """20 steps, with gradients that are missing now and then, or not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in tensors]
    opt = cls(params, fused=fused, foreach=None if fused else False, **settings)
    for _ in range(20):
        for p in params:
            noise = torch.randn(p.shape, generator=generator)
            chance = torch.rand((), generator=generator)
            p.grad = None if chance < 0.1 else 0.1 * noise + 0.1 * p.detach()
            if chance > 0.9:
                p.grad = torch.stack([p.grad, p.grad], -1)[..., 0]
        opt.step()
    return params, opt


tensors = st.lists(st.sampled_from([*SHAPES, (100,), (33, 31)]), min_size=1, max_size=6)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(pisa | sisa, any_settings, tensors, st.integers(1, 4), st.integers(0, 2**16))
def test_native_equals_loop(threads, kind, common, tensors, count, seed):
    torch.set_num_threads(count)
    cls, own = kind
    slow, one = run(cls, tensors, seed, False, **own, **common)
    fast, two = run(cls, tensors, seed, True, **own, **common)
    for p, q in zip(slow, fast, strict=True):
        scale = float(p.detach().abs().max()) if p.numel() else 0.0
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-6 * max(1.0, scale))
        assert one.state[p]["arrived"] == two.state[q]["arrived"]


@needs_compiler
def test_any_number_of_threads_gives_the_same_bits(threads):
    ends = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        params, _ = run(SISA, [(50, 41), (7,)], 0, True)
        ends.append(torch.cat([p.detach().flatten() for p in params]))
    assert all(torch.equal(end, ends[0]) for end in ends)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "'cc", "", shutil.which("false")])
def test_without_a_compiler(compiler, monkeypatch):
    """Asking for the kernel raises an error; a compiler is never called unasked."""
    if compiler is None:
        pytest.skip("there is no program `false`")
    native._library.cache_clear()
    monkeypatch.setenv("CC", compiler)
    try:
        assert native._library() is None
        p = nn.Parameter(torch.ones(5))
        with pytest.raises(ValueError, match="fused=True is not possible: no C compiler"):
            SISA([p], sigma=0.5, rho=1e3, fused=True)
    finally:
        native._library.cache_clear()


def test_no_compiler_runs_unless_asked_for(monkeypatch):
    monkeypatch.setattr(native, "_library", lambda: pytest.fail("compiled"))
    p = nn.Parameter(torch.ones(2**21))
    p.grad = torch.ones(2**21)
    SISA([p], sigma=0.5, rho=1e3).step()
    SISA([p]).step()


@pytest.mark.parametrize("elements", [5, 2**20])
def test_tensor_subclasses_take_the_plain_loop(elements, monkeypatch):
    """Their operations may mean something else, as those of sharded tensors do."""

    class Other(torch.Tensor):
        pass

    p = nn.Parameter(torch.ones(elements).as_subclass(Other))
    p.grad = torch.ones(elements)
    calls = []
    real = Loop.local_step
    monkeypatch.setattr(Loop, "local_step", lambda self, job: (calls.append(1), real(self, job)))
    SISA([p]).step()
    assert calls == [1]
    with pytest.raises(ValueError, match="fused=True is not possible: a parameter is a"):
        SISA([p], sigma=0.5, rho=1e3, fused=True)


@needs_compiler
def test_what_nsisa_does_not_orthogonalise_needs_no_sigma():
    """With fused=True too: there `foreach` steps it, since its sigma follows the gradients."""
    ends = []
    for fused in (False, True):
        p = nn.Parameter(torch.arange(1.0, 5.0))
        opt = NSISA([p], fused=fused)
        for _ in range(3):
            p.grad = p.detach().clone()
            opt.step()
        ends.append(p.detach())
    assert torch.equal(*ends)
