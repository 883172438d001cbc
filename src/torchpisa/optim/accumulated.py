"""Warn when a loop adds up gradients that an optimizer with several batches wants one by one."""

import warnings
import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["AccumulationWarning", "AccumulationWatch"]

# Steps after which a loop that has not accumulated is taken for one that never does.
_STEPS = 8


class AccumulationWarning(UserWarning):
    """As many gradients as a round has batches were added up for one step()."""


class AccumulationWatch:
    """Count backward passes between the first steps, and warn once if they fill a round."""

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        self._passes = self._looks = 0
        # Of a window that ends in the closure of a step, those before and including it.
        self._before_step = self._with_closure = 0
        self._grad: weakref.ref[Tensor] | None = None

    def look(self, params: Sequence[Tensor], batches: int) -> None:
        """Look at what has happened since the step before; called at the beginning of each one.

        Args:
            params: the optimizer's parameters.
            batches: in a round.
        """
        # Two passes may well be two losses of one batch, as of a GAN's real and generated images.
        if batches <= 2 or self._looks > _STEPS:
            return
        self._looks += 1
        if self._handle is None:
            reached = (param for param in params if param.grad is not None and param.is_leaf)
            param = next(reached, None)
            if param is not None and param.requires_grad:
                register = param.register_post_accumulate_grad_hook
                self._handle = register(self._count)  # type: ignore[no-untyped-call]
            return
        if batches in (self._passes, self._with_closure):
            warnings.warn(
                f"the gradients of {batches} backward passes were added up for one step(), with "
                f"batches={batches}: they count as one batch. If each of them is a batch, call "
                "step() and zero_grad() after each, or let torchpisa.integrations do it in "
                "Transformers, Accelerate, Lightning or a loop that you cannot change",
                AccumulationWarning,
                stacklevel=2,
            )
            self._looks = _STEPS + 1
        if self._looks > _STEPS:
            self._handle.remove()
        self._before_step, self._passes, self._with_closure = self._passes, 0, 0

    def skipped(self) -> None:
        """Forget the passes of a batch that was left out."""
        self._passes = self._before_step = self._with_closure = 0

    def _count(self, param: Tensor) -> None:
        # Not added up if the gradient was cleared meanwhile, as before a graph is captured.
        if self._grad is None or self._grad() is not param.grad:
            self._passes = self._before_step = 0
        assert param.grad is not None
        self._grad = weakref.ref(param.grad)
        self._passes += 1
        if self._passes == 1:
            self._with_closure = max(self._with_closure, self._before_step + 1)
