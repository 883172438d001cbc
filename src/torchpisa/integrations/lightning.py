"""Lightning: micro-batches as the batches of a round, and diagnostics in Lightning's own logs."""

import contextlib
from typing import Any

from torch.optim import Optimizer

from torchpisa.diagnostics import Diagnostics
from torchpisa.integrations.accumulation import MicroBatches, takes_batches
from torchpisa.integrations.ranks import has_ranks, keep_own_gradients

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "lightning":
        raise
    raise ModuleNotFoundError(
        "torchpisa.integrations.lightning needs Lightning: pip install 'torchpisa[lightning]'",
        name=error.name,
    ) from error

__all__ = ["DiagnosticsCallback", "MicroBatchCallback"]


class MicroBatchCallback(pl.Callback):
    """Let the optimizer see the gradient of every micro-batch of `accumulate_grad_batches`.

    For automatic optimization with an optimizer whose `batches` equal `accumulate_grad_batches`.
    Then each micro-batch is a batch of the optimizer's round, and each window a round.
    `gradient_clip_val` limits the gradient of every micro-batch.

    In manual optimization, call `step()` and `zero_grad()` after every `manual_backward`.

    With several processes (`strategy="ddp"`), gradients are averaged over them for every
    micro-batch. If the optimizer has a `process_group`, they are never averaged, not even in
    manual optimization: every rank is a node of its own.
    """

    def __init__(self) -> None:
        self._micro: MicroBatches | None = None
        self._averaging = contextlib.ExitStack()
        # Events of the current micro-batch.
        self._backward = self._ends_window = self._stepped = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the optimizer."""
        steps = trainer.accumulate_grad_batches
        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        if trainer.world_size > 1:
            for each in trainer.optimizers:
                keep_own_gradients(each, [trainer.strategy.model or pl_module])
        if not pl_module.automatic_optimization or not takes_batches(optimizer, steps):
            return
        if trainer.world_size > 1 and not has_ranks(optimizer):
            self._average_every_micro_batch(trainer.strategy)
        # Lightning clips and unscales gradients itself then; `on_train_batch_end` skips batches.
        optimizer._step_supports_amp_scaling = False
        self._micro = MicroBatches(
            optimizer, scaler=getattr(trainer.precision_plugin, "scaler", None)
        )
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Undo the division of the loss by the number of micro-batches."""
        self._backward = True
        if self._micro is not None:
            self._micro.rescale(trainer.accumulate_grad_batches)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Note that this micro-batch ends its window."""
        self._ends_window = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Take the gradients of a micro-batch that has not ended its window."""
        micro = self._micro
        if micro is None:
            return

        def clip() -> None:
            pl_module.configure_gradient_clipping(
                micro.optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

        if self._ends_window:
            if not self._stepped:  # the scaler has found infinities
                micro.close()
        elif self._backward:
            micro.take(clip)
        else:  # training_step() returned None
            micro.optimizer.skip()
        self._backward = self._ends_window = self._stepped = False

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let go of the optimizer."""
        if self._micro is not None:
            self._micro.remove()
            self._handle.remove()
            self._micro = None
        self._averaging.close()

    def _average_every_micro_batch(self, strategy: Any) -> None:
        """Let DDP average all gradients, where Lightning would wait for the last micro-batch."""
        if not isinstance(strategy, DDPStrategy):
            raise RuntimeError(
                "with several processes MicroBatchCallback needs strategy='ddp', got "
                f"{type(strategy).__name__}: use that, or an optimizer with batches=1"
            )
        strategy.block_backward_sync = contextlib.nullcontext  # type: ignore[assignment,method-assign]
        self._averaging.callback(vars(strategy).pop, "block_backward_sync")

    def _after_step(self, *_: object) -> None:
        assert self._micro is not None
        self._stepped = self._stepped or not self._micro.taking


class DiagnosticsCallback(pl.Callback):
    """Write the rows of `torchpisa.diagnostics.Diagnostics` to Lightning's loggers.

    Their names begin with `torchpisa/`.

    Args:
        every: rounds from row to row.
    """

    def __init__(self, every: int = 200) -> None:
        self.every = every
        self._rows: list[dict[str, float]] = []
        self._watch: Diagnostics | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to watch the optimizer."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"DiagnosticsCallback needs one optimizer, got {len(trainer.optimizers)}: make a "
                "torchpisa.diagnostics.Diagnostics for each that you want to watch"
            )
        optimizer: Any = trainer.optimizers[0]
        self._watch = Diagnostics(optimizer, every=self.every, callback=self._rows.append)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Log what was measured in the meantime."""
        for row in self._rows:
            pl_module.log_dict({f"torchpisa/{name}": float(value) for name, value in row.items()})
        self._rows.clear()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
