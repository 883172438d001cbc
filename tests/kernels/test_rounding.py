"""Stochastic rounding to bfloat16 has no bias, in every kernel."""

import pytest
import torch
from torch import nn

from tests.kernels.given import NSISA, SISA
from torchpisa.kernels.rounding import store
from torchpisa.kernels.triton import plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_store_hits_the_two_neighbours_with_the_right_frequencies():
    low, high = 1.0, 1.0078125  # neighbours in bfloat16
    value = low + 0.3 * (high - low)
    target = torch.zeros(100_000, dtype=torch.bfloat16)
    store(target, torch.full_like(target, value, dtype=torch.float32), stochastic=True)
    share = (target == high).double().mean()
    assert ((target == low) | (target == high)).all()
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / len(target)) ** 0.5


def test_store_leaves_what_needs_no_rounding():
    values = torch.tensor([0.0, -0.0, 1.5, -3.25, float("inf"), -float("inf"), float("nan")])
    target = torch.zeros(len(values), dtype=torch.bfloat16)
    store(target, values, stochastic=True)
    assert torch.equal(target.nan_to_num(7.0), values.bfloat16().nan_to_num(7.0))
    single = torch.zeros(3)
    store(single, torch.tensor([1 / 3, 1e-9, 3.0]), stochastic=True)
    assert single.tolist() == torch.tensor([1 / 3, 1e-9, 3.0]).tolist()


@pytest.fixture(params=["loop", "foreach", "fused"])
def kernel(request, monkeypatch):
    if request.param == "fused":
        pytest.importorskip("triton", minversion="3.3")
        monkeypatch.setattr(plan, "DEVICES", ["cuda", "cpu"])
        return {"fused": True}
    return {"fused": False, "foreach": request.param == "foreach"}


def mean_path(kernel, dtype, state_dtype, stochastic, cls=SISA, batches=1, side=64):
    """Equal coordinates, and their duals, after 20 steps along a constant gradient from 1."""
    w = nn.Parameter(torch.ones(side, side, dtype=dtype, device=DEVICE))
    opt = cls(
        [w],
        sigma=50.0,
        rho=1e4,
        batches=batches,
        state_dtype=state_dtype,
        stochastic_rounding=stochastic,
        **kernel,
    )
    for _ in range(20):
        w.grad = torch.full_like(w, 0.01)
        opt.step()
    return w.detach().double(), opt.state[w]["dual.0"].double()


@pytest.mark.parametrize(
    ("state_dtype", "batches"), [(torch.float32, 2), (torch.bfloat16, 1)], ids=str
)
def test_small_steps_add_up(kernel, state_dtype, batches):
    """Steps far below the spacing of bfloat16: lost one by one, kept on average."""
    few = {"batches": batches, "side": 4}  # without chance in it all coordinates are the same
    exact, _ = mean_path(kernel, torch.float32, torch.float32, False, **few)
    nearest, _ = mean_path(kernel, torch.bfloat16, state_dtype, False, **few)
    rounded, _ = mean_path(kernel, torch.bfloat16, state_dtype, True, batches=batches)
    moved = 1 - exact.mean()
    assert 2**-12 < moved < 2**-7
    assert (nearest == 1).all()
    error = rounded.std() / rounded.numel() ** 0.5
    assert abs(rounded.mean() - exact.mean()) < 5 * error
    assert 5 * error < 0.5 * moved


def test_bfloat16_state_has_no_drift(kernel):
    """The dual itself, whose increments are below its spacing towards the end."""
    _, exact = mean_path(kernel, torch.float32, torch.float32, False, side=4)
    _, rounded = mean_path(kernel, torch.float32, torch.bfloat16, True)
    error = rounded.std() / rounded.numel() ** 0.5
    assert error > 0
    assert abs(rounded.mean() - exact.mean()) < 5 * error


def test_draws_differ_from_step_to_step(kernel):
    """The same draws in every step would push the same coordinates every time."""
    w = nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16, device=DEVICE))
    opt = SISA([w], sigma=50.0, rho=1e4, stochastic_rounding=True, **kernel)
    moves = []
    for _ in range(40):
        before = w.detach().clone()
        w.grad = torch.full_like(w, 0.01)
        opt.step()
        moves.append((w.detach() != before).flatten())
    often = torch.stack(moves).sum(0)
    assert often.max() < 12
    assert often.sum() > 0


def test_matrices_of_nsisa_are_rounded_too(kernel):
    w = nn.Parameter(torch.ones(32, 48, dtype=torch.bfloat16, device=DEVICE))
    opt = NSISA([w], sigma=100.0, rho=0.0, stochastic_rounding=True, **kernel)
    for _ in range(3):
        w.grad = torch.ones_like(w)
        opt.step()
    assert 0 < (w != 1).sum() < w.numel()
