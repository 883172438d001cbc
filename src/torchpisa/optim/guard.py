"""Warn when weights grow by orders of magnitude, without knowing the loss or waiting for a GPU."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchpisa.checks import warn
from torchpisa.distributed import dtensor
from torchpisa.kernels.job import real

__all__ = ["DivergenceWarning", "Guard"]

# Elements to sample from each tensor.
_SAMPLE = 1024
# Growth of the root mean square that is reported.
_GROWTH = 1e3
# Lower bound of the first root mean square, because weights may start at zero.
_LEAST = 1e-2


class DivergenceWarning(UserWarning):
    """Warning that weights have grown by orders of magnitude."""


class Guard:
    """Sample the weights now and then, and warn once if they grow by orders of magnitude.

    Each check reads the sample that the check before has taken, so that nothing waits for a GPU.
    """

    every = 32  # rounds between two checks

    def __init__(self) -> None:
        self._first: float | None = None
        self._sampled: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._warned = False

    @torch.no_grad()
    def check(self, iteration: int, params: Sequence[Tensor], advice: str) -> None:
        """Judge the last sample and take the next one; called once in `every` rounds.

        Args:
            iteration: the number of rounds done.
            params: the weights.
            advice: what to try, for the warning.
        """
        if self._warned:
            return
        if params and params[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            return
        if self._sampled is not None:
            self._judge(iteration, float(self._sampled), advice)
        rms = _rms(params)
        self._sampled = None if rms is None else rms.to("cpu", non_blocking=True)
        self._arrived = None
        if rms is not None and rms.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def _judge(self, iteration: int, rms: float, advice: str) -> None:
        if self._first is None:
            self._first = max(rms, _LEAST) if math.isfinite(rms) else None
            return
        if rms > _GROWTH * self._first or not math.isfinite(rms):
            self._warned = True
            warn(
                f"weights have grown to a root mean square of {rms:.3g} at iteration "
                f"{iteration - self.every}, from {self._first:.3g}: the training seems to diverge; "
                f"{advice}",
                DivergenceWarning,
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
