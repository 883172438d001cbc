"""Transformers' Trainer: windows are rounds, monitors and checkpoints work."""

from pathlib import Path
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
    scale_losses,
)
from tests.optim.table import ENTRIES
from torchpisa import MISA, SISA

transformers = pytest.importorskip("transformers")

from torchpisa.integrations.transformers import (  # noqa: E402
    MicroBatchMixin,
    OptimizerFactory,
    Trainer,
)

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*", "ignore::DeprecationWarning")


def join(batch: list[dict[str, Any]]) -> dict[str, Any]:
    (only,) = batch
    return dict(only)


def arguments(folder: Path, **more: Any) -> Any:
    settings = {
        **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": STEPS, "use_cpu": True},
        **{"num_train_epochs": 1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
        **{"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"},
        **{"save_strategy": "no", "remove_unused_columns": False, "data_seed": 0},
    }
    return transformers.TrainingArguments(str(folder), **{**settings, **more})


class Ordered:
    """Data in their order; Trainer would shuffle them."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class OurTrainer(Ordered, Trainer):
    pass


class TheirTrainer(Ordered, transformers.Trainer):
    pass


def trainer(
    folder: Path,
    net: nn.Module,
    optimizer: Any,
    data: Any,
    cls: Any = OurTrainer,
    callbacks: Any = None,
    **more: Any,
) -> Any:
    return cls(
        net,
        arguments(folder, **more),
        train_dataset=data,
        data_collator=join,
        optimizers=(optimizer, None),
        callbacks=callbacks,
    )


@every_optimizer
def test_equals_the_plain_loop(make, tmp_path):
    batches, net = micro_batches(), model()
    optimizer = make(net.parameters())
    trainer(tmp_path, net, optimizer, batches).train()
    assert optimizer.iteration == WINDOWS
    assert_equal(net, plain(make, batches))


def test_without_the_mixin_a_window_is_one_batch(tmp_path):
    batches, net = micro_batches(), model()
    optimizer = OPTIMIZERS["sisa"](net.parameters())
    with pytest.warns(UserWarning, match="batches=4"):
        trainer(tmp_path, net, optimizer, batches, cls=TheirTrainer).train()
    assert optimizer.iteration == WINDOWS // STEPS


def test_another_optimizer_after_one_with_several_batches(tmp_path):
    ends = []
    for before in (["sisa"], []):
        net = model()
        made = trainer(tmp_path, net, None, micro_batches(2 * STEPS))
        for name in before:
            made.optimizer = OPTIMIZERS[name](net.parameters())
            made.train()
            net.load_state_dict(model().state_dict())
        made.optimizer, made.lr_scheduler = torch.optim.SGD(net.parameters(), lr=1e-2), None
        made.train()
        ends.append(net)
    assert_equal(*ends, rtol=0.0)


@pytest.mark.parametrize("name", ["misa", "adamw"])
def test_one_batch_is_as_without_the_mixin(name, tmp_path):
    ends = []
    for cls in (OurTrainer, TheirTrainer):
        net = model()
        made = {"misa": MISA, "adamw": torch.optim.AdamW}[name](net.parameters(), lr=1e-2)
        trainer(tmp_path, net, made, micro_batches(), cls=cls).train()
        ends.append(net)
    assert_equal(*ends, rtol=0.0)


class KilledError(Exception):
    pass


class Kill(transformers.TrainerCallback):
    """Ends the process, so to speak, in the middle of a window."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if not self.left:
            raise KilledError


@every_optimizer
def test_killed_in_the_middle_of_a_window_and_resumed(make, tmp_path):
    batches, net = micro_batches(), model()
    saving = {"save_strategy": "steps", "save_steps": 5}
    killed = 12 * (STEPS - 1) + 2  # two micro-batches into the thirteenth window
    with pytest.raises(KilledError):
        trainer(
            tmp_path, net, make(net.parameters()), batches, callbacks=[Kill(killed)], **saving
        ).train()

    net = Net()
    optimizer = make(net.parameters())
    trainer(tmp_path, net, optimizer, batches, **saving).train(resume_from_checkpoint=True)
    assert optimizer.iteration == WINDOWS
    assert_equal(net, plain(make, batches))


def test_short_last_window(tmp_path):
    batches, net = micro_batches(STEPS * 3 + 2), model()
    make = OPTIMIZERS["sisa-paper"]
    trainer(tmp_path, net, make(net.parameters()), batches).train()
    assert_equal(net, plain(make, batches))


def test_every_micro_batch_is_clipped(tmp_path):
    batches, net = micro_batches(), model()
    make = OPTIMIZERS["sisa-paper"]
    trainer(tmp_path, net, make(net.parameters()), batches, max_grad_norm=0.2).train()
    assert_equal(net, plain(make, batches, max_norm=0.2))


@pytest.mark.parametrize("max_norm", [0.0, 0.2])
def test_scaled_losses(max_norm, tmp_path):
    batches, net = micro_batches(), model()
    make = OPTIMIZERS["sisa-paper"]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    made = trainer(tmp_path, net, make(net.parameters()), batches, max_grad_norm=max_norm)
    made.accelerator.scaler = scaler  # for the optimizer

    class Half(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            scale_losses(made.accelerator, scaler)

    made.add_callback(Half())
    made.train()
    assert_equal(net, plain(make, batches, max_norm=max_norm or None))


def test_compiled_model(tmp_path):
    batches, net = micro_batches(), model()
    make = OPTIMIZERS["sisa-paper"]
    compiling = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer(tmp_path, net, make(net.parameters()), batches, **compiling).train()
    assert_equal(net, plain(make, batches))


class UnfreezeAfter(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step == self.step:
            model.layers[0].requires_grad_(True)


def test_unfreezing_between_windows(tmp_path):
    batches, make = micro_batches(), OPTIMIZERS["sisa-paper"]
    net = model()
    net.layers[0].requires_grad_(False)
    optimizer = make(net.parameters())
    trainer(tmp_path, net, optimizer, batches, callbacks=[UnfreezeAfter(10)]).train()
    expected = model()
    expected.layers[0].requires_grad_(False)
    made = make(expected.parameters())
    plain(lambda _: made, batches[: 10 * STEPS], net=expected)
    expected.layers[0].requires_grad_(True)
    plain(lambda _: made, batches[10 * STEPS :], net=expected)
    assert_equal(net, expected)


def test_other_windows_are_refused(tmp_path):
    net = model()
    made = trainer(tmp_path, net, SISA(net.parameters(), batches=3), micro_batches())
    with pytest.raises(ValueError, match=r"batches must be 1 or .* window \(4\), got 3"):
        made.train()


# A language model: the loss is a mean over the tokens of a window, counted by Trainer.


def language_model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, **no_dropout, **ends)
    return transformers.GPT2LMHeadModel(config).double()


def sentences(count: int = STEPS * WINDOWS, ragged: bool = False) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for number in range(count):
        ids = torch.randint(0, 17, (3, 9), generator=generator)
        labels = ids.clone()
        # At least the first, which no version of Trainer counts then; the loss never counts it.
        labels[:, : 1 + (number % 5 if ragged else 0)] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def adapted(net: Any, make: Any, data: Any, folder: Path, **more: Any) -> Any:
    trainer(folder, net, make(net.parameters()), data, **more).train()
    return net


def token_mean(make: Any, data: list[dict[str, Any]], net: Any, max_norm: float = 0.0) -> Any:
    """The plain loop for a loss that is a mean over all tokens of a window."""
    optimizer = make(net.parameters())
    for start in range(0, len(data), STEPS):
        window = data[start : start + STEPS]
        counts = [int(batch["labels"][:, 1:].ne(-100).sum()) for batch in window]
        for batch, count in zip(window, counts, strict=True):
            optimizer.zero_grad()
            share = STEPS * count / sum(counts)
            (net(**batch).loss * share).backward()
            if max_norm:
                nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            optimizer.step()
    return net


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("name", ["sisa-paper", "misa"])
def test_language_model_with_tied_weights(name, ragged, tmp_path):
    make, data = OPTIMIZERS[name], sentences(ragged=ragged)
    net = adapted(language_model(), make, data, tmp_path)
    assert net.lm_head.weight is net.transformer.wte.weight
    assert_equal(net, token_mean(make, data, language_model()))


def test_gradient_checkpointing(tmp_path):
    make, data = OPTIMIZERS["sisa-paper"], sentences()
    for reentrant in (False, True):
        net = adapted(
            *(language_model(), make, data, tmp_path),
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        assert_equal(net, token_mean(make, data, language_model()))


def test_bfloat16_is_near(tmp_path):
    make, data = OPTIMIZERS["sisa-paper"], sentences()
    net = adapted(language_model(), make, data, tmp_path, bf16=True, max_grad_norm=0.2)
    expected = token_mean(make, data, language_model(), max_norm=0.2)
    assert_equal(net, expected, rtol=0.05)


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")

    def wrapped() -> Any:
        net = language_model()
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(net, config)

    make, data = OPTIMIZERS["sisa-paper"], sentences()

    def trainable(params: Any) -> Any:
        return make([param for param in params if param.requires_grad])

    net = adapted(wrapped(), trainable, data, tmp_path)
    assert_equal(net, token_mean(trainable, data, wrapped()))
    before = dict(wrapped().named_parameters())
    moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)


# Optimizers by name, schedules, logs


def test_factory_knows_the_embedding(tmp_path):
    net = language_model()
    made = OurTrainer(
        net,
        arguments(tmp_path, gradient_accumulation_steps=1),
        train_dataset=sentences(8),
        data_collator=join,
        optimizer_cls_and_kwargs=(OptimizerFactory, {"name": "misa", "lr": 2e-3}),
    )
    made.train()
    optimizer = made.optimizer.optimizer
    assert isinstance(optimizer, MISA)
    assert {group["lr"] for group in optimizer.param_groups} == {2e-3}
    apart = next(g for g in optimizer.param_groups if "transformer.wte.weight" in g["param_names"])
    assert not apart["matrix"]


def test_factory_makes_misa_by_default():
    assert isinstance(OptimizerFactory()(model()), MISA)


def test_factory_with_parentheses(tmp_path):
    net = model()
    made = Trainer(
        net,
        arguments(tmp_path),
        train_dataset=micro_batches(),
        optimizer_cls_and_kwargs=(OptimizerFactory(), {"lr": 2e-3}),
    )
    with pytest.raises(TypeError, match=r"hold the class OptimizerFactory, .*: leave out the par"):
        made.create_optimizer()


def logged_rates(make: Any, schedule: str, folder: Any) -> list[float]:
    """Return the rates that a Trainer logs, as shares of the first."""
    net = model()
    optimizer = make(net.parameters())
    start = float(optimizer.param_groups[0]["lr"])
    made = OurTrainer(
        net,
        arguments(
            folder,
            **{"gradient_accumulation_steps": 1, "logging_strategy": "steps", "logging_steps": 1},
            **{"lr_scheduler_type": schedule, "warmup_steps": 0 if "plateau" in schedule else 2},
            **{"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1},
        ),
        train_dataset=micro_batches(10),
        eval_dataset=micro_batches(2),
        data_collator=join,
        optimizers=(optimizer, None),
    )
    made.train()
    rows = made.state.log_history
    return [row["learning_rate"] / start for row in rows if "learning_rate" in row]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *((name, "cosine") for name in ("pisa", "sisa-m3", "nsisa", "misa")),
        ("misa", "linear"),
        ("misa", "reduce_lr_on_plateau"),
    ],
)
def test_learning_rates_are_logged(name, schedule, tmp_path):
    (entry,) = [entry for entry in ENTRIES if entry.name == name]
    rates = logged_rates(entry, schedule, tmp_path)
    assert len(rates) == 10
    assert rates == pytest.approx(logged_rates(torch.optim.AdamW, schedule, tmp_path / "adamw"))


def test_mixin_goes_before_any_trainer():
    assert issubclass(Trainer, MicroBatchMixin)
    assert issubclass(Trainer, transformers.Trainer)
