"""Stages on a GPU: the same numbers as on a CPU, no waiting, and no CUDA graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from tests.preconditioners.test_consensus import averages, gradients
from torchpisa import MISA
from torchpisa.preconditioners.consensus import EigenbasisMoment, Stage, Whiten

pytestmark = pytest.mark.gpu

STAGES = [Whiten(every=4), Whiten(power=0.5, every=4), EigenbasisMoment(every=4)]
STAGES += [EigenbasisMoment("both", every=4)]
over_stages = pytest.mark.parametrize("stage", STAGES, ids=repr)


@over_stages
def test_gpu_equals_cpu(stage: Stage) -> None:
    gs = torch.stack([gradients(10, 40, 40, seed) for seed in range(3)], dim=1)
    us = torch.stack([averages(gs[:, i]) for i in range(3)], dim=1)
    results = []
    for device in ("cpu", "cuda"):
        states = [stage.init_state(40, 40, gs.to(device)) for _ in range(3)]
        state = {name: torch.stack([each[name] for each in states]) for name in stage.names}
        for t, (u, g) in enumerate(zip(us.to(device), gs.to(device), strict=True)):
            result, new = stage.apply(u, g, state, t)
            state |= new
        results.append(result.cpu())
    assert (results[0] - results[1]).norm() < 1e-6 * results[0].norm()


def optimizer(
    stage: Stage, blocks: int = 1, sizes: tuple[int, ...] = (96, 160)
) -> tuple[MISA, list[nn.Parameter]]:
    rows, columns = sizes
    shapes = [(rows, columns), (columns, rows), (rows, rows), (rows, columns)]
    params = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in shapes]
    opt = MISA(params, before=stage, damping=0.1, blocks=blocks, nonfinite="ignore")
    return opt, params


def step(opt: MISA, params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.randn_like(param)
    opt.step()


@pytest.mark.parametrize("blocks", [1, 2])
@over_stages
def test_steps_do_not_wait(
    no_waiting: Callable[[], AbstractContextManager[None]], stage: Stage, blocks: int
) -> None:
    opt, params = optimizer(stage, blocks)
    for _ in range(9):  # libraries are loaded, state is built
        step(opt, params)
    with no_waiting():
        for _ in range(8):  # two of them refresh
            step(opt, params)
    assert all(param.isfinite().all() for param in params)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # because nothing was captured
def test_capture_is_refused() -> None:
    opt, params = optimizer(Whiten())
    step(opt, params)
    with (
        pytest.raises(RuntimeError, match=r"before must be None for a CUDA graph, got Whiten"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        opt.step()
