"""The work of every rank: train the rows in turn, count bytes, time all-reduces."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import distributed

from benchmarks.distributed import overlap
from benchmarks.distributed.processes import LOOPBACK
from benchmarks.distributed.training import MODELS, REFERENCE, ROWS, Row, Training
from benchmarks.step import interquartile_range, rounded
from benchmarks.stopwatch import state_bytes

__all__ = ["MeasurementPlan", "Turn", "measure", "timed"]

TRACED = [REFERENCE, "torchpisa SISA, attach"]


class MeasurementPlan(NamedTuple):
    """The extent of a measurement.

    Attributes:
        model: one of `MODELS`.
        steps: that are timed in one turn of a row, at least; after one that is not.
        repeats: turns of each row.
        sizes: bytes of all-reduces to time.
        seed: seed of weights and data.
    """

    model: str
    steps: int
    repeats: int
    sizes: list[int]
    seed: int


class Turn(NamedTuple):
    """Means over the steps of a turn.

    Attributes:
        ms: the slowest rank's time.
        cpu_ms: CPU time of all ranks together.
        wire_bytes: the bytes that they sent; None if unknown.
    """

    ms: float
    cpu_ms: float
    wire_bytes: float | None


def measure(plan: MeasurementPlan) -> dict[str, Any]:
    """Return the part of the result for this number of processes; called on all ranks."""
    trainings = {row.name: Training(row, MODELS[plan.model], plan.seed) for row in ROWS}
    for row in ROWS:  # DDP forms its buckets anew after the first step
        for _ in range(3 * row.period):
            trainings[row.name].step()
    turns: dict[str, list[Turn]] = {row.name: [] for row in ROWS}
    for repeat in range(plan.repeats):
        _say(f"turn {repeat + 1} of {plan.repeats}")
        for row in ROWS:
            turns[row.name].append(_turn(trainings[row.name], row, plan.steps))
    rows = [_describe(row, trainings[row.name], turns) for row in ROWS]
    traces = [{"name": name, **_trace(trainings[name])} for name in TRACED]
    for training in trainings.values():
        training.check()
    _say("all-reduces")
    return {
        "processes": distributed.get_world_size(),
        "rows": rows,
        "overlap": traces,
        "all_reduce": _all_reduces(plan.sizes),
    }


def _turn(training: Training, row: Row, steps: int) -> Turn:
    """Measure some steps of a row, after one unmeasured round that warms up its caches."""
    for _ in range(row.period):
        training.step()
    return timed(training.step, -(-steps // row.period) * row.period)


def timed(step: Callable[[], object], steps: int) -> Turn:
    """Measure some calls of `step`; all ranks call this together."""
    distributed.barrier()
    sent = _sent_bytes()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    ms = torch.tensor(time.perf_counter() - start, dtype=torch.float64) / steps * 1e3
    cpu_ms = torch.tensor(time.process_time() - cpu_start, dtype=torch.float64) / steps * 1e3
    distributed.barrier()
    wire = None if sent is None else ((_sent_bytes() or 0) - sent) / steps
    distributed.all_reduce(ms, distributed.ReduceOp.MAX)
    distributed.all_reduce(cpu_ms)
    return Turn(ms.item(), cpu_ms.item(), wire)


def _sent_bytes() -> int | None:
    """Return the bytes that this host has sent to itself so far, headers included."""
    counter = LOOPBACK / "statistics" / "tx_bytes"
    return int(counter.read_text()) if counter.exists() else None


def _describe(row: Row, training: Training, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    handed = overlap.collectives(overlap.profiled(training, row.period))
    samples = [turn.ms for turn in turns[row.name]]
    beside = [turn.ms for turn in turns[REFERENCE]]
    wires = [turn.wire_bytes for turn in turns[row.name] if turn.wire_bytes is not None]
    ranks = distributed.get_world_size()
    state = sum(state_bytes(optimizer, training.parameters) for optimizer in training.optimizers)
    count = sum(param.numel() for param in training.parameters)
    return {
        "name": row.name,
        "period": row.period,
        "parameters": count,
        "tensors": len(training.parameters),
        "ms": rounded(statistics.median(samples)),
        "iqr_ms": rounded(interquartile_range(samples)),
        "samples_ms": [rounded(sample) for sample in samples],
        "ratio_of_medians": rounded(statistics.median(samples) / statistics.median(beside)),
        "median_of_ratios": rounded(
            statistics.median(sample / other for sample, other in zip(samples, beside, strict=True))
        ),
        "cpu_ms": rounded(statistics.median(turn.cpu_ms for turn in turns[row.name]) / ranks),
        "handed_bytes": sum(handed) / row.period,
        "all_reduces": len(handed) / row.period,
        "wire_bytes": rounded(min(wires) / ranks) if wires else None,  # others can only add to it
        "state_bytes_per_parameter": rounded(state / count),
    }


def _trace(training: Training, tries: int = 5) -> overlap.Timeline:
    """Return the step of median length of several, as the first rank saw it."""
    for _ in range(2):
        training.step()
    recorded = [overlap.profiled(training, 1) for _ in range(tries)]  # as often on every rank
    timelines = [overlap.timeline(events) for events in recorded if overlap.is_complete(events)]
    if not timelines:
        raise RuntimeError(f"none of {tries} steps was recorded to its end")
    return sorted(timelines, key=lambda times: times["total"])[len(timelines) // 2]


def _all_reduces(sizes: list[int], turns: int = 7) -> dict[str, Any]:
    """Return the median seconds of an all-reduce of each size, and the line through them."""
    tensors = [torch.zeros(size // 4) for size in sizes]
    samples: list[list[float]] = [[] for _ in sizes]
    for _ in range(turns + 1):
        for tensor, times in zip(tensors, samples, strict=True):
            calls = 50 if tensor.numel() < 2**14 else 5 if tensor.numel() < 2**20 else 1
            distributed.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                distributed.all_reduce(tensor)
            times.append((time.perf_counter() - start) / calls)
    seconds = [statistics.median(times[1:]) for times in samples]  # the first were to warm up
    latency, per_byte = fit(sizes, seconds)
    processes = distributed.get_world_size()
    hops = 2 * (processes - 1)
    return {
        "bytes": sizes,
        "seconds": [rounded(value) for value in seconds],
        # What the ring's formula makes of the line, see scaling.py.
        "alpha_s": rounded(latency / hops),
        "beta_s_per_byte": rounded(per_byte * processes / hops),
        "largest_error": rounded(
            max(
                abs((latency + per_byte * size) / value - 1)
                for size, value in zip(sizes, seconds, strict=True)
            )
        ),
    }


def fit(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Return seconds, and seconds per byte, by least squares of relative errors."""
    times = torch.tensor(seconds, dtype=torch.float64)
    columns = torch.stack([torch.ones_like(times), torch.tensor(sizes).double()], 1)
    ones = torch.ones_like(times)[:, None]
    solution = torch.linalg.lstsq(columns / times[:, None], ones).solution
    latency, per_byte = solution.flatten().tolist()
    return latency, per_byte


def _say(text: str) -> None:
    if distributed.get_rank() == 0:
        print(f"{distributed.get_world_size()} processes: {text}", flush=True)
