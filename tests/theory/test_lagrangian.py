"""L and its merit function against the formulas as printed, with every w_i stored."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.theory.data import problem
from torchpisa.preconditioners import Hessian, Identity, SecondMoment
from torchpisa.theory import augmented_lagrangian, certify, merit
from torchpisa.theory.lagrangian import lagrangian_change, lagrangian_gap

M, N, ITERATIONS = 3, 4, 6
GAMMA, RHO, SIGMA0, ETA = [0.75, 0.8, 0.9], [0.5, 1.0, 2.0], [40.0, 50.0, 60.0], 1.5
START = np.array([0.3, -0.2, 0.5, 0.1])


def choose_q(name, p, kept, l, i, w, r):  # noqa: E741 (the paper's letter)
    if name == "identity":
        return np.eye(N)
    if name == "SISA":
        kept[i] = 0.99 * kept[i] + 0.01 * r * r
        return np.diag(np.sqrt(np.minimum(kept[i] / (1 - 0.99 ** (l + 1)), ETA**2)))
    a = p.features[i].numpy()
    curvature = np.ones(len(a))
    if type(p).__name__ == "LogisticRegression":
        s = 1 / (1 + np.exp(a @ w))
        curvature = s * (1 - s)
    return a.T @ (curvature[:, None] * a) / len(a) + p.weight_decay * np.eye(N)


class Values(NamedTuple):
    lagrangian: float
    merit: float
    objective: float
    w: np.ndarray
    w_i: list[np.ndarray]
    sigma: list[float]


def literal(name, p):
    """Run Algorithm 1 with (2.6) and (3.7) after every iteration."""
    alpha, lam = p.alpha.numpy(), p.consensus_decay
    w, w_i, pi = START.copy(), [START.copy()] * M, [np.zeros(N)] * M
    q, sigma = [np.zeros((N, N))] * M, list(SIGMA0)
    kept = [np.zeros(N)] * M

    def loss(i, v):
        return float(p.local_objective(i, torch.tensor(v)))

    values = []
    for l in range(ITERATIONS + 1):  # noqa: E741
        lagrangian = lam / 2 * w @ w
        extra = 0.0
        for i in range(M):
            gap = w_i[i] - w
            local = loss(i, w_i[i]) + pi[i] @ gap + sigma[i] / 2 * gap @ gap
            lagrangian += alpha[i] * local
            pull = RHO[i] * q[i] @ gap
            extra += alpha[i] * 8 / sigma[i] * pull @ pull
            extra += alpha[i] * GAMMA[i] ** l / (16 * (1 - GAMMA[i]))
        objective = float(p.objective(torch.tensor(w)))
        values.append(Values(lagrangian, lagrangian + extra, objective, w, w_i, list(sigma)))
        w = sum(alpha[i] * (sigma[i] * w_i[i] + pi[i]) for i in range(M))
        w = w / (sum(alpha[i] * sigma[i] for i in range(M)) + lam)
        w_i, pi, q = list(w_i), list(pi), list(q)
        for i in range(M):
            g = p.local_gradient(i, torch.tensor(w)).numpy()
            q[i] = choose_q(name, p, kept, l, i, w, pi[i] + g)
            sigma[i] = sigma[i] / GAMMA[i]
            w_i[i] = w - np.linalg.inv(sigma[i] * np.eye(N) + RHO[i] * q[i]) @ (pi[i] + g)
            pi[i] = pi[i] + sigma[i] * (w_i[i] - w)
    return values


def descent(p, last, now):
    """Return the left side of (3.6) minus its right side."""
    promised = 0.0
    for i in range(M):
        step, local_step = now.w - last.w, now.w_i[i] - last.w_i[i]
        local = (last.sigma[i] + 2 * p.consensus_decay) / 4 * step @ step
        promised += p.alpha[i].item() * (local + last.sigma[i] / 4 * local_step @ local_step)
    return last.merit - now.merit - promised


PRECONDITIONERS = {
    "identity": Identity(),
    "SISA": SecondMoment(eta=ETA),
    "Newton": Hessian(),
}


@pytest.mark.parametrize("name", PRECONDITIONERS)
@pytest.mark.parametrize("kind", ["least squares", "logistic"])
def test_against_the_formulas(kind, name):
    p = problem(kind, True)
    certificate = certify(
        p,
        PRECONDITIONERS[name],
        gamma=GAMMA,
        rho=RHO,
        sigma0=SIGMA0,
        start=torch.tensor(START),
        iterations=ITERATIONS,
    )
    iterates, expected = certificate.iterates, literal(name, p)
    for at, values in zip(iterates, expected, strict=True):
        assert augmented_lagrangian(p, at) == pytest.approx(values.lagrangian, rel=1e-12)
        assert merit(p, at, GAMMA) == pytest.approx(values.merit, rel=1e-12)
        gap = values.lagrangian - values.objective
        assert lagrangian_gap(p, at) == pytest.approx(gap, abs=1e-12)
    for (last, now), (a, b) in zip(pairwise(iterates), pairwise(expected), strict=True):
        change = b.lagrangian - a.lagrangian
        assert lagrangian_change(p, last, now) == pytest.approx(change, abs=1e-12)
    worst = certificate["descent"]
    left = descent(p, *expected[worst.iteration : worst.iteration + 2])
    assert worst.bound - worst.value == pytest.approx(left, abs=1e-12)
