"""Ranks of a process group: the result of one process that holds all batches."""

import copy
import math
import os
import pickle
import re
import signal
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.problem import (
    SIZE,
    alone,
    backward,
    batch,
    difference,
    here,
    identical,
    network,
    settings,
    spectral,
    together,
    weights,
)
from tests.distributed.processes import RankError, run, run_cases
from torchpisa import NSISA, PISA, SISA
from torchpisa.preconditioners import SecondMoment

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def trained(make: Any, steps: int, dtype: torch.dtype, per_rank: int = 1, **more: Any) -> Any:
    model = network(dtype, seed=1 + distributed.get_rank())  # the first rank's is what counts
    nodes = here(per_rank)
    opt = together(make, nodes, **more)(model.parameters())
    for step in range(steps):
        for node in nodes:
            opt.zero_grad()
            backward(model, node, step, dtype)
            opt.step()
    assert opt.synced
    assert opt.iteration == steps
    return weights(model)


@pytest.mark.parametrize(
    ("make", "ranks", "dtype"),
    [
        (SISA, 4, torch.float64),
        (NSISA, 4, torch.float64),
        (SISA, 2, torch.float32),
        (NSISA, 2, torch.float32),
    ],
)
def test_equals_one_process(make: Any, ranks: int, dtype: torch.dtype) -> None:
    results = run(trained, ranks, make, 10, dtype)
    assert identical(results)
    assert difference(results, alone(make, ranks, 10, dtype)) <= TOLERANCE[dtype]


WAYS: list[dict[str, Any]] = [
    {"clip": 0.7},
    {"foreach": False},
    {"fused": False, "foreach": True},
    {"initial_consensus": True},
    {"scheme": "adagrad", "eta": 2.0},
    {"lr": 0.0},
    {"nonfinite": "ignore", "maximize": True, "sigma": 50.0},
]


def trained_in_all_ways() -> list[Any]:
    return [trained(SISA, 10, torch.float64, **more) for more in WAYS]


@pytest.fixture(scope="module")
def results() -> list[list[Any]]:
    """Weights by rank and way, all in one start of the processes."""
    return run(trained_in_all_ways, 2)


@pytest.mark.xdist_group("process group")
@pytest.mark.parametrize("number", range(len(WAYS)), ids=lambda number: str(WAYS[number]))
def test_equals_one_process_with(results: list[list[Any]], number: int) -> None:
    more = WAYS[number]
    expected = alone(SISA, 2, 10, **more)
    if more.get("lr") != 0:
        assert difference([weights(network())], expected) > 1e-3
    assert difference([of_rank[number] for of_rank in results], expected) <= 1e-12


@pytest.mark.parametrize("make", [SISA, NSISA, spectral])
def test_several_batches_per_rank(make: Any) -> None:
    results = run(trained, 2, make, 10, torch.float64, per_rank=2)
    assert identical(results)
    assert difference(results, alone(make, 4, 10)) <= 1e-10


def with_any_preconditioner() -> Any:
    model = network()
    opt = PISA(
        model.parameters(),
        SecondMoment("rmsprop", beta=0.9),
        sigma=2.0,
        rho=10.0,
        process_group=distributed.group.WORLD,
    )
    for step in range(5):
        opt.zero_grad()
        backward(model, here()[0], step, torch.float64)
        opt.step()
    return weights(model)


def test_pisa() -> None:
    model = network()
    opt = PISA(
        model.parameters(), SecondMoment("rmsprop", beta=0.9), sigma=2.0, rho=10.0, batches=2
    )
    for step in range(5):
        for node in range(2):
            opt.zero_grad()
            backward(model, node, step, torch.float64)
            opt.step()
    assert difference(run(with_any_preconditioner, 2), weights(model)) <= 1e-12


# What crosses the network


def loss_with(reduce_dtype: torch.dtype | None) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    opt = SISA(model.parameters(), process_group=distributed.group.WORLD, reduce_dtype=reduce_dtype)
    generator = torch.Generator().manual_seed(distributed.get_rank())
    x = torch.randn(256, 16, generator=generator)
    # A rank has two of the four classes.
    y = x[:, :2].argmax(1) + 2 * distributed.get_rank()
    loss = torch.zeros(())
    for _ in range(150):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x + distributed.get_rank()), y)
        loss.backward()
        opt.step()
    total = loss.detach().clone()
    distributed.all_reduce(total)
    return float(total) / 2


def losses_by_dtype() -> list[float]:
    return [loss_with(dtype) for dtype in (None, torch.bfloat16, torch.float16)]


def following(batches: int) -> Any:
    model = network()
    opt = SISA(
        model.parameters(),
        process_group=distributed.group.WORLD,
        batches=batches,
        weights=[SIZE[node] for node in here(batches)],
    )
    for step in range(20):
        for node in here(batches):
            opt.zero_grad()
            backward(model, node, step, torch.float64)
            opt.step()
    return weights(model)


@pytest.mark.parametrize("batches", [1, 2])
def test_sigma_that_follows_is_summed_over_all_ranks(batches: int) -> None:
    model = network()
    opt = SISA(model.parameters(), batches=2 * batches, weights=SIZE[: 2 * batches])
    for step in range(20):
        for node in range(2 * batches):
            opt.zero_grad()
            backward(model, node, step, torch.float64)
            opt.step()
    results = run(following, 2, batches)
    assert identical(results)
    assert difference(results, weights(model)) <= 1e-10


def test_half_precision_on_the_wire_ends_at_the_same_loss() -> None:
    exact, bfloat16, float16 = run(losses_by_dtype, 2)[0]
    assert exact < 0.5
    assert bfloat16 != exact
    assert bfloat16 == pytest.approx(exact, rel=0.01)
    assert float16 == pytest.approx(exact, rel=0.01)


def unusual_parameters() -> Any:
    """Layouts and dtypes that a flat buffer must not mix up."""
    torch.manual_seed(0)
    params = [
        nn.Parameter(torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(7, 5).t()),
        nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(0, 2)),
        nn.Parameter(torch.randn(11, dtype=torch.float64)),
        nn.Parameter(torch.randn(9).bfloat16()),
    ]
    size = distributed.get_world_size() if distributed.is_initialized() else 1
    kwargs: Any = {"process_group": distributed.group.WORLD} if size > 1 else {"batches": 2}
    opt = SISA(params, sigma=2.0, rho=10.0, **kwargs)
    for _ in range(5):
        for node in here() if size > 1 else range(2):
            for number, param in enumerate(params):
                target = torch.full_like(param, number + 2 * node)
                param.grad = param.detach() - target
            opt.step()
    return [param.detach() for param in params]


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 cannot sum bfloat16 with gloo")
def test_unusual_parameters() -> None:
    expected = unusual_parameters()
    for result in run(unusual_parameters, 2):
        for own, other in zip(result, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def where_sums_live() -> tuple[int, bool]:
    model = network()
    opt = together(SISA, here())(model.parameters())

    def step() -> set[int]:
        backward(model, 0, 0, torch.float64)
        opt.step()
        return {opt.state[p]["pending"].untyped_storage().data_ptr() for p in model.parameters()}

    first = step()
    again = step()
    opt.load_state_dict(opt.state_dict())
    step()
    return len(first), first == again


def test_sums_are_not_copied_from_round_to_round() -> None:
    assert run(where_sums_live, 2) == [(1, True), (1, True)]


# Parameters without gradients


class Branches(nn.Module):
    """One branch for each rank, one for nobody, one for all."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(4)).double()

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        return sum(self.branches[i](x) for i in used)


def used_by(node: int, step: int) -> tuple[int, ...]:
    """Branch 0 by all, 1 by node 1 only, 2 by nodes in turn, 3 by nobody until late."""
    used = [0]
    if node == 1:
        used.append(1)
    if step % 2 == node:
        used.append(2)
    if step >= 5:
        used.append(3)
    return tuple(used)


def branched(steps: int, spread: bool) -> Any:
    model = Branches()
    nodes = here() if spread else [0, 1]
    several: Any = {"process_group": distributed.group.WORLD} if spread else {"batches": 2}
    opt = SISA(model.parameters(), sigma=2.0, rho=10.0, **several)
    early = []
    for step in range(steps):
        for node in nodes:
            opt.zero_grad()
            x, y = batch(node, step)
            nn.functional.mse_loss(model(x, used_by(node, step)), y).backward()
            opt.step()
        if step == 3:
            early = [opt.state[p]["dual.0"].clone() for p in model.branches[3].parameters()]
    assert not any(dual.any() for dual in early)
    return weights(model)


def test_parameters_without_gradients() -> None:
    expected = branched(10, spread=False)
    results = run(branched, 2, 10, spread=True)
    assert identical(results)
    assert difference(results, expected) <= 1e-12


def thawed(spread: bool) -> Any:
    """The first layer is trained from step 2 on, in which node 1 has no part."""
    model = network()
    model[0].requires_grad_(False)
    nodes = here() if spread else [0, 1]
    make = together(SISA, nodes) if spread else lambda p: SISA(p, **settings(SISA, nodes))
    opt = make(model.parameters())
    for step in range(4):
        model[0].requires_grad_(step >= 2)
        for node in nodes:
            opt.zero_grad()
            if (step, node) == (2, 1):
                opt.skip()
            else:
                backward(model, node, step, torch.float64)
                opt.step()
    return weights(model)


def test_parameters_frozen_until_late() -> None:
    assert difference(run(thawed, 2, spread=True), thawed(spread=False)) <= 1e-12


# Batches that are left out


def disturbed(spread: bool, how: str, mode: str = "skip", **more: Any) -> Any:
    """Node 1 has no part in step 2, all nodes none in step 4."""
    model = network()
    nodes = here() if spread else [0, 1]
    if spread:
        opt = together(SISA, nodes, nonfinite=mode, **more)(model.parameters())
    else:
        opt = SISA(model.parameters(), nonfinite=mode, **{**settings(SISA, nodes), **more})
    scaler = torch.amp.GradScaler("cpu", enabled=how == "scaler", init_scale=1024.0)
    raised = []
    for step in range(8):
        for node in nodes:
            opt.zero_grad()
            bad = (step == 2 and node == 1) or step == 4
            if bad and how == "skip()":
                opt.skip()
                continue
            scale = float(scaler.scale(torch.ones(())))
            backward(model, node, step, torch.float64, math.inf if bad else scale)
            try:
                scaler.step(opt)
            except FloatingPointError as error:
                raised.append((step, str(error)))
            scaler.update()
    return weights(model), raised


@pytest.mark.parametrize("how", ["skip()", "infinite", "scaler"])
def test_absent_batches(how: str) -> None:
    expected, _ = disturbed(spread=False, how="skip()")
    results = [result for result, _ in run(disturbed, 2, spread=True, how=how)]
    assert identical(results)
    assert difference(results, expected) <= 1e-12


def test_nonfinite_gradients_raise_on_all_ranks() -> None:
    expected, _ = disturbed(spread=False, how="skip()")
    (first, told), (second, knows) = run(disturbed, 2, spread=True, how="infinite", mode="raise")
    assert [step for step, _ in told] == [step for step, _ in knows] == [2, 4]
    assert "non-finite gradient on another rank in iteration 2" in told[0][1]
    assert "non-finite gradient in batch 0 of iteration 2: parameter 0 of group" in knows[0][1]
    # The round was completed, so those who catch the error can go on.
    assert difference([first, second], expected) <= 1e-12


def flushed() -> Any:
    model = network()
    nodes = here(2)
    opt = together(SISA, nodes)(model.parameters())
    for step in range(3):
        backward(model, nodes[0], step, torch.float64)
        opt.step()
        opt.zero_grad()
        opt.flush()
        assert opt.synced
    return weights(model)


def test_flush() -> None:
    model = network()
    opt = SISA(model.parameters(), **settings(SISA, [0, 1, 2, 3]))
    for step in range(3):
        for node in (0, 2):
            opt.zero_grad()
            backward(model, node, step, torch.float64)
            opt.step(batch=node)
        opt.flush()
    assert difference(run(flushed, 2), weights(model)) <= 1e-12


def killed_in_the_middle() -> str:
    model = network()
    opt = together(SISA, here())(model.parameters())
    for step in range(5):
        opt.zero_grad()
        backward(model, here()[0], step, torch.float64)
        if step == 3 and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            opt.step()
        except RuntimeError as error:
            return f"{step}: {error}"
    return "nothing happened"


def test_survivors_of_a_killed_rank_are_told() -> None:
    told, _ = run(killed_in_the_middle, 2, killed=1)
    assert told.startswith("3: ")


# Checkpoints of one rank


def interrupted() -> bool:
    def steps(model: nn.Module, opt: Any, first: int, last: int) -> None:
        for step in range(first, last):
            for node in here(2)[step % 2 :][:1]:
                opt.zero_grad()
                backward(model, node, step, torch.float64)
                opt.step()

    model = network()
    opt = together(SISA, here(2))(model.parameters())
    steps(model, opt, 0, 5)  # in the middle of a round
    saved = pickle.loads(pickle.dumps((model.state_dict(), opt.state_dict())))
    steps(model, opt, 5, 10)
    other = network(seed=7)
    resumed = together(SISA, here(2))(other.parameters())
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    steps(other, resumed, 5, 10)
    return identical([weights(model), weights(other)])


def test_state_dict_of_a_rank_resumes_bit_for_bit() -> None:
    assert run(interrupted, 2) == [True, True]


# Bad input


def refused(case: str) -> str:
    rank = distributed.get_rank()
    world = distributed.group.WORLD
    model = network()
    params = list(model.parameters())
    try:
        if case == "shapes":
            SISA([nn.Parameter(torch.zeros(2 + rank))], process_group=world)
        elif case == "number":
            SISA(params[rank:], process_group=world)
        elif case == "weights":
            SISA(params, process_group=world, weights=[1.0] if rank else None)
        elif case == "batches":
            SISA(params, process_group=world, batches=1 + rank)
        elif case == "group":
            SISA(params, process_group="world")
        elif case == "capturable":
            SISA(params, process_group=world, capturable=True)
        elif case == "stochastic_rounding":
            SISA(params, process_group=world, stochastic_rounding=True)
        elif case == "reduce_dtype":
            SISA(params, process_group=world, reduce_dtype=torch.int32)
        elif case == "copy":
            copy.deepcopy(SISA(params, process_group=world))
        elif case == "pickle":
            pickle.dumps(SISA(params, process_group=world))
        elif case == "state":
            SISA(params, process_group=world).load_state_dict(SISA(params).state_dict())
        elif case == "plain DDP":
            opt = SISA(params, process_group=world)
            parallel = DistributedDataParallel(model)
            backward(parallel, rank, 0, torch.float64)
            opt.step()
        elif case == "DDP added later":
            opt = SISA(model[0].parameters(), process_group=world)
            backward(model, rank, 0, torch.float64)
            opt.step()
            head = DistributedDataParallel(model[2:])
            opt.add_param_group({"params": list(head.parameters())})
            backward(nn.Sequential(model[:2], head), rank, 0, torch.float64)
            opt.step()
        else:
            raise AssertionError(case)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


REFUSED = [
    ("shapes", r"parameters must have the same shapes .* shape \(2,\), .* shape \(3,\)"),
    ("number", r"the number of parameters must be the same on all ranks .* got 6 .* and 5"),
    ("weights", r"weights given or not given, on all ranks .*\(1, None\), \(1, \[1\.0\]\)"),
    ("batches", r"batches must be the same.*\(1, None\), \(2, None\)"),
    ("group", r"process_group must be a torch.distributed process group .* got 'world'"),
    ("capturable", r"capturable must be False with a process_group, got True"),
    ("stochastic_rounding", r"stochastic_rounding must be False with a process_group"),
    ("reduce_dtype", r"reduce_dtype must be None or a real floating dtype, got torch.int32"),
    ("copy", r"TypeError: an optimizer with a process_group cannot be copied or pickled"),
    ("pickle", r"TypeError: an optimizer with a process_group cannot be copied or pickled"),
    ("state", r"state_dict must be that of one of 2 ranks, got one of 1: use torchpisa.dist"),
    ("plain DDP", r"averages them: call torchpisa.distributed.attach\(optimizer, model\)"),
    ("DDP added later", r"averages them: call torchpisa.distributed.attach\(optimizer, model\)"),
]


@pytest.fixture(scope="module")
def answers() -> list[dict[str, str]]:
    """Return the message of each case on each rank; the processes start once for all cases."""
    return run_cases(refused, 2, [case for case, _ in REFUSED])


@pytest.mark.xdist_group("refused")
@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_bad_input_is_refused(answers: list[dict[str, str]], case: str, message: str) -> None:
    for told in answers:
        assert re.search(message, told[case]), told[case]


def with_rho_only() -> tuple[list[float], list[float], float]:
    opt = SISA(network().parameters(), rho=100.0, process_group=distributed.group.WORLD)
    group = opt.param_groups[0]
    return group["sigma"], group["rho"], opt.effective()[0].step


def test_default_sigma_is_that_of_several_batches() -> None:
    assert run(with_rho_only, 2) == [([2.0], [100.0], 0.5)] * 2


def with_itself() -> bool:
    group = distributed.new_group([distributed.get_rank()], use_local_synchronization=True)
    model = network()
    opt = SISA(model.parameters(), rho=10.0, process_group=group)
    assert opt.param_groups[0]["sigma"] == [0.5]
    backward(model, 0, 0, torch.float64)
    opt.step()
    other = network()
    plain = SISA(other.parameters(), rho=10.0)
    backward(other, 0, 0, torch.float64)
    plain.step()
    return identical([weights(model), weights(other)])


def test_a_group_of_one_rank_is_one_process() -> None:
    assert run(with_itself, 2) == [True, True]


def in_two_levels() -> Any:
    """Averages within pairs of ranks, consensus across them."""
    rank = distributed.get_rank()
    inner = [distributed.new_group([0, 1]), distributed.new_group([2, 3])][rank // 2]
    outer = [distributed.new_group([0, 2]), distributed.new_group([1, 3])][rank % 2]
    model = network()
    opt = together(SISA, [rank // 2], process_group=outer)(model.parameters())
    parallel = DistributedDataParallel(model, process_group=inner)
    for step in range(10):
        opt.zero_grad()
        backward(parallel, rank, step, torch.float64)
        opt.step()
    return weights(model)


def test_two_levels() -> None:
    model = network()
    opt = SISA(model.parameters(), **settings(SISA, [0, 1]))
    for step in range(10):
        for pair in ((0, 1), (2, 3)):
            opt.zero_grad()
            for node in pair:
                backward(model, node, step, torch.float64, scale=0.5)
            opt.step()
    results = run(in_two_levels, 4)
    assert identical(results)
    assert difference(results, weights(model)) <= 1e-12


def test_a_process_that_fails_is_reported() -> None:
    with pytest.raises(RankError, match="AssertionError: no such case"):
        run(refused, 2, "no such case")


def omitting(rank: int, step: int) -> str:
    """Train; one rank leaves a step out. What is raised."""
    model = network(torch.float64)
    opt = together(SISA, here(1))(model.parameters())
    try:
        for number in range(10):
            opt.zero_grad()
            backward(model, here(1)[0], number, torch.float64)
            if (distributed.get_rank(), number) == (rank, step):
                continue
            opt.step()
    except RuntimeError as error:
        return f"{opt.iteration}: {error}"
    return ""


@pytest.mark.parametrize("rank", [0, 2])
def test_step_left_out_is_noticed_by_every_rank(rank: int) -> None:
    for said in run(omitting, 3, rank, 4):
        assert said.startswith("5: every rank of process_group must call step() or skip() once")
        assert "A rank without a usable batch calls skip()" in said


def skipping() -> int:
    """One rank has bad batches, another none at all in the end, and all discard one."""
    model = network(torch.float64)
    opt = together(SISA, here(1))(model.parameters())
    rank = distributed.get_rank()
    for number in range(10):
        if rank == 1 and number >= 7:
            opt.skip()
            continue
        opt.zero_grad()
        backward(model, here(1)[0], number, torch.float64)
        if number == 5:
            continue
        opt.skip() if (rank, number) == (0, 3) else opt.step()
    return opt.iteration


def test_skipped_and_discarded_batches_are_not_mistaken() -> None:
    assert run(skipping, 3) == [9, 9, 9]


def joined() -> str:
    from torch.distributed.algorithms.join import Join

    model = network(torch.float64)
    opt = together(SISA, here(1))(model.parameters())
    with pytest.raises(RuntimeError, match=r"Call skip\(\) on it, once for each step\(\)") as error:
        Join([opt])
    return str(error.value)


def test_join_is_refused() -> None:
    assert len(set(run(joined, 2))) == 1
