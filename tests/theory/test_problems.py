"""Constants against brute force: bounds are never passed, and no bound is idle."""

import math

import pytest
import torch
from torch import nn

from tests.theory.data import SIZES, N, batches, problem
from torchpisa.theory import (
    LeastSquares,
    LogisticRegression,
    Network,
    Problem,
    certify,
    constants_of,
    delta_of,
)

KINDS = ["least squares", "logistic"]
RADIUS = 3.0


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.randn(12, 2)
    y = x.prod(dim=1, keepdim=True)
    parts = list(zip(x.split(6), y.split(6), strict=True))
    return Network(module, nn.functional.mse_loss, parts, weight_decay=0.02, consensus_decay=0.1)


def ball(n, radius, count):
    v = torch.randn(count, n, dtype=torch.float64)
    return radius * torch.rand(count, 1, dtype=torch.float64) ** 0.3 * v / v.norm(dim=1)[:, None]


def gradient(p, i, w, samples=None):
    """Return the gradient of F_i on a mini-batch."""
    w = w.clone().requires_grad_()
    loss = p.loss(i, w, samples) + 0.5 * p.weight_decay * (w @ w)
    return torch.autograd.grad(loss, w)[0]


def subset(size):
    return torch.randperm(size)[: int(torch.randint(1, size + 1, ()))]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_stay_below_their_bounds(kind):
    p = problem(kind, True)
    for i, size in enumerate(SIZES):
        bound, spread = p.gradient_bound(i, RADIUS), p.gradient_spread(i, RADIUS)
        r = p.smoothness(i, RADIUS)
        norms, differences = [], []
        for w, v in zip(ball(N, RADIUS, 20), ball(N, RADIUS, 20), strict=True):
            for samples in (subset(size), torch.randint(size, (1,)), None):
                g = gradient(p, i, w, samples)
                norms.append(float(g.norm()))
                differences.append(float((g - gradient(p, i, w, subset(size))).norm()))
                ratio = (g - gradient(p, i, v, samples)).norm() / (w - v).norm()
                assert ratio <= r * (1 + 1e-12)
        assert 0.2 * bound < max(norms) <= bound
        assert 0.2 * spread < max(differences) <= spread
        assert spread <= 2 * bound


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_are_nearly_attained(kind):
    """By one sample, at the far end of the ball in its own direction."""
    p = problem(kind, False)
    for i, size in enumerate(SIZES):
        attained, curvature = 0.0, 0.0
        for t in range(size):
            a, b = p.features[i][t], p.targets[i][t]
            w = -RADIUS * torch.sign(b) * a / a.norm()
            sample = torch.tensor([t])
            attained = max(attained, float(gradient(p, i, w, sample).norm()))
            h = 1e-4 * a / a.norm()
            slope = gradient(p, i, h, sample) - gradient(p, i, -h, sample)
            curvature = max(curvature, float(slope.norm() / (2 * h.norm())))
        assert attained == pytest.approx(p.gradient_bound(i, RADIUS), rel=0.05)
        assert curvature == pytest.approx(p.smoothness(i, RADIUS), rel=1e-6)


def test_spread_of_least_squares_is_that_of_its_worst_pair():
    p = LeastSquares(batches("least squares", False))
    a, b = p.features[0], p.targets[0]
    worst = 0.0
    for s in range(len(a)):
        for t in range(len(a)):
            matrix = torch.outer(a[s], a[s]) - torch.outer(a[t], a[t])
            constant = (a[s] * b[s] - a[t] * b[t]).norm()
            norm = torch.linalg.matrix_norm(matrix, ord=2)
            worst = max(worst, float(norm * RADIUS + constant))
    assert p.gradient_spread(0, RADIUS) == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_growth(kind):
    p = problem(kind)
    center, curvature, floor = p.growth()
    assert p.gradient(center).norm() < 1e-12
    assert float(p.objective(center)) == pytest.approx(floor, rel=1e-12)
    for away in ball(N, 20.0, 200):
        value = float(p.objective(center + away))
        assert value >= floor + 0.5 * curvature * float(away @ away) - 1e-9
    assert torch.equal(p.optimum, center)


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


def test_constants_of_the_rate():
    """Transcribed from the proofs of Theorems 3.1 and 3.2; C_2 with its missing terms."""
    k = constants_of(problem("least squares"), gamma=0.9, rho_eta=[1.0, 500.0, 2.0], sigma=3.0)
    rho_eta, eps, r, lam = 500.0, k.epsilon_delta, max(k.smoothness), 0.1
    assert eps < max(k.epsilon)
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


# Changes without cancellation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-12, 1e-4, 1.0, 30.0])
def test_change(kind, size):
    """Its own formula, the general one and, of large steps, the plain difference agree."""
    p = problem(kind)
    w, step = ball(N, 2.0, 2)
    step = size * step / step.norm()
    exact = p.change(0, w, step)
    assert Problem.change(p, 0, w, step) == pytest.approx(exact, rel=1e-7)
    if size >= 1:
        plain = float(p.local_objective(0, w + step) - p.local_objective(0, w))
        assert exact == pytest.approx(plain, rel=1e-12)
    else:
        first_order = float(p.local_gradient(0, w) @ step)
        assert exact == pytest.approx(first_order, rel=1e3 * size)


# Networks


def test_network_is_the_module(network):
    x, y = network.batches[1]
    w = network.start
    expected = nn.functional.mse_loss(network.module(x), y).detach()
    assert float(network.loss(1, w)) == pytest.approx(float(expected), rel=1e-12)
    few = torch.tensor([0, 3])
    expected = nn.functional.mse_loss(network.module(x[few]), y[few]).detach()
    assert float(network.loss(1, w, few)) == pytest.approx(float(expected), rel=1e-12)
    assert network.dimension == 13


def test_estimates_of_networks_exceed_what_is_met(network):
    bound, spread = network.gradient_bound(0, RADIUS), network.gradient_spread(0, RADIUS)
    r = network.smoothness(0, RADIUS)
    for w, v in zip(ball(13, RADIUS, 30), ball(13, RADIUS, 30), strict=True):
        sample = torch.randint(6, (1,))
        g = gradient(network, 0, w, sample)
        assert g.norm() <= bound
        assert (g - gradient(network, 0, w, subset(6))).norm() <= spread
        assert (g - gradient(network, 0, v, sample)).norm() <= r * (w - v).norm()


def test_certificate_of_a_network_proves_nothing(network):
    certificate = certify(network, iterations=15)
    assert certificate.passed
    assert not certificate.constants.proven
    assert certificate.covered is None
    assert "the constants are estimates: nothing is proven" in str(certificate)
    assert not certify(network, sigma0=5.0, iterations=15, batch_size=3)["descent"].holds


# What has no constants


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LogisticRegression(batches("logistic", False), consensus_decay=0), "must be > 0"),
        (lambda: LogisticRegression(batches("least squares", False)), "labels must be -1 or 1"),
        (
            lambda: LeastSquares([(torch.ones(3, 2), torch.ones(3))]).growth(),
            "must be > 0 for features without full column rank",
        ),
        (lambda: LeastSquares([(torch.ones(3, 2), torch.ones(2))]), r"got shapes \(3, 2\) and"),
        (lambda: LeastSquares([]), "at least one"),
        (
            lambda: LeastSquares([(torch.ones(3, 2), torch.ones(3))], weight_decay=-1),
            "weight_decay must be a finite number >= 0",
        ),
        (
            lambda: Network(nn.Linear(1, 1), nn.functional.mse_loss, [], consensus_decay=0),
            "must be > 0",
        ),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
