"""Rules for gamma."""

import math
import pickle

import pytest
import torch

from torchpisa import SISA
from torchpisa.penalty import Every, WarmDown, gamma_l, k0


def sigmas(rule, rounds, sigma=1.0):
    """Return sigma^1, sigma^2, ... as an optimizer uses them."""
    p = torch.nn.Parameter(torch.ones(1))
    opt = SISA([p], sigma=sigma, gamma=rule)
    values = []
    for _ in range(rounds):
        p.grad = torch.ones(1)
        opt.step()
        values.append(opt.param_groups[0]["sigma"][0])
    return values


def test_k0_is_the_papers():
    assert [k0(g) for g in (0.5, 0.7, 0.9, 0.99)] == [69, 36, 11, 1]
    assert k0(1.0) == 1


def test_constant_grows_already_in_the_first_round():
    assert sigmas(0.5, 4) == [2.0, 4.0, 8.0, 16.0]


def test_every_changes_the_multiples_of_k0():
    assert sigmas(Every(0.5, 3), 7) == [1, 1, 2, 2, 2, 4, 4]
    assert sigmas(Every(0.5, 1), 3) == sigmas(0.5, 3)
    assert Every(0.9).k0 == 11


@pytest.mark.parametrize("gamma", [0.5, 0.9])  # 0.99 itself has k0 = 1
def test_every_with_the_papers_k0_follows_the_slow_curve(gamma):
    """0.99^K = gamma^(K/k0), up to one change and the rounding of k0."""
    slow, fast = sigmas(0.99, 300), sigmas(Every(gamma), 300)
    for a, b in zip(slow, fast, strict=True):
        assert gamma * 0.8 <= b / a <= 1 / (gamma * 0.8)


def test_gamma_l_is_every_s_epochs():
    assert gamma_l(0.8, 15, 390) == Every(0.8, 15 * 390)


def test_warm_down_is_the_printed_rule():
    rule = WarmDown(epochs=5, n=2)
    printed = [1 - 1 / (5 - math.floor(k / 2)) for k in range(8)]
    assert [rule(k) for k in range(8)] == printed
    assert [rule(k) for k in range(8, 12)] == [1.0] * 4  # printed: 0, an infinite sigma


def test_warm_down_with_one_iteration_per_epoch_is_linear():
    values = sigmas(WarmDown(10), 9)
    torch.testing.assert_close(
        torch.tensor([1 / v for v in values]), torch.linspace(0.9, 0.1, 9), rtol=1e-5, atol=0
    )


def test_warm_down_in_every_round_of_many_ends_a_training():
    """As docs/paper.md says of Ant: by 100,000 after 10 of 100 epochs of 112 rounds."""
    grown = sigmas(WarmDown(100, 112), 1120)[-1]
    assert grown == pytest.approx((100 / 90) ** 112, rel=1e-9)
    assert 1e5 < grown < 2e5


def test_any_callable_and_one_rule_per_batch():
    p = torch.nn.Parameter(torch.ones(1))
    opt = SISA([p], sigma=[1.0, 2.0, 3.0], gamma=[1.0, 0.5, lambda k: 1 / (k + 1)], batches=3)
    for _ in range(6):
        p.grad = torch.ones(1)
        opt.step()
    assert opt.param_groups[0]["sigma"] == [1.0, 8.0, 6.0]


def test_absent_batches_keep_pace():
    """Sigma is a matter of the round, not of who is there, so that S needs nobody's answer."""
    p = torch.nn.Parameter(torch.ones(1))
    opt = SISA([p], sigma=1.0, gamma=0.5, batches=2)
    for _ in range(3):
        p.grad = torch.ones(1)
        opt.step(batch=1)
        opt.flush()
    assert opt.param_groups[0]["sigma"] == [8.0, 8.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Every(0.0), r"gamma must be in \(0, 1\], got 0\.0"),
        (lambda: Every(0.9, 0), r"k0 must be an integer >= 1, got 0"),
        (lambda: k0(1.5), r"gamma must be in \(0, 1\], got 1\.5"),
        (lambda: gamma_l(0.9, 0, 10), r"s must be an integer >= 1, got 0"),
        (lambda: gamma_l(0.9, 10, 2.5), r"n must be an integer >= 1, got 2\.5"),
        (lambda: WarmDown(0), r"epochs must be an integer >= 1, got 0"),
        (lambda: WarmDown(3, -1), r"n must be an integer >= 1, got -1"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_rules_are_pickled_and_compared():
    assert pickle.loads(pickle.dumps(Every(0.9))) == Every(0.9, 11)
