"""Second-order information: against closed forms, dense against matrix-free, and its guards."""

import copy
import math

import pytest
import torch
from torch import nn

from torchpisa import PISA
from torchpisa.preconditioners import Hessian
from torchpisa.preconditioners.hessian import conjugate_gradients

SIGMA, RHO = 0.7, 1.3
EYE = torch.eye(5, dtype=torch.float64)


def quadratic():
    torch.manual_seed(0)
    a = torch.randn(12, 5, dtype=torch.float64)
    return a.T @ a / 12, torch.randn(5, dtype=torch.float64)


def step(opt, loss, outputs=None):
    opt.zero_grad()
    loss.backward(retain_graph=True)
    opt.param_groups[0]["preconditioner"].observe(loss, outputs)
    opt.step()


def test_closed_form_on_a_quadratic():
    """w+ = w - 2 (sigma I + rho H)^-1 g in the first round of one batch."""
    h, b = quadratic()
    w = nn.Parameter(torch.ones(5, dtype=torch.float64))
    gradient = h @ w.detach() - b
    expected = w.detach() - 2 * torch.linalg.solve(SIGMA * EYE + RHO * h, gradient)
    step(PISA([w], Hessian(), sigma=SIGMA, rho=RHO), 0.5 * w @ h @ w - b @ w)
    torch.testing.assert_close(w.detach(), expected, rtol=1e-12, atol=0)


def test_small_sigma_is_newton():
    """With sigma -> 0 and rho = 1 the local point w + d is Newton's: the optimum at once."""
    h, b = quadratic()
    w = nn.Parameter(torch.ones(5, dtype=torch.float64))
    step(PISA([w], Hessian(), sigma=1e-9, rho=2.0), 0.5 * w @ h @ w - b @ w)
    torch.testing.assert_close(w.detach(), torch.linalg.solve(h, b), rtol=1e-6, atol=1e-8)


def test_weight_decay_is_part_of_the_curvature():
    h, b = quadratic()
    ends = []
    for decay in (0.0, 0.3):
        w = nn.Parameter(torch.ones(5, dtype=torch.float64))
        opt = PISA([w], Hessian(), sigma=SIGMA, rho=RHO, weight_decay=decay)
        explicit = 0.15 * w @ w if decay == 0 else 0
        step(opt, 0.5 * w @ h @ w - b @ w + explicit)
        ends.append(w.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=0)


def test_projection_to_zero_and_eta():
    """Negative curvature counts as 0, curvature above eta as eta."""
    diagonal = torch.tensor([-2.0, 0.5, 10.0], dtype=torch.float64)
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt = PISA([w], Hessian(solver="dense", eta=3.0), sigma=1.0, rho=2.0)
    step(opt, 0.5 * (diagonal * w * w).sum())
    q = torch.tensor([0.0, 0.5, 3.0], dtype=torch.float64)
    torch.testing.assert_close(w.detach(), 1 - 2 * diagonal / (1 + 2 * q))


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(20, 4, dtype=torch.float64)
    return model, x, torch.randint(0, 3, (20,))


@pytest.mark.parametrize("curvature", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("probes", [0, 4])
def test_conjugate_gradients_equal_the_dense_solve(curvature, probes):
    """On logistic regression, which is convex, so that the dense solver projects nothing."""
    ends = []
    for solver in ("dense", "cg"):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        _, x, y = network()
        hessian = Hessian(curvature, solver, tol=1e-12, max_iter=200, probes=probes)
        opt = PISA(model.parameters(), hessian, sigma=0.5, rho=2.0)
        for _ in range(5):
            outputs = model(x)
            step(opt, nn.functional.cross_entropy(outputs, y), outputs)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-11)


def test_gauss_newton_matrix():
    """J^T H J against the Jacobian written out."""
    model, x, y = network()
    params = list(model.parameters())
    outputs = model(x)
    loss = nn.functional.cross_entropy(outputs, y)
    hessian = Hessian("gauss_newton")
    hessian.observe(loss, outputs)
    product = hessian._product(params, torch.float64)
    n = sum(p.numel() for p in params)
    ours = torch.stack([product(e) for e in torch.eye(n, dtype=torch.float64)])

    names = [name for name, _ in model.named_parameters()]
    values = tuple(p.detach() for p in params)
    call = lambda *v: torch.func.functional_call(model, dict(zip(names, v, strict=True)), (x,))  # noqa: E731
    jacobian = torch.cat(
        [j.reshape(outputs.numel(), -1) for j in torch.autograd.functional.jacobian(call, values)],
        dim=1,
    )
    inner = torch.autograd.functional.hessian(
        lambda o: nn.functional.cross_entropy(o.view_as(outputs), y), outputs.detach().flatten()
    )
    torch.testing.assert_close(ours, jacobian.T @ inner @ jacobian, rtol=1e-9, atol=1e-12)


def test_a_network_trains_matrix_free():
    model, x, y = network()
    hessian = Hessian("gauss_newton", "cg", max_iter=20)
    opt = PISA(model.parameters(), hessian, sigma=0.1, rho=2.0, batches=2)
    losses = []
    for k in range(200):
        half = slice(k % 2 * 10, k % 2 * 10 + 10)
        outputs = model(x[half])
        loss = nn.functional.cross_entropy(outputs, y[half])
        losses.append(loss.item())
        step(opt, loss, outputs)
    assert losses[-1] < 0.3 * losses[0]


def test_a_loss_serves_one_step_only():
    h, b = quadratic()
    w = nn.Parameter(torch.ones(5, dtype=torch.float64))
    opt = PISA([w], Hessian(), sigma=SIGMA, rho=RHO)
    step(opt, 0.5 * w @ h @ w - b @ w)
    with pytest.raises(RuntimeError, match=r"observe\(loss, outputs\) before every step"):
        opt.step()


def test_two_groups_share_a_loss():
    h, b = quadratic()
    parts = [nn.Parameter(p.clone()) for p in torch.ones(5, dtype=torch.float64).split([2, 3])]
    opt = PISA([{"params": [p]} for p in parts], Hessian(), sigma=SIGMA, rho=RHO)
    w = torch.cat(parts)
    step(opt, 0.5 * w @ h @ w - b @ w)
    gradient = h @ torch.ones(5, dtype=torch.float64) - b
    for p, cut in zip(parts, (slice(0, 2), slice(2, 5)), strict=True):
        block = (SIGMA * EYE + RHO * h)[cut, cut]
        torch.testing.assert_close(p.detach(), 1 - 2 * torch.linalg.solve(block, gradient[cut]))


@pytest.mark.parametrize("eta", [math.inf, 0.2], ids=["no cap", "cap below the decay"])
def test_missing_gradients_have_no_curvature_but_the_decay(eta):
    a, b = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    hessian = Hessian(solver="dense", eta=eta)
    opt = PISA([a, b], hessian, sigma=2.0, rho=3.0, batches=2, weight_decay=0.5)
    step(opt, (a * a).sum() + (b * b).sum())
    step(opt, (a * a).sum())
    dual = 2.0 * -0.5 / (2.0 + 3.0 * min(0.5, eta))
    torch.testing.assert_close(opt.state[b]["dual.1"], torch.full_like(b, dual))


def test_copies_leave_the_graph_behind():
    h, b = quadratic()
    w = nn.Parameter(torch.ones(5, dtype=torch.float64))
    opt = PISA([w], Hessian(), sigma=SIGMA, rho=RHO)
    step(opt, 0.5 * w @ h @ w - b @ w)
    assert copy.deepcopy(opt).iteration == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Hessian("newton"),
            "curvature must be one of 'hessian', 'gauss_newton', got 'newton'",
        ),
        (lambda: Hessian(solver="lu"), "solver must be one of 'auto', 'dense', 'cg', got 'lu'"),
        (lambda: Hessian(eta=0.0), r"eta must be a number > 0, got 0\.0"),
        (lambda: Hessian(eta=1.0), r"eta must be inf unless solver is 'dense', got 1\.0"),
        (lambda: Hessian(tol=0.0), r"tol must be a finite number > 0, got 0\.0"),
        (lambda: Hessian(max_iter=0), "max_iter must be an integer >= 1, got 0"),
        (lambda: Hessian(probes=-1), "probes must be an integer >= 0, got -1"),
        (lambda: Hessian().observe(torch.ones(())), "loss must be differentiable"),
        (
            lambda: Hessian("gauss_newton").observe(torch.ones((), requires_grad=True)),
            "outputs must be given",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_complex_parameters_are_refused():
    z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    opt = PISA([z], Hessian())
    with pytest.raises(ValueError, match="params must be real"):
        step(opt, z.abs().square().sum())


class TestConjugateGradients:
    def test_solves(self):
        h, b = quadratic()
        a = h + 0.1 * EYE
        x = conjugate_gradients(lambda v: a @ v, b, a.diagonal(), tol=1e-14, max_iter=20)
        torch.testing.assert_close(x, torch.linalg.solve(a, b), rtol=1e-9, atol=1e-11)

    def test_iteration_cap(self):
        h, b = quadratic()
        calls = []
        conjugate_gradients(
            lambda v: calls.append(1) or h @ v, b, torch.ones(5), tol=1e-14, max_iter=2
        )
        assert len(calls) == 2

    def test_stops_at_negative_curvature(self):
        a = torch.diag(torch.tensor([1.0, -1.0]))
        b = torch.tensor([0.0, 1.0])
        x = conjugate_gradients(lambda v: a @ v, b, torch.full((2,), 2.0), tol=1e-9, max_iter=9)
        assert x.tolist() == [0.0, 0.5]

    def test_zero_right_hand_side(self):
        x = conjugate_gradients(lambda v: v, torch.zeros(3), torch.ones(3), tol=0.1, max_iter=9)
        assert not x.any()
