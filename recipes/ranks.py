"""Several processes that do the same runs together, when torchrun has started them.

Without torchrun there is one process, and every function here says so or does nothing.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed

__all__ = ["agree", "average", "by_torchrun", "count", "gather", "group", "rank", "total"]


def by_torchrun() -> bool:
    """Return whether torchrun has started this process together with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextlib.contextmanager
def group(device: str) -> Iterator[str]:
    """Form the process group that torchrun asks for; yield the device of this process."""
    if not by_torchrun() or distributed.is_initialized():
        yield device
        return
    gpu = device.startswith("cuda")
    if gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if gpu else "gloo")
    try:
        yield device
    finally:
        distributed.destroy_process_group()


def rank() -> int:
    """Return the number of this process, from 0."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def count() -> int:
    """Return the number of processes."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def agree(value: Any) -> Any:
    """Return the first process's value on all of them."""
    if count() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]


def gather(value: Any) -> list[Any]:
    """Return the values of all processes."""
    values = [value] * count()
    if count() > 1:
        distributed.all_gather_object(values, value)
    return values


def total(tensor: Tensor) -> Tensor:
    """Add up a tensor over the processes, in place."""
    if count() > 1:
        distributed.all_reduce(tensor)
    return tensor


def average(tensors: list[Tensor]) -> None:
    """Replace tensors by their means over the processes."""
    if count() == 1:
        return
    for work in [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    torch._foreach_div_(tensors, count())
