"""Hugging Face Transformers: a Trainer whose micro-batches are the batches of a round."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchpisa.integrations.accumulation import MicroBatches, takes_batches
from torchpisa.integrations.ranks import has_ranks, keep_own_gradients
from torchpisa.registry import create

try:
    import transformers
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("transformers", "accelerate"):
        raise
    raise ModuleNotFoundError(
        "torchpisa.integrations.transformers needs Transformers and Accelerate: "
        "pip install 'torchpisa[huggingface]'",
        name=error.name,
    ) from error

__all__ = ["MicroBatchMixin", "OptimizerFactory", "Trainer"]


class MicroBatchMixin:
    """Let the optimizer of a Trainer see the gradient of every micro-batch.

    Put it before a Trainer class of your own, `class MyTrainer(MicroBatchMixin, SFTTrainer)`.
    Nothing changes unless the optimizer has `batches` equal to `gradient_accumulation_steps`. Then
    each micro-batch is a batch of the optimizer's round, and each window a round. `max_grad_norm`
    limits the gradient of every micro-batch.

    The gradient of a micro-batch is what Trainer computes for it times the number of micro-batches
    in its window, so that their mean is the gradient that Trainer would have stepped with: the mean
    over micro-batches or, where the model takes `num_items_in_batch`, over tokens.

    With several processes, gradients are averaged over them for every micro-batch. If the optimizer
    has a `process_group`, they are not averaged at all: every rank is a node of its own.
    """

    _micro: MicroBatches | None = None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """Make the optimizer, and see to it that processes average what it needs."""
        optimizer: Optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        accelerator = self.accelerator  # type: ignore[attr-defined]
        steps = self.args.gradient_accumulation_steps  # type: ignore[attr-defined]
        several = accelerator.num_processes > 1 and not has_ranks(optimizer)
        if several and takes_batches(optimizer, steps):
            accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        return optimizer

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Compute the gradients of a micro-batch and, unless it ends its window, take them."""
        keep_own_gradients(self._optimizer(), [model])
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        micro = self._micro_batches()
        if micro is not None:
            micro.rescale(self.current_gradient_accumulation_steps)  # type: ignore[attr-defined]
            if not self.accelerator.sync_gradients:  # type: ignore[attr-defined]
                micro.take(self._clip_micro_batch)
        return loss

    def _clip_micro_batch(self) -> None:
        max_norm = self.args.max_grad_norm  # type: ignore[attr-defined]
        if max_norm:
            assert self._micro is not None
            groups = self._micro.optimizer.param_groups
            params = [param for group in groups for param in group["params"]]
            torch.nn.utils.clip_grad_norm_(params, max_norm)

    def _micro_batches(self) -> MicroBatches | None:
        optimizer = self._optimizer()
        if self._micro is not None and self._micro.optimizer is not optimizer:
            self._micro = None
        steps = self.args.gradient_accumulation_steps  # type: ignore[attr-defined]
        if self._micro is None and takes_batches(optimizer, steps):
            self._micro = MicroBatches(optimizer, scaler=self.accelerator.scaler)  # type: ignore[attr-defined]
        return self._micro

    def _optimizer(self) -> Optimizer:
        """Return the optimizer without what Accelerate has wrapped it in."""
        optimizer: Any = self.optimizer  # type: ignore[attr-defined]
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        return optimizer  # type: ignore[no-any-return]


class Trainer(MicroBatchMixin, transformers.Trainer):
    """`transformers.Trainer`, with micro-batches as the batches of a round: see the mixin."""


class OptimizerFactory:
    """Make an optimizer inside Trainer, with groups that know the model's embeddings and head.

    Hand it over as `Trainer(..., optimizer_cls_and_kwargs=(OptimizerFactory, {"name": "misa",
    "lr": 3e-3}))`. The keywords are those of `torchpisa.create`. Trainer's own `learning_rate` and
    `weight_decay` are not used.
    """

    def __call__(self, model: nn.Module | None = None, **arguments: Any) -> Optimizer:
        """Return the optimizer of a model."""
        if model is None:  # Trainer has called an object to make one
            raise TypeError(
                "optimizer_cls_and_kwargs must hold the class OptimizerFactory, got an object of "
                "it: leave out the parentheses"
            )
        arguments.setdefault("name", "misa")
        return create(arguments.pop("name"), model, **arguments)
