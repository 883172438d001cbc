"""Private parts of torch that have no public counterpart; tried with torch 2.6 to 2.13."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as disable_dynamo

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["cpu_multiplies_bfloat16", "ddp_hooks", "disable_dynamo", "is_flattened", "loss_scale"]
__all__ += ["without_autocast"]

# A context manager for all kinds of devices; `torch.autocast` is for one, and slow to enter.
without_autocast = torch._C._DisableAutocast


def ddp_hooks(model: "DistributedDataParallel") -> list[Callable[..., Any]]:
    """Return the communication hooks of a model."""
    return [hook for hook, _ in model._comm_hooks]


def is_flattened(param: Tensor) -> bool:
    """Return whether a parameter is part of a FullyShardedDataParallel model (not fully_shard)."""
    return getattr(param, "_fsdp_flattened", False)


def loss_scale(scaler: torch.amp.GradScaler) -> Tensor | None:
    """Return what a GradScaler multiplies losses by, as a tensor, without waiting for a device."""
    return scaler._get_scale_async()


def cpu_multiplies_bfloat16() -> bool:
    """Return whether the processor has instructions for products of bfloat16."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    asked = [getattr(torch.cpu, name, None) for name in names]
    return any(ask() for ask in asked if ask is not None)
