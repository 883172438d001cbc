"""Warn when gradients are accumulated that an optimizer with several batches needs one by one."""

import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchpisa.checks import warn

__all__ = ["AccumulationWarning", "AccumulationWatch"]

# Steps after which a loop is taken to never accumulate.
_STEPS = 8


class AccumulationWarning(UserWarning):
    """Warning that one step() got the sum of as many gradients as a round has batches."""


class AccumulationWatch:
    """Count backward passes between steps, and warn once if there are as many as batches."""

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        self._passes = self._steps = 0
        # Of a window that ends in the closure of a step, those before and including it.
        self._before_step = self._with_closure = 0
        self._grad: weakref.ref[Tensor] | None = None

    def on_step(self, params: Sequence[Tensor], batches: int) -> None:
        """Check the passes since the last step; called at the beginning of each step.

        Args:
            params: the optimizer's parameters.
            batches: the number of batches in a round.
        """
        if self._steps > _STEPS:
            return
        self._steps += 1
        if self._handle is None:
            reached = (param for param in params if param.grad is not None and param.is_leaf)
            param = next(reached, None)
            if param is not None and param.requires_grad:
                register = param.register_post_accumulate_grad_hook
                self._handle = register(self._count)  # type: ignore[no-untyped-call]
            return
        if batches in (self._passes, self._with_closure):
            warn(
                f"the gradients of {batches} backward passes were added up for one step(), with "
                f"batches={batches}: they count as one batch. If each of them is a batch, call "
                "step() and zero_grad() after each, or let torchpisa.integrations do it in "
                "Transformers, Accelerate, Lightning or a loop that you cannot change",
                AccumulationWarning,
            )
            self._steps = _STEPS + 1
        if self._steps > _STEPS:
            self._handle.remove()
        self._before_step, self._passes, self._with_closure = self._passes, 0, 0

    def on_skip(self) -> None:
        """Forget the passes of a batch that is skipped."""
        self._passes = self._before_step = self._with_closure = 0

    def _count(self, param: Tensor) -> None:
        # A new gradient tensor means that the old one was cleared: counting starts again.
        if self._grad is None or self._grad() is not param.grad:
            self._passes = self._before_step = 0
        assert param.grad is not None
        self._grad = weakref.ref(param.grad)
        self._passes += 1
        if self._passes == 1:
            self._with_closure = max(self._with_closure, self._before_step + 1)
