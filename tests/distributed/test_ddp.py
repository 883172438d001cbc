"""DistributedDataParallel with an attached optimizer: the same result, while backward runs."""

import contextlib
import copy
import gc
import math
import re
import weakref
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.problem import (
    alone,
    backward,
    batch,
    difference,
    here,
    identical,
    network,
    settings,
    together,
    weights,
)
from tests.distributed.processes import run, run_cases
from tests.distributed.test_process_group import TOLERANCE, Branches, used_by
from torchpisa import NSISA, SISA
from torchpisa.distributed import attach

# So small that every layer has buckets of its own.
SMALL = {"bucket_cap_mb": 0.0002}


def trained(
    make: Any,
    steps: int,
    dtype: torch.dtype = torch.float64,
    *,
    per_rank: int = 1,
    options: dict[str, Any] | None = None,
    compiled: str = "",
    **more: Any,
) -> Any:
    model = network(dtype)
    nodes = here(per_rank)
    opt = together(make, nodes, **more)(model.parameters())
    inner = torch.compile(model, backend="aot_eager") if compiled == "inside" else model
    buckets = {} if compiled else SMALL  # the compiler cuts graphs at buckets, but not that small
    parallel = DistributedDataParallel(inner, **buckets, **(options or {}))
    attach(opt, parallel)
    forward: Any = parallel
    if compiled == "outside":
        forward = torch.compile(parallel, backend="aot_eager")
    for step in range(steps):
        for node in nodes:
            opt.zero_grad()
            backward(forward, node, step, dtype)
            opt.step()
    assert opt.synced
    assert opt.iteration == steps
    return weights(model)


@pytest.mark.parametrize(
    ("make", "ranks", "views", "dtype"),
    [
        (SISA, 4, True, torch.float64),
        (NSISA, 4, False, torch.float64),
        (SISA, 2, False, torch.float32),
        (NSISA, 2, True, torch.float32),
    ],
)
def test_equals_one_process(make: Any, ranks: int, views: bool, dtype: torch.dtype) -> None:
    results = run(trained, ranks, make, 10, dtype, options={"gradient_as_bucket_view": views})
    assert identical(results)
    assert difference(results, alone(make, ranks, 10, dtype)) <= TOLERANCE[dtype]


OPTIONS: list[dict[str, Any]] = [{"static_graph": True}, {"find_unused_parameters": True}]
SETTINGS: list[dict[str, Any]] = [
    {"clip": 0.7},
    {"foreach": False},
    {"weight_decay": 0.1, "dual_decay": 0.9},
]


def trained_in_all_ways() -> tuple[list[Any], list[Any]]:
    return (
        [trained(SISA, 10, options=options) for options in OPTIONS],
        [trained(SISA, 10, **more) for more in SETTINGS],
    )


def test_options_of_the_model_and_settings_of_the_optimizer() -> None:
    results = run(trained_in_all_ways, 2)
    for number, options in enumerate(OPTIONS):
        found = [of_rank[0][number] for of_rank in results]
        assert difference(found, alone(SISA, 2, 10)) <= 1e-12, options
    for number, more in enumerate(SETTINGS):
        found = [of_rank[1][number] for of_rank in results]
        assert difference(found, alone(SISA, 2, 10, **more)) <= 1e-12, more


@pytest.mark.parametrize("compiled", ["inside", "outside"])
def test_compiled_model(compiled: str) -> None:
    results = run(trained, 2, SISA, 10, compiled=compiled)
    assert difference(results, alone(SISA, 2, 10)) <= 1e-12


@pytest.mark.parametrize("make", [SISA, NSISA])
def test_several_batches_per_rank(make: Any) -> None:
    results = run(trained, 2, make, 10, per_rank=2)
    assert difference(results, alone(make, 4, 10)) <= 1e-10


# Gradients


def accumulated(views: bool) -> Any:
    model = network()
    opt = together(SISA, here())(model.parameters())
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=views, **SMALL)
    attach(opt, parallel)
    for step in range(8):
        opt.zero_grad()
        for part in range(3):
            with parallel.no_sync() if part < 2 else contextlib.nullcontext():
                backward(parallel, here()[0], 3 * step + part, torch.float64, 1 / 3)
        opt.step()
    return weights(model)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_accumulation(views: bool) -> None:
    model = network()
    opt = SISA(model.parameters(), **settings(SISA, [0, 1]))
    for step in range(8):
        for node in range(2):
            opt.zero_grad()
            for part in range(3):
                backward(model, node, 3 * step + part, torch.float64, 1 / 3)
            opt.step()
    assert difference(run(accumulated, 2, views), weights(model)) <= 1e-12


def branched(spread: bool, per_rank: int = 1, views: bool = False) -> Any:
    model = Branches()
    if spread:
        nodes = here(per_rank)
        opt = together(SISA, nodes)(model.parameters())
        forward: Any = DistributedDataParallel(
            model, find_unused_parameters=True, gradient_as_bucket_view=views, **SMALL
        )
        attach(opt, forward)
    else:
        nodes = list(range(2 * per_rank))
        opt = SISA(model.parameters(), **settings(SISA, nodes))
        forward = model
    for step in range(10):
        for node in nodes:
            opt.zero_grad()
            x, y = batch(node, step)
            nn.functional.mse_loss(forward(x, used_by(node % 2, step)), y).backward()
            opt.step()
        if step == 3:
            untouched = [opt.state[p] for p in model.branches[3].parameters()]
            assert not any(state["dual.0"].any() or state["step.0"] for state in untouched)
    return weights(model)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_unused_parameters(views: bool) -> None:
    results = run(branched, 2, True, views=views)
    assert identical(results)
    assert difference(results, branched(False)) <= 1e-12


def test_unused_parameters_in_several_batches() -> None:
    assert difference(run(branched, 2, True, per_rank=2), branched(False, per_rank=2)) <= 1e-12


def gradients() -> float:
    """Return how far `.grad` is, after the step, from the gradient of this rank's own batch."""
    model = network()
    opt = together(SISA, here())(model.parameters())
    parallel = DistributedDataParallel(model, **SMALL)
    attach(opt, parallel)
    backward(parallel, here()[0], 0, torch.float64)
    left = [param.grad.clone() for param in model.parameters()]
    other = network()
    backward(other, here()[0], 0, torch.float64)
    return difference([left], [param.grad for param in other.parameters()])


def test_gradients_stay_those_of_a_rank() -> None:
    assert max(run(gradients, 2)) <= 1e-14


def wrapped_again(options: dict[str, Any]) -> Any:
    """Weights of a model that is wrapped again before it is trained, and what outlives it."""
    model = network()
    opt = together(SISA, here())(model.parameters())
    models = []
    for _ in range(2):
        models.append(DistributedDataParallel(model, **options, **SMALL))
        attach(opt, models[-1])
    for step in range(4):
        opt.zero_grad()
        backward(models[-1], here()[0], step, torch.float64)
        opt.step()
    found, left = weights(model), [weakref.ref(each) for each in (model, opt, *models)]
    del model, opt, models
    gc.collect()
    return found, [each() for each in left]


def wrapped_again_in_all_ways() -> list[Any]:
    return [wrapped_again(options) for options in ({}, {"find_unused_parameters": True})]


def test_models_may_be_wrapped_again_and_are_freed() -> None:
    expected = alone(SISA, 2, 4)
    for of_rank in run(wrapped_again_in_all_ways, 2):
        for found, left in of_rank:
            assert difference([found], expected) <= 1e-12
            assert left == [None] * 4


def order_of_events() -> list[str]:
    model = network()
    opt = together(SISA, here())(model.parameters())
    parallel = DistributedDataParallel(model, **SMALL)
    attach(opt, parallel)
    events: list[str] = []
    for step in range(3):  # buckets are rebuilt after the first
        events.clear()
        handle = model[0].weight.register_hook(
            lambda _: events.append(f"first layer, {len(opt.peers._under_way)} sums sent")
        )
        backward(parallel, here()[0], step, torch.float64)
        handle.remove()
        events.append(f"backward over, {len(opt.peers._under_way)} sums sent")
        opt.step()
    return events


def test_sums_start_while_backward_is_running() -> None:
    for first, last in run(order_of_events, 2):
        sent, total = (int(re.search(r"\d+", event)[0]) for event in (first, last))
        assert 2 <= sent < total


def interrupted() -> bool:
    """A new model lays out its buckets as the old one did in its first steps, not in its last."""

    def made(seed: int) -> Any:
        model = network(torch.float32, seed)
        opt = together(SISA, here())(model.parameters())
        parallel = DistributedDataParallel(model, **SMALL)
        attach(opt, parallel)
        return model, opt, parallel

    def steps(opt: Any, parallel: nn.Module, first: int, last: int) -> None:
        for step in range(first, last):
            opt.zero_grad()
            backward(parallel, here()[0], step, torch.float32)
            opt.step()

    model, opt, parallel = made(1)
    steps(opt, parallel, 0, 4)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    steps(opt, parallel, 4, 8)
    other, resumed, again = made(2)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    steps(resumed, again, 4, 8)
    return identical([weights(model), weights(other)])


def test_resumes_bit_for_bit() -> None:
    assert run(interrupted, 4) == [True] * 4


# Batches that are left out


def disturbed(spread: bool, how: str, mode: str = "skip") -> Any:
    """Node 1 has no part in step 2, all nodes none in step 4."""
    model = network()
    nodes = here() if spread else [0, 1]
    scaler = torch.amp.GradScaler("cpu", enabled=how == "scaler", init_scale=1024.0)
    if spread:
        opt = together(SISA, nodes, nonfinite=mode)(model.parameters())
        forward: Any = DistributedDataParallel(model, **SMALL)
        attach(opt, forward, scaler=scaler)
    else:
        opt = SISA(model.parameters(), nonfinite=mode, **settings(SISA, nodes))
        forward = model
    raised = []
    for step in range(8):
        for node in nodes:
            opt.zero_grad()
            bad = (step == 2 and node == 1) or step == 4
            if bad and not spread:
                opt.skip()
                continue
            scale = float(scaler.scale(torch.ones(())))
            backward(forward, node, step, torch.float64, math.nan if bad else scale)
            try:
                scaler.step(opt)
            except FloatingPointError as error:
                raised.append((step, str(error)))
            scaler.update()
    return weights(model), raised, scaler.get_scale()


@pytest.mark.parametrize("how", ["infinite", "scaler"])
def test_absent_batches(how: str) -> None:
    expected, _, _ = disturbed(False, how="")
    (first, _, scale), (second, _, other_scale) = run(disturbed, 2, True, how=how)
    assert identical([first, second])
    assert difference([first], expected) <= 1e-12
    if how == "scaler":
        assert (scale, other_scale) == (512.0, 256.0)


def partly_disturbed() -> Any:
    """One bucket of rank 1 is not finite: its duals are contributed, the others are stepped."""
    model = network()
    opt = together(SISA, here(), nonfinite="skip")(model.parameters())
    parallel = DistributedDataParallel(model, **SMALL)
    attach(opt, parallel)
    changed = []
    for step in range(3):
        opt.zero_grad()
        if step == 2 and distributed.get_rank() == 1:
            model[4].bias.register_hook(lambda grad: grad * math.nan)
        before = [opt.state[param]["dual.0"].clone() for param in model.parameters()]
        backward(parallel, here()[0], step, torch.float64)
        opt.step()
        after = [opt.state[param]["dual.0"] for param in model.parameters()]
        changed = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert all(param.isfinite().all() for param in model.parameters())
    return weights(model), changed


def test_a_bucket_that_is_not_finite() -> None:
    (first, all_of_them), (second, changed) = run(partly_disturbed, 2)
    assert identical([first, second])
    assert all(all_of_them)
    assert all(changed[:3])
    assert not changed[5]  # the parameter itself; others of its bucket may share its fate


def test_nonfinite_gradients_raise_on_all_ranks() -> None:
    (first, told, _), (second, knows, _) = run(disturbed, 2, True, how="infinite", mode="raise")
    assert [step for step, _ in told] == [step for step, _ in knows] == [2, 4]
    assert "on another rank" in told[0][1]
    assert "non-finite gradient in batch 0 of iteration 2: parameter" in knows[0][1]
    assert identical([first, second])


# Bad input


def refused(case: str) -> str:
    model = network()
    world = distributed.group.WORLD
    opt = SISA(model.parameters(), process_group=world)
    parallel = DistributedDataParallel(model)
    rank = distributed.get_rank()
    try:
        if case == "no DDP":
            attach(opt, model)
        elif case == "no group":
            attach(SISA(model.parameters()), parallel)
        elif case == "AdamW":
            attach(torch.optim.AdamW(model.parameters()), parallel)
        elif case == "scaler":
            attach(opt, parallel, scaler=1024)
        elif case == "other group":
            other = distributed.new_group([1, 0], sort_ranks=False)
            attach(SISA(model.parameters(), process_group=other), parallel)
        elif case == "missing":
            attach(SISA(list(model.parameters())[:-1], process_group=world), parallel)
        elif case == "twice":
            attach(opt, parallel)
            backward(parallel, rank, 0, torch.float64)
            backward(parallel, rank, 0, torch.float64)
        elif case == "no backward":
            attach(opt, parallel)
            opt.step()
        elif case == "skip":
            attach(opt, parallel)
            opt.skip()
        elif case == "late skip":
            attach(opt, parallel)
            backward(parallel, rank, 0, torch.float64)
            opt.skip()
        elif case == "several":
            attach(opt, DistributedDataParallel(model[:2]))
            attach(opt, DistributedDataParallel(model[2:]))
        elif case == "attached":
            attach(opt, parallel)
            attach(SISA(model.parameters(), process_group=world), parallel)
        elif case == "no_sync":
            attach(opt, parallel)
            with parallel.no_sync():
                backward(parallel, rank, 0, torch.float64)
            opt.step()
        else:
            raise AssertionError(case)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


REFUSED = [
    ("no DDP", r"model must be a .*DistributedDataParallel, got Sequential; any other"),
    ("no group", r"optimizer must have been made with process_group="),
    ("AdamW", r"optimizer must be a PISA, SISA or NSISA, got AdamW"),
    ("scaler", r"scaler must be a torch.amp.GradScaler or None, got 1024"),
    ("other group", r"process_group of the model, ranks \[0, 1\], got \[1, 0\]"),
    ("missing", r"all parameters of the model that are trained, but not 4\.bias"),
    ("twice", r"backward\(\) ran twice before step\(\).*no_sync"),
    ("no backward", r"RuntimeError: no gradients are on their way"),
    ("no_sync", r"RuntimeError: no gradients are on their way.*not under no_sync"),
    ("skip", r"RuntimeError: no gradients are on their way.*skip\(\) cannot take its place"),
    ("late skip", r"RuntimeError: skip\(\) is too late for this batch"),
    ("several", r"optimizer must not be attached to several models: put them into one module"),
    ("attached", r"model must not have a communication hook yet"),
]
if torch.__version__ < "2.7":  # groups are always in the order of their ranks there
    REFUSED = [each for each in REFUSED if each[0] != "other group"]


@pytest.fixture(scope="module")
def answers() -> list[dict[str, str]]:
    """Return the message of each case on each rank; the processes start once for all cases."""
    return run_cases(refused, 2, [case for case, _ in REFUSED])


@pytest.mark.xdist_group("refused")
@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_bad_input_is_refused(answers: list[dict[str, str]], case: str, message: str) -> None:
    for told in answers:
        assert re.search(message, told[case]), told[case]


def with_itself() -> Any:
    group = distributed.new_group([distributed.get_rank()], use_local_synchronization=True)
    model = network()
    opt = SISA(model.parameters(), process_group=group)
    parallel = DistributedDataParallel(model, process_group=group)
    attach(opt, parallel)
    backward(parallel, 0, 0, torch.float64)
    opt.step()
    return weights(model)


def test_a_single_rank_needs_nothing() -> None:
    model = network()
    opt = SISA(model.parameters())
    backward(model, 0, 0, torch.float64)
    opt.step()
    assert identical([*run(with_itself, 2), weights(model)])


def joined() -> None:
    from torch.distributed.algorithms.join import Join

    model = network(torch.float64)
    opt = together(SISA, here(1))(model.parameters())
    parallel = DistributedDataParallel(model)
    attach(opt, parallel)
    for start in (parallel.join, lambda: Join([parallel])):
        with pytest.raises(RuntimeError, match=r"attached optimizer: .* call skip\(\)"):
            start()


def test_join_is_refused() -> None:
    run(joined, 2)
