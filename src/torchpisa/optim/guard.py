"""A word of warning when weights run away, without looking at the loss or waiting for a device."""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from torchpisa.distributed import dtensor
from torchpisa.kernels.job import real

__all__ = ["DivergenceWarning", "Guard"]

# Elements that are looked at of a tensor, and growth that is reported.
_SAMPLE = 1024
_GROWTH = 1e3
# Root mean squares are compared with at least this: weights may start at zero.
_LEAST = 1e-2


class DivergenceWarning(UserWarning):
    """Weights have grown by orders of magnitude; silence it as any warning."""


class Guard:
    """Looks at a sample of the weights now and then, and warns once if they run away.

    What is seen in one look is read in the next one, so that nothing waits for a device.
    """

    every = 32  # rounds between two looks

    def __init__(self) -> None:
        self._level: float | None = None
        self._seen: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._warned = False

    @torch.no_grad()
    def look(self, iteration: int, params: Sequence[Tensor], remedy: str) -> None:
        """Take a look; called every so many rounds.

        Args:
            iteration: rounds done.
            params: the weights.
            remedy: what to change, for the message.
        """
        if self._warned:
            return
        if params and params[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            return
        if self._seen is not None:
            self._judge(iteration, float(self._seen), remedy)
        rms = _rms(params)
        self._seen = None if rms is None else rms.to("cpu", non_blocking=True)
        self._arrived = None
        if rms is not None and rms.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def _judge(self, iteration: int, rms: float, remedy: str) -> None:
        if self._level is None:
            self._level = max(rms, _LEAST) if math.isfinite(rms) else None
            return
        if rms > _GROWTH * self._level or not math.isfinite(rms):
            self._warned = True
            warnings.warn(
                f"weights have grown to a root mean square of {rms:.3g} at iteration "
                f"{iteration - self.every}, from {self._level:.3g}: the training seems to diverge; "
                f"{remedy}",
                DivergenceWarning,
                stacklevel=2,
            )


def _rms(params: Sequence[Tensor]) -> Tensor | None:
    """Return the root mean square of a sample of the weights, on their device."""
    samples = []
    for param in params:
        flat = real(dtensor.local(param.detach())).reshape(-1)
        if flat.numel():
            samples.append(flat[:: max(1, flat.numel() // _SAMPLE)].float())
    if not samples:
        return None
    home = samples[0].device
    norms = torch.stack([torch.linalg.vector_norm(sample).to(home) for sample in samples])
    count = sum(sample.numel() for sample in samples)
    rms: Tensor = torch.linalg.vector_norm(norms) / count**0.5
    return rms
