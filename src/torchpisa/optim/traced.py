"""`step()` inside `torch.compile`: one opaque operation in the graph.

Which batch it is, what sigma and lr are, whether the round ends: a step decides this in Python, and
a trace would freeze it or break. So the graph holds a single operation that is told which
parameters it moves and which gradients it reads, and that takes the ordinary step when it runs.
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
    """Return a number by which the operation in a graph finds `optimizer`."""
    number = max(_OPTIMIZERS, default=-1) + 1
    _OPTIMIZERS[number] = optimizer
    return number


def step(params: Sequence[Tensor], number: int, batch: int | None) -> None:
    """Put the operation into a graph that takes a step when it runs.

    Args:
        params: all parameters of the optimizer. Not read off its groups here: whatever changes in
            them would be guarded, and compiled anew.
        number: what `register` returned for it.
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
    all_params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [param.grad for param in all_params]
    given = iter(grads)
    for param, has_grad in zip(all_params, reached, strict=True):
        param.grad = next(given) if has_grad else None
    try:
        optimizer.step(batch=None if batch == _NEXT_FREE else batch)
    finally:
        for param, grad in zip(all_params, before, strict=True):
            param.grad = grad
    # A compiler may hand over copies of the parameters and write their contents back afterwards.
    with torch.no_grad():
        for handed, param in zip(params, all_params, strict=True):
            if handed.data_ptr() != param.data_ptr():
                handed.copy_(param)


@_step.register_fake
def _(*_: object) -> None:
    return None
