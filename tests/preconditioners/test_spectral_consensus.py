"""A consensus by singular values: SpectralConsensus against the formulas, in PISA."""

import math

import pytest
import torch
from torch import nn

from torchpisa import PISA
from torchpisa.preconditioners import Spectral, SpectralConsensus
from torchpisa.theory import LeastSquares, certify

DOUBLE = {"dtype": torch.float64}


def consensus(params, *, momentum=0.95, method="smooth", eta=math.inf, scaling=False, **more):
    rule = Spectral(eta, aspect_scaling=scaling, method="auto" if eta < math.inf else method)
    return PISA(params, SpectralConsensus(momentum, rule), **more)


def by_hand(targets, curvatures, w, *, sigmas, rhos, alphas, mu, lr, decay, scale, rounds):
    """Literally: duals, the sum of what they contribute, and a resolvent by an SVD."""
    duals = [torch.zeros_like(w) for _ in targets]
    for _ in range(rounds):
        total = torch.zeros_like(w)
        for i, (target, curvature) in enumerate(zip(targets, curvatures, strict=True)):
            d = -(1 - mu) / sigmas[i] * (duals[i] + curvature * (w - target))
            total += alphas[i] * (duals[i] + 2 * sigmas[i] * d)
            duals[i] += sigmas[i] * d
        s = sum(a * sigma for a, sigma in zip(alphas, sigmas, strict=True)) + lr * decay
        r = sum(a * rho for a, rho in zip(alphas, rhos, strict=True)) / scale
        u, values, vh = torch.linalg.svd(total - decay * w, full_matrices=False)
        w = w + lr * (u * (values / (s + r * values))) @ vh
    return w


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (6, 2)])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_is_the_formula(shape, decay, foreach):
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(3, *shape, generator=generator, **DOUBLE)
    curvatures, sigmas, rhos, weights = (1.0, 0.5, 2.0), [1.0, 2.0, 3.0], [2.0, 4.0, 1.0], [1, 2, 3]
    w = nn.Parameter(torch.randn(shape, generator=generator, **DOUBLE))
    expected = by_hand(
        *(targets, curvatures, w.detach()),
        **{"sigmas": sigmas, "rhos": rhos, "alphas": [1 / 6, 2 / 6, 3 / 6], "mu": 0.8},
        **{"lr": 0.7, "decay": decay, "scale": max(1, shape[0] / shape[1]) ** 0.5, "rounds": 30},
    )
    opt = consensus(
        *([w],),
        **{"sigma": sigmas, "rho": rhos, "batches": 3, "weights": weights, "momentum": 0.8},
        **{"lr": 0.7, "consensus_decay": decay, "scaling": True, "foreach": foreach},
        method="svd",
    )
    for _ in range(30):
        for target, curvature in zip(targets, curvatures, strict=True):
            w.grad = curvature * (w.detach() - target)
            opt.step()
    torch.testing.assert_close(w.detach(), expected, rtol=1e-12, atol=1e-12)


def test_batches_are_added_up_before_anything_is_preconditioned():
    """Several batches of one sigma go exactly where one with their mean gradient goes."""
    targets = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1), **DOUBLE)
    one, four = (nn.Parameter(torch.zeros(5, 3, **DOUBLE)) for _ in range(2))
    settings = {"sigma": 0.5, "rho": 3.0}
    single, several = consensus([one], **settings), consensus([four], batches=4, **settings)
    for _ in range(25):
        one.grad = one.detach() - targets.mean(0)
        single.step()
        for target in targets:
            four.grad = four.detach() - target
            several.step()
    torch.testing.assert_close(four, one, rtol=1e-12, atol=1e-13)


def test_is_muon_where_singular_values_are_large():
    """Orthogonalised momentum in Nesterov's form, with 1/rho as learning rate."""
    generator = torch.Generator().manual_seed(2)
    w = nn.Parameter(torch.zeros(4, 6, **DOUBLE))
    opt = consensus([w], sigma=1e-9, rho=50.0, momentum=0.9, method="svd")
    expected, average = w.detach().clone(), torch.zeros(4, 6, **DOUBLE)
    for _ in range(20):
        g = torch.randn(4, 6, generator=generator, **DOUBLE)
        w.grad = g
        opt.step()
        ahead = g - average
        average += 0.1 * ahead
        u, _, vh = torch.linalg.svd(average + 0.1 * ahead, full_matrices=False)
        expected -= 0.02 * u @ vh
    torch.testing.assert_close(w.detach(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("settings", [{}, {"eta": 0.1}, {"momentum": 0.0}, {"method": "auto"}])
def test_finds_the_minimum_of_batches_that_differ(settings):
    """Least squares for a matrix, every batch with its own targets and curvature."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(3, 4, 6, generator=generator, **DOUBLE)
    curvatures = torch.tensor([0.2, 1.0, 3.0], **DOUBLE)
    best = (curvatures.view(3, 1, 1) * targets).sum(0) / curvatures.sum()
    w = nn.Parameter(torch.zeros(4, 6, **DOUBLE))
    opt = consensus([w], sigma=3.0, rho=5.0, batches=3, **settings)
    for _ in range(600):
        for target, curvature in zip(targets, curvatures, strict=True):
            w.grad = curvature * (w.detach() - target)
            opt.step()
    torch.testing.assert_close(w.detach(), best, rtol=0, atol=1e-6)


def test_absent_batches_stay_in_the_sum():
    targets = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(3), **DOUBLE)
    w = nn.Parameter(torch.zeros(4, 6, **DOUBLE))
    opt = consensus([w], sigma=2.0, rho=5.0, momentum=0.5, batches=3)
    for k in range(1500):
        for i, target in enumerate(targets):
            if (k + i) % 4 == 0:
                opt.skip()
                continue
            w.grad = w.detach() - target
            opt.step()
    torch.testing.assert_close(w.detach(), targets.mean(0), rtol=0, atol=1e-6)


def test_theory_is_about_the_papers_consensus():
    problem = LeastSquares([(torch.eye(4), torch.ones(4)), (torch.eye(4), torch.zeros(4))])
    with pytest.raises(ValueError, match=r"must leave the consensus \(2\.9\).*SpectralConsensus"):
        certify(problem, SpectralConsensus(), iterations=2)


def test_keeps_no_average():
    with pytest.raises(ValueError, match=r"average must be 0 at the consensus.* got 0\.5"):
        SpectralConsensus(spectral=Spectral(average=0.5))


def test_spectral_of_another_kind():
    with pytest.raises(TypeError, match="spectral must be a Spectral, got 'svd'"):
        SpectralConsensus(spectral="svd")
