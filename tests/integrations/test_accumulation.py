"""Windows of a plain loop: micro-batches are taken one by one, by explicit calls and by hooks."""

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.windows import (
    OPTIMIZERS,
    STEPS,
    WINDOWS,
    Net,
    assert_equal,
    micro_batches,
    model,
    plain,
)
from torchpisa import MISA, SISA
from torchpisa.integrations.accumulation import MicroBatches, MicroBatchHooks, takes_batches
from torchpisa.optim.accumulated import AccumulationWarning

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def accumulate(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[dict[str, Any]],
    *,
    divided_by: float = STEPS,
    max_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    first: int = 0,
) -> None:
    """A loop that knows nothing of batches: it adds up gradients and steps once per window."""
    for number, batch in enumerate(batches[first:], first):
        loss = net(**batch)["loss"] / divided_by
        (loss if scaler is None else scaler.scale(loss)).backward()
        if (number + 1) % STEPS == 0 or number + 1 == len(batches):
            if scaler is not None:
                scaler.unscale_(optimizer)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()


@every_optimizer
@pytest.mark.parametrize("divided_by", [STEPS, 1])
def test_hooks_equal_the_plain_loop(make, divided_by):
    batches, net = micro_batches(), model()
    optimizer = make(net.parameters())
    with MicroBatchHooks(net, optimizer, steps=STEPS, divided_by=divided_by):
        accumulate(net, optimizer, batches, divided_by=divided_by)
    assert optimizer.iteration == WINDOWS
    assert_equal(net, plain(make, batches))


@every_optimizer
def test_without_hooks_a_window_is_one_batch_and_it_says_so_once(make):
    batches, net = micro_batches(), model()
    optimizer = make(net.parameters())
    message = r"gradients of 4 backward passes were added up for one step\(\), with batches=4"
    with pytest.warns(AccumulationWarning, match=message) as warned:
        accumulate(net, optimizer, batches)
    assert len(warned) == 1
    assert optimizer.iteration == WINDOWS // STEPS


@every_optimizer
def test_it_says_so_where_a_closure_has_the_last_pass_of_a_window(make):
    """As in Lightning."""
    batches, net = micro_batches(), model()
    optimizer = make(net.parameters())

    def train() -> None:
        for number, batch in enumerate(batches, 1):

            def closure(batch=batch) -> float:
                loss = net(**batch)["loss"]
                loss.backward()
                return loss.item()

            if number % STEPS == 1:
                optimizer.zero_grad()
            if number % STEPS == 0:
                optimizer.step(closure)
            else:
                closure()

    with pytest.warns(AccumulationWarning, match="gradients of 4 backward passes") as warned:
        train()
    assert len(warned) == 1


def test_a_closure_of_one_batch_is_no_reason_to_warn():
    net = model()
    optimizer = OPTIMIZERS["sisa"](net.parameters())
    for batch in micro_batches(20):

        def closure(batch=batch) -> float:
            optimizer.zero_grad()
            loss = net(**batch)["loss"]
            loss.backward()
            return loss.item()

        optimizer.step(closure)


def test_passes_that_make_up_one_batch_are_no_reason_to_warn():
    """Two losses, as of real and of generated images; the suite makes errors of warnings."""
    net = model()
    optimizer = OPTIMIZERS["sisa"](net.parameters())
    for first, second in zip(micro_batches(20), micro_batches(20), strict=True):
        optimizer.zero_grad()
        net(**first)["loss"].backward()
        net(**second)["loss"].backward()
        optimizer.step()


def test_passes_whose_gradients_were_cleared_are_no_reason_to_warn(recwarn):
    """As they are when kernels are warmed up before a CUDA graph is captured."""
    batches, net = micro_batches(), model()
    optimizer = SISA(net.parameters(), batches=STEPS)
    for batch in batches[: 2 * STEPS]:
        for _ in range(STEPS):
            for param in net.parameters():
                param.grad = None
            net(**batch)["loss"].backward()
        optimizer.step()
    assert not [warning for warning in recwarn if warning.category is AccumulationWarning]


def test_the_watch_lets_go_of_the_model():
    net = model()
    optimizer = OPTIMIZERS["sisa"](net.parameters())
    for number, batch in enumerate(micro_batches(12)):
        optimizer.zero_grad()
        net(**batch)["loss"].backward()
        optimizer.step()
        hooks = [param._post_accumulate_grad_hooks for param in net.parameters()]
        if number == 3:
            assert any(hooks)
            pickle.loads(pickle.dumps(net))
    assert not any(hooks)


@every_optimizer
def test_hooks_resume_in_the_middle_of_a_window(make):
    batches, net = micro_batches(), model()
    optimizer = make(net.parameters())
    middle = 10 * STEPS + 2
    saved = io.BytesIO()
    hooks = MicroBatchHooks(net, optimizer, steps=STEPS, divided_by=STEPS)
    for number, batch in enumerate(batches[:middle]):
        (net(**batch)["loss"] / STEPS).backward()
        if (number + 1) % STEPS == 0:
            optimizer.step()
            optimizer.zero_grad()
    torch.save({"model": net.state_dict(), "opt": optimizer.state_dict()}, saved)
    hooks.remove()

    net = Net()
    optimizer = make(net.parameters())
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    net.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["opt"])
    with MicroBatchHooks(net, optimizer, steps=STEPS, divided_by=STEPS):
        accumulate(net, optimizer, batches, first=middle)
    assert_equal(net, plain(make, batches))


def test_saving_changes_nothing_for_the_one_who_goes_on():
    batches, net = micro_batches(), model()
    make = OPTIMIZERS["sisa"]
    optimizer = make(net.parameters())
    with MicroBatchHooks(net, optimizer, steps=STEPS, divided_by=STEPS):
        for number, batch in enumerate(batches):
            (net(**batch)["loss"] / STEPS).backward()
            optimizer.state_dict()  # after every backward pass, that of the last micro-batch too
            if (number + 1) % STEPS == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert_equal(net, plain(make, batches))


def test_a_short_window_closes_its_round():
    batches, net = micro_batches(STEPS * 3 + 2), model()
    make = OPTIMIZERS["sisa-paper"]
    optimizer = make(net.parameters())
    with MicroBatchHooks(net, optimizer, steps=STEPS, divided_by=STEPS):
        accumulate(net, optimizer, batches)
    assert optimizer.synced
    assert optimizer.iteration == 4
    assert_equal(net, plain(make, batches))


def test_every_micro_batch_is_clipped():
    batches, net = micro_batches(), model()
    make = OPTIMIZERS["sisa-paper"]
    optimizer = make(net.parameters())
    with MicroBatchHooks(net, optimizer, steps=STEPS, divided_by=STEPS, max_norm=0.2):
        accumulate(net, optimizer, batches, max_norm=0.2)
    assert_equal(net, plain(make, batches, max_norm=0.2))


@every_optimizer
def test_scaled_losses(make):
    batches, net = micro_batches(), model()
    optimizer = make(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with MicroBatchHooks(net, optimizer, steps=STEPS, divided_by=STEPS, scaler=scaler):
        accumulate(net, optimizer, batches, scaler=scaler)
    assert_equal(net, plain(make, batches))


@pytest.mark.parametrize("at", [0, 2, 3])
def test_an_overflow_ends_its_window_and_lowers_the_scale(at):
    """The micro-batches before it count; it and the rest of the window do not."""
    batches, net = micro_batches(STEPS * 2), model()
    make = OPTIMIZERS["sisa-paper"]
    optimizer = make(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    spoiled = copy.deepcopy(batches)
    spoiled[STEPS + at]["x"][0, 0] = float("inf")
    with MicroBatchHooks(net, optimizer, steps=STEPS, divided_by=STEPS, scaler=scaler):
        accumulate(net, optimizer, spoiled, scaler=scaler)
    assert scaler.get_scale() == 512.0
    assert optimizer.iteration == 2
    assert optimizer.synced
    assert_equal(net, plain(make, batches[: STEPS + at]))


def test_unfreezing_between_windows():
    batches, make = micro_batches(), OPTIMIZERS["sisa-paper"]

    def train(hooked: bool) -> Net:
        net = model()
        net.layers[0].requires_grad_(False)
        optimizer = make(net.parameters())
        half = len(batches) // 2
        hooks = MicroBatchHooks(net, optimizer, steps=STEPS, divided_by=STEPS) if hooked else None
        for part in (batches[:half], batches[half:]):
            if hooked:
                accumulate(net, optimizer, part)
            else:
                for batch in part:
                    net(**batch)["loss"].backward()
                    optimizer.step()
                    optimizer.zero_grad()
            net.layers[0].requires_grad_(True)
        if hooks is not None:
            hooks.remove()
        return net

    assert_equal(train(hooked=True), train(hooked=False))


def test_two_losses_of_one_micro_batch():
    batches, net = micro_batches(), model()
    make = OPTIMIZERS["sisa-paper"]
    optimizer = make(net.parameters())
    with MicroBatchHooks(net, optimizer, steps=STEPS, divided_by=STEPS):
        for number, batch in enumerate(batches):
            loss = net(**batch)["loss"] / STEPS
            (0.25 * loss).backward(retain_graph=True)
            (0.75 * loss).backward()
            if (number + 1) % STEPS == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert_equal(net, plain(make, batches))


@pytest.mark.parametrize("watched", ["compiled", "inner"])
def test_compiled_model(watched):
    batches, net = micro_batches(STEPS * 5), model()
    make = OPTIMIZERS["sisa-paper"]
    optimizer = make(net.parameters())
    compiled = torch.compile(net, backend="aot_eager")
    model_of_hooks = compiled if watched == "compiled" else net
    with MicroBatchHooks(model_of_hooks, optimizer, steps=STEPS, divided_by=STEPS):
        accumulate(compiled, optimizer, batches)
    assert_equal(net, plain(make, batches))


def test_averaged_weights():
    batches, net = micro_batches(), model()
    make = OPTIMIZERS["sisa-paper"]
    optimizer = make(net.parameters())
    average = torch.optim.swa_utils.AveragedModel(net)
    optimizer.register_step_post_hook(
        lambda *_: average.update_parameters(net) if optimizer.synced else None
    )
    with MicroBatchHooks(net, optimizer, steps=STEPS, divided_by=STEPS):
        accumulate(net, optimizer, batches)
    weights = [
        [param.detach() for param in plain(make, batches[:end]).parameters()]
        for end in range(STEPS, len(batches) + 1, STEPS)
    ]
    expected = model()
    for param, each in zip(expected.parameters(), zip(*weights, strict=True), strict=True):
        param.data = torch.stack(each).mean(0)
    assert_equal(average.module, expected)


def test_after_removal_the_loop_is_as_it_was():
    batches, net = micro_batches(STEPS * 4), model()
    optimizer = OPTIMIZERS["sisa"](net.parameters())
    MicroBatchHooks(net, optimizer, steps=STEPS, divided_by=STEPS).remove()
    with pytest.warns(AccumulationWarning):
        accumulate(net, optimizer, batches)
    assert optimizer.iteration == 1


@pytest.mark.parametrize(
    "optimizer",
    [
        SISA([nn.Parameter(torch.zeros(2))]),
        MISA([nn.Parameter(torch.zeros(2))]),
        torch.optim.AdamW([nn.Parameter(torch.zeros(2))]),
        None,
    ],
    ids=["sisa", "misa", "adamw", "none"],
)
def test_optimizers_of_one_batch_are_left_alone(optimizer):
    assert not takes_batches(optimizer, STEPS)


def test_batches_without_accumulation_are_left_alone():
    assert not takes_batches(SISA([nn.Parameter(torch.zeros(2))], batches=4), 1)


def test_nothing_holds_the_optimizer():
    optimizer = SISA([nn.Parameter(torch.zeros(2))], batches=4)
    MicroBatches(optimizer)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None


def test_other_windows_are_refused():
    optimizer = SISA([nn.Parameter(torch.zeros(2))], batches=4)
    with pytest.raises(ValueError, match=r"batches must be 1 or .* window \(8\), got 4: with 1 "):
        takes_batches(optimizer, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"steps": 4.0}, r"steps must be an integer >= 1, got 4\.0"),
        ({"divided_by": 0}, "divided_by must be a finite number > 0, got 0"),
        ({"divided_by": "4"}, "divided_by must be a finite number > 0, got '4'"),
        ({"max_norm": -1.0}, r"max_norm must be a number > 0, got -1\.0"),
    ],
)
def test_hooks_refuse_bad_numbers(settings, message):
    net = model()
    optimizer = OPTIMIZERS["sisa"](net.parameters())
    with pytest.raises(ValueError, match=message):
        MicroBatchHooks(net, optimizer, **{"steps": STEPS, "divided_by": STEPS, **settings})


def test_hooks_refuse_model_and_optimizer_in_the_wrong_order():
    net = model()
    optimizer = OPTIMIZERS["sisa"](net.parameters())
    with pytest.raises(TypeError, match=r"model must be a .*, got SISA and Net"):
        MicroBatchHooks(optimizer, net, steps=STEPS, divided_by=STEPS)


def test_a_window_that_is_too_long_is_refused():
    batches, net = micro_batches(STEPS), model()
    optimizer = OPTIMIZERS["sisa"](net.parameters())
    micro = MicroBatches(optimizer)
    for batch in batches[:-1]:
        net(**batch)["loss"].backward()
        micro.take()
    net(**batches[-1])["loss"].backward()
    with pytest.raises(RuntimeError, match=r"more than 4 micro-batches, or a round was open"):
        micro.take()
