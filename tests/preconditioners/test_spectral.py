"""Spectral as a preconditioner: shapes, state, batches of one shape, what it refuses."""

import math

import pytest
import torch
from torch import nn

from torchpisa import PISA
from torchpisa.algorithms.spectral import by_svd
from torchpisa.kernels import resolvent
from torchpisa.preconditioners import LocalProblem, Spectral


def problem(r, sigma=0.5, rho=2.0, step=1):
    zero = torch.zeros_like(r)
    return LocalProblem(r, r, zero, r, sigma, rho, 0.0, step)


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (6, 3, 2, 2), (1, 5), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["auto", "svd", "gram", "polar"])
def test_step_of_one_matrix(shape, dtype, method):
    """Convolutions are matrices of their first dimension; both scalings divide rho."""
    if method == "gram" and dtype == torch.float64:
        pytest.skip("for float32")
    r = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    cols = r.numel() // shape[0]
    largest = math.sqrt(max(shape[0], cols))
    scales = {
        **{"none": 1.0, "aspect_scaling": math.sqrt(max(1.0, shape[0] / cols))},
        "match_rms": largest if 1 in (shape[0], cols) else 0.2 * largest,
    }
    for name, a in scales.items():
        own = Spectral(eta=1.5, method=method, **({} if name == "none" else {name: True}))
        d, state = own.solve(problem(r), {})
        wanted = -by_svd(r.flatten(1), 0.5, 2.0 / a, 1.5).reshape(shape)
        tolerance = 1e-5 if dtype == torch.float32 or method == "polar" else 1e-12
        torch.testing.assert_close(d, wanted, rtol=tolerance, atol=tolerance)
        assert state == own.init(r) == {}


@pytest.mark.parametrize("shape", [(40, 70), (70, 40), (60, 3, 2, 2), (90,), (1, 50)])
def test_match_rms_bounds_the_entries_of_a_step(shape):
    """Whatever the shape and the scale: with a tiny sigma, 0.2 or 1 over rho, and never more."""
    u = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bound = (1.0 if len(shape) == 1 or 1 in shape else 0.2) / 50.0
    for scale, sigma in ((1e-3, 1e-12), (1e5, 1e-12), (1.0, 10.0)):
        w = Spectral(match_rms=True).consensus(torch.zeros_like(u), scale * u, 50.0, sigma)
        rms = float(w.square().mean().sqrt())
        assert rms <= bound * (1 + 1e-9)
        assert (rms > 0.999 * bound) == (sigma < 1)


def test_one_scaling_at_a_time():
    with pytest.raises(ValueError, match="aspect_scaling must be False with match_rms"):
        Spectral(aspect_scaling=True, match_rms=True)


def test_vectors_are_those_of_a_division_by_their_norm():
    """One row has one singular value, its norm: the whole row is divided by sigma + rho |r|."""
    r = torch.randn(1, 9, dtype=torch.float64)
    d, _ = Spectral().solve(problem(r), {})
    torch.testing.assert_close(d, -r / (0.5 + 2 * r.norm()))


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (6, 2, 2, 2)])
def test_average_is_small_and_moves(shape):
    own = Spectral(average=0.8)
    r = torch.randn(shape, dtype=torch.float64)
    state = own.init(r)
    n = min(shape[0], r.numel() // shape[0])
    assert state["average"].shape == (n, n)
    d, state = own.solve(problem(r), state)
    torch.testing.assert_close(d, Spectral().solve(problem(r), {})[0])  # of one, its own
    _, state = own.solve(problem(3 * r, step=2), state)
    assert float(state["average"].trace()) == pytest.approx(
        float((0.8 * 0.2 + 0.2 * 9) * r.square().sum())
    )


def test_matrices_of_one_shape_are_solved_together(monkeypatch):
    """Up to transposition, unless they are scaled differently."""
    calls = []
    solve = Spectral.solve_matrix

    def counted(self, r, *rest):
        calls.append(tuple(r.shape))
        return solve(self, r, *rest)

    monkeypatch.setattr(Spectral, "solve_matrix", counted)
    rs = [torch.randn(shape) for shape in [(4, 6), (6, 4), (4, 6), (3, 3)]]
    for own, expected in (
        (Spectral(), [(3, 4, 6), (1, 3, 3)]),
        (Spectral(aspect_scaling=True), [(2, 4, 6), (1, 3, 3), (1, 4, 6)]),
    ):
        calls.clear()
        for r, y in zip(rs, resolvent.resolvents(rs, own, 0.5, 2.0), strict=True):
            wanted = by_svd(r, 0.5, 2.0 / own.scale(*r.shape))
            torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)
        assert calls == expected


def test_refuses_what_is_no_matrix():
    for param in (torch.ones(3), torch.ones(2, 2, dtype=torch.complex64), torch.ones(0, 3)):
        w = nn.Parameter(param)
        opt = PISA([w], Spectral())
        w.grad = torch.zeros_like(w)
        with pytest.raises(ValueError, match="params must be real matrices for Spectral, got"):
            opt.step()
    with pytest.raises(ValueError, match=r"method must be one of 'auto', .* 'smooth', got 'qr'"):
        Spectral(method="qr")


def test_averages_are_saved_and_resumed():
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
        return model, PISA([model[0].weight, model[1].weight], Spectral(average=0.9), batches=2)

    def train(model, opt, start, stop):
        for k in range(start, stop):
            torch.manual_seed(k)
            opt.zero_grad()
            model(torch.randn(6, 5)).square().mean().backward()
            opt.step()

    (one, opt), (two, other) = made(), made()
    train(one, opt, 0, 7)
    two.load_state_dict(one.state_dict())
    other.load_state_dict(opt.state_dict())
    assert opt.memory().by_name["average"] == 2 * 4 * (16 + 4)
    train(one, opt, 7, 12)
    train(two, other, 7, 12)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(ValueError, match="state_dict must have"):
        PISA([two[0].weight, two[1].weight], Spectral(), batches=2).load_state_dict(
            opt.state_dict()
        )


@pytest.mark.parametrize("settings", [{}, {"average": 0.9}, {"eta": 0.1}])
def test_finds_the_minimum_of_batches_that_differ(settings):
    """Least squares for a matrix, every batch with its own targets: the mean wins."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(3, 4, 6, dtype=torch.float64, generator=generator)
    w = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    opt = PISA([w], Spectral(**settings), sigma=3.0, rho=1.0, batches=3, gamma=0.999)
    for _ in range(300):
        for target in targets:
            w.grad = w.detach() - target
            opt.step()
    torch.testing.assert_close(w.detach(), targets.mean(0), rtol=0, atol=1e-3)


@pytest.mark.parametrize("options", [{"eta": 1.0}, {"average": 0.5}])
def test_smooth_has_neither_cap_nor_average(options):
    with pytest.raises(ValueError, match="method must not be 'smooth' with a finite eta"):
        Spectral(method="smooth", **options)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5)])
def test_smooth_batches_equal_single_matrices(shape):
    torch.manual_seed(0)
    own = Spectral(method="smooth", aspect_scaling=True)
    rs = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    rs.append(torch.randn(shape[::-1], dtype=torch.float64))
    for found, r in zip(resolvent.resolvents(rs, own, 0.3, 2.0), rs, strict=True):
        expected, _ = own.solve_matrix(r, {}, 0.3, 2.0 / own.scale(*r.shape), 1)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_smooth_without_rho_is_gradient_descent(dtype):
    """Up to the usual factor of Newton-Schulz."""
    r = torch.randn(4, 6, dtype=dtype, generator=torch.Generator().manual_seed(0))
    own = Spectral(method="smooth")
    for y in (own.solve_matrix(r, {}, 0.5, 0.0, 1)[0], *resolvent.resolvents([r], own, 0.5, 0.0)):
        ratio = y / (r / 0.5)
        assert 0.6 < ratio.min() <= ratio.max() < 1.3
