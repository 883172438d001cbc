"""The timeline of a step, from a profile of it: who computes, waits and sends."""

from collections.abc import Iterable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.distributed.training import BACKWARD, FORWARD, LOCAL, STEP, Training
from benchmarks.stopwatch import quiet

__all__ = ["Timeline", "collectives", "is_complete", "profiled", "timeline", "waited_ms"]

Span = tuple[float, float]
Timeline = dict[str, Any]

ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}
# Between two operations the host is busy with Python; what is longer is waiting.
PAUSE_MS = 0.2
# An all-reduce, as the thread that trains and as gloo's threads record it.
CALL, SUM = "c10d::allreduce_", "gloo:all_reduce"


def profiled(training: Training, steps: int) -> list[Any]:
    """Return the events of some steps."""
    with quiet(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(steps):
            training.step()
    return list(recorded.profiler.kineto_results.events())


def collectives(events: Iterable[Any]) -> list[int]:
    """Return the bytes that were handed to each collective, in the order of their starts."""
    calls = [event for event in events if event.name().startswith("gloo:")]
    return [_bytes(event) for event in sorted(calls, key=lambda event: event.start_ns())]


def _bytes(event: Any) -> int:
    total = 0
    for shape, dtype in zip(event.shapes(), event.dtypes(), strict=True):
        elements = 1
        for length in shape:
            elements *= length
        total += elements * ITEM_BYTES[dtype]
    return total


def is_complete(events: list[Any]) -> bool:
    """Return whether every all-reduce that was called was recorded to its end.

    A thread of gloo may note the end of the last one when the recording is over.
    """
    names = [event.name() for event in events]
    return names.count(CALL) == names.count(SUM)


def timeline(events: list[Any]) -> Timeline:
    """Return spans in milliseconds from the start of one step.

    An all-reduce is called, and begins once one of gloo's threads is free; first come, first
    served. The thread that trains waits where it does nothing, after the last gradient, although
    an all-reduce is under way.
    """
    zero = min(event.start_ns() for event in events)

    def spans(*names: str) -> list[Span]:
        return sorted(_span(event, zero) for event in events if event.name() in names)

    forward, backward, local, step = (spans(name) for name in (FORWARD, BACKWARD, LOCAL, STEP))
    calls = spans(CALL)
    sums = sorted((e for e in events if e.name() == SUM), key=lambda e: e.start_ns())
    flights = [
        {"called": call, "begun": begun, "done": done, "bytes": _bytes(event)}
        for (call, _), event in zip(calls, sums, strict=True)
        for begun, done in [_span(event, zero)]
    ]
    thread = next(e.start_thread_id() for e in events if e.name() == BACKWARD)
    labels = (FORWARD, BACKWARD, LOCAL, STEP)
    operations = [
        _span(event, zero)
        for event in events
        if event.start_thread_id() == thread and event.end_thread_id() == thread
        if event.name() not in labels and not event.name().startswith("Optimizer.")
    ]
    gradients = (e for e in events if e.name().startswith("autograd::engine::"))
    last = max(_span(event, zero)[1] for event in gradients)
    idle = without([(last, backward[-1][1]), *step], operations)
    waiting = within(idle, [(flight["called"], flight["done"]) for flight in flights])
    waiting = [(start, end) for start, end in waiting if end - start > PAUSE_MS]
    return _rounded(
        {
            "forward": forward,
            "backward": without(backward, local + waiting),
            "local": local,
            "step": without(step, waiting),
            "waiting": waiting,
            "all_reduces": flights,
            # A thread of gloo may note its end after the one that it has told of it.
            "total": max([end for _, end in step] + [flight["done"] for flight in flights]),
        }
    )


def waited_ms(times: Timeline) -> tuple[float, float]:
    """Return milliseconds with an all-reduce under way, and those in which the trainer waited."""
    flights = union((flight["called"], flight["done"]) for flight in times["all_reduces"])
    return length(flights), length(within(times["waiting"], flights))


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same time in spans that do not overlap."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def without(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Return the parts of `spans` outside of `others`."""
    left = union(spans)
    for start, end in union(others):
        left = [
            part
            for low, high in left
            for part in ((low, min(high, start)), (max(low, end), high))
            if part[0] < part[1]
        ]
    return left


def within(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Return the parts of `spans` inside of `others`."""
    spans = list(spans)
    return without(spans, without(spans, others))


def length(spans: Iterable[Span]) -> float:
    """Return the time that the spans cover."""
    return sum(end - start for start, end in union(spans))


def _span(event: Any, zero: int) -> Span:
    start = event.start_ns() - zero
    return start / 1e6, (start + event.duration_ns()) / 1e6


def _rounded(value: Any) -> Any:
    """Round to microseconds."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
