"""certify(): passes where the theory holds, names what is not met, and can fail."""

import math

import pytest
import torch

import torchpisa
from tests.theory.data import batches, problem
from torchpisa.algorithms import pisa
from torchpisa.kernels.foreach import Foreach
from torchpisa.preconditioners import Hessian, Identity, Preconditioner, SecondMoment
from torchpisa.theory import LeastSquares, certify, constants_of

PRECONDITIONERS = {
    "identity": Identity,
    "SISA": lambda: SecondMoment(eta=2.0),
    "Newton": Hessian,
}
KINDS = ["least squares", "logistic"]
NAMES = [
    "updates",
    "preconditioner",
    "containment",
    "descent",
    "lower bound",
    "successive duals",
    "w_i - w vanishes",
    "steps of w vanish",
    "steps of w_i vanish",
    "merit gap vanishes",
    "rate of w, w_i",
    "rate of pi_i",
    "rate of F, L, L~",
]


# Problem, preconditioner and gradients in all combinations; each has both divisions of the data and
# all values of gamma in turn.
CASES = [
    (kind, (i + j + k) % 2 == 1, preconditioner, batch_size, (0.75, 0.9, 0.99)[(2 * i + j + k) % 3])
    for i, kind in enumerate(KINDS)
    for j, preconditioner in enumerate(PRECONDITIONERS)
    for k, batch_size in enumerate((None, 4))
]


@pytest.mark.parametrize(("kind", "skewed", "preconditioner", "batch_size", "gamma"), CASES)
def test_passes(kind, skewed, preconditioner, batch_size, gamma):
    certificate = certify(
        problem(kind, skewed),
        PRECONDITIONERS[preconditioner](),
        gamma=gamma,
        batch_size=batch_size,
        iterations=25,
    )
    assert certificate.passed, str(certificate)
    assert certificate.constants.proven
    # In expectation only, the duals of stochastic runs have a limit.
    absent = set() if batch_size is None else {"rate of pi_i"}
    assert {check.name for check in certificate.checks} == set(NAMES) - absent
    # A certified run hardly moves.
    assert certificate.covered < 1e-2
    assert certificate.gradient_left > 0.99


def test_long_run_does_not_drown_in_rounding():
    """Sigma grows by 1e37, far beyond where differences of stored weights have digits left."""
    certificate = certify(problem("logistic"), gamma=0.75, iterations=300, start=torch.ones(4))
    assert certificate.passed
    assert certificate.iterates[-1].sigma[0] > 1e37 * certificate.sigma0
    assert certificate["descent"].margin > 0.99


def test_run_ends_before_sigma_leaves_the_numbers():
    one = LeastSquares([(torch.ones(1, 1), torch.ones(1))])
    certificate = certify(one, gamma=[0.3], iterations=1000)
    assert certificate.holds
    assert 1e149 < certificate.iterates[-1].sigma[0] < 1e151
    assert certificate.iterates[-1].iteration < 300


def test_settings_of_every_batch_its_own():
    certificate = certify(
        problem("least squares"),
        SecondMoment(scheme="rmsprop", eta=1.5, eps=0.1),
        gamma=[0.75, 0.8, 0.9],
        rho=[0.5, 1.0, 2.0],
        sigma0=[1e8, 2e8, 3e8],
        start=torch.ones(4),
        iterations=25,
    )
    assert certificate.passed
    assert certificate.constants.gamma == 0.9
    assert certificate.constants.rho_eta == pytest.approx([0.8, 1.6, 3.2])
    assert certificate.sigma0 == 1e8


def test_runs_what_the_optimizer_runs():
    """The weights are those of SISA as users have it, without the recorder."""
    p = problem("least squares", True)
    certificate = certify(p, SecondMoment(eta=2.0), gamma=0.9, sigma0=5.0, rho=3.0, iterations=30)
    w = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    opt = torchpisa.SISA(
        [w],
        sigma=5.0,
        rho=3.0,
        gamma=0.9,
        eta=2.0,
        eps=0.0,
        batches=3,
        weights=p.sizes,
        weight_decay=0.02,
        consensus_decay=0.1,
    )
    for _ in range(29):
        for i in range(3):
            opt.zero_grad()
            p.loss(i, w).backward()
            opt.step()
    torch.testing.assert_close(w.detach(), certificate.iterates[30].w, rtol=1e-12, atol=0)
    assert certificate.covered > 0.3


# Conditions that are not met


def test_small_sigma0_is_reported_with_the_term_that_decides():
    p = problem("least squares")
    least = constants_of(p, gamma=0.9, rho_eta=[1.0] * 3).sigma0
    certificate = certify(p, sigma0=least / 2, iterations=5)
    (unmet,) = certificate.unmet
    assert unmet == (
        f"sigma0 = {least / 2:.6g} < {least:.6g}, the choice of sigma (3.4), dominated by the term "
        "epsilon_i(2 delta)"
    )
    assert certificate.holds
    assert not certificate.passed
    assert f"unmet condition: {unmet}" in str(certificate)


def test_the_dominating_term_depends():
    by_rho = certify(problem("logistic"), rho=1e6, sigma0=1.0, iterations=5)
    assert by_rho.constants.dominant == "rho_i eta_i"
    assert "dominated by the term rho_i eta_i" in by_rho.unmet[0]
    by_sigma = constants_of(problem("logistic"), gamma=0.9, rho_eta=[1.0] * 3, sigma=1e6)
    assert by_sigma.dominant == "sigma"
    assert by_sigma.sigma0 == 8e6


@pytest.mark.parametrize("gamma", [0.6, [0.9, 0.6, 0.8]])
def test_small_gamma_is_reported(gamma):
    certificate = certify(problem("least squares"), gamma=gamma, iterations=5)
    assert certificate.unmet == ("gamma = 0.6 < 0.75 (B.5)",)


# The counterexample to the printed constants


def test_printed_constants_fail_on_large_targets():
    large = LeastSquares(batches("least squares", False, scale=30.0))
    certificate = certify(large, gamma=0.75, constants="printed", iterations=30)
    assert not certificate.unmet
    assert certificate.constants.dominant == "r_i"
    descent = certificate["descent"]
    assert not descent.holds
    assert descent.iteration == 0
    assert descent.value - descent.bound > 10
    assert not certificate["successive duals"].holds
    assert "FAILS  descent" in str(certificate)
    assert certify(large, gamma=0.75, iterations=30).passed


def test_counterexample_by_hand():
    """F(w) = (w - 30)^2 / 2, one batch, Q = I, rho = 1, gamma = 3/4; in print sigma0 = 8 will do.

    w^1 = 0, g = -30 and sigma^1 = 32/3 give d = 18/7 and pi = 192/7, and so all the rest.
    """
    one = LeastSquares([(torch.ones(1, 1), torch.full((1,), 30.0))])
    certificate = certify(one, gamma=0.75, constants="printed", sigma=1.0, iterations=1)
    assert certificate.constants.sigma0 == certificate.sigma0 == 8
    d, pi, sigma = 18 / 7, 192 / 7, 32 / 3
    rise = (d - 30) ** 2 / 2 - 450 + pi * d + sigma / 2 * d**2
    assert rise == pytest.approx(31.959, abs=1e-3)
    penalty = 8 / sigma * d**2
    delta = 30 + math.sqrt(2 * 454 * 2)
    varpi, c = math.sqrt(6) * delta, math.sqrt(18) * delta
    c1 = max(varpi + 4 * c, varpi / 8 + 4 * c)
    c2 = c1**2 / 2 + varpi * (math.sqrt(5) * delta + varpi / 2) + varpi**2 * (1 / 2 + 1 / 8) + 1 / 4
    expected = {
        "preconditioner": (1, 1, 1),
        "containment": (1, d, delta),
        "descent": (0, rise + penalty + 8 / 4 * d**2, 1 / 16),
        "lower bound": (1, d**2 / 2 - rise, 1),
        "successive duals": (1, pi**2 + 16 / 3 * d**2, 0),
        "w_i - w vanishes": (1, pi, varpi),
        "steps of w vanish": (0, 0, c),
        "steps of w_i vanish": (0, d, c + 2 * varpi),
        "merit gap vanishes": (1, penalty, 3 / 4 * varpi**2 / 8),
        "rate of w, w_i": (1, d, 3 / 4 * c1),
        "rate of pi_i": (1, 30 - pi, 3 / 4 * c1),
        "rate of F, L, L~": (1, rise + penalty + 3 / 16, 3 / 4 * c2),
    }
    for name, (iteration, value, bound) in expected.items():
        check = certificate[name]
        assert check.iteration == iteration, name
        assert (check.value, check.bound) == pytest.approx((value, bound), rel=1e-12), name
        assert check.holds == (name not in ("descent", "successive duals")), name


def test_mini_batches_of_like_samples_are_no_way_out():
    """Printed epsilon is a spread, so samples that agree make it zero again."""
    same = LeastSquares([(torch.ones(6, 1), torch.full((6,), 30.0))] * 2)
    certificate = certify(same, gamma=0.75, constants="printed", batch_size=2, iterations=5)
    assert not certificate.unmet
    assert not certificate["descent"].holds


# Runs that are wrong


def test_wrong_sign_in_the_dual_is_found(monkeypatch):
    def wrong(dual, delta, dual_decay=1.0):
        return pisa.Local(dual + 2 * delta, dual - delta, delta)

    monkeypatch.setattr(pisa, "local_step_of_delta", wrong)
    certificate = certify(problem("least squares"), iterations=30)
    assert not certificate.unmet
    failed = {check.name for check in certificate.checks if not check.holds}
    assert {"updates", "lower bound", "successive duals", "w_i - w vanishes"} <= failed


def test_wrong_consensus_is_found(monkeypatch):
    right = Foreach.take_consensus

    def wrong(self, members, consensus, keep):
        right(self, members, consensus._replace(consensus_decay=0.0), keep)

    monkeypatch.setattr(Foreach, "take_consensus", wrong)
    certificate = certify(problem("least squares"), iterations=5, start=torch.ones(4))
    assert not certificate["updates"].holds


def test_sigma_far_too_small_fails_without_raising():
    certificate = certify(problem("least squares"), sigma0=1e-3, rho=0.0, iterations=100)
    assert certificate.unmet
    failed = {check.name for check in certificate.checks if not check.holds}
    assert {"containment", "descent"} <= failed
    assert "FAILS  containment" in str(certificate)


class TooLarge(Preconditioner):
    def solve(self, problem, state):
        return -problem.residual / (problem.sigma + 3 * problem.rho), {}


class Negative(Preconditioner):
    def solve(self, problem, state):
        return -problem.residual / (problem.sigma - 0.5 * problem.rho), {}


@pytest.mark.parametrize("wrong", [TooLarge, Negative])
def test_preconditioner_outside_its_bounds_is_found(wrong):
    certificate = certify(problem("least squares"), wrong(), eta=2.0, iterations=5)
    assert not certificate["preconditioner"].holds
    if wrong is TooLarge:
        assert certify(problem("least squares"), wrong(), eta=3.0, iterations=5).passed


class FloorTooHigh(LeastSquares):
    def growth(self):
        return super().growth()._replace(floor=float(self.objective(self.start)) + 5)


def test_floor_above_the_objective_is_found():
    data = batches("least squares", skewed=False)
    wrong = FloorTooHigh(data, consensus_decay=0.1)
    certificate = certify(wrong, iterations=5)
    check = certificate["lower bound"]
    assert not check.holds
    assert check.value == pytest.approx(5, abs=1e-3)
    assert certify(LeastSquares(data, consensus_decay=0.1), iterations=5).passed


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": 1.0}, r"gamma must be in \(0, 1\), got 1.0"),
        ({"gamma": [0.9, 0.8]}, "gamma must be one value or a sequence of 3"),
        ({"rho": -1.0}, "rho must be a finite number >= 0"),
        ({"sigma": 0.0}, "sigma must be a finite number > 0"),
        ({"sigma0": 0.0}, "sigma0 must be a finite number > 0"),
        ({"eta": 0.0}, "eta must be a finite number > 0"),
        ({"iterations": 0}, "iterations must be an integer >= 1"),
        ({"batch_size": 11}, "batch_size must be at most 10"),
        ({"constants": "mine"}, "constants must be one of 'corrected', 'printed'"),
        ({"start": torch.zeros(3)}, r"start must be a vector of 4 weights, got shape \(3,\)"),
        ({"preconditioner": SecondMoment()}, "eta must be given for SecondMoment"),
        ({"preconditioner": SecondMoment}, "preconditioner must be .*, got <class .*SecondMom"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        certify(problem("least squares"), **{"iterations": 2, **arguments})


def test_something_else_than_a_problem():
    with pytest.raises(ValueError, match=r"problem must be a Problem, .* got Linear\("):
        certify(torch.nn.Linear(2, 1))


def test_unknown_check():
    certificate = certify(problem("least squares"), iterations=2)
    with pytest.raises(KeyError, match="no check named 'ascent'; there are 'updates', "):
        certificate["ascent"]
