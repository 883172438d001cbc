"""SISA's iterates equal Algorithm 2 as printed (tests/reference/literal.py)."""

import pytest

from tests.algorithms.problem import assert_same, moved, over_paths, over_problems
from tests.reference import literal
from torchpisa import SISA

SCHEMES = {"adagrad": "I", "rmsprop": "II", "adam": "III"}


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
