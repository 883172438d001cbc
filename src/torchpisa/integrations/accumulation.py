"""Take the micro-batches of training loops that call step() once per window of several.

An optimizer with `batches=4` wants the gradient of each of its four batches. A loop that
accumulates over four micro-batches hands it one sum instead, and would need four windows for a
round. The classes here take the gradient of every micro-batch as soon as its backward pass is over,
so that a window is a round.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchpisa.checks import check_count, check_range
from torchpisa.optim import MISA, NSISA, PISA, SISA

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MicroBatchHooks", "MicroBatches", "takes_batches"]

Consensus = PISA | SISA | NSISA | MISA

# At most one hook per optimizer closes its rounds, even if a framework prepares it twice.
_CLOSING: "WeakKeyDictionary[Optimizer, RemovableHandle]" = WeakKeyDictionary()


def takes_batches(optimizer: Optimizer | None, steps: int) -> TypeGuard[Consensus]:
    """Return whether the micro-batches of a window are the batches of an optimizer's round.

    Args:
        optimizer: any optimizer. Those of other libraries, and those with one batch, need the sum
            of the gradients, as frameworks pass it.
        steps: the number of micro-batches in a window.

    Raises:
        ValueError: the optimizer has several batches, but not as many as the window.
    """
    if not isinstance(optimizer, PISA | SISA | NSISA | MISA):
        return False
    if optimizer.batches == 1 or steps == 1:
        return False
    if optimizer.batches != steps:
        raise ValueError(
            f"batches must be 1 or the number of micro-batches in a window ({steps}), got "
            f"{optimizer.batches}: with 1 the optimizer uses the sum of their gradients, with "
            f"{steps} the gradient of each"
        )
    return True


class MicroBatches:
    """Take the gradients of micro-batches one by one, each as a batch of the optimizer's round.

    After the backward pass of every micro-batch, call `rescale` with the divisor of its loss; after
    all but the last one of a window, call `take` as well. The training loop's own
    `optimizer.step()` takes the last one, after any unscaling and clipping. If the window was
    shorter than the round, as at the end of an epoch, this step also closes the round: missing
    batches contribute their duals.

    The gradients of a micro-batch are gone after `take`. They are part of the optimizer's state, so
    a checkpoint between two micro-batches loses nothing. A second object for the same optimizer
    takes the place of the first.

    Args:
        optimizer: an optimizer of torchpisa with as many `batches` as a window has micro-batches.
        scaler: the GradScaler of the losses, if any. A micro-batch whose gradients are not
            finite is left out together with the rest of its window, and the scaler gets to see it.

    Attributes:
        taking: True while `take` runs, so that step hooks can ignore its steps.
    """

    def __init__(self, optimizer: Consensus, *, scaler: torch.amp.GradScaler | None = None) -> None:
        self.optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.taking = False
        if optimizer in _CLOSING:
            _CLOSING[optimizer].remove()
        self._handle = optimizer.register_step_post_hook(self._after_step)
        _CLOSING[optimizer] = self._handle

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply the gradients of the micro-batch that has just ended by a factor.

        Args:
            factor: the divisor of the loss, so that the optimizer sees the gradient of the
                loss itself.
        """
        grads = self._gradients()
        if factor != 1 and grads:
            torch._foreach_mul_(grads, factor)

    @torch.no_grad()
    def take(self, clip: Callable[[], object] | None = None) -> None:
        """Take the gradients of a micro-batch that is not the last one of its window.

        Args:
            clip: clips the gradients in place; it is called once they are unscaled.

        Raises:
            RuntimeError: the optimizer expects the last batch of its round.
        """
        optimizer = self.optimizer
        if optimizer.batch == optimizer.batches - 1:
            raise RuntimeError(
                f"a window has more than {optimizer.batches} micro-batches, or a round was open "
                "when it began: call optimizer.flush() before you start a window anew"
            )
        self.taking = True
        try:
            if self.scaler is not None and not self._unscale():
                optimizer.skip()
                return  # and keep the gradients, so that the scaler sees the infinities
            if clip is not None:
                clip()
            optimizer.step()
        finally:
            self.taking = False
        optimizer.zero_grad()

    def close(self) -> None:
        """Close the round of a window whose `optimizer.step()` was left out."""
        if not self.optimizer.synced:
            self.optimizer.flush()

    def remove(self) -> None:
        """Remove the hook from the optimizer."""
        self._handle.remove()

    def _after_step(self, *_: object) -> None:
        if not self.taking:
            self.close()

    def _gradients(self) -> list[Tensor]:
        groups = self.optimizer.param_groups
        return [p.grad for group in groups for p in group["params"] if p.grad is not None]

    def _unscale(self) -> bool:
        """Divide the gradients by the scale of the loss, and return whether they are finite."""
        assert self.scaler is not None
        grads = self._gradients()
        if not grads:
            return True
        torch._foreach_mul_(grads, 1 / self.scaler.get_scale())
        return math.isfinite(float(torch.nn.utils.get_total_norm(grads)))


class MicroBatchHooks:
    """Hooks that take the micro-batches of a training loop one by one, without changing the loop.

    For loops that call `optimizer.step()` once per window. If the loop is yours, simply call
    `optimizer.step()` and `optimizer.zero_grad()` after every backward pass instead.

    A micro-batch is a forward pass of the model and its backward passes. Its gradients are taken
    when the next forward pass begins, or when the state of the optimizer is saved.

    Args:
        model: the model. The loop calls it once per micro-batch.
        optimizer: an optimizer of torchpisa with `batches` equal to `steps`; for any other one
            nothing happens.
        steps: micro-batches in a window.
        divided_by: the loop's divisor of the loss of a micro-batch: `steps` where losses are
            means over a window, 1 where they are added up.
        max_norm: the norm that the loop clips gradients to, None for no clipping.
        scaler: the GradScaler of the loop, if any.

    Raises:
        ValueError: `batches` is neither 1 nor `steps`, or a number is out of range.
        TypeError: `model` or `optimizer` is something else.

    Examples:
        >>> import torch, torchpisa
        >>> model = torch.nn.Linear(4, 1)
        >>> opt = torchpisa.SISA(model.parameters(), batches=2)
        >>> with MicroBatchHooks(model, opt, steps=2, divided_by=2):
        ...     for _ in range(2):
        ...         (model(torch.randn(8, 4)).square().mean() / 2).backward()
        ...     opt.step()
        >>> opt.iteration
        1
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        steps: int,
        divided_by: float,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise TypeError(
                "model must be a torch.nn.Module and optimizer a torch.optim.Optimizer, got "
                f"{type(model).__name__} and {type(optimizer).__name__}"
            )
        check_count("steps", steps)
        check_range("divided_by", divided_by, 0, low_open=True, high_open=True)
        if max_norm is not None:
            check_range("max_norm", max_norm, 0, low_open=True)
        self._handles: list[RemovableHandle] = []
        self._watched: set[Tensor] = set()
        self._pending = False
        self._left = steps - 1  # micro-batches of this window that are not its last one
        self._steps, self._factor, self._max_norm = steps, divided_by, max_norm
        self._micro: MicroBatches | None = None
        if takes_batches(optimizer, steps):
            self._micro = MicroBatches(optimizer, scaler=scaler)
            self._left -= optimizer.batch
            self._handles = [
                model.register_forward_pre_hook(self._before_forward),
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_state_dict_pre_hook(self._before_save),
            ]
            self._watch_params()

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        if self._micro is not None:
            self._micro.remove()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _params(self) -> list[Tensor]:
        assert self._micro is not None
        return [param for group in self._micro.optimizer.param_groups for param in group["params"]]

    def _watch_params(self) -> None:
        for param in self._params():
            if param.requires_grad and param not in self._watched:
                self._watched.add(param)
                # Rescale before accumulation: a micro-batch may have several backward passes.
                if self._factor != 1:
                    self._handles.append(param.register_hook(self._rescaled))  # type: ignore[no-untyped-call]
                handle = param.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _rescaled(self, grad: Tensor) -> Tensor:
        return grad * self._factor

    def _accumulated(self, _: Tensor) -> None:
        self._pending = True

    def _before_forward(self, *_: object) -> None:
        self._watch_params()
        self._take()

    def _before_save(self, *_: object) -> None:
        if self._left:
            self._take()

    def _take(self) -> None:
        assert self._micro is not None
        if self._pending:
            self._pending = False
            self._left -= 1
            clip = None if self._max_norm is None else self._clip
            self._micro.take(clip)

    def _clip(self) -> None:
        assert self._max_norm is not None
        clip_grad_norm_(self._params(), self._max_norm)

    def _after_step(self, *_: object) -> None:
        assert self._micro is not None
        if not self._micro.taking:
            self._pending, self._left = False, self._steps - 1
