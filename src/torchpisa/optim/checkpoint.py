"""What a state_dict holds beyond torch's own, and whether one fits."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchpisa.optim.rounds import Group
from torchpisa.preconditioners import Preconditioner

__all__ = ["check", "packed", "restore"]


def packed(state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` without rules for gamma and preconditioners: they are code, not state."""
    groups = [
        {name: value for name, value in group.items() if not _is_code(value)}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def check(state_dict: dict[str, Any], groups: Sequence[Group], state: dict[Tensor, Any]) -> None:
    """Raise ValueError unless `state_dict` fits an optimizer with `groups` and `state`."""
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"state_dict must have {len(groups)} parameter groups, got {len(saved_groups)}"
        )
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if "batches" not in saved:
            raise ValueError(
                "state_dict must come from a torchpisa optimizer, got one whose groups have "
                f"{', '.join(sorted(map(str, saved)))}"
            )
        if saved["batches"] != group["batches"]:
            raise ValueError(
                f"state_dict must be for batches={group['batches']}, got batches="
                f"{saved['batches']}: every batch has its own dual"
            )
        ranks = saved.get("ranks", 1)  # what was saved before there were ranks has none
        if ranks != group.get("ranks", 1):
            raise ValueError(
                f"state_dict must be that of one of {group['ranks']} ranks, got one of {ranks}: "
                "use torchpisa.distributed.load, which shares the duals out anew"
            )
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"state_dict must have {len(group['params'])} parameters in group {number}, "
                f"got {len(saved['params'])}"
            )
        for key, param in zip(saved["params"], group["params"], strict=True):
            _check_param(state_dict["state"].get(key, {}), state.get(param, {}), key)


def _check_param(saved: dict[str, Any], own: dict[str, Any], key: object) -> None:
    if not saved or not own:
        return
    # The sum of an open round; some optimizers have it only then.
    if (saved.keys() ^ own.keys()) - {"pending"}:
        raise ValueError(
            f"state_dict must have {', '.join(sorted(own))} for parameter {key}, "
            f"got {', '.join(sorted(saved))}"
        )
    for name, value in saved.items():
        if isinstance(value, Tensor) and name in own and value.shape != own[name].shape:
            raise ValueError(
                f"state_dict must have {name} of shape {tuple(own[name].shape)} for parameter "
                f"{key}, got {tuple(value.shape)}"
            )


def restore(
    state_dict: dict[str, Any],
    previous: Sequence[Group],
    groups: Sequence[Group],
    state: dict[Tensor, Any],
) -> None:
    """Undo what torch's load does to dtypes, and put back what `packed` left out."""
    for saved, before, group in zip(state_dict["param_groups"], previous, groups, strict=True):
        for name, value in before.items():
            group.setdefault(name, value)
        if group["capturable"] and group["params"]:
            device = group["params"][0].device
            for name in ("sigma", "rho"):
                group[name] = [value.to(device) for value in group[name]]
        for key, param in zip(saved["params"], group["params"], strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    device = state[param][name].device
                    if name.startswith("step.") and not group["capturable"]:
                        device = "cpu"
                    state[param][name] = value.to(device, copy=True)


def _is_code(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_code(entry) for entry in value)
    return callable(value) or isinstance(value, Preconditioner)
