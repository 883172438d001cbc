"""Constants against brute force, and as the proofs have them."""

import math
from dataclasses import replace

import pytest
import torch

from tests.theory.data import N, problem
from torchpisa.theory import (
    constants_of,
    delta_of,
)


@pytest.mark.parametrize(("kind", "gamma"), [("least squares", 0.75), ("logistic", 0.99)])
def test_delta_bounds_omega(kind, gamma):
    """Points on the edge of Omega, by bisection along random rays of (w, W)."""
    p = problem(kind)
    sigma, start = 0.7, torch.ones(N, dtype=torch.float64)
    delta = delta_of(p, gamma=gamma, sigma=sigma, start=start)
    level = float(p.objective(start)) + 1 / (1 - gamma)

    def inside(w, d):
        return float(p.objective(w) + sigma / 2 * p.alpha @ d.square().sum(1)) <= level

    assert inside(start, torch.zeros(3, N, dtype=torch.float64))
    farthest = 0.0
    for _ in range(50):
        direction = torch.randn(N, dtype=torch.float64)
        # One batch at a time, and along w: that is where the bound is attained.
        parts = torch.zeros(3, N, dtype=torch.float64)
        parts[int(torch.randint(3, ()))] = direction * torch.rand(()) * 3
        low, high = 0.0, 1e4
        for _ in range(40):
            middle = (low + high) / 2
            if inside(p.optimum + middle * direction, middle * parts):
                low = middle
            else:
                high = middle
        w = p.optimum + low * direction
        farthest = max(farthest, float(w.norm()), float((w + low * parts).norm(dim=1).max()))
    assert 0.2 * delta < farthest <= delta


def test_terms_of_the_condition():
    p = problem("least squares")
    constants = constants_of(p, gamma=0.9, rho_eta=[1.0, 5.0, 2.0], sigma=0.5)
    assert constants.delta == delta_of(p, gamma=0.9, sigma=0.5)
    assert constants.terms == {
        "sigma": 4.0,
        "rho_i eta_i": 40.0,
        "r_i": 8 * max(p.smoothness(i, math.inf) for i in range(3)),
        "delta^-2": 8 / constants.delta**2,
        "epsilon_i(2 delta)": 8
        * max(64 * p.gradient_bound(i, 2 * constants.delta) ** 2 for i in range(3)),
    }
    assert constants.sigma0 == constants.terms["epsilon_i(2 delta)"]


def test_epsilon_on_the_smaller_ball_is_smaller():
    k = constants_of(problem("least squares"), gamma=0.9, rho_eta=[1.0, 500.0, 2.0], sigma=3.0)
    assert k.epsilon_delta < max(k.epsilon)


@pytest.mark.parametrize("comparable", [False, True])
def test_constants_of_the_rate(comparable):
    """Transcribed from the proofs of Theorems 3.1 and 3.2; C_2 with its missing terms."""
    k = constants_of(problem("least squares"), gamma=0.9, rho_eta=[1.0, 500.0, 2.0], sigma=3.0)
    if comparable:  # so that no term is lost beside another
        k = replace(k, delta=1.3, epsilon_delta=40.0, rho_eta=(1.0, 2.0, 0.5), consensus_decay=1.5)
    rho_eta, eps, r, lam = max(k.rho_eta), k.epsilon_delta, max(k.smoothness), k.consensus_decay
    varpi2 = 6 * (rho_eta * k.delta) ** 2 + eps / 4  # (B.28)
    c2 = (18 * rho_eta**2 + 3 * lam**2) * k.delta**2 + eps  # before (B.29)
    assert k.varpi**2 == pytest.approx(varpi2)
    assert k.c**2 == pytest.approx(c2)
    tail = k.c / (3.0 * (1 - 0.9))
    assert k.c1 == pytest.approx(max(k.varpi / 3.0 + tail, k.varpi / 8 + r * tail))
    printed = (math.sqrt(eps) * k.c1 + 8 * lam * k.delta * k.c1 + 4 * (r + lam) * k.c1**2) / 8
    # L - F <= |grad F_i| |d| + r/2 |d|^2 + |pi| |d| + sigma_i/2 |d|^2 with |d| <= varpi/sigma.
    d, pi = k.varpi / 3.0, math.sqrt(5 * eps / 64 + 5 * (rho_eta * k.delta) ** 2)  # (B.27)
    lagrangian = math.sqrt(eps) / 8 * d + r / 2 * d**2 + pi * d + k.varpi * d / 2
    assert k.c2 == pytest.approx(printed + lagrangian + k.varpi * d / 8 + 1 / (16 * 0.1))


def test_printed_epsilon():
    p = problem("logistic")
    full = constants_of(p, gamma=0.9, rho_eta=[1.0] * 3, kind="printed")
    assert full.epsilon == (0, 0, 0)
    assert full.epsilon_delta == 0
    drawn = constants_of(p, gamma=0.9, rho_eta=[1.0] * 3, kind="printed", stochastic=True)
    spreads = [p.gradient_spread(i, 2 * drawn.delta) for i in range(3)]
    assert drawn.epsilon == pytest.approx([64 * spread**2 for spread in spreads])
