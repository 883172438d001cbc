"""A training that runs away says so, once, and one that does not is left in peace."""

import warnings

import pytest
import torch
from torch import nn

from tests.optim.table import ENTRIES
from torchpisa import MISA, SISA
from torchpisa.optim.guard import DivergenceWarning


def runs_away(opt: torch.optim.Optimizer, param: nn.Parameter, rounds: int) -> None:
    for _ in range(rounds):
        param.grad = -param.detach()  # the further it is, the faster it goes
        opt.step()


def test_divergence_is_reported_once_with_the_remedy() -> None:
    param = nn.Parameter(torch.ones(5))
    opt = SISA([param], sigma=20.0, rho=0.0)
    with pytest.warns(DivergenceWarning, match="diverge; give a larger sigma") as seen:
        runs_away(opt, param, 320)
    (warning,) = seen
    assert warning.filename == __file__


def speeds_up(opt: torch.optim.Optimizer, param: nn.Parameter) -> None:
    for k in range(320):
        param.grad = -torch.ones(5)
        opt.param_groups[0]["lr"] = 2.0 * (1 + k) ** 4
        opt.step()


@pytest.mark.parametrize("make", [SISA, MISA])
def test_remedy_is_the_learning_rate_where_there_is_one(make: type) -> None:
    param = nn.Parameter(torch.ones(5))
    opt = make([param], lr=2.0, weight_decay=0.0)
    with pytest.warns(DivergenceWarning, match="lower lr"):
        speeds_up(opt, param)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_ordinary_trainings_are_left_in_peace(entry) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    opt = entry(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error", DivergenceWarning)
        for _ in range(100 * opt.batches):
            x = torch.randn(16, 4)
            opt.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
            opt.step()
