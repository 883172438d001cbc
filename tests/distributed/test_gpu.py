"""The same on a GPU: ranks that share one talk over gloo, a single rank over nccl."""

import math
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.problem import batch, difference, here, identical, network, settings
from tests.distributed.processes import run
from torchpisa import NSISA, SISA
from torchpisa.distributed import attach, process_group

pytestmark = pytest.mark.gpu

STEPS = 30


def backward(model: Any, node: int, step: int, scale: float = 1) -> None:
    x, y = (tensor.cuda() for tensor in batch(node, step, torch.float32))
    (scale * torch.nn.functional.mse_loss(model(x), y)).backward()


def weights(model: torch.nn.Module) -> Any:
    return [param.detach().cpu() for param in model.parameters()]


def exactly(make: Any) -> dict[str, Any]:
    return {"ns_dtype": None} if make is NSISA else {}


def expected(make: Any, absent: Any = ()) -> Any:
    model = network(torch.float32).cuda()
    opt = make(model.parameters(), **settings(make, [0, 1]), **exactly(make))
    for step in range(STEPS):
        for node in range(2):
            opt.zero_grad()
            if (step, node) in absent:
                opt.skip()
            else:
                backward(model, node, step)
                opt.step()
    return weights(model)


def trained(make: Any, route: str, how: str = "", absent: Any = ()) -> Any:
    model = network(torch.float32).cuda()
    more: Any = {"nonfinite": "skip"} if absent else {}
    opt = make(
        model.parameters(),
        process_group=distributed.group.WORLD,
        **settings(make, here()),
        **exactly(make),
        **more,
    )
    scaler = torch.amp.GradScaler("cuda", enabled=how == "scaler", init_scale=256.0)
    forward: Any = model
    if route == "attach":
        forward = DistributedDataParallel(model, bucket_cap_mb=0.0002)
        attach(opt, forward, scaler=scaler)
    (node,) = here()
    for step in range(STEPS):
        opt.zero_grad()
        scale = float(scaler.scale(torch.ones((), device="cuda")))
        backward(forward, node, step, math.inf if (step, node) in absent else scale)
        scaler.step(opt)
        scaler.update()
    opt.flush()
    return weights(model)


@pytest.mark.parametrize("route", ["process_group", "attach"])
@pytest.mark.parametrize("make", [SISA, NSISA])
def test_two_ranks(make: Any, route: str) -> None:
    results = run(trained, 2, make, route)
    assert identical(results)
    assert difference(results, expected(make)) <= 1e-5


@pytest.mark.parametrize("how", ["skip", "scaler"])
@pytest.mark.parametrize("route", ["process_group", "attach"])
def test_absent_batches(route: str, how: str) -> None:
    absent = [(3, 1), (5, 0), (5, 1)]
    results = run(trained, 2, SISA, route, how, absent)
    assert identical(results)
    assert difference(results, expected(SISA, absent)) <= 1e-5


def raises_later() -> tuple[bool, bool]:
    """The rank whose gradient is not finite hears of it; nobody waits for ever."""
    model = network(torch.float32).cuda()
    opt = SISA(model.parameters(), process_group=distributed.group.WORLD)
    (node,) = here()
    for step in range(4):
        opt.zero_grad()
        backward(model, node, step, math.nan if (step, node) == (2, 1) else 1)
        if step == 3:
            torch.cuda.synchronize()
        try:
            opt.step()
        except FloatingPointError:
            opt.step()  # the others are waiting for it
            return True, all(bool(param.isfinite().all()) for param in model.parameters())
    return False, all(bool(param.isfinite().all()) for param in model.parameters())


def test_nonfinite_gradients_raise_later() -> None:
    assert run(raises_later, 2) == [(False, True), (True, True)]


def over_nccl(route: str) -> Any:
    """All collectives of a real nccl group, although it has a single rank."""
    distributed.destroy_process_group()
    store = distributed.HashStore()
    distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    group = distributed.group.WORLD
    process_group.join = lambda *_: process_group.Ranks(group, None)
    model = network(torch.float32).cuda()
    opt = SISA(model.parameters(), process_group=group, **settings(SISA, [0, 1]))
    forward: Any = model
    if route == "attach":
        forward = DistributedDataParallel(model, bucket_cap_mb=0.0002)
        attach(opt, forward)
    for step in range(STEPS):
        for node in range(2):
            opt.zero_grad()
            backward(forward, node, step)
            opt.step()
    return weights(model)


@pytest.mark.parametrize("route", ["process_group", "attach"])
def test_nccl(route: str) -> None:
    assert difference(run(over_nccl, 1, route), expected(SISA)) <= 1e-5
