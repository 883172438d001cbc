"""Problems: their bounds against brute force, never passed and never idle."""

import pytest
import torch
from torch import nn

from tests.theory.data import RADIUS, SIZES, N, ball, batches, gradient, problem, subset
from torchpisa.theory import (
    LeastSquares,
    LogisticRegression,
    Network,
    Problem,
)

KINDS = ["least squares", "logistic"]


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


@pytest.mark.parametrize("opposed", [False, True])
def test_spread_of_logistic_regression_is_between_its_farthest_gradients(opposed):
    """Gradients are c a with c in [0, 1]: two samples may be farthest apart, or one and zero."""
    a = torch.tensor([[5.0, 0.0, 0.0], [5.0, 0.1, 0.0]], dtype=torch.float64)
    b = torch.tensor([1.0, -1.0 if opposed else 1.0], dtype=torch.float64)
    spread = LogisticRegression([(a, b)], weight_decay=0.1).gradient_spread(0, RADIUS)
    farthest = (a[0] + a[1]).norm() if opposed else a[1].norm()
    assert spread == pytest.approx(float(farthest), rel=1e-12)


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


# What has no constants

ONE = [(torch.ones(3, 1), torch.ones(3))]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LogisticRegression(batches("logistic", False), consensus_decay=0), "must be > 0"),
        (lambda: LogisticRegression(batches("least squares", False)), r"must be -1 or 1, got .*\d"),
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
            lambda: Network(nn.Linear(1, 1), nn.functional.mse_loss, ONE, consensus_decay=0),
            "must be > 0",
        ),
        (lambda: LeastSquares(ONE[0]), r"batches\[0\] must be a pair of tensors, .* a Tensor$"),
        (
            lambda: LeastSquares([tuple(x.numpy() for x in ONE[0])]),
            "got a tuple of ndarray, ndarray$",
        ),
        (lambda: Network(nn.Linear(1, 1), nn.functional.mse_loss, []), "one pair of .*, got none"),
        (
            lambda: LeastSquares([*ONE, (torch.ones(3, 2), torch.ones(3))]),
            r"one width, got widths \[1, 2\]",
        ),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
