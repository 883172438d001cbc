"""A step that fails changes nothing, wherever in it the user's own code raised."""

import pytest
import torch
from torch import nn

from tests.optim.test_arguments import assert_unchanged, snapshot
from torchpisa import PISA
from torchpisa.kernels.foreach import Foreach
from torchpisa.preconditioners import Hessian, Identity, Preconditioner


class Trap(Preconditioner):
    """A momentum of its own, and an error in the call that it is told."""

    def __init__(self):
        self.calls = 0
        self.falls = None

    def init(self, param):
        return {"velocity": torch.zeros_like(param)}

    def solve(self, problem, state):
        self.calls += 1
        if self.calls == self.falls:
            raise ZeroDivisionError("trapped")
        velocity = 0.5 * state["velocity"] + problem.residual
        return -velocity / (problem.sigma + problem.rho), {"velocity": velocity}


def setup(batches, **settings):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(3, 2)) for _ in range(4)]
    trap = Trap()
    groups = [
        {"params": params[:1], "preconditioner": Identity()},
        {"params": params[1:], "preconditioner": trap},
    ]
    opt = PISA(groups, batches=batches, gamma=0.5, sigma=2.0, consensus_decay=0.1, **settings)
    return params, trap, opt


def give_gradients(params, k):
    """The last one is missed by every other batch, and settled at the end of the round."""
    generator = torch.Generator().manual_seed(k)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    if k % 2 == 0:
        params[-1].grad = None


@pytest.mark.parametrize("settings", [{}, {"capturable": True}, {"foreach": False}])
@pytest.mark.parametrize(
    ("batches", "call"), [*((1, call) for call in (1, 2, 3)), *((2, call) for call in (1, 2, 3, 4))]
)
def test_an_error_in_a_preconditioner(batches, call, settings):
    params, trap, opt = setup(batches, **settings)
    others, _, smooth = setup(batches, **settings)
    for k in range(3):
        give_gradients(params, k), give_gradients(others, k)
        opt.step(), smooth.step()
    failed = 0
    for k in range(3, 8):
        give_gradients(params, k), give_gradients(others, k)
        trap.falls = trap.calls + call
        before = snapshot(opt)
        sigmas = [[float(s) for s in group["sigma"]] for group in opt.param_groups]
        try:
            opt.step()
        except ZeroDivisionError:
            assert_unchanged(opt, before)
            assert sigmas == [[float(s) for s in group["sigma"]] for group in opt.param_groups]
            failed += 1
            trap.falls = None
            opt.step()
        smooth.step()
    assert failed
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p.detach(), q.detach())


@pytest.mark.parametrize("end", ["flush", "skip"])
def test_an_error_at_the_end_of_a_round(end):
    """The end of a round steps batches that had no gradient for a parameter."""
    params, trap, opt = setup(3)
    for k in (1, 2):
        give_gradients(params, k)
        opt.step()
    trap.falls = trap.calls + 1
    before = snapshot(opt)
    with pytest.raises(ZeroDivisionError):
        getattr(opt, end)()
    assert_unchanged(opt, before)
    trap.falls = None
    getattr(opt, end)()
    assert opt.iteration == 1


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_what_an_interrupted_run_saves_loads(steps, monkeypatch):
    """As by Ctrl-C, between two groups that torchpisa's own kernel steps."""
    params = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    opt = PISA([{"params": [p]} for p in params], batches=3)
    give_gradients(params, 1)
    for _ in range(steps):
        opt.step()
    local_step, calls = Foreach.local_step, []

    def interrupted(kernel, job):
        calls.append(job)
        if len(calls) == 2:
            raise KeyboardInterrupt
        local_step(kernel, job)

    with monkeypatch.context() as patch:
        patch.setattr(Foreach, "local_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            opt.step()
    assert (opt.iteration, opt.batch) == divmod(steps, 3)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = PISA([{"params": [p]} for p in others], batches=3)
    other.load_state_dict(opt.state_dict())
    for _ in range(6):
        give_gradients(params, 1), give_gradients(others, 1)
        opt.step(), other.step()
    assert all(map(torch.equal, params, others))


def test_hessian_may_be_tried_again(monkeypatch):
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    hessian = Hessian()
    opt = PISA([p], hessian)
    loss = (p**4).sum()
    loss.backward(retain_graph=True)
    hessian.observe(loss)
    before = snapshot(opt)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opt.step()
    assert_unchanged(opt, before)
    opt.step()
    assert not torch.equal(p.detach(), torch.tensor([1.0, 2.0]))
