"""Match an optimizer with a checkpoint: collect what this process saves, check what it loads."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchpisa.distributed.checkpoint import contents
from torchpisa.distributed.checkpoint.contents import Contents
from torchpisa.distributed.checkpoint.remap import Named, node_rank
from torchpisa.distributed.checkpoint.storage import Checkpoint
from torchpisa.optim.pisa import PISA
from torchpisa.state_keys import model_key, node_key, of_slot, state_key

__all__ = ["check_model", "check_optimizer", "local_contents", "local_state", "named_params"]

# What torch adds to the names of parameters when it wraps modules.
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")


def named_params(model: nn.Module, optimizer: PISA) -> list[Named]:
    """Return the optimizer's parameters, by group, with the names that the model gives them."""
    from torch.nn.parallel import DistributedDataParallel

    if optimizer.peers is not None and optimizer.peers.step_begun:
        raise ValueError(
            "optimizer must not be between backward() and step(): the backward pass has sent "
            "contributions to the other ranks already"
        )
    inner: Any = model
    while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    names = {id(param): _WRAPPERS.sub("", name) for name, param in inner.named_parameters()}
    groups: list[Named] = []
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ValueError(
                    "optimizer must hold parameters of the model only, got one of shape "
                    f"{tuple(param.shape)} in group {number} that the model does not have; with "
                    "fully_shard, make the optimizer afterwards"
                )
        groups.append([(names[id(param)], param) for param in group["params"]])
    return groups


def local_contents(params: Sequence[Named], optimizer: PISA) -> Contents:
    """Return the contents of this rank."""
    state: dict[str, list[str]] = {}
    steps: dict[str, list[float]] = {}
    arrived: dict[str, list[int]] = {}
    for name, param in (entry for named_params in params for entry in named_params):
        if optimizer.has_state(param):
            param_state, slots = optimizer.state[param], range(optimizer.batches)
            state[name] = [kind for kind in of_slot(param_state, 0) if kind != "step"]
            steps[name] = [param_state[state_key("step", slot)].item() for slot in slots]
            arrived[name] = [param_state["arrived"]]
    return Contents(
        optimizer=type(optimizer).__name__,
        batches=optimizer.batches,
        groups=[[contents.pack(group, optimizer.round) for group in optimizer.param_groups]],
        names=[[name for name, _ in named_params] for named_params in params],
        state=state,
        steps=steps,
        arrived=arrived,
    )


def local_state(params: Sequence[Named], optimizer: PISA) -> dict[str, Tensor]:
    """Return the state tensors of this rank, under their names in a checkpoint."""
    rank, batches = node_rank(optimizer), optimizer.batches
    tensors = {}
    for name, param in (entry for named_params in params for entry in named_params):
        param_state = optimizer.state[param] if optimizer.has_state(param) else {}
        for slot in range(batches):
            for kind, value in of_slot(param_state, slot).items():
                if kind != "step":
                    tensors[node_key(name, kind, rank * batches + slot)] = value
        if param_state.get("arrived"):
            tensors[node_key(name, "pending", rank)] = param_state["pending"]
    return tensors


def check_model(source: Checkpoint, entries: Mapping[str, Any]) -> None:
    """Raise ValueError unless names and shapes of the model's state are those saved."""
    prefix = model_key("")
    saved = {key.removeprefix(prefix) for key in source.kinds if key.startswith(prefix)}
    saved |= source.objects.keys()
    if missing := sorted(entries.keys() - saved):
        raise ValueError(
            f"model must be the one that was saved, got one with {', '.join(missing)}, which the "
            "checkpoint does not have"
        )
    if left := sorted(saved - entries.keys()):
        raise ValueError(
            f"model must be the one that was saved, got one without {', '.join(left)}, which the "
            "checkpoint has"
        )
    for name, entry in entries.items():
        if isinstance(entry, Tensor):
            _check_shape("model", name, entry, source, model_key(name))


def check_optimizer(source: Checkpoint, params: Sequence[Named], optimizer: PISA) -> None:
    """Raise ValueError unless class, groups and state of the optimizer are those saved."""
    saved = source.contents
    if type(optimizer).__name__ != saved.optimizer:
        raise ValueError(
            f"optimizer must be a {saved.optimizer}, which was saved, got a "
            f"{type(optimizer).__name__}"
        )
    if len(params) != len(saved.names):
        advice = ""
        if saved.optimizer == "NSISA" and len(params) < len(saved.names):
            advice = (
                "; earlier versions split every group into matrices and the rest: give NSISA "
                "these groups, with matrix=True and matrix=False"
            )
        raise ValueError(
            f"optimizer must have {len(saved.names)} parameter groups, as the one that was saved, "
            f"got {len(params)}{advice}"
        )
    for number, (named_params, names) in enumerate(zip(params, saved.names, strict=True)):
        if differing := sorted({name for name, _ in named_params} ^ set(names)):
            raise ValueError(
                f"optimizer must have the parameters of the one that was saved in group {number}, "
                f"got one that differs in {', '.join(differing)}"
            )
        for name, param in named_params:
            if name not in saved.state:
                continue
            if not optimizer.has_state(param):
                _check_shape("dual of", name, param, source, node_key(name, "dual", 0))
                continue
            state = of_slot(optimizer.state[param], 0)
            kinds = state.keys() - {"step"}
            if kinds != set(saved.state[name]):
                raise ValueError(
                    f"optimizer must have {', '.join(sorted(saved.state[name]))} for {name}, which "
                    f"was saved, got {', '.join(sorted(kinds))}"
                )
            for kind in kinds:
                key = node_key(name, kind, 0)
                _check_shape(f"{kind} of", name, state[kind], source, key)


def _check_shape(what: str, name: str, tensor: Tensor, source: Checkpoint, key: str) -> None:
    shape = source.kinds[key].shape if key in source.kinds else None
    if shape != tensor.shape:
        saved = "nothing" if shape is None else f"shape {tuple(shape)}"
        raise ValueError(
            f"{what} {name} must have the shape that was saved, {saved}, got {tuple(tensor.shape)}"
        )
