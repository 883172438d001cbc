"""Sharded models: each replica is a node, and shards make no difference."""

import math
import re
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.problem import (
    alone,
    backward,
    difference,
    identical,
    network,
    settings,
    spectral,
    together,
    weights,
)
from tests.distributed.processes import run, run_cases
from tests.distributed.test_process_group import TOLERANCE
from torchpisa import MISA, NSISA, PISA, SISA
from torchpisa.distributed import shard
from torchpisa.preconditioners import SecondMoment, Spectral


def whole(model: nn.Module) -> Any:
    return [param.full_tensor().detach() for param in model.parameters()]


def mesh(replicas: int) -> DeviceMesh:
    shape = replicas, distributed.get_world_size() // replicas
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def trained(make: Any, steps: int, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """Two replicas of two shards; the shards of a replica see the same batch."""
    model = network(dtype, seed=1 + distributed.get_rank() // 2)
    grid = mesh(2)
    nodes = shard(model, grid, [model[0], model[2]])
    node = grid.get_local_rank("replicate")
    opt = together(make, [node], nodes, **more)(model.parameters())
    for step in range(steps):
        opt.zero_grad()
        backward(model, node, step, dtype)
        opt.step()
    for state in opt.state.values():
        assert isinstance(state["dual.0"], DTensor)
    return whole(model)


WAYS: list[tuple[Any, dict[str, Any]]] = [
    (SISA, {}),
    (SISA, {"dtype": torch.float32}),
    (SISA, {"clip": 0.7}),
    (SISA, {"foreach": False}),
    (SISA, {"initial_consensus": True, "scheme": "adagrad"}),
    (NSISA, {}),
    (NSISA, {"dtype": torch.float32}),
    (NSISA, {"clip": 0.7}),
    (NSISA, {"foreach": False}),
    (NSISA, {"nesterov": True, "aspect_scaling": True}),
    (spectral, {"clip": 0.7, "aspect_scaling": True, "eta": 0.5}),
    (spectral, {"foreach": False}),
    (spectral, {"local": True, "clip": 0.7, "aspect_scaling": True, "eta": 0.5}),
    (spectral, {"local": True, "foreach": False}),
]


def trained_in_all_ways() -> list[Any]:
    return [trained(make, 5, **more) for make, more in WAYS]


@pytest.fixture(scope="module")
def results() -> list[list[Any]]:
    """Weights by rank and way, all in one start of the processes."""
    return run(trained_in_all_ways, 4)


@pytest.mark.xdist_group("hsdp")
@pytest.mark.parametrize(
    "number", range(len(WAYS)), ids=[f"{make.__name__}-{more}" for make, more in WAYS]
)
def test_hsdp_equals_one_process(results: list[list[Any]], number: int) -> None:
    make, more = WAYS[number]
    found = [of_rank[number] for of_rank in results]
    assert identical(found)
    tolerance = TOLERANCE[more.get("dtype", torch.float64)]
    assert difference(found, alone(make, 2, 5, **more)) <= tolerance


# One replica: no process group, several batches in turn


def fully_sharded(make: Any, **more: Any) -> Any:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    opt = make(model.parameters(), **{**settings(make, [0, 1]), **more})
    for step in range(10):
        for node in range(2):
            opt.zero_grad()
            backward(model, node, step, torch.float64)
            opt.step()
    return whole(model)


@pytest.mark.parametrize("make", [SISA, NSISA, spectral])
def test_fsdp_equals_one_process(make: Any) -> None:
    assert difference(run(fully_sharded, 3, make), alone(make, 2, 10)) <= 1e-10


def many_small(make: Any, sharded: bool) -> Any:
    """So many parameters of one shape that plain ones are stepped as rows of one tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(12)))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    opt = make(model.parameters())
    for _ in range(4):
        opt.zero_grad()
        model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
        opt.step()
    return whole(model) if sharded else weights(model)


@pytest.mark.parametrize("make", [SISA, MISA])
def test_many_small_shards_equal_one_process(make: Any) -> None:
    assert difference(run(many_small, 2, make, True), many_small(make, False)) <= 1e-10


def averages_of_shards() -> None:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"average must be 0 for sharded parameters, got 0\.9"):
        PISA([model[0].weight], Spectral(average=0.9))


def test_averages_of_shards_are_refused() -> None:
    run(averages_of_shards, 2)


def unknown_preconditioner() -> Any:
    """PISA must not hand shards to a preconditioner that may need all of a parameter."""

    class Own(SecondMoment):
        def solve(self, problem: Any, state: Any) -> Any:
            assert isinstance(problem.residual, DTensor)
            return super().solve(problem, state)

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    opt = PISA(model.parameters(), Own("rmsprop", beta=0.9), sigma=2.0, rho=10.0)
    for step in range(5):
        opt.zero_grad()
        backward(model, 0, step, torch.float64)
        opt.step()
    return whole(model)


def test_unknown_preconditioners_see_whole_parameters() -> None:
    model = network()
    opt = PISA(model.parameters(), SecondMoment("rmsprop", beta=0.9), sigma=2.0, rho=10.0)
    for step in range(5):
        opt.zero_grad()
        backward(model, 0, step, torch.float64)
        opt.step()
    assert difference(run(unknown_preconditioner, 2), weights(model)) <= 1e-12


# Parameters of one group that are sharded, copied and plain, as with tensor parallelism


def mixed(spread: bool) -> list[torch.Tensor]:
    grid = init_device_mesh("cpu", (2,)) if spread else None
    layouts = [None, [Shard(0)], [Shard(1)], [Replicate()], [Shard(0)], None]

    def part(tensor: torch.Tensor, number: int) -> torch.Tensor:
        layout = layouts[number]
        return distribute_tensor(tensor, grid, layout) if spread and layout else tensor.clone()

    params = [nn.Parameter(part(w, i)) for i, w in enumerate(weights(network()))]
    opt = SISA(params, sigma=2.0, rho=10.0, clip=0.3, nonfinite="skip")
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for number, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            if step == 2 and number == 1:
                grad[-1] = math.nan  # in the shard of the last process only
            param.grad = part(grad, number)
        opt.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in params]


def test_mixed_layouts_equal_one_process() -> None:
    assert difference(run(mixed, 2, True), mixed(False)) <= 1e-12


# Batches that are left out


def disturbed(how: str) -> Any:
    """In step 2 a single shard of a single replica is not finite."""
    model = network()
    grid = mesh(2)
    nodes = shard(model, grid)
    node = grid.get_local_rank("replicate")
    mode = "raise" if how == "raise" else "skip"
    opt = together(SISA, [node], nodes, nonfinite=mode)(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=how == "scaler", init_scale=64.0)
    raised = []
    for step in range(5):
        opt.zero_grad()
        scale = float(scaler.scale(torch.ones(())))
        backward(model, node, step, torch.float64, scale)
        if step == 2 and distributed.get_rank() == 3:
            model[0].weight.grad.to_local().fill_(math.inf)
        try:
            scaler.step(opt)
        except FloatingPointError as error:
            raised.append((step, str(error)))
        scaler.update()
    return whole(model), raised


@pytest.mark.parametrize("how", ["skip", "raise", "scaler"])
def test_a_shard_that_is_not_finite(how: str) -> None:
    model = network()
    opt = SISA(model.parameters(), **settings(SISA, [0, 1]))
    for step in range(5):
        for node in range(2):
            opt.zero_grad()
            if step == 2 and node == 1:
                opt.skip()
            else:
                backward(model, node, step, torch.float64)
                opt.step()
    results = run(disturbed, 4, how)
    assert difference([result for result, _ in results], weights(model)) <= 1e-12
    if how == "raise":
        told = [" ".join(message for _, message in raised) for _, raised in results]
        assert [len(raised) for _, raised in results] == [1] * 4
        assert "on another rank" in told[0]
        assert "in a shard of another process" in told[2]
        assert "parameter 0 of group 0" in told[3]


# Bad input


def refused(case: str) -> str:
    model = network()
    try:
        if case == "both dimensions":
            grid = mesh(2)
            fully_shard(model, mesh=grid)
            SISA(model.parameters(), process_group=grid["replicate"])
        elif case == "shards":
            grid = mesh(2)
            shard(model, grid)
            SISA(model.parameters(), process_group=grid["shard"])
        elif case == "two dimensions":
            SISA(model.parameters(), process_group=mesh(2))
        elif case == "one dimension":
            shard(model, init_device_mesh("cpu", (4,)))
        elif case == "twice":
            grid = mesh(2)
            shard(model, grid, mesh=grid)
        elif case == "FSDP1":
            flat = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
            SISA(flat.parameters(), process_group=distributed.group.WORLD)
        else:
            raise AssertionError(case)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


REFUSED = [
    ("both dimensions", r"over which fully_shard averages .* Use torchpisa.distributed.shard"),
    ("shards", r"process_group must not have two ranks that hold shards of one replica"),
    ("two dimensions", r"mesh of one dimension, got one of 2: .*mesh\['replicate'\]"),
    ("one dimension", r"mesh must be a DeviceMesh of two named dimensions, replicas and shar"),
    ("twice", r"got multiple values for"),
    ("FSDP1", r"process_group must be None for parameters in FullyShardedDataParallel, which"),
]


@pytest.fixture(scope="module")
def answers() -> list[dict[str, str]]:
    """Return the message of each case on each rank; the processes start once for all cases."""
    return run_cases(refused, 4, [case for case, _ in REFUSED])


@pytest.mark.xdist_group("refused")
@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_bad_input_is_refused(answers: list[dict[str, str]], case: str, message: str) -> None:
    for told in answers:
        assert re.search(message, told[case]), told[case]
