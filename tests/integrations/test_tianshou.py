"""The factory for Tianshou makes what constructing the optimizer makes, and says what is wrong."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import torchpisa
from torchpisa.optim.param_groups import split

pytest.importorskip("tianshou", reason="needs Tianshou: pip install torchpisa[rl]")

from tianshou.algorithm.optim import LRSchedulerFactoryLinear

from torchpisa.integrations.tianshou import PISAOptimizerFactory

OPTIMIZERS = [
    (torchpisa.SISA, None, {"sigma": 5.0, "rho": 2e4, "batches": 4}),
    (torchpisa.SISA, None, {}),
    (torchpisa.PISA, None, {"sigma": 2.0, "gamma": 0.9}),
    (torchpisa.NSISA, split, {}),
    (torchpisa.MISA, None, {"batches": 2}),
    (torchpisa.MISA, split, {}),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    torch.manual_seed(1)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(16, 5)).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize(("optimizer", "groups", "arguments"), OPTIMIZERS)
def test_factory_makes_the_optimizer(optimizer, groups, arguments):
    ours, theirs = network(), network()
    direct = optimizer(ours.parameters() if groups is None else groups(ours), **arguments)
    made, scheduler = PISAOptimizerFactory(optimizer, groups=groups, **arguments).create_instances(
        theirs
    )
    assert type(made) is optimizer
    assert scheduler is None
    assert made.defaults == direct.defaults
    expected, found = train(ours, direct), train(theirs, made)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(found, network().parameters(), strict=True))


def test_factory_serves_several_modules():
    factory = PISAOptimizerFactory(torchpisa.SISA)
    first, second = (factory.create_instances(network())[0] for _ in range(2))
    assert first is not second
    assert first.param_groups[0]["params"][0] is not second.param_groups[0]["params"][0]


def test_tianshou_schedules_drive_it():
    factory = PISAOptimizerFactory(torchpisa.SISA, sigma=2.0, rho=100.0, batches=2)
    factory.with_lr_scheduler_factory(LRSchedulerFactoryLinear(4, 100, 100))
    model = network()
    optimizer, scheduler = factory.create_instances(model)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        train(model, optimizer)
        scheduler.step()
    assert rates == [1.0, 0.75, 0.5, 0.25]


def test_wrong_arguments_raise_at_once():
    with pytest.raises(ValueError, match="sigma"):
        PISAOptimizerFactory(torchpisa.SISA, sigma=-1.0)
    with pytest.raises((TypeError, ValueError), match="sigmma"):
        PISAOptimizerFactory(torchpisa.SISA, sigmma=1.0)
    with pytest.raises(TypeError, match=r"must be a class such as torchpisa\.SISA, got 'sisa'"):
        PISAOptimizerFactory("sisa")


ALONE = """
import sys, torchpisa, torchpisa.integrations, recipes.__main__
print(sorted({"tianshou", "gymnasium", "mujoco", "numba"} & set(sys.modules)))

sys.modules["tianshou"] = None  # importing it raises ModuleNotFoundError
try:
    import torchpisa.integrations.tianshou
except ModuleNotFoundError as error:
    print(error)
"""


def test_tianshou_is_not_imported_unasked_and_the_error_says_what_to_install():
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "[]",
        "torchpisa.integrations.tianshou needs Tianshou 2: pip install 'torchpisa[rl]'",
    ]
