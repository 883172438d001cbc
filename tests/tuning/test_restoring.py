"""Whatever is tried out, everything is afterwards as it was before."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.tuning.problem import loader, model, scaled
from torchpisa import SISA
from torchpisa.tuning import calibrate, find_sigma


def everything(net: nn.Module, generator: torch.Generator) -> list[Any]:
    return [
        *(tensor.clone() for tensor in net.state_dict().values()),
        *(None if param.grad is None else param.grad.clone() for param in net.parameters()),
        torch.get_rng_state(),
        generator.get_state(),
        torch.tensor(random.getstate()[1]),
        torch.from_numpy(np.random.get_state()[1].astype("int64")),
    ]


def random_loss(net: nn.Module, batch: Any) -> torch.Tensor:
    """Draw from every generator there is."""
    noise = random.random() + np.random.rand() + float(torch.rand(()))
    return scaled()(net, batch) + 1e-6 * noise


@pytest.mark.parametrize("do", [calibrate, find_sigma])
@pytest.mark.parametrize("own_generator", [True, False])
def test_leaves_everything_as_it_was(do: Callable[..., Any], own_generator: bool) -> None:
    net = model(dropout=0.5)
    generator = torch.Generator().manual_seed(5)
    data = loader(generator if own_generator else None)
    random_loss(net, next(iter(data))).backward()
    grads = [param.grad for param in net.parameters()]
    versions = [param.data_ptr() for param in net.parameters()]
    net[1].eval()
    before = everything(net, generator)
    do(net, random_loss, data)
    after = everything(net, generator)
    assert all(
        (one is None and other is None) or torch.equal(one, other)
        for one, other in zip(before, after, strict=True)
    )
    assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))
    assert versions == [param.data_ptr() for param in net.parameters()]
    assert not net[1].training
    assert net[0].training


def test_order_of_the_data_is_what_it_would_have_been() -> None:
    def first_batch(look: bool) -> torch.Tensor:
        torch.manual_seed(1)
        net, data = model(), loader()
        torch.manual_seed(2)
        if look:
            find_sigma(net, scaled(), data, trials=4)
        return next(iter(data))[0]

    assert torch.equal(first_batch(True), first_batch(False))


def test_restores_after_an_error() -> None:
    net = model()
    before = [param.detach().clone() for param in net.parameters()]
    calls = []

    def failing(net: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 60:
            raise KeyError("bad batch")
        return scaled()(net, batch)

    with pytest.raises(KeyError, match="bad batch"):
        find_sigma(net, failing, loader())
    for param, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(param, old)


@pytest.mark.parametrize("do", [calibrate, find_sigma])
def test_data_that_cannot_be_gone_through_again(do: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"data must be something that starts anew .* generator"):
        do(model(), scaled(), (batch for batch in loader()))


@pytest.mark.parametrize("do", [calibrate, find_sigma])
def test_arguments_in_the_wrong_place(do: Callable[..., Any]) -> None:
    net, loss, data = model(), scaled(), loader()
    expected = "loss must be a function of the model and a batch, such as lambda .* got "
    with pytest.raises(TypeError, match=expected + "DataLoader"):
        do(net, data, loss)
    for criterion, name in ((nn.MSELoss(), "MSELoss"), (nn.functional.mse_loss, "mse_loss")):
        with pytest.raises(TypeError, match=expected + name):
            do(net, criterion, data)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got SISA"):
        do(SISA(net.parameters()), loss, data)
    with pytest.raises(ValueError, match=r"model must have a parameter that .*, got 6 param"):
        do(model().requires_grad_(False), loss, data)
