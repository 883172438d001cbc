"""Lightning: windows are rounds, in both kinds of optimization; monitors and clipping work."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
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
from tests.optim.table import ENTRIES
from torchpisa import MISA, SISA

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import (  # noqa: E402
    BaseFinetuning,
    EMAWeightAveraging,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from torchpisa.integrations.lightning import (  # noqa: E402
    DiagnosticsCallback,
    MicroBatchCallback,
)

ALONE = [entry for entry in ENTRIES if "batches" not in entry.settings]
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*exists and is not empty",
    "ignore:.*treespec, LeafSpec:FutureWarning",
)


class Loader:
    """Micro-batches in their order, which can go on where it stopped."""

    def __init__(self, batches: list[dict[str, Any]]) -> None:
        self.batches, self.first, self.seen = batches, 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for number in range(self.first, len(self.batches)):
            self.seen = number
            yield self.batches[number]
        self.first = 0

    def state_dict(self) -> dict[str, int]:
        return {"first": self.seen + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]


class Module(pl.LightningModule):
    def __init__(self, make: Any, net: nn.Module | None = None, schedule: Any = None) -> None:
        super().__init__()
        self.net, self.make, self.schedule = model() if net is None else net, make, schedule

    def training_step(self, batch: Any, _: int) -> Any:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.net.parameters())
        if self.schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]


def trainer(folder: Path, *callbacks: Any, **more: Any) -> Any:
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    settings = {
        **dict.fromkeys(quiet, False),
        **{"accelerator": "cpu", "max_epochs": 1, "accumulate_grad_batches": STEPS},
        **{"default_root_dir": str(folder), "callbacks": list(callbacks)},
    }
    return pl.Trainer(**{**settings, **more})


def fit(module: Any, batches: Any, folder: Path, *callbacks: Any, **more: Any) -> Any:
    made = trainer(folder, *callbacks, **more)
    made.fit(module, Loader(batches))
    return module.net


@every_optimizer
def test_equals_the_plain_loop(make, tmp_path):
    batches, module = micro_batches(), Module(make)
    net = fit(module, batches, tmp_path, MicroBatchCallback())
    assert_equal(net, plain(make, batches))


class SaveAfter(pl.Callback):
    """Saves a checkpoint after a micro-batch, and stops."""

    def __init__(self, count: int, path: Path) -> None:
        self.count, self.path = count, path

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, at: int
    ) -> None:
        if at + 1 == self.count:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


@every_optimizer
def test_saved_and_resumed_in_the_middle_of_a_window(make, tmp_path):
    batches, path = micro_batches(), tmp_path / "middle.ckpt"
    with pytest.raises(SystemExit):
        fit(Module(make), batches, tmp_path, MicroBatchCallback(), SaveAfter(10 * STEPS + 2, path))
    module = Module(make, Net())
    made = trainer(tmp_path, MicroBatchCallback())
    made.fit(module, Loader(batches), ckpt_path=path, weights_only=False)
    assert made.optimizers[0].iteration == WINDOWS
    assert_equal(module.net, plain(make, batches))


def test_short_last_window(tmp_path):
    batches, make = micro_batches(STEPS * 3 + 2), OPTIMIZERS["sisa-paper"]
    net = fit(Module(make), batches, tmp_path, MicroBatchCallback())
    assert_equal(net, plain(make, batches))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_every_micro_batch_is_clipped(precision, tmp_path):
    batches, make = micro_batches(), OPTIMIZERS["sisa-paper"]
    more = {"gradient_clip_val": 0.2, "precision": precision}
    net = fit(Module(make), batches, tmp_path, MicroBatchCallback(), **more)
    expected = plain(make, batches, max_norm=0.2)
    assert_equal(net, expected, rtol=1e-6 if precision == "32-true" else 0.05)


def scaled(scale: float = 1024.0) -> Any:
    """Mixed precision with scaled losses, without half precision, which CPUs compute badly."""

    class Scaled(MixedPrecision):
        def forward_context(self) -> Any:
            return torch.autocast("cpu", enabled=False)

    return Scaled("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))


@pytest.mark.parametrize("max_norm", [None, 0.2])
def test_scaled_losses(max_norm, tmp_path):
    batches, make = micro_batches(), OPTIMIZERS["sisa-paper"]
    more = {"plugins": [scaled()], "gradient_clip_val": max_norm}
    net = fit(Module(make), batches, tmp_path, MicroBatchCallback(), **more)
    assert_equal(net, plain(make, batches, max_norm=max_norm))


@pytest.mark.parametrize("at", [1, 3])
def test_an_overflow_ends_its_window_and_lowers_the_scale(at, tmp_path):
    batches, make, plugin = micro_batches(STEPS * 2), OPTIMIZERS["sisa-paper"], scaled()
    spoiled = copy.deepcopy(batches)
    spoiled[STEPS + at]["x"][0, 0] = float("inf")
    net = fit(Module(make), spoiled, tmp_path, MicroBatchCallback(), plugins=[plugin])
    assert plugin.scaler.get_scale() == 512.0
    assert_equal(net, plain(make, batches[: STEPS + at]))


@pytest.mark.parametrize("name", ["misa", "adamw"])
def test_one_batch_is_as_without_the_callback(name, tmp_path):
    make = {"misa": MISA, "adamw": torch.optim.AdamW}[name]
    ends = [
        fit(Module(lambda p: make(p, lr=1e-2)), micro_batches(), tmp_path, *callbacks)
        for callbacks in ((), (MicroBatchCallback(),))
    ]
    assert_equal(*ends, rtol=0.0)


def test_a_step_that_returns_none_is_an_absent_batch(tmp_path):
    batches, make = micro_batches(STEPS * 3), OPTIMIZERS["sisa-paper"]

    class Choosy(Module):
        def training_step(self, batch: Any, at: int) -> Any:
            return None if at == STEPS + 1 else super().training_step(batch, at)

    with pytest.warns(UserWarning, match="returned `None`"):
        net = fit(Choosy(make), batches, tmp_path, MicroBatchCallback())
    expected = model()
    optimizer = make(expected.parameters())
    for number, batch in enumerate(batches):
        if number == STEPS + 1:
            optimizer.skip()
            continue
        optimizer.zero_grad()
        expected(**batch)["loss"].backward()
        optimizer.step()
    assert_equal(net, expected)


def test_other_windows_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"batches must be 1 or .* window \(4\), got 2"):
        fit(Module(lambda p: SISA(p, batches=2)), micro_batches(), tmp_path, MicroBatchCallback())


def test_several_processes_need_ddp():
    """`test_ranks.py` has those that have it."""
    module = Module(OPTIMIZERS["sisa"])
    trainer = SimpleNamespace(
        accumulate_grad_batches=STEPS,
        optimizers=[module.configure_optimizers()],
        strategy=SimpleNamespace(model=module),
        world_size=2,
    )
    with pytest.raises(RuntimeError, match=r"needs strategy='ddp', got SimpleNamespace"):
        MicroBatchCallback().on_train_start(trainer, module)


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(**batch)["loss"])
        optimizer.step()


@every_optimizer
def test_manual_optimization(make, tmp_path):
    batches = micro_batches()
    net = fit(Manual(make), batches, tmp_path, MicroBatchCallback(), accumulate_grad_batches=1)
    assert_equal(net, plain(make, batches))


@every_optimizer
def test_manual_optimization_resumed_in_the_middle_of_a_window(make, tmp_path):
    batches, path = micro_batches(), tmp_path / "middle.ckpt"
    stop = SaveAfter(10 * STEPS + 2, path)
    with pytest.raises(SystemExit):
        fit(Manual(make), batches, tmp_path, stop, accumulate_grad_batches=1)
    module = Manual(make, Net())
    made = trainer(tmp_path, accumulate_grad_batches=1)
    made.fit(module, Loader(batches), ckpt_path=path, weights_only=False)
    assert made.optimizers[0].iteration == WINDOWS
    assert_equal(module.net, plain(make, batches))


def test_averaged_weights_of_windows(tmp_path):
    """EMA is taken once per window, of the weights that the round has moved."""
    batches, make = micro_batches(), OPTIMIZERS["sisa-paper"]
    net = fit(Module(make), batches, tmp_path, MicroBatchCallback(), EMAWeightAveraging(decay=0.9))
    expected = model()
    optimizer = make(expected.parameters())
    average = torch.optim.swa_utils.AveragedModel(
        expected, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        expected(**batch)["loss"].backward()
        optimizer.step()
        if (number + 1) % STEPS == 0:
            average.update_parameters(expected)
    assert_equal(net, average.module)


class Unfreeze(BaseFinetuning):
    """The first layer is frozen, and trained from the second epoch on, in a group of its own."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net.layers[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.layers[0], optimizer, lr=1.0)


def test_finetuning_unfreezes_a_layer(tmp_path):
    batches, make = micro_batches(STEPS * 5), OPTIMIZERS["sisa-paper"]

    class Head(Module):
        def configure_optimizers(self) -> Any:
            return make(self.net.layers[2].parameters())

    net = fit(Head(make), batches, tmp_path, MicroBatchCallback(), Unfreeze(), max_epochs=3)
    expected = model()
    expected.layers[0].requires_grad_(False)
    optimizer = make(expected.layers[2].parameters())
    for epoch in range(3):
        if epoch == 1:
            expected.layers[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(expected.layers[0].parameters()), "lr": 1.0})
        for batch in batches:
            optimizer.zero_grad()
            expected(**batch)["loss"].backward()
            optimizer.step()
    assert_equal(net, expected)


def test_compiled_module(tmp_path):
    batches, make = micro_batches(STEPS * 5), OPTIMIZERS["sisa-paper"]
    module = Module(make, torch.compile(model(), backend="aot_eager"))
    net = fit(module, batches, tmp_path, MicroBatchCallback())
    assert_equal(net, plain(make, batches))


# Without the callback


def cycles_momentum(optimizer: Any) -> bool:
    """All but PISA have one; torch's schedulers ask for it unless they are told not to."""
    return "momentum" in optimizer.param_groups[0]


SCHEDULES = {
    "onecycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=24, cycle_momentum=cycles_momentum(optimizer)
    ),
    "cyclic": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
        optimizer, 1e-3, 1e-2, step_size_up=4, cycle_momentum=cycles_momentum(optimizer)
    ),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24),
}


@pytest.mark.parametrize("entry", ALONE, ids=lambda entry: entry.name)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-scaled"])
def test_clipping_without_the_callback(entry, precision, tmp_path):
    more = {"plugins": [scaled()]} if precision == "16-scaled" else {"precision": precision}
    net = fit(
        Module(entry),
        micro_batches(8),
        tmp_path,
        gradient_clip_val=0.5,
        accumulate_grad_batches=1,
        **more,
    )
    assert all(param.isfinite().all() for param in net.parameters())


@pytest.mark.filterwarnings("ignore:You have set log_momentum=True, but some")  # PISA has none
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_monitor_of_learning_rate_and_momentum(entry, schedule, tmp_path):
    monitor = LearningRateMonitor(logging_interval="step", log_momentum=True)
    more = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "accumulate_grad_batches": 1}
    module = Module(entry, schedule=schedule)
    net = fit(module, micro_batches(24), tmp_path, monitor, **more)
    assert all(param.isfinite().all() for param in net.parameters())
    lines = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    head = lines[0].split(",")
    for kind in ("", "-momentum"):
        column = next(
            number
            for number, name in enumerate(head)
            if name.startswith("lr-") and name.endswith("-momentum") == bool(kind)
        )
        values = [line.split(",")[column] for line in lines[1:]]
        numbers = [float(value) for value in values if value]
        assert len(numbers) == 24
        assert all(math.isfinite(number) for number in numbers)


@pytest.mark.parametrize(
    "average",
    [lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1), EMAWeightAveraging],
    ids=["swa", "ema"],
)
@pytest.mark.filterwarnings("ignore:Swapping scheduler", "ignore:.*SWA")
def test_averaged_weights(average, tmp_path):
    net = fit(Module(MISA), micro_batches(12), tmp_path, average(), max_epochs=4)
    assert all(param.isfinite().all() for param in net.parameters())


def test_diagnostics_reach_the_logger(tmp_path):
    module = Module(OPTIMIZERS["sisa-paper"])
    fit(
        *(module, micro_batches(), tmp_path, MicroBatchCallback(), DiagnosticsCallback(every=5)),
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    head, *rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    column = head.split(",").index("torchpisa/iteration")
    iterations = {line.split(",")[column] for line in rows} - {""}
    assert {float(number) for number in iterations} == {5.0, 10.0, 15.0, 20.0}
    assert "torchpisa/spread" in head


def test_diagnostics_of_several_optimizers_are_refused(tmp_path):
    class Two(Manual):
        def configure_optimizers(self) -> Any:
            return [self.make([param]) for param in self.net.parameters()][:2]

    with pytest.raises(ValueError, match="DiagnosticsCallback needs one optimizer, got 2: make a"):
        fit(
            *(Two(OPTIMIZERS["sisa-paper"]), micro_batches(), tmp_path, DiagnosticsCallback()),
            accumulate_grad_batches=1,
        )
