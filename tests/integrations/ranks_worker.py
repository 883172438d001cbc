"""The program of every rank of `test_ranks.py`: all frameworks in turn, in one process group.

    python -m tests.integrations.ranks_worker FOLDER

Frameworks are imported once, by the process that forks all ranks, with what torchrun tells them.
Each case leaves the weights of a rank, or the message of its error, in FOLDER.
"""

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import accelerate
import lightning.pytorch as pl
import torch
import transformers
from torch import distributed, nn
from torch.utils.data import DataLoader, SequentialSampler

from tests.distributed.launch import environments
from tests.integrations.windows import (
    CASES,
    STEPS,
    WINDOWS,
    Net,
    micro_batches,
    model,
    scale_losses,
)
from torchpisa.integrations import accelerate as ours
from torchpisa.integrations import lightning as ours_in_lightning
from torchpisa.integrations import transformers as ours_in_transformers
from torchpisa.integrations.ranks import keep_own_gradients

RANKS = 2
MIDDLE = 10 * STEPS + 2
OVERFLOW = 5 * RANKS * STEPS + 2 * RANKS + 1  # window 5, slot 2, of the last rank
# Frameworks deal these out, one to each rank in turn.
DATA = [{**batch, "x": batch["x"].double()} for batch in micro_batches(RANKS * STEPS * WINDOWS)]

Case = Callable[[Any, Path], nn.Module]


def network() -> Net:
    return model().double()


def loader(data: Any = DATA) -> Any:
    return DataLoader(data, collate_fn=lambda made: made[0])


# Accelerate


def prepare(make: Any, net: Net, cls: Any) -> Any:
    accelerate.state.GradientState._reset_state()
    accelerator = cls(gradient_accumulation_steps=STEPS, cpu=True)
    return accelerator, *accelerator.prepare(net, make(net.parameters()), loader())


def accumulate(accelerator: Any, net: Any, optimizer: Any, batches: Any) -> None:
    for batch in batches:
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def with_accelerate(make: Any, folder: Path, cls: Any = ours.Accelerator) -> nn.Module:
    net = network()
    accumulate(*prepare(make, net, cls))
    return net


def with_accelerate_resumed(make: Any, folder: Path) -> nn.Module:
    accelerator, net, optimizer, batches = prepare(make, network(), ours.Accelerator)
    accumulate(accelerator, net, optimizer, islice(batches, MIDDLE))
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    net = Net().double()
    accelerator, wrapped, optimizer, batches = prepare(make, net, ours.Accelerator)
    accelerator.load_state(str(folder))
    accumulate(accelerator, wrapped, optimizer, accelerator.skip_first_batches(batches, MIDDLE))
    return net


def with_accelerate_again(make: Any, folder: Path) -> nn.Module:
    """The same optimizer, with a model that is wrapped anew after half of the windows."""
    net = network()
    optimizer = make(net.parameters())
    half = len(DATA) // 2
    for data in (DATA[:half], DATA[half:]):
        accelerate.state.GradientState._reset_state()
        accelerator = ours.Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
        accumulate(accelerator, *accelerator.prepare(net, optimizer, loader(data)))
    return net


def with_accelerate_loaded(make: Any, folder: Path) -> nn.Module:
    accelerator, net, *_ = prepare(make, network(), ours.Accelerator)
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(folder))
    return net  # type: ignore[no-any-return]


def with_accelerate_overflow(make: Any, folder: Path) -> nn.Module:
    """Losses are scaled, and one micro-batch of the last rank is not finite."""
    accelerate.state.GradientState._reset_state()
    accelerator = ours.Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net = network()
    spoiled = [dict(batch) for batch in DATA]
    spoiled[OVERFLOW]["x"] = torch.full_like(spoiled[OVERFLOW]["x"], torch.inf)
    prepared = accelerator.prepare(net, make(net.parameters()), loader(spoiled))
    scale_losses(accelerator, accelerator.scaler)
    accumulate(accelerator, *prepared)
    expected = 512.0 if distributed.get_rank() == OVERFLOW % RANKS else 1024.0
    if accelerator.scaler.get_scale() != expected:
        raise RuntimeError(f"the scale is {accelerator.scaler.get_scale()}, not {expected}")
    accelerate.state.AcceleratorState._reset_state()
    return net


def without_ddp(make: Any, folder: Path) -> nn.Module:
    net = network()
    keep_own_gradients(make(net.parameters()), [net])
    return net


def without_our_accelerator(make: Any, folder: Path) -> nn.Module:
    return with_accelerate(make, folder, accelerate.Accelerator)


# Transformers


class Ordered:
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class OurTrainer(Ordered, ours_in_transformers.Trainer):
    pass


class TheirTrainer(Ordered, transformers.Trainer):
    pass


def with_trainer(make: Any, folder: Path, cls: Any = OurTrainer) -> nn.Module:
    net = network()
    args = transformers.TrainingArguments(
        str(folder / "trainer"),
        **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": STEPS, "use_cpu": True},
        **{"num_train_epochs": 1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
        **{"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"},
        **{"save_strategy": "no", "remove_unused_columns": False, "ddp_backend": "gloo"},
    )
    optimizers = make(net.parameters()), None
    cls(
        net,
        args,
        train_dataset=DATA,
        data_collator=lambda made: dict(made[0]),
        optimizers=optimizers,
    ).train()
    return net


def without_our_trainer(make: Any, folder: Path) -> nn.Module:
    return with_trainer(make, folder, TheirTrainer)


# Lightning


class Module(pl.LightningModule):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.net, self.make = network(), make

    def training_step(self, batch: Any, _: int) -> Any:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return self.make(self.net.parameters())


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch: Any, at: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, at))
        optimizer.step()


def with_lightning(make: Any, folder: Path, cls: Any = Module, callback: bool = True) -> nn.Module:
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    module = cls(make)
    trainer = pl.Trainer(
        **dict.fromkeys(quiet, False),
        **{"accelerator": "cpu", "devices": RANKS, "strategy": "ddp", "max_epochs": 1},
        accumulate_grad_batches=STEPS if cls is Module else 1,
        callbacks=[ours_in_lightning.MicroBatchCallback()] if callback else [],
        default_root_dir=str(folder),
        use_distributed_sampler=False,  # it would shuffle
    )
    trainer.fit(module, loader(DATA[distributed.get_rank() :: RANKS]))
    return module.net


def with_lightning_by_hand(make: Any, folder: Path) -> nn.Module:
    return with_lightning(make, folder, Manual)


def without_our_callback(make: Any, folder: Path) -> nn.Module:
    return with_lightning(make, folder, callback=False)


RUNS: dict[tuple[str, str], Case] = {
    ("accelerate", "sisa-mean"): with_accelerate,
    ("accelerate", "sisa-nodes"): with_accelerate,
    ("accelerate", "nsisa-nodes"): with_accelerate,
    ("trainer", "sisa-mean"): with_trainer,
    ("trainer", "sisa-nodes"): with_trainer,
    ("lightning", "sisa-mean"): with_lightning,
    ("lightning", "sisa-nodes"): with_lightning,
    ("lightning-manual", "sisa-mean"): with_lightning_by_hand,
    ("lightning-manual", "sisa-nodes"): with_lightning_by_hand,
    ("accelerate-resumed", "sisa-mean"): with_accelerate_resumed,
    ("accelerate-again", "sisa-nodes"): with_accelerate_again,
    ("accelerate-overflow", "sisa-nodes"): with_accelerate_overflow,
    # Without an adapter
    ("bare-accelerate", "misa-mean"): without_our_accelerator,
    ("bare-trainer", "misa-mean"): without_our_trainer,
    ("bare-lightning", "misa-mean"): without_our_callback,
}
REFUSED: dict[tuple[str, str], Case] = {
    ("bare-accelerate", "sisa-nodes"): without_our_accelerator,
    ("bare-trainer", "sisa-nodes"): without_our_trainer,
    ("bare-lightning", "sisa-nodes"): without_our_callback,
    ("accelerate-loaded", "sisa-nodes"): with_accelerate_loaded,
    ("unwrapped", "sisa-nodes"): without_ddp,
}


def main(folder: Path) -> None:
    """Run every case, and leave what came of it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    accelerate.PartialState(cpu=True)  # joins the process group, which all cases then share
    rank = distributed.get_rank()
    for (framework, name), run in {**RUNS, **REFUSED}.items():
        place = folder / f"{framework}_{name}"
        place.mkdir(exist_ok=True)
        try:
            found: Any = [param.detach() for param in run(CASES[name].ranked, place).parameters()]
        except (RuntimeError, ValueError) as error:
            found = f"{type(error).__name__}: {error}"
        torch.save(found, place / f"rank{rank}.pt")
        distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # threads of gloo may be waiting


def start(folder: Path, environment: dict[str, str]) -> int:
    """Fork a rank and return its process id."""
    pid = os.fork()
    if pid == 0:
        os.environ.update(environment)
        try:
            main(folder)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


if __name__ == "__main__":
    gc.freeze()  # Accelerate collects garbage after every training
    with environments(RANKS) as of_ranks:
        started = [start(Path(sys.argv[1]), environment) for environment in of_ranks]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    sys.exit(any(codes))
