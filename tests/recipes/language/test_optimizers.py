"""Every optimizer by name, the schedule, and rounds of several batches."""

import pytest
import torch
from torch import Tensor, nn

import torchpisa
from recipes.language.model import SIZES, build
from recipes.language.optimizers import (
    DEFAULTS,
    NAMES,
    Choice,
    Team,
    choose,
    factor,
    missing_requirement,
    state_bytes,
)
from recipes.language.optimizers import build as build_team

BATCH = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    return build(SIZES["tiny"], 0)


def available(choice: Choice) -> Choice:
    reason = missing_requirement(choice)
    if reason is not None:
        pytest.skip(reason)
    return choice


def loss_of(net: nn.Module, batch: Tensor = BATCH) -> Tensor:
    loss: Tensor = net(batch[:, :-1], batch[:, 1:])
    return loss


CHOICES = [choose(name) for name in NAMES]
CHOICES += [choose(name, rest="own") for name in ("nsisa", "misa")]


@pytest.mark.parametrize(
    ("choice", "batches"),
    [
        *((choice, 1) for choice in CHOICES),
        *((choose(name), 4) for name in ("adamw", "sisa", "nsisa")),  # all kinds of teams
    ],
    ids=lambda value: f"{value.name}-{value.rest}" if isinstance(value, Choice) else str(value),
)
def test_every_optimizer_lowers_the_loss(choice: Choice, batches: int) -> None:
    net = model()
    team = build_team(available(choice), net, batches)
    first = loss_of(net).item()
    for _ in range(8):
        for _ in range(batches):
            loss_of(net).backward()
            team.step()
    assert loss_of(net).item() < first - 0.3
    assert all(param.grad is None for param in net.parameters())
    owners = [p for o in team.optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(map(id, owners)) == sorted(map(id, net.parameters()))  # each by exactly one
    assert state_bytes(team) > 0


def test_settings_reach_the_optimizer() -> None:
    team = build_team(choose("nsisa", sigma=50.0, dual_decay=1.0), model(), 4)
    (nsisa,), (other,) = team.consensus, team.averaging
    assert isinstance(nsisa, torchpisa.NSISA)
    assert nsisa.batches == 4
    group = nsisa.param_groups[0]
    assert (group["dual_decay"], group["nesterov"], group["aspect_scaling"]) == (1.0, True, True)
    assert (group["sigma"], group["rho"]) == ([50.0] * 4, [100.0] * 4)
    params = [param for group in nsisa.param_groups for param in group["params"]]
    assert all("momentum.0" in nsisa.state[param] for param in params)  # matrices only
    assert other.param_groups[0]["lr"] == 3.6e-3
    shapes = {tuple(param.shape) for param in other.param_groups[0]["params"]}
    assert shapes == {(256, 64)}  # the embedding, though it is a matrix
    whole = build_team(choose("nsisa", rest="own"), model())
    assert not whole.averaging


def test_wrong_settings_raise() -> None:
    with pytest.raises(ValueError, match=r"optimizer must be one of adamw, muon.*, got 'sgd'"):
        choose("sgd")
    with pytest.raises(ValueError, match="optimizer must be one of"):
        build_team(Choice("sgd"), model())
    with pytest.raises(TypeError, match="unexpected keyword argument 'sigmma'"):
        build_team(choose("sisa", sigmma=1.0), model())
    with pytest.raises(ValueError, match="rest must be 'adamw' or 'own', got 'muon'"):
        build_team(choose("nsisa", rest="muon"), model())


def test_what_a_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    lacking = [name for name in NAMES if missing_requirement(choose(name))]
    assert lacking == ["muon", "soap", "shampoo", "adam_mini"]
    with pytest.raises(ImportError, match="pip install pytorch_optimizer"):
        build_team(choose("soap"), model())


# Rounds


def test_weights_move_once_in_a_round_of_four() -> None:
    for name in ("nsisa", "sisa", "adamw"):
        net = model()
        team = build_team(choose(name), net, 4)
        start = [param.detach().clone() for param in net.parameters()]
        for batch in range(4):
            loss_of(net, BATCH[batch : batch + 1]).backward()
            same = [torch.equal(*pair) for pair in zip(net.parameters(), start, strict=True)]
            assert all(same)
            team.step()
        pairs = zip(net.named_parameters(), start, strict=True)
        # NSISA adds and takes away sigma w: a rounding error is no move.
        moved = {name for (name, param), old in pairs if (param - old).abs().max() > 1e-7}
        # The others have no gradient yet: the projections begin at zero.
        first = {name for name, _ in net.named_parameters() if "proj" in name or "wte" in name}
        assert moved == first
        for optimizer in team.consensus:
            assert (optimizer.iteration, optimizer.synced) == (1, True)


def test_averaging_over_four_batches_is_one_step_on_all() -> None:
    one, four = model(), model()
    whole, parted = build_team(choose("adamw"), one, 1), build_team(choose("adamw"), four, 4)
    loss_of(one).backward()
    wanted = [param.grad.clone() for param in one.parameters() if param.grad is not None]
    whole.step()
    seen: list[Tensor] = []
    step = parted.averaging[0].step
    parted.averaging[0].step = lambda: (  # type: ignore[method-assign]
        seen.extend(p.grad.clone() for p in four.parameters() if p.grad is not None),
        step(),
    )
    for batch in BATCH:
        loss_of(four, batch[None]).backward()
        parted.step()
    for a, b in zip(seen, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_consensus_gets_each_batch_by_itself() -> None:
    seen: list[float] = []

    class Probe(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            seen.append(self.param_groups[0]["params"][0].grad.item())

    w = nn.Parameter(torch.zeros(()))
    v = nn.Parameter(torch.zeros(()))
    team = Team([Probe([w], lr=1.0)], [Probe([v], lr=1.0)], batches=3)
    for gradient in (1.0, 2.0, 6.0):
        ((w + v) * gradient).backward()
        team.step()
    assert seen == [1.0, 2.0, 6.0, 3.0]


# The schedule


def test_factor() -> None:
    constant = [factor(step, 10, warm_down=0) for step in range(10)]
    assert constant == [1.0] * 10
    values = [factor(step, 10, warm_up=2, warm_down=0.4) for step in range(10)]
    assert values == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert factor(0, 320, 0) == 1.0
    assert 0 < factor(319, 320) < 0.02


@pytest.mark.parametrize("name", ["adamw", "sisa"])
def test_factor_reaches_the_learning_rates(name: str) -> None:
    team = build_team(choose(name), model())
    given = DEFAULTS[name].get("lr", 1.0)  # relative for those of torchpisa
    for value in (0.5, 0.25, 1.0):
        team.set_factor(value)
        rates = {group["lr"] for o in team.optimizers for group in o.param_groups}
        assert rates == {given * value}


def test_state_bytes() -> None:
    net = model()
    matrices = sum(p.numel() for n, p in net.named_parameters() if n[0] == "h" and p.dim() == 2)
    rest = SIZES["tiny"].parameters - matrices
    for choice, expected in [
        (choose("adamw"), 8 * (matrices + rest)),
        (choose("sisa"), 8 * (matrices + rest)),
        (choose("muon"), 4 * matrices + 8 * rest),
        (choose("nsisa"), 8 * (matrices + rest)),
        (choose("misa", row_beta=None), 4 * matrices + 8 * rest),
    ]:
        if missing_requirement(choice) is None:
            team = build_team(choice, net)
            loss_of(net).backward()
            team.step()
            assert state_bytes(team) == expected
