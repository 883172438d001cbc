"""NSISA's iterates equal Algorithm 3 as printed (tests/reference/literal.py)."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.algorithms.problem import Problem, assert_same, moved, over_paths, over_problems
from tests.reference import literal
from torchpisa import NSISA


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


@over_paths
def test_perturbation_falls_from_round_to_round(foreach):
    """It is epsilon^(l+1): a dual that forgets everything leaves nothing else in these steps."""
    w = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    w.grad = torch.zeros_like(w)
    opt = NSISA([w], sigma=2.0, rho=1.0, perturbation=0.5, dual_decay=0.0, foreach=foreach)
    for _ in range(3):
        opt.step()
    assert torch.allclose(w, torch.tensor(-2 / 2.0 * (0.5 + 0.25 + 0.125), dtype=w.dtype))
