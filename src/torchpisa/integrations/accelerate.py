"""Hugging Face Accelerate: an Accelerator whose micro-batches are the batches of a round."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from torchpisa.integrations.accumulation import MicroBatches, takes_batches
from torchpisa.integrations.ranks import has_ranks, keep_own_gradients

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "accelerate":
        raise
    raise ModuleNotFoundError(
        "torchpisa.integrations.accelerate needs Accelerate: pip install 'torchpisa[huggingface]'",
        name=error.name,
    ) from error

__all__ = ["Accelerator"]


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` that lets an optimizer see the gradient of every micro-batch.

    It has an effect if an optimizer of torchpisa has `batches` equal to
    `gradient_accumulation_steps`. You call `optimizer.step()` for every micro-batch as always; each
    one is then a batch of the optimizer's round, and a window is a round.

    If you clip gradients, call `clip_grad_norm_` for every micro-batch, without
    `if accelerator.sync_gradients`.

    With several processes, gradients are averaged over them for every micro-batch. If the optimizer
    has a `process_group`, they are not averaged at all: every rank is a node of its own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Models as the training loop calls them; `free_memory` is to free them.
        self._wrapped: WeakSet[nn.Module] = WeakSet()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers."""
        prepared = super().prepare(*args, device_placement=device_placement)
        for optimizer in self._optimizers:
            keep_own_gradients(optimizer.optimizer, self._wrapped)
        return prepared

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Prepare a model."""
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        self._wrapped.add(prepared)
        return prepared

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> Optimizer:
        """Prepare an optimizer."""
        prepared = getattr(optimizer, "_is_accelerate_prepared", False)
        if prepared or not takes_batches(optimizer, self.gradient_accumulation_steps):
            return super().prepare_optimizer(optimizer, device_placement)  # type: ignore[no-any-return]
        if self.num_processes > 1 and not has_ranks(optimizer):
            self.gradient_state.plugin_kwargs["sync_each_batch"] = True
        placed = self.device_placement if device_placement is None else device_placement
        taking = _MicroBatchOptimizer(optimizer, placed, self.scaler)
        self._optimizers.append(taking)
        return taking

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradients of the loss, undivided by the number of micro-batches."""
        steps = self.gradient_accumulation_steps
        for optimizer in self._taking:  # gradients of other losses of this micro-batch
            optimizer.micro.rescale(1 / steps)
        super().backward(loss, **kwargs)
        for optimizer in self._taking:
            optimizer.micro.rescale(steps)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> Any:
        """Clip the gradients of a micro-batch by their norm, and return it."""
        if self.sync_gradients or not self._taking:
            self._remark()
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        params = list(parameters)
        self._clip(lambda: torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type))
        norm = get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
        return norm if self.scaler is None else norm / self.scaler.get_scale()

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        """Clip the gradients of a micro-batch by their values."""
        if self.sync_gradients or not self._taking:
            self._remark()
            super().clip_grad_value_(parameters, clip_value)
            return
        params = list(parameters)
        self._clip(lambda: torch.nn.utils.clip_grad_value_(params, clip_value))

    @property
    def _taking(self) -> list["_MicroBatchOptimizer"]:
        return [each for each in self._optimizers if isinstance(each, _MicroBatchOptimizer)]

    def _clip(self, clip: Callable[[], object]) -> None:
        """Leave clipping to the step, which unscales gradients first."""
        for optimizer in self._taking:
            optimizer.clip = clip

    def _remark(self) -> None:
        """Warn if the last micro-batch of a window is clipped and the one before was not."""
        if any(optimizer.unclipped for optimizer in self._taking):
            warnings.warn(
                "clip_grad_norm_ was called for the last micro-batch of a window only: call it for "
                "every micro-batch, without `if accelerator.sync_gradients`",
                stacklevel=3,
            )


class _MicroBatchOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's wrapper of an optimizer, which also steps within a window."""

    _is_accelerate_prepared = True

    def __init__(
        self, optimizer: Any, device_placement: bool, scaler: torch.amp.GradScaler | None
    ) -> None:
        super().__init__(optimizer, device_placement=device_placement, scaler=scaler)
        self.micro = MicroBatches(optimizer, scaler=scaler)
        self.clip: Callable[[], object] | None = None
        self.unclipped = False  # True if a micro-batch of this window was taken unclipped

    def step(self, closure: Callable[[], float] | None = None) -> None:
        if self.gradient_state.sync_gradients:
            super().step(closure)
            self.unclipped = False
            return
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.unclipped = self.unclipped or self.clip is None
        self.micro.take(self.clip)
        self.clip = None
