"""Least squares on which the optimizers are held against the paper's algorithms as printed."""

import numpy as np
import pytest
import torch

ITERATIONS = 50
LAMBDA, MU = 0.05, 0.12


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
