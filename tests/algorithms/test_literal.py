"""The optimizers' iterates equal the paper's algorithms as printed (tests/reference/literal.py)."""

import copy

import numpy as np
import pytest
import torch

from tests.reference import literal
from torchpisa import NSISA, PISA, SISA
from torchpisa.preconditioners import Hessian

ITERATIONS = 50
LAMBDA, MU = 0.05, 0.12
SCHEMES = {"adagrad": "I", "rmsprop": "II", "adam": "III"}


class Problem:
    """Least squares in a 6 x 3 matrix with a fresh mini-batch for every iteration and batch."""

    rows, cols, samples = 6, 3, 8

    def __init__(self, m: int, gammas: str) -> None:
        rng = np.random.default_rng(m)
        self.x = rng.standard_normal((ITERATIONS, m, self.samples, self.rows))
        self.x[..., 2] = 0  # a feature that never occurs: its gradients are exactly zero
        self.y = rng.standard_normal((ITERATIONS, m, self.samples, self.cols))
        self.y += 2 * np.arange(m)[:, None, None]  # the batches disagree
        self.start = rng.standard_normal((self.rows, self.cols))
        self.start[2] = 0  # without decay of the weights either
        sizes = np.arange(1, m + 1)
        self.alpha = sizes / sizes.sum()
        self.sigma = 2.0 + 1.5 * np.arange(m)
        self.rho = 3.0 + np.arange(m)[::-1] * 2.0
        growing = 0.75 + 0.2 * np.arange(m) / m
        self.gamma = growing if gammas == "growing" else np.ones(m)
        self.m = m

    def matrix_gradient(self, l: int, i: int, w: np.ndarray) -> np.ndarray:  # noqa: E741
        x, y = self.x[l, i], self.y[l, i]
        return x.T @ (x @ w - y) / self.samples + (MU - LAMBDA) * w

    def gradient(self, l: int, i: int, w: np.ndarray) -> np.ndarray:  # noqa: E741
        return self.matrix_gradient(l, i, w.reshape(self.start.shape)).reshape(-1)

    def hessian(self, l: int, i: int) -> np.ndarray:  # noqa: E741
        x = self.x[l, i]
        h = np.kron(x.T @ x / self.samples, np.eye(self.cols))
        return h + (MU - LAMBDA) * np.eye(self.start.size)

    def printed(self) -> dict:
        return {
            "iterations": ITERATIONS,
            "alpha": self.alpha,
            "sigma0": self.sigma,
            "rho": self.rho,
            "gamma": lambda _, i: self.gamma[i],
            "lam": LAMBDA,
        }

    def settings(self) -> dict:
        return {
            "batches": self.m,
            "weights": [i + 1 for i in range(self.m)],
            "sigma": self.sigma.tolist(),
            "rho": self.rho.tolist(),
            "gamma": self.gamma.tolist(),
            "weight_decay": MU - LAMBDA,
            "consensus_decay": LAMBDA,
            "initial_consensus": True,
        }

    def iterates(self, make, observe=None) -> list[np.ndarray]:
        """w^1, w^2, ... of an optimizer, stepped in an ordinary loop."""
        w = torch.nn.Parameter(torch.tensor(self.start))
        opt = make([w])
        iterates = []
        for l in range(ITERATIONS):  # noqa: E741
            iterates.append(w.detach().numpy().copy())
            for i in range(self.m):
                x, y = torch.tensor(self.x[l, i]), torch.tensor(self.y[l, i])
                loss = 0.5 * (x @ w - y).square().sum() / self.samples
                opt.zero_grad()
                loss.backward(retain_graph=True)
                if observe is not None:
                    observe(loss)
                assert opt.batch == i
                opt.step()
        return iterates


def assert_same(ours, printed) -> None:
    for l, (a, b) in enumerate(zip(ours, printed, strict=True)):  # noqa: E741
        error = np.linalg.norm(a - b.reshape(a.shape)) / np.linalg.norm(b)
        assert error <= 1e-12, f"iteration {l}: relative error {error:.1e}"


def moved(iterates) -> bool:
    return np.linalg.norm(iterates[-1] - iterates[0]) > 0.01


over_problems = pytest.mark.parametrize(
    "problem",
    [Problem(1, "growing"), Problem(2, "constant"), Problem(4, "growing")],
    ids=lambda p: f"m{p.m}-gamma{p.gamma.min():g}",
)
over_paths = pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])


@over_problems
@over_paths
def test_pisa_with_identity(problem, foreach):
    printed = literal.pisa(
        problem.start.reshape(-1),
        problem.gradient,
        lambda _l, _i, _pi, _g, w: np.eye(len(w)),
        **problem.printed(),
    )
    ours = problem.iterates(lambda p: PISA(p, foreach=foreach, **problem.settings()))
    assert moved(ours)
    assert_same(ours, printed)


@over_problems
def test_pisa_with_hessian(problem):
    printed = literal.pisa(
        problem.start.reshape(-1),
        problem.gradient,
        lambda k, i, _pi, _g, _w: problem.hessian(k, i),
        **problem.printed(),
    )
    hessian = Hessian(solver="dense")
    ours = problem.iterates(lambda p: PISA(p, hessian, **problem.settings()), hessian.observe)
    assert_same(ours, printed)


@over_problems
@over_paths
@pytest.mark.parametrize("eta", [0.5, float("inf")], ids=["capped", "free"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sisa(problem, foreach, scheme, eta):
    beta = 0.9
    printed = literal.pisa(
        problem.start.reshape(-1),
        problem.gradient,
        literal.second_moment(SCHEMES[scheme], problem.m, problem.start.size, beta, eta),
        **problem.printed(),
    )
    ours = problem.iterates(
        lambda p: SISA(p, scheme=scheme, beta=beta, eta=eta, foreach=foreach, **problem.settings())
    )
    assert moved(ours)
    assert_same(ours, printed)


@over_problems
@over_paths
@pytest.mark.parametrize("nesterov", [False, True])
def test_nsisa(problem, foreach, nesterov):
    # Steps of the size that NSISA is used with: orthogonalised gradients keep their length near the
    # optimum, and larger steps make the iteration chaotic, which amplifies rounding.
    problem = copy.copy(problem)
    problem.sigma = 20 * problem.sigma
    rule = {"momentum": 0.9, "nesterov": nesterov}
    printed = literal.nsisa(
        problem.start, problem.matrix_gradient, epsilon=0.5, **rule, **problem.printed()
    )
    ours = problem.iterates(
        lambda p: NSISA(p, perturbation=0.5, foreach=foreach, **rule, **problem.settings())
    )
    assert moved(ours)
    assert_same(ours, printed)


def test_perturbation_reaches_the_iterates():
    """The zero feature of the problem makes entries of pi + o vanish, so epsilon must matter."""
    problem = Problem(2, "constant")
    ends = [
        problem.iterates(lambda p, e=e: NSISA(p, perturbation=e, **problem.settings()))[-1]
        for e in (0.0, 0.5)
    ]
    assert np.abs(ends[0] - ends[1]).max() > 1e-6
