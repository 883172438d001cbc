"""Networks as problems: their constants are estimates."""

import pytest
import torch
from torch import nn

from tests.theory.data import RADIUS, ball, gradient, subset
from torchpisa.theory import (
    Network,
    certify,
)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.randn(12, 2)
    y = x.prod(dim=1, keepdim=True)
    parts = list(zip(x.split(6), y.split(6), strict=True))
    return Network(module, nn.functional.mse_loss, parts, weight_decay=0.02, consensus_decay=0.1)


def test_network_is_the_module(network):
    x, y = network.batches[1]
    w = network.start
    expected = nn.functional.mse_loss(network.module(x), y).detach()
    assert float(network.loss(1, w)) == pytest.approx(float(expected), rel=1e-12)
    few = torch.tensor([0, 3])
    expected = nn.functional.mse_loss(network.module(x[few]), y[few]).detach()
    assert float(network.loss(1, w, few)) == pytest.approx(float(expected), rel=1e-12)
    assert network.dimension == 13


def test_estimates_of_networks_exceed_what_is_met(network):
    bound, spread = network.gradient_bound(0, RADIUS), network.gradient_spread(0, RADIUS)
    r = network.smoothness(0, RADIUS)
    for w, v in zip(ball(13, RADIUS, 30), ball(13, RADIUS, 30), strict=True):
        sample = torch.randint(6, (1,))
        g = gradient(network, 0, w, sample)
        assert g.norm() <= bound
        assert (g - gradient(network, 0, w, subset(6))).norm() <= spread
        assert (g - gradient(network, 0, v, sample)).norm() <= r * (w - v).norm()


def test_bound_of_a_network_counts_its_weight_decay(network):
    """The gradient of the L2 term is as long as the weights are, times their decay."""
    parts, decays = network.batches, {"weight_decay": 0.5, "consensus_decay": 0.1}
    decayed = Network(network.module, nn.functional.mse_loss, parts, **decays)
    more = decayed.gradient_bound(0, RADIUS) - network.gradient_bound(0, RADIUS)
    assert more == pytest.approx(0.48 * RADIUS, rel=1e-9)


def test_certificate_of_a_network_proves_nothing(network):
    certificate = certify(network, iterations=15)
    assert certificate.passed
    assert not certificate.constants.proven
    assert certificate.covered is None
    assert "the constants are estimates: nothing is proven" in str(certificate)
    assert not certify(network, sigma0=5.0, iterations=15, batch_size=3)["descent"].holds
