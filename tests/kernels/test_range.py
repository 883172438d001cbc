"""Penalties that have grown to the end of float32, or for 200,000 rounds, leave numbers finite."""

import math

import pytest
import torch
from torch import nn

from torchpisa import MISA, NSISA, PISA, SISA
from torchpisa.kernels.cpu import native
from torchpisa.kernels.optional import without_triton
from torchpisa.kernels.triton import plan
from torchpisa.penalty import LARGEST_SIGMA, grown
from torchpisa.preconditioners import Identity, Preconditioner, Spectral, SpectralConsensus

# Only sigmas that were given grow by gamma.
PAPER = {"sigma": 0.5, "rho": 1e3}
KINDS = {
    "identity": (PISA, {}),
    "sisa": (SISA, PAPER),
    "sisa-adagrad": (SISA, {"scheme": "adagrad", **PAPER}),
    "nsisa": (NSISA, {"ns_dtype": None, "sisa_sigma": 0.5, "sisa_rho": 1e3}),
    "consensus": (PISA, {"preconditioner": SpectralConsensus(spectral=Spectral(method="smooth"))}),
    "consensus-svd": (PISA, {"preconditioner": SpectralConsensus(spectral=Spectral(method="svd"))}),
    "spectral": (PISA, {"preconditioner": Spectral()}),
    "spectral-average": (PISA, {"preconditioner": Spectral(average=0.9)}),
}
WAYS = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "default": {},
    "capturable": {"capturable": True},
    "native": {"fused": True},
    "triton": {"fused": True},
}
# Fused kernels know neither preconditioners of one's own nor, in C, NSISA.
UNFUSED = [kind for kind, (_, own) in KINDS.items() if "preconditioner" in own]
kernels = pytest.mark.parametrize(
    ("kind", "way"),
    [
        (kind, way)
        for kind in KINDS
        for way in WAYS
        if not (kind in UNFUSED and "fused" in WAYS[way]) and (kind, way) != ("nsisa", "native")
    ],
)


def make(kind, way, monkeypatch, dtype=torch.float32, **more):
    """An optimizer of a matrix and a vector, in one of the ways to compute."""
    cls, own = KINDS[kind]
    if way == "triton":
        if without_triton() is not None:
            pytest.skip("needs Triton")
        monkeypatch.setattr(plan, "DEVICES", ["cuda", "cpu"])
    if way == "native" and native._library() is None:
        pytest.skip("needs a C compiler")
    torch.manual_seed(0)
    shapes = ((4, 3), (2, 5)) if kind.startswith("spectral") else ((4, 3), (5,))
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    if cls is NSISA and "sigma" in more:
        more["sisa_sigma"] = more["sigma"]
    return params, cls(params, **{**own, **WAYS[way], **more})


def train(params, opt, rounds, seed=0):
    """A quadratic loss with a little noise, one gradient per batch."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(rounds * opt.batches):
        for p in params:
            p.grad = p.detach() + 0.1 * torch.randn(p.shape, generator=generator).to(p.dtype)
        opt.step()


def tensors(opt):
    return [v for own in opt.state.values() for v in own.values() if isinstance(v, torch.Tensor)]


def assert_finite(params, opt):
    assert all(t.isfinite().all() for t in (*params, *tensors(opt)))


@kernels
@pytest.mark.parametrize(("batches", "sigma"), [(1, 1e38), (2, 1e30)])
def test_sigma_at_the_end_of_float32(kind, way, batches, sigma, monkeypatch):
    """The duals are those of float64, where nothing is near an end."""
    more = {"sigma": sigma, "batches": batches}
    params, opt = make(kind, way, monkeypatch, **more)
    exact, other = make(kind, "loop", monkeypatch, torch.float64, **more)
    train(params, opt, 5)
    train(exact, other, 5)
    assert_finite(params, opt)
    for p, q in zip(params, exact, strict=True):
        found, expected = opt.state[p]["dual.0"].double(), other.state[q]["dual.0"]
        # Newton-Schulz multiplies the rounding of small singular values.
        tolerance = 1e-2 if kind == "nsisa" else 1e-4
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(p.detach(), q.detach().float()), "so large a penalty moves nothing"


@kernels
def test_growth_over_the_range_of_200_000_rounds(kind, way, monkeypatch):
    """1 / 0.999^200000 is 1e87, here in fewer rounds; float32 ends before half of them."""
    rounds = 40 if way == "triton" else 100
    gamma = math.exp(200_000 * math.log(0.999) / rounds)
    params, opt = make(kind, way, monkeypatch, gamma=gamma)
    train(params, opt, rounds)
    assert_finite(params, opt)
    for group in opt.param_groups:
        assert [float(sigma) for sigma in group["sigma"]] == pytest.approx([LARGEST_SIGMA])


@pytest.mark.parametrize("way", ["loop", "foreach", "capturable"])
def test_misa_has_no_penalty_to_grow(way):
    """Instead, its running averages of vanishing gradients stay finite."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (5,))]
    opt = MISA(params, ns_dtype=None, **WAYS[way])
    for k in range(500):  # subnormal gradients from about 380 on, zeros from about 450 on
        for p in params:
            p.grad = p.detach() * 0.5 ** (k / 3)
        opt.step()
    assert_finite(params, opt)


def test_growth_of_tensors():
    sigma = torch.tensor([2.0, 8e29, 1e35])
    expected = torch.tensor([4.0, 1e30, 1e35])
    assert torch.equal(grown(sigma, 0.5), expected)
    assert torch.equal(grown(sigma, torch.tensor(0.5)), expected)
    assert grown(2.0, torch.tensor(0.5)) == 4
    assert grown(1e35, torch.tensor(0.5)) == torch.tensor(1e35)


class Plain(Preconditioner):
    """Identity as a user writes it, who returns d."""

    def __init__(self):
        self.seen = []

    def solve(self, problem, state):
        self.seen.append((problem.sigma, problem.rho))
        return -problem.residual / (problem.sigma + problem.rho), {}


def test_own_preconditioners_see_sigma_and_rho():
    ends, own = [], Plain()
    for preconditioner in (own, Identity()):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(4))
        opt = PISA([p], preconditioner, sigma=3.0, rho=2.0, gamma=0.5)
        train([p], opt, 200)
        assert_finite([p], opt)
        ends.append(p.detach())
    torch.testing.assert_close(*ends)
    assert own.seen[:2] == [(6.0, 2.0), (12.0, 2.0)]
    assert own.seen[-1] == (LARGEST_SIGMA, 2.0)
