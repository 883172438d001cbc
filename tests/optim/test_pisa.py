"""PISA: what lr, clip and dual_decay do to the fixed point, and what it is with one batch."""

import pytest
import torch
from torch import nn

import torchpisa
from tests.optim.least_squares import PROBLEM, rounds, sisa
from torchpisa import NSISA, PISA, SISA


@pytest.mark.parametrize(
    "schedule",
    [
        lambda k: max(0.5, 0.97**k),
        lambda k: min(1.0, k / 60),
        lambda k: float(not 20 <= k < 40),
    ],
    ids=["decaying", "warming up from zero", "zero in mid-run"],
)
def test_lr_schedules_reach_the_optimum(schedule):
    w = PROBLEM.start()
    opt = sisa(w)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    for _ in range(220):
        rounds(opt, w, 1)
        scheduler.step()
    assert PROBLEM.error(w) < 1e-8


def test_lr_zero_moves_duals_only():
    w = PROBLEM.start()
    before = w.detach().clone()
    opt = sisa(w, lr=0.0, consensus_decay=0.1)
    rounds(opt, w, 5)
    assert torch.equal(w.detach(), before)
    assert opt.state[w]["dual.0"].abs().max() > 0


def test_lr_equals_dividing_sigma_and_rho():
    starts, ends = [], []
    for settings in ({"lr": 0.25}, {"sigma": 4 * PROBLEM.curvature, "rho": 4.0}):
        w = PROBLEM.start()
        opt = sisa(w, consensus_decay=0.3, initial_consensus=True, **settings)
        starts.append(w.detach().clone())
        rounds(opt, w, 50)
        ends.append(w.detach())
    torch.testing.assert_close(starts[0], starts[1], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-14)


def test_clipping_the_residual_reaches_the_optimum():
    w = PROBLEM.start()
    opt = sisa(w, clip=1.0)
    first = [float(torch.autograd.grad(PROBLEM.loss(i, w), w)[0].norm()) for i in range(PROBLEM.m)]
    assert max(first) > 10, "the clip must bite for the test to say anything"
    rounds(opt, w, 120)
    assert PROBLEM.error(w) < 1e-8


def test_clipping_gradients_does_not():
    w = PROBLEM.start()
    opt = sisa(w)
    for _ in range(120):
        for i in range(PROBLEM.m):
            opt.zero_grad()
            PROBLEM.loss(i, w).backward()
            torch.nn.utils.clip_grad_norm_([w], 1.0)
            opt.step()
    assert PROBLEM.error(w) > 0.1


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
def test_clip_is_the_norm_over_all_parameters(foreach):
    """Two groups, two dtypes: one norm over everything."""
    a = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    b = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    opt = PISA([{"params": [a]}, {"params": [b]}], sigma=1.0, rho=0.0, clip=1.5, foreach=foreach)
    a.grad, b.grad = torch.tensor([2.0, 4.0]), torch.tensor([4.0], dtype=torch.float64)  # norm 6
    opt.step()
    torch.testing.assert_close(a.detach(), torch.tensor([0.0, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(b.detach(), torch.zeros(1).double(), atol=1e-6, rtol=0)


def test_dual_decay_moves_the_fixed_point():
    """Without decay, as many rounds end at the optimum (tests above)."""
    w = PROBLEM.start()
    rounds(sisa(w, dual_decay=0.99), w, 120)
    assert PROBLEM.error(w) > 1e-3


@pytest.mark.parametrize("q", [0.3, 1.0, 4.0])
def test_one_batch_is_heavy_ball_with_a_look_ahead(q):
    """y+ = b y - g(x + y)/(sigma + rho q), x+ = x + y+, over 300 steps; x + y is w."""
    sigma, rho = 0.7, 2.0 * q
    a = PROBLEM.a[3] / PROBLEM.curvature**0.5
    gradient = lambda w: a.T @ (a @ w - PROBLEM.b[3]) / len(a)  # noqa: E731
    w = PROBLEM.start()
    opt = PISA([w], sigma=sigma, rho=rho)
    x, y = w.detach().clone(), torch.zeros_like(w)
    b = rho / (sigma + rho)
    for _ in range(300):
        w.grad = gradient(w.detach())
        y = b * y - gradient(x + y) / (sigma + rho)
        x = x + y
        opt.step()
        torch.testing.assert_close(w.detach(), x + y, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(opt.state[w]["dual.0"] / sigma, y, rtol=1e-9, atol=1e-11)


def test_with_identity_the_duals_are_one_dual_on_the_averaged_gradient():
    w, v = PROBLEM.start(), PROBLEM.start()
    many = PISA([w], sigma=3.0, rho=5.0, batches=PROBLEM.m, weights=PROBLEM.weights)
    one = PISA([v], sigma=3.0, rho=5.0)
    for _ in range(100):
        rounds(many, w, 1)
        one.zero_grad()
        sum(a * PROBLEM.loss(i, v) for i, a in enumerate(PROBLEM.weights)).backward()
        one.step()
    torch.testing.assert_close(w.detach(), v.detach(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("make", [SISA, NSISA, PISA])
def test_a_relative_lr_that_looks_absolute_warns(make, recwarn):
    settings = {"sigma": 0.5, "rho": 10.0}
    make([torch.nn.Parameter(torch.ones(2))], **settings)
    make([torch.nn.Parameter(torch.ones(2))], lr=0.5, **settings)
    SISA([torch.nn.Parameter(torch.ones(2))], lr=1e-3)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"lr=0\.001 is relative here"):
        make([torch.nn.Parameter(torch.ones(2))], lr=1e-3, **settings)


class Mine(SISA):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda w: PISA([w], lr=1e-3),
        lambda w: SISA([w], lr=1e-3, sigma=0.5),
        lambda w: NSISA([w], lr=1e-3),
        lambda w: Mine([w], lr=1e-3, sigma=0.5),
        lambda w: SISA([{"params": [w], "lr": 1e-3, "sigma": 0.5}]),
        lambda w: SISA([torch.ones(1)]).add_param_group({"params": [w], "lr": 1e-3, "sigma": 0.5}),
        lambda w: torchpisa.create("sisa", nn.ParameterList([w]), lr=1e-3, sigma=0.5),
        lambda w: torchpisa.create("sisa", nn.ParameterList([w]), momentum=0.5, sigma=0.5),
    ],
)
def test_warnings_about_arguments_name_the_line_of_the_user(make):
    with pytest.warns(UserWarning, match="is relative here|has no effect") as seen:
        make(nn.Parameter(torch.ones(2)))
    (warning,) = seen
    assert (warning.filename, warning.lineno) == (__file__, make.__code__.co_firstlineno)


@pytest.mark.parametrize("make", [SISA, NSISA, PISA])
def test_a_negative_lr_is_refused_before_a_dual_has_changed(make):
    """Also in the batch that ends a round, whose local step comes before the consensus."""
    w = torch.nn.Parameter(torch.ones(3, 2))
    opt = make([w], batches=2)
    w.grad = torch.ones(3, 2)
    opt.step()
    before = {key: value.clone() for key, value in opt.state[w].items() if key != "arrived"}
    opt.param_groups[0]["lr"] = -0.1
    with pytest.raises(ValueError, match=r"lr must be a finite number >= 0, got -0\.1"):
        opt.step()
    assert all(torch.equal(opt.state[w][key], value) for key, value in before.items())
    assert opt.batch == 1
