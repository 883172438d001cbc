"""`step()` inside `torch.compile`: one opaque operation in the graph.

A step decides in Python which batch it takes, what sigma and lr are and whether the round ends. A
trace would freeze these decisions or break. So the graph holds a single operation, which declares
the parameters that it writes and the gradients that it reads, and takes the ordinary step when it
runs.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["register", "step"]

_OPTIMIZERS: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_NEXT_FREE = -1


def register(optimizer: object) -> int:
    """Return the number under which the operation in a graph finds `optimizer`."""
    number = max(_OPTIMIZERS, default=-1) + 1
    _OPTIMIZERS[number] = optimizer
    return number


def step(params: Sequence[Tensor], number: int, batch: int | None) -> None:
    """Add the operation to the graph that is being traced.

    Args:
        params: all parameters of the optimizer. Not read from its groups here, because every
            change in a group would then trigger a recompilation.
        number: the optimizer's number from `register`.
        batch: see `step` of the optimizer.
    """
    torch.ops.torchpisa.step(
        params,
        [param.grad for param in params if param.grad is not None],
        [param.grad is not None for param in params],
        number,
        _NEXT_FREE if batch is None else batch,
    )


# The schema is spelled out because older versions of torch do not derive it from these types.
@torch.library.custom_op(
    "torchpisa::step",
    mutates_args=("params",),
    schema="(Tensor(a!)[] params, Tensor[] grads, bool[] reached, int number, int batch) -> ()",
)
def _step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    reached: Sequence[bool],
    number: int,
    batch: int,
) -> None:
    optimizer = _OPTIMIZERS[number]
    all_params = optimizer.all_params  # those of the graph, even if groups have changed since
    before = [param.grad for param in all_params]
    given = iter(grads)
    for param, has_grad in zip(all_params, reached, strict=True):
        param.grad = next(given) if has_grad else None
    try:
        optimizer.step(batch=None if batch == _NEXT_FREE else batch)
    finally:
        for param, grad in zip(all_params, before, strict=True):
            param.grad = grad
    # The compiler may pass copies of the parameters, which it writes back afterwards.
    with torch.no_grad():
        for passed, param in zip(params, all_params, strict=True):
            if passed.data_ptr() != param.data_ptr():
                passed.copy_(param)


@_step.register_fake
def _(*_: object) -> None:
    return None
