"""Spectral with a finite eta meets the theory's conditions; without one it cannot be certified."""

import pytest
import torch

from tests.theory.data import problem
from torchpisa.preconditioners import Identity, SecondMoment, Spectral
from torchpisa.theory import Blocks, certify


@pytest.mark.parametrize("average", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["least squares", "logistic"])
@pytest.mark.parametrize("shapes", [[(2, 2)], [(1, 4)], [(1, 2), (2,)]], ids=str)
def test_passes(kind, shapes, average):
    preconditioner = Blocks(Spectral(eta=0.5, average=average), shapes, SecondMoment(eta=0.4))
    certificate = certify(problem(kind, True), preconditioner, rho=2.0, iterations=25)
    assert certificate.passed, str(certificate)
    assert certificate.constants.terms["rho_i eta_i"] == 8.0  # sigma0 >= 8 rho eta


def test_sigma_below_eight_rho_eta_is_named():
    """If rho eta is the dominant bound, sigma0 one percent below it is an unmet condition."""
    preconditioner = Blocks(Spectral(eta=1e12), [(2, 2)])
    wanted = certify(problem("least squares"), preconditioner, iterations=1).constants
    assert wanted.dominant == "rho_i eta_i"
    assert wanted.sigma0 == 8e12
    low = certify(problem("least squares"), preconditioner, sigma0=0.99 * 8e12, iterations=1)
    assert "rho_i eta_i" in low.unmet[0]


@pytest.mark.parametrize(
    ("inner", "rest", "eta"),
    [
        (Spectral(eta=0.1, match_rms=True), None, 0.1 / (0.2 * 2**0.5)),
        (Spectral(eta=0.1, aspect_scaling=True), None, 0.1),
        (Spectral(eta=0.1, match_rms=True), SecondMoment(eta=0.4, eps=0.2), 0.4 + 0.2),
        (Spectral(eta=0.1), Identity(), 1.0),
    ],
    ids=["match_rms", "aspect_scaling", "eps", "identity"],
)
def test_eta_is_that_of_q_with_all_factors(inner, rest, eta):
    """`scale` of a small matrix is below one, and divides Q."""
    preconditioner = Blocks(inner, [(2, 2)] if rest is None else [(1, 2), (2,)], rest)
    assert preconditioner.eta == pytest.approx(eta)
    certificate = certify(problem("least squares", True), preconditioner, iterations=10)
    assert certificate.passed, str(certificate)


def test_the_cap_is_checked_and_not_believed():
    """Singular values above the eta that is claimed."""
    preconditioner = Blocks(Spectral(), [(2, 2)])
    with pytest.raises(ValueError, match="eta must be given for Blocks"):
        certify(problem("least squares"), preconditioner)
    certificate = certify(problem("least squares"), preconditioner, eta=1e-3, iterations=5)
    assert not certificate["preconditioner"].holds


def test_shapes_that_do_not_fit():
    preconditioner = Blocks(Spectral(eta=1.0), [(2, 3)])
    with pytest.raises(ValueError, match=r"shapes must be of 4 weights together, got 6: \[\(2"):
        certify(problem("least squares"), preconditioner, iterations=1, start=torch.zeros(4))
