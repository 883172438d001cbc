"""The study of Appendix A.2: how sigma and gamma decide where PISA ends, as orderings.

m = 32 batches of 50 to 150 samples and w in R^100; a third of the features normal, a third
Student-t(5), a third uniform on [-5, 5], as in the paper that the appendix cites for its data.
"""

import functools

import numpy as np
import pytest
import torch

from torchpisa import PISA, SISA
from torchpisa.penalty import Every
from torchpisa.preconditioners import Hessian

M, N, ROUNDS, SECOND_ORDER_ROUNDS = 32, 100, 300, 60
SIGMAS = [2.0**k for k in range(2, 8)]
GAMMAS = [0.5, 0.6, 0.7, 0.8, 0.9, 0.99]


@functools.cache
def data():
    rng = np.random.default_rng(0)
    sizes = rng.integers(50, 151, M)
    total = int(sizes.sum())
    third = total // 3
    a = np.concatenate(
        [
            rng.standard_normal((third, N)),
            rng.standard_t(5, (third, N)),
            rng.uniform(-5, 5, (total - 2 * third, N)),
        ]
    )
    b = np.concatenate(
        [
            rng.standard_normal(third),
            rng.standard_t(5, third),
            rng.uniform(-5, 5, total - 2 * third),
        ]
    )
    order = rng.permutation(total)
    a, b = torch.tensor(a[order]), torch.tensor(b[order])
    optimum = torch.linalg.lstsq(a, b.unsqueeze(1)).solution.squeeze(1)
    least = float(0.5 * (a @ optimum - b).square().mean())
    cuts = sizes.tolist()
    return a.split(cuts), b.split(cuts), [s / total for s in cuts], a, b, least


@functools.cache
def gaps(sigma, gamma, second_order=False):
    """F(w) - F* after every round, relative to F*."""
    parts_a, parts_b, alpha, a, b, least = data()
    w = torch.nn.Parameter(torch.zeros(N, dtype=torch.float64))
    settings = {"sigma": sigma, "rho": 1.0, "gamma": gamma, "batches": M, "weights": alpha}
    hessian = Hessian(solver="dense")
    opt = PISA([w], hessian, **settings) if second_order else SISA([w], **settings)
    values = []
    for _ in range(SECOND_ORDER_ROUNDS if second_order else ROUNDS):
        for x, y in zip(parts_a, parts_b, strict=True):
            opt.zero_grad()
            loss = 0.5 * (x @ w - y).square().mean()
            loss.backward(retain_graph=second_order)
            if second_order:
                hessian.observe(loss)
            opt.step()
        values.append(float(0.5 * (a @ w.detach() - b).square().mean()) / least - 1)
    return values


def fluctuation(values):
    """Sum of the rises of log10 of the gap over the first 60 rounds, down to 1e-12."""
    logs = np.log10(np.maximum(values[:60], 1e-12))
    return float(np.maximum(np.diff(logs), 0).sum())


@pytest.mark.xdist_group("sigma")
class TestSigma:
    """gamma = 0.99 in every round, sigma from 2^2 to 2^7, second moment (Scheme III)."""

    def test_all_but_the_largest_reach_the_optimum(self):
        for sigma in SIGMAS[:4]:
            assert gaps(sigma, 0.99)[-1] < 1e-8, sigma

    def test_large_sigma_stalls_above_the_optimum(self):
        ends = [gaps(sigma, 0.99)[-1] for sigma in SIGMAS]
        assert ends[-1] > 1e-6
        assert ends[-1] > ends[-2] > max(ends[:3])

    def test_small_sigma_fluctuates_and_large_is_smooth(self):
        rises = [fluctuation(gaps(sigma, 0.99)) for sigma in SIGMAS]
        assert rises[0] > 3 * rises[2]
        assert rises[-1] < 1e-6


class TestSigmaWithSecondOrderInformation:
    """The same with Q the Hessian of each batch."""

    def test_moderate_sigma_reaches_the_optimum_and_large_lags_behind(self):
        ends = [gaps(sigma, 0.99, second_order=True)[-1] for sigma in (16.0, 64.0, 128.0)]
        assert ends[0] < 1e-6
        assert ends[0] < ends[1] < ends[2]
        assert ends[2] > 1e-4


@pytest.mark.xdist_group("gamma")
class TestGamma:
    """sigma = 2^4, gamma from 0.5 to 0.99."""

    def test_in_every_round_only_the_largest_reaches_the_optimum(self):
        ends = [gaps(16.0, gamma)[-1] for gamma in GAMMAS]
        assert ends[-1] < 1e-8
        assert all(end > 1e-4 for end in ends[:-1])
        assert ends == sorted(ends, reverse=True)

    def test_smaller_gamma_settles_earlier(self):
        def settled(gamma):
            values = np.array(gaps(16.0, gamma))
            return int(np.argmax(np.abs(values / values[-1] - 1) < 1e-3))

        times = [settled(gamma) for gamma in GAMMAS[:-1]]
        assert times == sorted(times)

    @pytest.mark.parametrize("gamma", GAMMAS)
    def test_with_the_papers_k0_all_reach_the_optimum(self, gamma):
        assert gaps(16.0, Every(gamma))[-1] < 1e-8
