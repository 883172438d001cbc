"""Accelerate: windows are rounds, states are saved in the middle of one."""

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.integrations.windows import (
    OPTIMIZERS,
    STEPS,
    WINDOWS,
    Net,
    assert_equal,
    micro_batches,
    model,
    plain,
    scale_losses,
)
from torchpisa import SISA

accelerate = pytest.importorskip("accelerate")

from torchpisa.integrations.accelerate import Accelerator  # noqa: E402

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def forget() -> None:
    """Accelerators, Trainer's among them, share their settings in a process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    forget()
    yield
    forget()


def prepare(
    make: Any,
    net: Net,
    batches: Any,
    cls: Any = Accelerator,
    scaler: torch.amp.GradScaler | None = None,
    **more: Any,
) -> Any:
    accelerator = cls(gradient_accumulation_steps=STEPS, cpu=True, **more)
    accelerator.scaler = scaler
    loader = DataLoader(batches, collate_fn=lambda made: made[0])
    optimizer = make(net.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    prepared = accelerator.prepare(net, optimizer, loader, scheduler)
    if scaler is not None:
        scale_losses(accelerator, scaler)
    return accelerator, optimizer, *prepared


def train(
    accelerator: Any, net: Any, optimizer: Any, loader: Any, scheduler: Any, max_norm: float = 0.0
) -> None:
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch)["loss"])
            if max_norm:
                accelerator.clip_grad_norm_(net.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@every_optimizer
def test_equals_the_plain_loop(make):
    batches, net = micro_batches(), model()
    accelerator, bare, *rest = prepare(make, net, batches)
    train(accelerator, *rest)
    assert bare.iteration == WINDOWS
    assert_equal(net, plain(make, batches))


@every_optimizer
def test_saved_and_resumed_in_the_middle_of_a_window(make, tmp_path):
    batches, net = micro_batches(), model()
    middle = 10 * STEPS + 2
    accelerator, _, prepared, optimizer, _, scheduler = prepare(make, net, batches)
    train(accelerator, prepared, optimizer, batches[:middle], scheduler)
    accelerator.save_state(str(tmp_path / "state"))

    net = Net()
    accelerator, bare, prepared, optimizer, loader, scheduler = prepare(make, net, batches)
    accelerator.load_state(str(tmp_path / "state"))
    assert bare.batch == 2
    rest = accelerator.skip_first_batches(loader, middle)
    train(accelerator, prepared, optimizer, rest, scheduler)
    assert bare.iteration == WINDOWS
    assert_equal(net, plain(make, batches))


@every_optimizer
def test_prepared_again(make):
    """With a second Accelerator, as for a second phase of training."""
    batches, net = micro_batches(), model()
    made = make(net.parameters())
    half = len(batches) // 2
    for part in (batches[:half], batches[half:]):
        forget()
        accelerator, _, *rest = prepare(lambda _: made, net, part)
        train(accelerator, *rest)
    assert made.iteration == WINDOWS
    assert_equal(net, plain(make, batches))


def test_short_last_window():
    """Accelerate divides by the length of a full window; so does what undoes it."""
    batches, net = micro_batches(STEPS * 3 + 2), model()
    make = OPTIMIZERS["sisa-paper"]
    accelerator, bare, *rest = prepare(make, net, batches)
    train(accelerator, *rest)
    assert bare.iteration == 4
    assert_equal(net, plain(make, batches))


def test_two_losses_of_one_micro_batch():
    batches, net = micro_batches(), model()
    make = OPTIMIZERS["sisa-paper"]
    accelerator, _, prepared, optimizer, loader, _ = prepare(make, net, batches)
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch)["loss"]
            accelerator.backward(0.25 * loss, retain_graph=True)
            accelerator.backward(0.75 * loss)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(net, plain(make, batches))


def test_every_micro_batch_is_clipped():
    batches, net = micro_batches(), model()
    make = OPTIMIZERS["sisa-paper"]
    accelerator, _, *rest = prepare(make, net, batches)
    train(accelerator, *rest, max_norm=0.2)
    assert_equal(net, plain(make, batches, max_norm=0.2))


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_clipping_returns_the_norm(scale):
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    net = model()
    made = prepare(OPTIMIZERS["sisa-paper"], net, micro_batches(2 * STEPS), scaler=scaler)
    accelerator, _, net, optimizer, loader, _ = made
    params = list(net.parameters())
    for batch in loader:
        with accelerator.accumulate(net):
            grads = torch.autograd.grad(net(**batch)["loss"], params, allow_unused=True)
            expected = torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None])
            accelerator.backward(net(**batch)["loss"])
            norm = accelerator.clip_grad_norm_(params, 0.2)
            torch.testing.assert_close(norm, expected)
            optimizer.step()
            optimizer.zero_grad()


@every_optimizer
@pytest.mark.parametrize("max_norm", [0.0, 0.2])
def test_scaled_losses(make, max_norm):
    batches, net = micro_batches(), model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator, _, *rest = prepare(make, net, batches, scaler=scaler)
    train(accelerator, *rest, max_norm=max_norm)
    assert_equal(net, plain(make, batches, max_norm=max_norm or None))


@pytest.mark.parametrize("at", [1, 3])
def test_an_overflow_ends_its_window_and_lowers_the_scale(at):
    batches, net = micro_batches(STEPS * 2), model()
    make = OPTIMIZERS["sisa-paper"]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    spoiled = copy.deepcopy(batches)
    spoiled[STEPS + at]["x"][0, 0] = float("inf")
    accelerator, bare, *rest = prepare(make, net, spoiled, scaler=scaler)
    train(accelerator, *rest)
    assert scaler.get_scale() == 512.0
    assert bare.iteration == 2
    assert_equal(net, plain(make, batches[: STEPS + at]))


def test_clipping_in_the_last_micro_batch_only_is_remarked_on():
    batches, net = micro_batches(STEPS * 2), model()
    accelerator, _, net, optimizer, loader, _ = prepare(OPTIMIZERS["sisa"], net, batches)

    def train_as_in_the_manual() -> None:
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.2)
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(UserWarning, match="clip_grad_norm_ was called for the last micro-batch"):
        train_as_in_the_manual()


@pytest.mark.parametrize("name", ["sisa", "adamw"])
def test_one_batch_is_as_with_the_plain_accelerator(name):
    ends = []
    makes = {"sisa": lambda p: SISA(p, lr=1e-2), "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2)}
    for cls in (Accelerator, accelerate.Accelerator):
        net = model()
        accelerator, _, *rest = prepare(makes[name], net, micro_batches(), cls=cls)
        train(accelerator, *rest, max_norm=0.5)
        ends.append(net)
        accelerate.state.GradientState._reset_state()
    assert_equal(*ends, rtol=0.0)


def test_compiled_model():
    batches, net = micro_batches(STEPS * 5), model()
    make = OPTIMIZERS["sisa-paper"]
    accelerator, _, _, optimizer, loader, scheduler = prepare(make, net, batches)
    compiled = torch.compile(net, backend="aot_eager")
    train(accelerator, compiled, optimizer, loader, scheduler)
    assert_equal(net, plain(make, batches))


def test_bfloat16_is_near():
    batches, net = micro_batches(), model()
    make = OPTIMIZERS["sisa-paper"]
    accelerator, _, *rest = prepare(make, net, batches, mixed_precision="bf16")
    train(accelerator, *rest, max_norm=1.0)
    assert_equal(net, plain(make, batches, max_norm=1.0), rtol=0.05)


def test_unfreezing_between_windows():
    batches, make = micro_batches(), OPTIMIZERS["sisa-paper"]
    half = len(batches) // 2

    def halves(net: Net, train_on: Any) -> Net:
        net.layers[0].requires_grad_(False)
        for part in (batches[:half], batches[half:]):
            train_on(part)
            net.layers[0].requires_grad_(True)
        return net

    net = model()
    accelerator, _, prepared, optimizer, _, scheduler = prepare(make, net, batches)
    halves(net, lambda part: train(accelerator, prepared, optimizer, part, scheduler))
    expected = model()
    made = make(expected.parameters())
    halves(expected, lambda part: plain(lambda _: made, part, net=expected))
    assert_equal(net, expected)


def test_free_memory_frees_the_model():
    accelerator, _, net, *_ = prepare(OPTIMIZERS["sisa-paper"], model(), micro_batches())
    left = weakref.ref(net)
    del net, _
    accelerator.free_memory()
    gc.collect()
    assert left() is None


def test_other_windows_are_refused():
    with pytest.raises(ValueError, match=r"batches must be 1 or .* window \(4\), got 2"):
        prepare(lambda params: SISA(params, batches=2), model(), micro_batches())
