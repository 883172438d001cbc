"""sigma that changes while training."""

import math

import pytest
import torch
from torch import nn

from tests.tuning.problem import loader, model, scaled
from torchpisa import MISA, PISA, SISA
from torchpisa.tuning import ResidualBalancing, Restart


def test_restart_until_it_is_steady() -> None:
    net = model()
    opt = PISA(net.parameters(), sigma=1e-3, rho=0.0)
    restart = Restart(net, opt, iterations=100, factor=4.0)
    sigmas, losses = [], []
    loss = scaled()
    while len(losses) < 120:
        for batch in loader():
            opt.zero_grad()
            value = loss(net, batch)
            value.backward()
            opt.step()
            losses.append(value.item())
            if restart.update(losses[-1]):
                sigmas.append(opt.param_groups[0]["sigma"][0])
                losses.clear()
                break
    assert restart.restarts == len(sigmas) >= 2
    assert sigmas == pytest.approx([1e-3 * 4.0 ** (k + 1) for k in range(len(sigmas))])
    assert losses[-1] < 0.8 * losses[0]


def test_a_restart_begins_where_training_began() -> None:
    net = model()
    start = [tensor.clone() for tensor in net.state_dict().values()]
    opt = SISA(net.parameters(), sigma=2.0, batches=2)
    restart = Restart(net, opt)
    for batch in list(loader())[:3]:
        opt.zero_grad()
        scaled()(net, batch).backward()
        opt.step()
    assert not restart.update(1.0)
    assert restart.update(math.nan)
    assert all(map(torch.equal, net.state_dict().values(), start))
    assert opt.iteration == 0
    assert opt.synced
    assert opt.param_groups[0]["sigma"] == [4.0, 4.0]
    state = opt.state[next(net.parameters())]
    assert not state["dual.0"].any()
    assert not state["moment.1"].any()


def test_steady_runs_are_left_alone() -> None:
    net = nn.Linear(2, 1)
    restart = Restart(net, SISA(net.parameters(), sigma=0.5), iterations=60)
    noise = torch.randn(500, generator=torch.Generator().manual_seed(0)).tolist()
    losses = [math.exp(-k / 50) * (1 + 0.1 * noise[k]) for k in range(500)]
    assert not any(restart.update(loss) for loss in losses)
    assert restart.restarts == 0


def test_what_happens_after_the_watch_is_not_its_business() -> None:
    net = nn.Linear(2, 1)
    restart = Restart(net, SISA(net.parameters(), sigma=0.5), iterations=40)
    assert not any(restart.update(1 / (1 + k)) for k in range(40))
    assert not restart.update(math.nan)


def test_the_last_restart_warns() -> None:
    net = nn.Linear(2, 1)
    restart = Restart(net, SISA(net.parameters(), sigma=0.5), restarts=2)
    assert restart.update(math.inf)
    with pytest.warns(RuntimeWarning, match="not steady after 2 restarts; this was the last"):
        assert restart.update(math.inf)
    assert not restart.update(math.inf)


def test_restart_needs_a_fresh_optimizer() -> None:
    net = nn.Linear(2, 1)
    opt = SISA(net.parameters(), sigma=0.5)
    net(torch.ones(1, 2)).sum().backward()
    opt.step()
    with pytest.raises(ValueError, match=r"optimizer must not have taken a step yet, got .* 1"):
        Restart(net, opt)


def least_squares(sigma: float, balanced: bool) -> tuple[float, list[float]]:
    """Return error and sigma after 400 rounds on four batches with different solutions."""
    torch.manual_seed(0)
    a = torch.randn(4, 20, 5, dtype=torch.float64)
    b = torch.randn(4, 20, 1, dtype=torch.float64) + torch.arange(4.0).view(4, 1, 1)
    w = nn.Parameter(torch.zeros(5, 1, dtype=torch.float64))
    opt = PISA([w], sigma=sigma, rho=1.0, batches=4)
    if balanced:
        balancing = ResidualBalancing(opt, every=5, ratio=4.0)
    for _ in range(400):
        for own_a, own_b in zip(a, b, strict=True):
            opt.zero_grad()
            ((own_a @ w - own_b).square().mean() / 2).backward()
            opt.step()
    if balanced:
        balancing.close()
    best = torch.linalg.lstsq(a.reshape(80, 5), b.reshape(80, 1)).solution
    return float((w.detach() - best).norm() / best.norm()), opt.param_groups[0]["sigma"]


@pytest.mark.parametrize("sigma", [300.0, 1e4])
def test_balancing_finds_its_way_from_a_sigma_that_is_far_too_large(sigma: float) -> None:
    fixed, _ = least_squares(sigma, balanced=False)
    balanced, ends = least_squares(sigma, balanced=True)
    assert fixed > 0.1
    assert balanced < 0.01 * fixed
    assert all(end < sigma for end in ends)


def test_balancing_stops_when_closed() -> None:
    w = nn.Parameter(torch.ones(3))
    opt = SISA([w], sigma=1e6)
    balancing = ResidualBalancing(opt, every=1)
    balancing.close()
    for _ in range(5):
        w.grad = w.detach().clone()
        opt.step()
    assert opt.param_groups[0]["sigma"] == [1e6]


def test_bad_arguments() -> None:
    opt = SISA([nn.Parameter(torch.ones(3))], sigma=0.5)
    with pytest.raises(ValueError, match="ratio must be a finite number >= 1, got 0"):
        ResidualBalancing(opt, ratio=0)
    with pytest.raises(ValueError, match="factor must be a finite number > 1, got 1"):
        ResidualBalancing(opt, factor=1)
    with pytest.raises(ValueError, match="every must be an integer >= 1, got 0"):
        ResidualBalancing(opt, every=0)
    with pytest.raises(ValueError, match="iterations must be an integer >= 40, got 10"):
        Restart(nn.Linear(1, 1), opt, iterations=10)
    forgetful = SISA([nn.Parameter(torch.ones(3))], sigma=0.5, dual_decay=0)
    with pytest.raises(ValueError, match=r"dual_decay must be in \(0, 1\], got 0"):
        ResidualBalancing(forgetful)
    net = nn.Linear(1, 1)
    for wrong in (MISA(net.parameters()), torch.optim.AdamW(net.parameters()), net):
        expected = f"optimizer must be a PISA, SISA or NSISA, .* got {type(wrong).__name__}"
        with pytest.raises(ValueError, match=expected):
            Restart(net, wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=expected):
            ResidualBalancing(wrong)  # type: ignore[arg-type]
