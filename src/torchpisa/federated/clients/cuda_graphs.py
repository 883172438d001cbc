"""CUDA graphs of functions, which spare the host from issuing every kernel again."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

__all__ = ["GraphedFunction", "copy_tensors"]

MAX_RECORDED = 32  # sets of shapes with a graph, each of which holds its own memory


class GraphedFunction:
    """A function of nested tensors, recorded on a GPU once per set of shapes, the first 32 sets.

    Small models are bound by the host, which issues a hundred small kernels per local step. The
    next call overwrites what the function returned; `copy_tensors` makes a copy. On a CPU every
    call runs the function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        flat, spec = tree_flatten(arguments)
        if flat[0].device.type != "cuda":
            return self._function(*arguments)
        key = (str(spec), tuple((t.shape, t.dtype) for t in flat))
        if key not in self._graphs:
            if len(self._graphs) == MAX_RECORDED:  # every round has other shapes
                return self._function(*arguments)
            self._graphs[key] = self._record(flat, spec)
        graph, inputs, outputs = self._graphs[key]
        torch._foreach_copy_(inputs, flat)
        graph.replay()
        return outputs

    def _record(
        self, flat: list[Tensor], spec: TreeSpec
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
        inputs = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in flat]
        torch._foreach_copy_(inputs, flat)
        arguments = tree_unflatten(inputs, spec)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the set-up of libraries cannot be recorded
            for _ in range(2):
                self._function(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection(), torch.cuda.graph(graph):
            outputs = self._function(*arguments)
        return graph, inputs, outputs


def copy_tensors(outputs: Any) -> Any:
    """Return a copy of nested tensors, which later calls of a `GraphedFunction` leave alone."""
    return cast(Any, tree_map(torch.clone, outputs))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep device memory from being freed, which would break the recording of a graph."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
