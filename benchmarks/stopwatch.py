"""Time and memory of steps: common parameters for all optimizers, runs of back-to-back steps."""

import contextlib
import gc
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from benchmarks.rows import AbsentError, Named, Row
from benchmarks.shapes import MODELS

__all__ = ["Copy", "Entry", "Problem", "round_robin", "state_bytes"]

RUN_S = 0.075  # length of a run on a GPU, long beside the start and the end of it
BUDGET_S = 20.0  # a slow row leaves the round robin after this time ...
MIN_SAMPLES = 5  # ... and this many samples


class Problem:
    """The parameters of a model with random gradients, the same for every optimizer."""

    def __init__(self, model: str, device: str, seed: int) -> None:
        self.device = torch.device(device)
        self.shapes = MODELS[model]()
        generator = torch.Generator(device).manual_seed(seed)
        normal = {"generator": generator, "device": device}
        self.params = [Parameter(0.02 * torch.randn(s.size, **normal)) for s in self.shapes]
        self._grads = [torch.randn(s.size, **normal) for s in self.shapes]
        # Some optimizers write into the gradients.
        self._given = [torch.empty_like(grad) for grad in self._grads]
        self._data = [param.data for param in self.params]
        self.restore()

    def named(self, kinds: tuple[str, ...]) -> Named:
        """Return the parameters of some kinds, with their names."""
        pairs = zip(self.shapes, self.params, strict=True)
        return [(shape.name, param) for shape, param in pairs if shape.kind in kinds]

    def restore(self) -> None:
        """Undo what a step, or half of one, did to gradients and to the parameters' views."""
        torch._foreach_copy_(self._given, self._grads)
        for param, data, grad in zip(self.params, self._data, self._given, strict=True):
            if param.shape != data.shape or param.data_ptr() != data.data_ptr():
                param.data = data
            if param.grad is not grad:
                param.grad = grad

    def check(self) -> None:
        """Raise if a parameter is no longer finite, and start afresh."""
        norms = torch.stack(torch._foreach_norm(self._data))
        if not norms.isfinite().all():
            for data in self._data:
                data.normal_(std=0.02)
            raise FloatingPointError("the parameters did not stay finite")

    def wait(self) -> None:
        """Wait until the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Copy:
    """A plain copy, timed like a step: its bandwidth bounds elementwise steps."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.source = torch.ones(size, dtype=torch.uint8, device=device)
        self.target = torch.zeros_like(self.source)
        self.moved = 2 * size

    def step(self) -> None:
        self.target.copy_(self.source)


class CapReachedError(BaseException):
    """The end of a row at its time limit; not an Exception, which libraries catch."""


class Entry:
    """A row in the making: its optimizer, how it is run, and what was measured."""

    def __init__(self, name: str, row: Row | None = None) -> None:
        self.name = name
        self.row = row
        self.period = row.period if row else 1
        self.optimizer: Any = None
        self.steps = self.period
        self.samples: list[float] = []
        self.facts: dict[str, Any] = {}
        self.note = row.note if row else ""
        self.error: str | None = None

    @property
    def running(self) -> bool:
        return self.error is None

    def prepare(self, problem: Problem, cap_s: float) -> None:
        """Make the optimizer, warm it up, and see how much memory it takes."""
        assert self.row is not None
        start = time.perf_counter()
        reason = self._attempt(problem, cap_s, compiled=True)
        if reason and self.row.compiles and problem.device.type == "cpu":
            self.close()
            without = self._attempt(problem, cap_s, compiled=False)
            if without is None:
                note = f"not compiled (compiled: {reason})"
                self.note = f"{self.note}; {note}" if self.note else note
            reason = without
        if reason:
            self.fail(reason)
        self.facts["warmup_s"] = round(time.perf_counter() - start, 2)

    def _attempt(self, problem: Problem, cap_s: float, compiled: bool) -> str | None:
        """Return why it failed, as a string: an exception would keep its frames' memory alive."""
        try:
            with cap(cap_s), quiet():
                self._warm_up(problem, compiled)
        except CapReachedError:
            return f"warm-up took over {cap_s:g} s"
        except Exception as error:
            return _reason(error)
        return None

    def _warm_up(self, problem: Problem, compiled: bool) -> None:
        assert self.row is not None
        named = problem.named(self.row.kinds)
        if not named:
            kinds = " or ".join(self.row.kinds)
            raise AbsentError(f"takes a hidden {kinds} only, and the model has none")
        self.facts["parameters"] = sum(param.numel() for _, param in named)
        self.facts["tensors"] = len(named)
        self.optimizer = self.row.make(self.row, named, compiled)
        problem.restore()
        for _ in range(max(3, 2 * self.period)):
            self.optimizer.step()
        problem.check()
        self.choose_steps(problem)
        self.facts["temporary_bytes"] = temporary_bytes(self.optimizer, self.period, problem)
        self.facts["state_bytes"] = state_bytes(self.optimizer, problem.params)

    def choose_steps(self, problem: Problem) -> None:
        """Choose enough steps for a run on a GPU, so that the host runs ahead as in training."""
        if problem.device.type == "cuda":
            once = timed(self.optimizer, self.period, problem) / 1e3 * self.period
            self.steps = self.period * math.ceil(RUN_S / once)

    def sample(self, problem: Problem) -> float:
        """Return the milliseconds of a step, the mean of one run."""
        problem.restore()
        ms = timed(self.optimizer, self.steps, problem)
        problem.check()
        return ms

    def fail(self, reason: str) -> None:
        """Give up; the reason stands in the row."""
        self.error = reason
        self.close()

    def close(self) -> None:
        """Let go of the optimizer and its state."""
        self.optimizer = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def timed(optimizer: Any, steps: int, problem: Problem) -> float:
    """Return milliseconds per step, from the first call to the end of the last one's work."""
    problem.wait()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    problem.wait()
    return (time.perf_counter() - start) / steps * 1e3


def round_robin(entries: list[Entry], repeats: int, problem: Problem) -> dict[str, float]:
    """Sample all rows in turn, repeatedly, so that changes of the clock affect all of them.

    Returns the medians of this time; the samples are added to the entries'.
    """
    fresh: dict[str, list[float]] = {entry.name: [] for entry in entries}
    spent = dict.fromkeys(fresh, 0.0)
    for _ in range(repeats):
        for entry in entries:
            samples = fresh[entry.name]
            if not entry.running:
                continue
            if spent[entry.name] > BUDGET_S and len(samples) >= MIN_SAMPLES:
                continue
            reason = None
            try:
                samples.append(entry.sample(problem))
                spent[entry.name] += samples[-1] * entry.steps / 1e3
            except Exception as error:
                reason = _reason(error)
            if reason is not None:  # out of the block, where the exception holds no memory
                entry.fail(reason)
    for entry in entries:
        entry.samples += fresh[entry.name]
    return {entry.name: median(fresh[entry.name]) for entry in entries if entry.running}


def state_bytes(optimizer: torch.optim.Optimizer, params: list[Parameter]) -> int:
    """Return the bytes of the tensors in an optimizer's state, however deeply nested."""
    storages: dict[int, int] = {}
    seen: set[int] = set()

    def visit(value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            visit(vars(value))

    visit(dict(optimizer.state))
    for tensor in (*params, *(p.grad for p in params if p.grad is not None)):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def temporary_bytes(optimizer: Any, period: int, problem: Problem) -> int:
    """Return the most that warm steps allocate on top of what is there before them."""
    if problem.device.type == "cuda":
        problem.wait()
        torch.cuda.reset_peak_memory_stats(problem.device)
        before = torch.cuda.memory_allocated(problem.device)
        for _ in range(period):
            optimizer.step()
        problem.wait()
        return torch.cuda.max_memory_allocated(problem.device) - before
    # What torch's own allocator gives out; scratch memory inside of libraries is not seen.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in range(period):
            optimizer.step()
    results = recorded.profiler.kineto_results
    changes = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        now += change
        peak = max(peak, now)
    return peak


@contextlib.contextmanager
def cap(seconds: float) -> Iterator[None]:
    """Raise CapReachedError after some time, between two calls into C.

    Does nothing where there are no alarms: on Windows, and in threads.
    """
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def stop(*_: object) -> None:
        raise CapReachedError

    previous = signal.signal(signal.SIGALRM, stop)
    # Again every few seconds, should the first be lost in a destructor.
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what compilers and profilers write to stderr; errors still raise."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            with contextlib.redirect_stderr(nowhere):
                yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _reason(error: Exception) -> str:
    """Return an error in one line; for an absent library without the name of the error."""
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else ""
    return first if isinstance(error, AbsentError) else f"{type(error).__name__}: {first}"
