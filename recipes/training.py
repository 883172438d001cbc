"""Run trainings that can be interrupted and resumed, with passes as CUDA graphs."""

import contextlib
import dataclasses
import gc
import json
import math
import os
import shutil
import warnings
from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from recipes import ranks
from recipes.datasets import CorruptFileError
from recipes.recipe import Line

__all__ = [
    "GraphedPass",
    "GraphedRound",
    "Training",
    "add_precision_option",
    "checkpoint_file",
    "finite_or_none",
    "forward_precision",
    "run_training",
    "save_atomically",
    "seed_from",
    "with_precision",
]

PRECISIONS = ("float32", "bfloat16")


class Training(ABC):
    """A training that `run_training` can run, interrupt and resume.

    Args:
        settings: the settings of the run, a dataclass with a `name`.
        device: the device to train on.
        total: the length of the run, in epochs or steps.

    Attributes:
        done: epochs or steps that are done.
        elapsed: seconds of training.
        saved: names of the attributes with a `state_dict` that a checkpoint holds.
    """

    saved: ClassVar[tuple[str, ...]] = ("model", "optimizer")

    def __init__(self, settings: Any, device: torch.device, total: int) -> None:
        self.settings, self.device, self.total = settings, device, total
        self.done, self.elapsed = 0, 0.0

    def first_line(self) -> Line | None:
        """Return what to log before training, if anything."""
        return None

    @abstractmethod
    def advance(self) -> Line:
        """Train up to the next line of the log and return it.

        `diverged` in the line ends the run.
        """

    def state(self) -> dict[str, Any]:
        """Return the state to resume from; called right after `advance`."""
        parts = {name: getattr(self, name).state_dict() for name in self.saved}
        return {"done": self.done, "elapsed": self.elapsed, **parts}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name in self.saved:
            getattr(self, name).load_state_dict(state[name])
        self.done, self.elapsed = state["done"], state["elapsed"]


def run_training(
    training: Training, checkpoints: str | Path | None, save_every: int = 10
) -> Iterator[Line]:
    """Train to the end and yield the lines of the log.

    Args:
        training: just built.
        checkpoints: folder of checkpoints, or None for none. That of a run is removed when the run
            is done; one of other settings is not used.
        save_every: epochs or steps from one checkpoint to the next. There is one more where the
            caller closes the generator, as at a time limit.
    """
    lines: list[Line] = []
    file = checkpoint_file(checkpoints, training.settings)
    key = json.dumps(dataclasses.asdict(training.settings), sort_keys=True)
    state = read_checkpoint(file, key)
    # Processes that were killed while they saved may have different steps: begin anew.
    steps = ranks.gather(None if state is None else state["training"]["done"])
    if state is not None and len(set(steps)) == 1:
        training.load(state["training"])
        lines = state["lines"]
    first = None if lines else training.first_line()
    if first is not None:
        lines.append(first)
    # A log is written from its beginning, so the lines of a checkpoint are yielded again.
    yield from lines
    while training.done < training.total and not (lines and lines[-1].get("diverged")):
        lines.append(training.advance())
        due = training.done % save_every == 0 and training.done < training.total
        if file is not None and due:
            save_run(training, lines, key, file)
        try:
            yield lines[-1]
        except GeneratorExit:
            if file is not None and not due:
                save_run(training, lines, key, file)
            raise
    if file is not None:
        file.unlink(missing_ok=True)


def save_run(training: Training, lines: list[Line], key: str, file: Path) -> None:
    """Save a training and its log so far, right after a line of it."""
    save_atomically({"settings": key, "lines": lines, "training": training.state()}, file)


def checkpoint_file(folder: str | Path | None, settings: Any) -> Path | None:
    """Return the file of a run's checkpoint, one for each of several processes, or None."""
    if folder is None:
        return None
    suffix = f".rank{ranks.rank()}of{ranks.count()}" if ranks.count() > 1 else ""
    return Path(folder) / f"{settings.name}{suffix}.pt"


def read_checkpoint(file: Path | None, key: str) -> dict[str, Any] | None:
    """Return what a checkpoint of these settings holds, or None if there is none.

    Raises:
        CorruptFileError: it is damaged.
    """
    if file is None or not file.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return state if state["settings"] == key else None
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the bytes decide what torch makes of them
        raise CorruptFileError(
            f"{file.resolve()} is damaged, or no checkpoint. Remove it, and the run begins anew"
        ) from error


def save_atomically(state: dict[str, Any], file: Path) -> None:
    """Save a state; an interruption leaves the file as it was.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    try:
        torch.save(state, partial)
    except RuntimeError as error:  # which does not say why
        partial.unlink(missing_ok=True)
        free = shutil.disk_usage(file.parent).free / 2**20
        raise OSError(
            f"{file.resolve()} cannot be written, with {free:,.0f} MiB left on its disk: {error}"
        ) from error
    os.replace(partial, file)


def seed_from(*numbers: int) -> None:
    """Seed torch's generators by several numbers, so that no random state has to be saved."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 12_345) % 2**63
    torch.manual_seed(mixed)


def finite_or_none(value: float | None) -> float | None:
    """Return the value, or None, which JSON has, if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def forward_precision(name: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context for forward passes: "float32", or "bfloat16" by autocast on a GPU.

    Its cache of cast weights is off, because a cast within a CUDA graph must be repeated.
    """
    if name not in PRECISIONS:
        raise ValueError(f"precision must be 'float32' or 'bfloat16', got {name!r}")
    lower = name == "bfloat16" and device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=lower, cache_enabled=False)


def add_precision_option(parser: ArgumentParser) -> None:
    """Add an option to a recipe's command that takes the place of its preset's precision."""
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="of forward passes on a GPU; default: the preset's"
    )


def with_precision(config: Any, args: Namespace) -> Any:
    """Return a preset with the precision that was asked for, if one was."""
    if args.precision is None:
        return config
    return dataclasses.replace(config, precision=args.precision)


class GraphedPass:
    """A forward and backward pass for inputs of fixed shapes, on a GPU as one CUDA graph.

    Small models spend most of their time waiting for kernels to be launched; a graph launches all
    of them at once. Gradients are those of the last call and do not add up. With graphs they are
    always the same tensors, for all passes over the same parameters, so optimizers that keep
    their addresses need not look for them again.

    Args:
        loss: returns the loss, a tensor of 0 dimensions, from the inputs. It must not read anything
            from the device.
        params: the parameters that get gradients.
        inputs: examples of the inputs.
        changes: tensors that `loss` changes, such as buffers; capturing leaves them as they were.
        graph: whether to capture a graph, on a GPU.
        shares_memory_with: a pass that never runs at the same time as this one.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        params: Iterable[nn.Parameter],
        inputs: Sequence[Tensor],
        changes: Iterable[Tensor] = (),
        graph: bool = True,
        shares_memory_with: "GraphedPass | None" = None,
    ) -> None:
        self.loss, self.params = loss, list(params)
        self.graph: torch.cuda.CUDAGraph | None = None
        if graph and self.params[0].is_cuda:
            try:
                other = shares_memory_with
                pool = None if other is None or other.graph is None else other.graph.pool()
                self.capture(inputs, list(changes), pool)
            except RuntimeError as error:  # for example an operation that cannot be captured
                self.graph = None
                warnings.warn(f"no CUDA graph, so this is slower: {error}", stacklevel=2)

    def capture(
        self, inputs: Sequence[Tensor], changes: Sequence[Tensor], pool: Any = None
    ) -> None:
        """Capture the graph; random state and what the loss changes stay as they were."""
        self.inputs = [tensor.clone() for tensor in inputs]
        self.grads = [
            torch.zeros_like(param) if param.grad is None else param.grad for param in self.params
        ]
        before = [tensor.clone() for tensor in changes]
        random_state = torch.cuda.get_rng_state()
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(3):  # lets libraries choose their kernels and allocate
                self.backward(self.inputs)
        torch.cuda.current_stream().wait_stream(side_stream)
        self.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.output = self.backward(self.inputs)
            torch._foreach_copy_(self.grads, [param.grad for param in self.params])
        self.graph = graph
        torch.cuda.set_rng_state(random_state)
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
        """Set the gradients of a batch and return its loss, which is valid until the next call."""
        if self.graph is None:
            return self.backward(inputs)
        for static, value in zip(self.inputs, inputs, strict=True):
            static.copy_(value)
        self.graph.replay()
        self.set_gradients()
        return self.output

    def set_gradients(self) -> None:
        """Set the gradients of the parameters to the tensors that all passes write."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad


class GraphedRound:
    """All passes and steps of a round as one CUDA graph.

    An optimizer that launches a few kernels per step spends most of a small model's training on
    the host; a replayed round costs the host one launch. What changes from round to round must be
    in tensors on the device, such as a learning rate.

    Args:
        single: the pass, captured; it shares its memory and must not run any more.
        optimizer: made with `capturable=True`, after at least one round without the graph.
        inputs: examples of a round's inputs.
        parts: passes and steps of a round; each gets an equal part of the inputs.
    """

    def __init__(
        self,
        single: GraphedPass,
        optimizer: torch.optim.Optimizer,
        inputs: Sequence[Tensor],
        parts: int,
    ) -> None:
        if single.graph is None:
            raise ValueError("single must be captured, got a pass without a graph")
        self.inputs = [tensor.clone() for tensor in inputs]
        random_state = torch.cuda.get_rng_state()
        self.graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # what is freed during a capture may belong to the capture's memory
        try:
            with torch.cuda.graph(self.graph, pool=single.graph.pool()):
                for share in zip(*(tensor.chunk(parts) for tensor in self.inputs), strict=True):
                    single.backward(share)
                    torch._foreach_copy_(single.grads, [param.grad for param in single.params])
                    single.set_gradients()
                    optimizer.step()
        finally:
            gc.enable()
        torch.cuda.set_rng_state(random_state)

    def __call__(self, *inputs: Tensor) -> None:
        """Train on a round."""
        for static, value in zip(self.inputs, inputs, strict=True):
            static.copy_(value)
        self.graph.replay()
