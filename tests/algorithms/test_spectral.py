"""The resolvent of `Spectral`, against an SVD in float64: as good as one in float32, never nan."""

import math

import pytest
import torch

from torchpisa.algorithms import nsisa, spectral
from torchpisa.algorithms.spectral import by_gram, by_polar, by_svd

FAST = {"gram": by_gram, "polar": by_polar}
SPECTRA = {
    **{f"condition {c:g}": c for c in (1.0, 10.0, 1e2, 1e4, 1e6, 1e8)},
    "all but one equal": None,
    "rank n - 1": -1,
    "rank n / 2": -2,
}


def singular_values(n, spectrum):
    kind = SPECTRA[spectrum]
    if kind is None:
        return torch.cat([torch.ones(1), torch.full((n - 1,), 1e-3)]).double()
    if kind > 0:
        return torch.logspace(0, -math.log10(kind), n, dtype=torch.float64)
    s = torch.linspace(1, 0.5, n, dtype=torch.float64)
    s[n - 1 if kind == -1 else n // 2 :] = 0
    return s


def matrix(rows, cols, spectrum, seed=0):
    """With singular values that are known, the largest of them one."""
    generator = torch.Generator().manual_seed(seed)
    n = min(rows, cols)
    u, v = (
        torch.linalg.qr(torch.randn(size, n, generator=generator, dtype=torch.float64))[0]
        for size in (rows, cols)
    )
    return (u * singular_values(n, spectrum)) @ v.mT


def relative(value, wanted):
    return float((value.double() - wanted).norm() / wanted.norm())


SHAPES = [(16, 16), (24, 60), (120, 150), (60, 24)]


@pytest.mark.parametrize("way", FAST)
@pytest.mark.parametrize(
    ("spectrum", "shape"),
    [
        (spectrum, shape)
        for number, spectrum in enumerate(SPECTRA)
        for shape in SHAPES[number % 2 :: 2]
    ],
)
def test_as_accurate_as_an_svd_in_float32(way, shape, spectrum):
    """Within three times its error, for sigma/rho from 10 to 1e-4 of the largest singular value."""
    r = matrix(*shape, spectrum).float()
    turns = (r, r.mT, r.flip(0), r.flip(1))  # on one of them alone an SVD may be lucky
    for tau in (10.0, 1e-1, 1e-2, 1e-3, 1e-4):
        for eta in (math.inf, 0.3, 1e-2):
            wanted = by_svd(r.double(), tau, 1.0, eta)
            of_svd = max(
                relative(by_svd(x, tau, 1.0, eta), by_svd(x.double(), tau, 1.0, eta)) for x in turns
            )
            # Nobody is asked for less than a few roundings.
            allowed = max(3 * of_svd, 1e-6)
            assert relative(FAST[way](r, tau, 1.0, eta), wanted) <= allowed, (tau, eta)


def test_definition():
    """(sigma I + rho Q)^-1 r with Q written out, and what it does to singular values."""
    r = matrix(5, 8, "condition 10")
    values, vectors = torch.linalg.eigh(r @ r.mT)
    for sigma, rho, eta in ((2.0, 3.0, math.inf), (0.1, 5.0, 0.4)):
        q = (vectors * values.sqrt().clamp(max=eta)) @ vectors.mT
        wanted = torch.linalg.solve(sigma * torch.eye(5) + rho * q, r)
        torch.testing.assert_close(by_svd(r, sigma, rho, eta), wanted)
        torch.testing.assert_close(by_svd(r.mT, sigma, rho, eta), wanted.mT)
        s = singular_values(5, "condition 10")
        mapped = torch.linalg.svdvals(wanted)
        expected = s / (sigma + rho * s.clamp(max=eta))
        torch.testing.assert_close(mapped, expected.sort(descending=True).values)


@pytest.mark.parametrize("way", FAST)
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e-12, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("spectrum", ["condition 1e+08", "rank n / 2"])
def test_every_scale(way, scale, spectrum):
    """Tiny, huge and zero matrices, with sigma from nothing to everything beside rho s."""
    r = (scale * matrix(12, 20, spectrum)).float()
    size = float(torch.linalg.matrix_norm(r.double(), ord=2)) or 1.0
    for tau in (1e6, 1.0, 1e-3, 1e-8, 1e-15):
        sigma = tau * size
        if not 1e-300 < sigma < 1e300:
            continue
        for eta in (math.inf, 0.1 * size):
            y = FAST[way](r, sigma, 1.0, eta)
            assert y.shape == r.shape
            assert y.dtype == torch.float32
            assert y.isfinite().all()
            # s/(sigma + min(s, eta)) is at most one, or s/eta.
            assert y.norm() <= 1.01 * (1 if eta == math.inf else 10) * math.sqrt(12)
            if tau >= 1e-3 and scale > 1e-40:
                wanted = by_svd(r.double(), sigma, 1.0, eta)
                assert relative(y, wanted) < 1e-3 if scale else not y.any()
    assert torch.equal(FAST[way](0 * r, 1.0, 1.0), 0 * r)


@pytest.mark.parametrize("way", FAST)
def test_without_rho_it_is_a_division(way):
    r = matrix(6, 9, "condition 100").float()
    torch.testing.assert_close(FAST[way](r, 4.0, 0.0), r / 4)


@pytest.mark.parametrize("way", [*FAST, "svd"])
def test_batches(way):
    """Every matrix of a batch as if alone, also when one of them is not finite."""
    solve = {**FAST, "svd": by_svd}[way]
    batch = torch.stack([matrix(6, 10, name, 1) for name in SPECTRA]).float()
    batch[3, 2, 2] = math.nan
    y = solve(batch, 0.1, 2.0, 0.5)
    for index, r in enumerate(batch):
        if index == 3:
            assert y[index].isnan().any()
        else:
            torch.testing.assert_close(y[index], solve(r, 0.1, 2.0, 0.5), rtol=1e-5, atol=1e-6)
    assert solve(batch.view(3, 3, 6, 10), 0.1, 2.0).shape == (3, 3, 6, 10)


def test_zero_rows_stay_zero():
    """Neurons that nothing reaches are left alone, exactly."""
    r = matrix(8, 12, "condition 100").float()
    r[3] = 0
    r[:, 5] = 0
    y = by_polar(r, 1e-3, 1.0)
    assert not y[3].any()
    assert not y[:, 5].any()


def test_polar_coefficients():
    """Their composition takes [3e-7, 1] to 1, and stays within (0, 1] below and in between."""
    s = torch.logspace(-10, 0, 100001, dtype=torch.float64)
    x = s.clone()
    lowest = torch.full_like(s, math.inf)
    for linear, cubic, quintic in spectral.POLAR:
        x = linear * x + cubic * x**3 + quintic * x**5
        # What has come up must not be taken down again, where rounding would hide it.
        lowest = torch.where(s > 0.3, torch.minimum(lowest, x), lowest)
    assert (x[s >= 3e-7] - 1).abs().max() < 1e-6
    assert x.min() > 0
    assert x.max() < 1 + 1e-6
    assert lowest.min() > 0.6


def test_polar_factor_in_full_precision_only(monkeypatch):
    """Whatever is set for the model's products; and it is set back."""
    setting = torch.backends.cuda.matmul
    newer = hasattr(setting, "fp32_precision")
    name, low, full = ("fp32_precision", "tf32", "ieee") if newer else ("allow_tf32", True, False)
    seen = []
    polar = spectral.polar_factor
    monkeypatch.setattr(
        spectral, "polar_factor", lambda x: seen.append(getattr(setting, name)) or polar(x)
    )
    before = getattr(setting, name)
    try:
        setattr(setting, name, low)
        by_polar(torch.eye(3), 1.0, 1.0)
        assert getattr(setting, name) == low
    finally:
        setattr(setting, name, before)
    assert seen == [full]


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_average(shape):
    """A bias-corrected average, on the smaller side; of one matrix it is that matrix's own."""
    beta = 0.9
    rs = [matrix(*shape, "condition 10", seed) for seed in range(4)]
    n = min(shape)
    average, plain = torch.zeros(n, n, dtype=torch.float64), 0
    for step, r in enumerate(rs, 1):
        x = r if shape[0] < shape[1] else r.mT
        average = spectral.update_average(average, r, beta)
        plain = beta * plain + (1 - beta) * x @ x.mT
        values, vectors = torch.linalg.eigh(plain / (1 - beta**step))
        q = (vectors * values.sqrt().clamp(max=0.6)) @ vectors.mT
        wanted = torch.linalg.solve(0.3 * torch.eye(n) + 2.0 * q, x)
        y = spectral.averaged(r, average, step, beta, 0.3, 2.0, 0.6)
        torch.testing.assert_close(y if shape[0] < shape[1] else y.mT, wanted)
        if step == 1:
            torch.testing.assert_close(y, by_svd(r, 0.3, 2.0, 0.6))


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (7, 7)])
@pytest.mark.parametrize("tau", [0.03, 0.3, 3.0])
def test_smoothed_is_what_it_says_up_to_newton_schulz(shape, tau):
    """Singular vectors stay; values are those of the Q it says, times 0.65 to 1.25 (Muon's)."""
    torch.manual_seed(0)
    r = torch.randn(shape, dtype=torch.float64)
    rho = 4.0
    u, s, vh = torch.linalg.svd(r, full_matrices=False)
    y = spectral.smoothed(r, tau * rho, rho)
    values = u.mT @ y @ vh.mT
    torch.testing.assert_close(values, torch.diag(values.diagonal()), rtol=0, atol=1e-12)
    ratio = values.diagonal() / (s / (rho * (tau**2 + s**2).sqrt()))
    assert ratio.min() > 0.65
    assert ratio.max() < 1.25


def test_smoothed_with_accurate_steps_is_the_resolvent_of_its_q(monkeypatch):
    """Many steps that converge give (sigma I + rho Q)^-1 r, Q = (r r^T + tau^2 I)^(1/2) - tau I."""
    monkeypatch.setattr(nsisa, "COEFFICIENTS", (1.875, -1.25, 0.375))
    torch.manual_seed(0)
    r, sigma, rho = torch.randn(6, 11, dtype=torch.float64), 0.8, 2.0
    values, vectors = torch.linalg.eigh(r @ r.mT)
    tau, eye = sigma / rho, torch.eye(6, dtype=torch.float64)
    q = vectors @ torch.diag((values + tau**2).sqrt() - tau) @ vectors.mT
    expected = torch.linalg.solve(sigma * eye + rho * q, r)
    assert torch.linalg.eigvalsh(q).min() > 0
    torch.testing.assert_close(spectral.smoothed(r, sigma, rho, steps=25), expected)


def test_smoothed_of_zero_is_zero():
    assert not spectral.smoothed(torch.zeros(3, 5), 0.5, 2.0).any()


def test_failed_decomposition_takes_a_multiple_of_the_identity(monkeypatch):
    """Only for the matrix whose decomposition failed, with a bound on its norm for Q."""
    decompose = torch.linalg.cholesky_ex

    def fail_first(matrix):
        triangle, info = decompose(matrix)
        triangle[0], info[0] = math.nan, 1
        return triangle, info

    torch.manual_seed(0)
    r = torch.randn(2, 4, 6)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", fail_first)
    y = spectral.by_polar(r, 0.5, 2.0)
    torch.testing.assert_close(y[1], spectral.by_svd(r[1], 0.5, 2.0))
    ratio = y[0] / r[0]
    torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio))
    norm = float(torch.linalg.matrix_norm(r[0], ord=2))
    assert norm <= (1 / float(ratio[0, 0]) - 0.5) / 2.0 <= 4**0.25 * norm
