"""Optimizers by name, schedules, and the rows of the paper's table."""

import pytest
import torch
from torch import nn

import torchpisa
from recipes.optimizers import (
    TITLES,
    Choice,
    Schedule,
    build,
    capturable,
    gamma_rule,
    grow_sigmas,
    missing_requirement,
    scale_learning_rates,
    state_bytes,
)
from torchpisa.presets import PAPER_TABLE

OPTIONS = {
    "sgd": {"lr": 0.05, "momentum": 0.9},
    "msvag": {"lr": 0.05},
    "padam": {"lr": 0.05},
    "muon": {"lr": 0.02, "rest_lr": 3e-3},
    "sisa": {"sigma": 1.0, "rho": 100.0},
    "nsisa": {"sigma": 20.0, "rho": 20.0},
    "misa": {},
}


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return model, torch.randn(16, 1, 6, 6), torch.randint(3, (16,))


@pytest.mark.parametrize("name", list(TITLES))
def test_each_name_trains(name: str) -> None:
    reason = missing_requirement(name)
    if reason is not None:
        pytest.skip(reason)
    model, x, y = problem()
    options = OPTIONS.get(name, {"lr": 5e-3})
    optimizer = build(Choice(name, options), model, rounds=1)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert state_bytes(optimizer) > 0


def test_rates_are_multiples_of_what_was_given() -> None:
    model, *_ = problem()
    optimizer = build(Choice("adam", {"lr": 0.1}), model, 1)
    for factor in (0.5, 0.25):
        scale_learning_rates(optimizer, factor)
        assert optimizer.param_groups[0]["lr"] == 0.1 * factor


def test_weight_decay_of_a_class_without_one_is_added_to_the_gradient() -> None:
    pytest.importorskip("pytorch_optimizer")
    weights = []
    for decay in (0.0, 0.5):
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = build(Choice("msvag", {"lr": 0.1, "weight_decay": decay}), model, 1)
        model.weight.grad = torch.ones(1, 2) - decay
        optimizer.step()
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(weights[1], weights[0])


def test_gamma_in_epochs_becomes_gamma_in_rounds() -> None:
    model = nn.Linear(2, 1)
    choice = Choice("sisa", {"sigma": 1.0, "rho": 1.0, "gamma": (0.5, 2)})
    optimizer = build(choice, model, rounds=3)
    assert isinstance(optimizer, torchpisa.SISA)
    seen = []
    for _ in range(7):
        model.weight.grad = torch.ones(1, 2)
        model.bias.grad = torch.ones(1)
        optimizer.step()
        seen.append(optimizer.param_groups[0]["sigma"])
    sigmas = [value[0] if isinstance(value, list | tuple) else value for value in seen]
    assert [float(value) for value in sigmas] == [1, 1, 1, 1, 1, 2, 2]


def test_capturable_optimizers_have_what_changes_in_tensors() -> None:
    """For replayed rounds: the rate, and sigma, which grows as it does by the rule itself."""
    choice = Choice("sisa", {"sigma": 1.0, "rho": 1.0, "gamma": (0.5, 2)}, batches=2)
    rule = gamma_rule(choice, rounds=3)
    assert rule is not None
    models = [nn.Linear(2, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain = build(choice, models[0], rounds=3)
    tensors = build(capturable(choice), models[1], rounds=3)
    (group,) = tensors.param_groups
    places = [group["lr"].data_ptr(), *(sigma.data_ptr() for sigma in group["sigma"])]
    for number in range(7):
        for optimizer in (plain, tensors):
            scale_learning_rates(optimizer, 1 / (1 + number))
        if rule(number) != 1:
            grow_sigmas(tensors, rule(number))
        for part in range(2):
            for model, optimizer in zip(models, (plain, tensors), strict=True):
                for param in model.parameters():
                    param.grad = torch.full_like(param, 1.0 + part)
                optimizer.step()
        torch.testing.assert_close(models[1].weight, models[0].weight)
    assert [sigma.item() for sigma in group["sigma"]] == plain.param_groups[0]["sigma"] == [2, 2]
    assert [group["lr"].data_ptr(), *(sigma.data_ptr() for sigma in group["sigma"])] == places
    assert gamma_rule(Choice("misa"), rounds=3) is None


def test_schedules() -> None:
    steps = Schedule("steps", ((2, 0.5), (3, 0.1)))
    values = [steps.factor(epoch, 4) for epoch in (0, 1.9, 2, 3)]
    assert values == pytest.approx([1, 1, 0.5, 0.05])
    cosine = Schedule("cosine", warm_up=1)
    assert cosine.factor(0, 10) == 0
    assert cosine.factor(5, 10) == pytest.approx(0.5)
    assert cosine.factor(10, 10) == pytest.approx(0)
    assert Schedule().factor(3, 4) == 1


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"name must be one of sisa, .*, got 'addam'"):
        Choice("addam")
    with pytest.raises(ValueError, match=r"batches must be 1 for adam, .*got 4"):
        Choice("adam", batches=4)
    with pytest.raises(ValueError, match=r"kind must be .*, got 'linear'"):
        Schedule("linear")


@pytest.mark.parametrize("name", list(PAPER_TABLE))
def test_rows_are_arguments_of_sisa(name: str) -> None:
    row = PAPER_TABLE[name]
    model = nn.Linear(2, 1)
    optimizer = build(Choice("sisa", row.options(), row.batches), model, row.rounds)
    (group,) = optimizer.param_groups
    assert group["weight_decay"] == row.mu
    assert group["consensus_decay"] == row.consensus_decay
    assert group["beta"] == row.beta
