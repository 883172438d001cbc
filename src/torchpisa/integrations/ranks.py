"""Optimizers with a `process_group` in frameworks that wrap models in DDP."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchpisa.optim import PISA

__all__ = ["has_ranks", "keep_own_gradients"]

_RANK = "torchpisa_rank"
# Prepared models and optimizers, apart because frameworks may wrap a model again.
_MODELS: WeakSet[nn.Module] = WeakSet()
_OPTIMIZERS: WeakSet[Optimizer] = WeakSet()


def has_ranks(optimizer: Optimizer | None) -> bool:
    """Return whether the optimizer has a `process_group`: every rank is then a node."""
    return isinstance(optimizer, PISA) and optimizer.peers is not None


def keep_own_gradients(optimizer: Optimizer | None, models: Iterable[nn.Module]) -> None:
    """Stop DistributedDataParallel from averaging gradients if the optimizer has a `process_group`.

    With averages all duals would be equal. After this call the backward pass leaves gradients
    alone, so a framework may unscale, rescale and clip them, and only `optimizer.step()`
    communicates. Call it before the first backward pass; further calls do no harm.

    Frameworks save the optimizer's state of the first rank only, but every rank has its own duals.
    So a state cannot be loaded on another rank.

    Args:
        optimizer: any optimizer; nothing happens unless it has a `process_group`.
        models: the models as wrapped by the framework. If none has the optimizer's parameters,
            nothing happens.

    Raises:
        RuntimeError: the model is not wrapped in DistributedDataParallel.
    """
    if not isinstance(optimizer, PISA) or optimizer.peers is None:
        return
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for model in models:
        if model in _MODELS or not any(id(param) in params for param in model.parameters()):
            continue
        if not isinstance(model, DistributedDataParallel):
            raise RuntimeError(
                "an optimizer with a process_group needs a model in DistributedDataParallel here, "
                f"got {type(model).__name__}: leave process_group out to train on averages, or "
                "write the loop yourself, with torchpisa.distributed.shard for sharded models"
            )
        model.register_comm_hook(None, noop_hook)
        _MODELS.add(model)
    if optimizer not in _OPTIMIZERS:
        _refuse_states_of_others(optimizer, optimizer.peers.rank)
        _OPTIMIZERS.add(optimizer)


def _refuse_states_of_others(optimizer: Optimizer, rank: int) -> None:
    """Write the rank into every `state_dict`, and refuse to load that of another rank."""

    def sign(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, _RANK: rank}

    def compare(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if state.get(_RANK, rank) != rank:
            raise ValueError(
                f"state_dict must be that of rank {rank}, got that of rank {state[_RANK]}: every "
                "rank has duals of its own, and the framework saved those of one. Save with "
                "torchpisa.distributed.save(folder, model, optimizer) and resume with load"
            )
        return {key: value for key, value in state.items() if key != _RANK}

    optimizer.register_state_dict_post_hook(sign)
    optimizer.register_load_state_dict_pre_hook(compare)
