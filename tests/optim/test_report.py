"""Reports of an optimizer: its memory, and its step in terms of momentum."""

import pytest
import torch
from torch import nn

from torchpisa import MISA, NSISA, PISA, SISA


def test_memory_is_as_promised():
    p = nn.Parameter(torch.zeros(100, 1000))
    n = p.numel()
    for opt, expected in [
        (SISA([p]), 8),
        (SISA([p], batches=4), 36),
        (SISA([p], batches=4, state_dtype=torch.bfloat16), 18),
        (NSISA([p]), 8),
        (NSISA([p], batches=2), 20),
        (MISA([p]), 4.004),  # and one number per row
        (MISA([p], batches=4), 4.004),
        (MISA([{"params": [p], "matrix": False}]), 8),
        (PISA([p]), 4),
    ]:
        memory = opt.memory()
        assert memory.bytes_per_parameter == pytest.approx(expected, rel=1e-3)
        assert memory.bytes == sum(memory.by_name.values())
    assert opt.memory().by_name == {"dual": 4 * n, "step": 4}


@pytest.mark.parametrize("eps", [0.0, 0.25])
def test_effective_reports_the_momentum_picture(eps):
    p = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    opt = SISA([p], sigma=2.0, rho=4.0, lr=0.5, scheme="rmsprop", beta=0.5, eps=eps)
    assert opt.effective()[0].momentum is None
    p.grad = torch.tensor([1.0, 2.0, 4.0])
    opt.step()
    q = (0.5 * torch.tensor([1.0, 2.0, 4.0]) ** 2).sqrt() + eps
    report = opt.effective()[0]
    momentum = 4 * q / (2 + 4 * q)
    assert report.step == 0.25
    assert report.momentum == pytest.approx(tuple(momentum.tolist()))
    assert report.first_step.max == pytest.approx(float(2 * 0.5 / (2 + 4 * q[0])))
    assert report.stable_curvature.min == pytest.approx(float(2 / 3 * (2 + 8 * q[0]) / 0.5))
