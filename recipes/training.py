"""What trainings share: passes replayed as CUDA graphs, and runs that go on where they were."""

import contextlib
import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recipes.recipe import Line

__all__ = ["Pass", "Trainable", "drive", "finite", "precision", "reseed"]


class Trainable(Protocol):
    """A training that `drive` can run.

    Attributes:
        done: epochs that are done.
        epochs: of the whole run.
    """

    done: int
    epochs: int

    def epoch(self) -> Line:
        """Train for an epoch and return what to log. `diverged` is true if there is no point in
        going on."""

    def state(self) -> dict[str, Any]:
        """Return all that it takes to go on; called between epochs."""

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""


def drive(
    training: Trainable, settings: Any, file: Path | None, save_every: int = 10
) -> Iterator[Line]:
    """Train to the end and yield a line per epoch.

    Args:
        training: just built.
        settings: of the run, a dataclass; a checkpoint of other settings is not used.
        file: of the checkpoint, or None for none. It is removed when the run is done.
        save_every: epochs from one checkpoint to the next.
    """
    lines: list[Line] = []
    key = json.dumps(dataclasses.asdict(settings), sort_keys=True)
    if file is not None and file.is_file():
        state = torch.load(file, map_location="cpu", weights_only=True)
        if state["settings"] == key:
            training.load(state["training"])
            lines = state["lines"]
    # A log is written from its beginning, so what it had is handed out again.
    yield from lines
    while training.done < training.epochs and not (lines and lines[-1].get("diverged")):
        lines.append(training.epoch())
        last = training.done == training.epochs
        if file is not None and not last and training.done % save_every == 0:
            save({"settings": key, "lines": lines, "training": training.state()}, file)
        yield lines[-1]
    if file is not None:
        file.unlink(missing_ok=True)


def save(state: dict[str, Any], file: Path) -> None:
    """Save in one move: an interruption leaves the file as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, file)


def reseed(*numbers: int) -> None:
    """Seed torch's generators by some numbers, so that an epoch's chance needs no saved state."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 12_345) % 2**63
    torch.manual_seed(mixed)


def finite(value: float) -> float | None:
    """The value, or None for the log if it is not finite."""
    return value if math.isfinite(value) else None


def precision(name: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context for forward passes: "float32", or "bfloat16" by autocast on a GPU.

    Its cache of cast weights is off, because a cast within a CUDA graph must be repeated.
    """
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"precision must be 'float32' or 'bfloat16', got {name!r}")
    lower = name == "bfloat16" and device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=lower, cache_enabled=False)


class Pass:
    """Forward and backward pass over inputs of fixed shapes, on a GPU replayed as one CUDA graph.

    Small models spend most of their time waiting for the next kernel's launch; a graph launches all
    of them at once. Gradients are those of the last call, they do not add up. With graphs they are
    always the same tensors, for all passes over the same parameters: optimizers that keep their
    addresses need not look for them again.

    Args:
        loss: returns the loss, a tensor of 0 dimensions, from the inputs. It must not read anything
            from the device.
        params: that get gradients.
        inputs: examples.
        changes: tensors that `loss` changes, such as buffers; capturing leaves them as they were.
        graph: whether to capture a graph. Only on a GPU.
        like: a pass whose memory this one may use too: they never run at the same time.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        params: Iterable[nn.Parameter],
        inputs: Sequence[Tensor],
        changes: Iterable[Tensor] = (),
        graph: bool = True,
        like: "Pass | None" = None,
    ) -> None:
        self.loss, self.params = loss, list(params)
        self.graph: torch.cuda.CUDAGraph | None = None
        if graph and self.params[0].is_cuda:
            try:
                pool = None if like is None or like.graph is None else like.graph.pool()
                self.capture(inputs, list(changes), pool)
            except RuntimeError as error:  # such as an operation that cannot be captured
                self.graph = None
                warnings.warn(f"no CUDA graph, so this is slower: {error}", stacklevel=2)

    def capture(
        self, inputs: Sequence[Tensor], changes: Sequence[Tensor], pool: Any = None
    ) -> None:
        """Capture the graph; leaves random state and what the loss changes as they were."""
        self.inputs = [tensor.clone() for tensor in inputs]
        self.grads = [
            torch.zeros_like(param) if param.grad is None else param.grad for param in self.params
        ]
        before = [tensor.clone() for tensor in changes]
        chance = torch.cuda.get_rng_state()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):  # libraries choose their kernels and allocate
                self.backward(self.inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.output = self.backward(self.inputs)
            torch._foreach_copy_(self.grads, [param.grad for param in self.params])
        self.graph = graph
        torch.cuda.set_rng_state(chance)
        for tensor, value in zip(changes, before, strict=True):
            tensor.copy_(value)

    def clear(self) -> None:
        for param in self.params:
            param.grad = None

    def backward(self, inputs: Sequence[Tensor]) -> Tensor:
        self.clear()
        loss = self.loss(*inputs)
        loss.backward(inputs=self.params)
        return loss.detach()

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Set the gradients of a batch; returns its loss, valid until the next call."""
        if self.graph is None:
            return self.backward(inputs)
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        return self.output
