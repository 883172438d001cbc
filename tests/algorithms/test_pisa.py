"""PISA's iterates equal Algorithm 1 as printed (tests/reference/literal.py)."""

import numpy as np

from tests.algorithms.problem import assert_same, moved, over_paths, over_problems
from tests.reference import literal
from torchpisa import PISA
from torchpisa.preconditioners import Hessian


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
