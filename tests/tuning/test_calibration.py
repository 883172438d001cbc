"""sigma and rho from gradients."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.tuning.problem import loader, model, scaled
from torchpisa import MISA, NSISA, PISA, SISA
from torchpisa.preconditioners import SecondMoment
from torchpisa.tuning import calibrate


def batches() -> list[Any]:
    torch.manual_seed(0)
    return list(loader())


def test_formula() -> None:
    """Literally: the noise of gradients, entry by entry."""
    net, data = model(), batches()[:8]
    settings = calibrate(net, scaled(), data, lr=1e-2, momentum=0.8)
    rows = []
    for batch in data:
        grads = torch.autograd.grad(scaled()(net, batch), list(net.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]).double())
    noise = torch.stack(rows).var(dim=0).mean().sqrt()
    assert settings["sigma"] == pytest.approx(float(noise) / 1e-2, rel=1e-4)
    assert settings["rho"] == pytest.approx(0.8 / 0.2 / 1e-2)


def test_momentum_and_step_are_what_was_asked_for() -> None:
    settings = calibrate(model(), scaled(), batches(), lr=1e-3, momentum=0.9)
    q = settings["sigma"] * 1e-3
    assert settings["rho"] * q / (settings["sigma"] + settings["rho"] * q) == pytest.approx(0.9)
    assert q / settings["sigma"] == pytest.approx(1e-3)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_training_does_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    results = []
    for factor in (1.0, scale):
        net, data = model().double(), [(x.double(), y.double()) for x, y in batches()]
        opt = SISA(net.parameters(), **calibrate(net, scaled(factor), data))
        for batch in data * 3:
            opt.zero_grad()
            scaled(factor)(net, batch).backward()
            opt.step()
        results.append(torch.cat([param.detach().flatten() for param in net.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-10)


def test_equal_batches_have_no_noise() -> None:
    net, data = model(), batches()[:1] * 4
    settings = calibrate(net, scaled(), data, lr=1.0)
    grads = torch.autograd.grad(scaled()(net, data[0]), list(net.parameters()))
    size = torch.cat([grad.flatten() for grad in grads]).square().mean().sqrt()
    assert settings["sigma"] == pytest.approx(0.1 * float(size), rel=1e-4)


def test_unused_frozen_and_complex_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Parameter(torch.ones(3))
            self.unused = nn.Parameter(torch.ones(3))
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def loss(net: Odd, x: torch.Tensor) -> torch.Tensor:
        return (net.used * x * net.frozen).sum() + (net.turn * x).abs().sum()

    settings = calibrate(Odd(), loss, [torch.randn(3) for _ in range(4)])
    assert math.isfinite(settings["sigma"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lr": 0.0}, r"lr must be a finite number > 0, got 0\.0"),
        ({"momentum": 1.0}, r"momentum must be in \(0, 1\), got 1\.0"),
        ({"batches": 1}, r"batches must be an integer >= 2, got 1"),
    ],
)
def test_bad_arguments(more: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(model(), scaled(), batches(), **more)


def test_bad_data() -> None:
    with pytest.raises(ValueError, match="data must have two batches at least, got 1"):
        calibrate(model(), scaled(), batches()[:1])
    with pytest.raises(ValueError, match=r"gradients must be finite and not all zero, got .* 0"):
        calibrate(model(), scaled(0.0), batches())
    with pytest.raises(ValueError, match=r"gradients must be finite and not all zero, got .* nan"):
        calibrate(model(), scaled(math.nan), batches())


def test_a_loss_that_is_a_number() -> None:
    def loss(net: nn.Module, batch: Any) -> float:
        return float(scaled()(net, batch).item())

    with pytest.raises(TypeError, match=r"loss must return a tensor, got \d"):
        calibrate(model(), loss, batches())  # type: ignore[arg-type]


def test_a_result_is_for_one_kind_of_optimizer() -> None:
    net, data = model(), batches()
    sisa, nsisa = (calibrate(net, scaled(), data, optimizer=cls) for cls in (SISA, NSISA))
    assert nsisa == {f"sisa_{name}": value for name, value in sisa.items()}
    assert NSISA(net.parameters(), **nsisa).param_groups[0]["sisa_sigma"] == [sisa["sigma"]]
    PISA(net.parameters(), SecondMoment(), **sisa)
    with pytest.raises(ValueError, match=r"sigma must be calibrated for NSISA, got .* for SISA"):
        NSISA(net.parameters(), **sisa)
    with pytest.raises(TypeError, match="sigma"):
        MISA(net.parameters(), **sisa)
    for wrong, named in ((MISA, "MISA"), ("sisa", "'sisa'")):
        with pytest.raises(ValueError, match=f"optimizer must be SISA or NSISA, .* got {named}$"):
            calibrate(net, scaled(), data, optimizer=wrong)  # type: ignore[arg-type]
