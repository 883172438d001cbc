"""What a state_dict holds beyond torch's own, and what an optimizer takes from one that fits.

`unpacked` writes to nothing: it returns groups and state that are complete and checked, or raises.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchpisa.kernels.job import state_key
from torchpisa.optim import arguments
from torchpisa.optim.common import SHARED
from torchpisa.optim.rounds import Group
from torchpisa.preconditioners import Preconditioner

__all__ = ["Loaded", "load", "packed", "unpacked"]

# Kinds of numbers that state may be kept in; others would be loaded and then fail in a step.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX_DTYPES = (torch.complex64, torch.complex128)

State = dict[str, Any]


class Loaded(NamedTuple):
    """What takes the place of an optimizer's groups and state."""

    groups: list[Group]
    state: defaultdict[Tensor, State]


def packed(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return `state_dict` without rules for gamma and preconditioners: they are code, not state."""
    groups = [
        {
            name: value if name == "params" else arguments.plain(value)
            for name, value in group.items()
            if not _is_code(value)
        }
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def load(
    optimizer: Optimizer,
    state_dict: object,
    check_group: Callable[[Group], None],
    fresh_state: Callable[[Tensor, Group, int], State],
) -> None:
    """Load `state_dict` into `optimizer`, hooks included, or raise and change nothing.

    For the other arguments see `unpacked`.
    """
    given: Any = state_dict.copy() if isinstance(state_dict, dict) else state_dict
    for prepare in optimizer._optimizer_load_state_dict_pre_hooks.values():
        prepared = prepare(optimizer, given)
        given = given if prepared is None else prepared
    loaded = unpacked(given, optimizer.param_groups, optimizer.defaults, check_group, fresh_state)
    optimizer.__setstate__({"state": loaded.state, "param_groups": loaded.groups})
    for finish in optimizer._optimizer_load_state_dict_post_hooks.values():
        finish(optimizer)


def unpacked(
    state_dict: object,
    groups: Sequence[Group],
    defaults: Group,
    check_group: Callable[[Group], None],
    fresh_state: Callable[[Tensor, Group, int], State],
) -> Loaded:
    """Return what an optimizer with `groups` takes from `state_dict`.

    Args:
        state_dict: what `packed` returned, perhaps long ago.
        groups: the optimizer's own.
        defaults: of its settings.
        check_group: raises if the optimizer could not have been made with a group.
        fresh_state: the state that a parameter of a group starts with, for so many batches.

    Raises:
        ValueError: something does not fit; the message names the entry.
    """
    saved_groups, saved_state = _parts(state_dict)
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"state_dict must have {len(groups)} parameter groups, got {len(saved_groups)}"
        )
    pairs = [
        (saved, _taken_over(saved, own, number, defaults, check_group))
        for number, (saved, own) in enumerate(zip(saved_groups, groups, strict=True))
    ]
    new_groups = [group for _, group in pairs]
    for number, group in enumerate(new_groups):
        for name in (*SHARED, "iteration", "visited", "present"):
            if name in group and group[name] != new_groups[0][name]:
                raise ValueError(
                    f"state_dict must have one {name} for all groups, got {new_groups[0][name]!r} "
                    f"in group 0 and {group[name]!r} in group {number}"
                )
    state: defaultdict[Tensor, State] = defaultdict(dict)
    seen: set[Hashable] = set()
    for saved, group in pairs:
        for key, param in zip(saved["params"], group["params"], strict=True):
            if not isinstance(key, Hashable) or key in seen:
                raise ValueError(
                    f"state_dict must name every parameter once in 'params', got {key!r}"
                )
            seen.add(key)
            held = saved_state.get(key)
            if held is not None and not isinstance(held, dict):
                raise ValueError(f"state_dict must have a dictionary for parameter {key}: {held!r}")
            if held:
                expected = fresh_state(param, group, 1)
                state[param] = _checked_state(held, expected, param, group, key)
            elif param.requires_grad:
                state[param] = fresh_state(param, group, group["batches"])
    for key in saved_state:
        if key not in seen:
            raise ValueError(f"state_dict must have state of parameters only, got {key!r}")
    return Loaded(new_groups, state)


def _parts(state_dict: object) -> tuple[list[Any], dict[Any, Any]]:
    for name, kind in (("param_groups", list), ("state", dict)):
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get(name), kind):
            raise ValueError(
                f"state_dict must have {name!r}, a {kind.__name__}, got {_shown(state_dict)}"
            )
    assert isinstance(state_dict, Mapping)
    return state_dict["param_groups"], state_dict["state"]


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dictionary with {', '.join(sorted(map(str, value))) or 'nothing in it'}"
    return f"a {type(value).__name__}"


# Groups


def _taken_over(
    saved: Any, own: Group, number: int, defaults: Group, check_group: Callable[[Group], None]
) -> Group:
    """Return a group with the saved settings; rules and preconditioners stay those of `own`."""
    if not isinstance(saved, dict) or "batches" not in saved:
        raise ValueError(
            "state_dict must come from a torchpisa optimizer, got one whose groups have "
            f"{', '.join(sorted(map(str, saved))) if isinstance(saved, dict) else repr(saved)}"
        )
    if type(saved["batches"]) is not int or saved["batches"] != own["batches"]:
        raise ValueError(
            f"state_dict must be for batches={own['batches']}, got batches="
            f"{saved['batches']}: every batch has its own dual"
        )
    ranks = saved.get("ranks", 1)  # what was saved before there were ranks has none
    if type(ranks) is not int or ranks != own.get("ranks", 1):
        raise ValueError(
            f"state_dict must be that of one of {own.get('ranks', 1)} ranks, got one of {ranks}: "
            "use torchpisa.distributed.load, which shares the duals out anew"
        )
    params = saved.get("params")
    if not isinstance(params, list) or len(params) != len(own["params"]):
        got = len(params) if isinstance(params, list) else repr(params)
        raise ValueError(
            f"state_dict must have {len(own['params'])} parameters in group {number}, got {got}"
        )
    names = saved.get("param_names")
    if "param_names" in saved and not (
        isinstance(names, list)
        and len(names) == len(params)
        and all(isinstance(name, str) for name in names)
    ):
        raise ValueError(
            f"state_dict must have a name for every parameter in 'param_names' of group {number}, "
            f"got {names!r}"
        )
    with _naming(f"param_groups[{number}]"):
        settings = {name: value for name, value in saved.items() if name != "params"}
        taken = arguments.in_form(copy.deepcopy(settings), defaults)
        for name, value in taken.items():
            if not isinstance(name, str):
                raise ValueError(f"names of settings must be strings, got {name!r}")
            if _is_code(value):
                raise ValueError(f"{name} must be a value, not code, got {value!r}")
        # What only an open round has may be missing.
        group = {**own, **({"kept": None} if "kept" in own else {}), **taken}
        check_group(group)
        _check_progress(group, saved)
        _put_in_form(group)
    return group


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Say in errors where in the state_dict the entry is that they are about."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"state_dict does not fit in {where}: {error}") from error


def _check_progress(group: Group, saved: Group) -> None:
    """Check where a round stands, and the shares of the batches."""
    batches = group["batches"]
    for name in ("iteration", "visited", "present"):
        if name not in saved:
            raise ValueError(f"{name} must be there")
    _check_bits("iteration", group["iteration"], math.inf)
    # A round whose last slot has been used is over, and its bits are zero again.
    _check_bits("visited", group["visited"], (1 << batches) - 2)
    _check_bits("present", group["present"], (1 << batches) - 1, within=group["visited"])
    moves = group.get("moves", False)
    if not isinstance(moves, bool) and not (
        isinstance(moves, Tensor) and moves.dim() == 0 and moves.dtype == torch.bool
    ):
        raise ValueError(f"moves must be True, False or a tensor of one bool, got {moves!r}")
    kept = group.get("kept")
    if kept is not None and not (
        isinstance(kept, Tensor)
        and kept.shape == (batches,)
        and kept.dtype == torch.bool
        and not kept.is_meta
    ):
        raise ValueError(f"kept must be None or a tensor of {batches} bools, got {kept!r}")
    weights = group["weights"]
    if not isinstance(weights, list) or len(weights) != batches:
        raise ValueError(f"weights must be a list of {batches} numbers, got {weights!r}")
    for weight in weights:
        arguments.check_sigma("weights", weight)
    total = math.fsum(weights)
    if total > 1 + 1e-6 or (group.get("ranks", 1) == 1 and total < 1 - 1e-6):
        raise ValueError(f"weights must add up to 1 over all batches, got {weights!r}")


def _check_bits(name: str, value: Any, most: float, within: int | None = None) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} must be an integer in [0, {most}], got {value!r}")
    if within is not None and value & ~within:
        raise ValueError(f"{name} must be among the slots used, {within:b} in bits, got {value:b}")


def _put_in_form(group: Group) -> None:
    """Make numbers what the group's steps expect: floats, or tensors where the parameters are."""
    params, batches = group["params"], group["batches"]
    device = params[0].device if params else torch.device("cpu")
    for name, check in (("sigma", arguments.check_sigma), ("rho", arguments.check_rho)):
        if group.get(name) is not None:
            values = arguments.per_batch(name, group[name], batches, check)
            group[name] = arguments.numbers(values, device if group["capturable"] else None)
    if group["capturable"] and isinstance(group["lr"], Tensor):
        group["lr"] = group["lr"].to(device)
    for name in ("kept", "moves"):
        if isinstance(group.get(name), Tensor):
            group[name] = group[name].to(device)


# State


def _checked_state(held: State, first: State, param: Tensor, group: Group, key: object) -> State:
    """Return copies of `held` on the devices where they belong.

    Args:
        held: what was saved for the parameter.
        first: what it has before the first step, for one batch.
        param: the parameter.
        group: its group, as loaded.
        key: its name in the state_dict.
    """
    suffix = state_key("", 0)
    expected = {
        state_key(name.removesuffix(suffix), slot): value
        for slot in range(group["batches"])
        for name, value in first.items()
        if name.endswith(suffix)
    }
    expected |= {name: value for name, value in first.items() if not name.endswith(suffix)}
    if (
        "pending" in held and "dual" in first
    ):  # with one dual for all batches, while a round is open
        dtype = torch.promote_types(first["dual"].dtype, torch.float32)
        expected["pending"] = first["dual"].to(dtype)
    if held.keys() != expected.keys():
        raise ValueError(
            f"state_dict must have {', '.join(sorted(expected))} for parameter {key}, "
            f"got {', '.join(sorted(map(str, held)))}"
        )
    taken: State = {}
    dtypes: dict[torch.dtype, torch.dtype] = {}
    for name, like in expected.items():
        where, value = f"{name} of parameter {key}", held[name]
        if name == "arrived":
            with _naming(f"state of parameter {key}"):
                _check_bits(name, value, (1 << group["batches"]) - 1, within=group["visited"])
            taken[name] = value
        elif name.partition(".")[0] == "step":
            taken[name] = _counter(value, like, where)
        else:
            _check_tensor(value, like, where, name, key)
            if name != "pending" and dtypes.setdefault(like.dtype, value.dtype) != value.dtype:
                raise ValueError(
                    f"state_dict must have one dtype for the state of parameter {key}, got "
                    f"{value.dtype} for {name} and {dtypes[like.dtype]} before"
                )
            taken[name] = value.detach().resolve_conj().to(like.device, copy=True)
    return taken


def _counter(value: Any, like: Tensor, where: str) -> Tensor:
    """Return a step counter in float32, whatever it was saved in."""
    number = value.item() if _is_number(value) else None
    if number is None or not (0 <= number < math.inf and number == int(number)):
        raise ValueError(
            f"state_dict must have a tensor of one whole number >= 0 for {where}, got {value!r}"
        )
    return torch.full_like(like, number)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dim() == 0
        and not value.is_complex()
        and not value.is_meta
        and value.layout is torch.strided
        and (value.dtype in _DTYPES or value.dtype in (torch.int32, torch.int64))
    )


def _check_tensor(value: Any, like: Tensor, where: str, name: str, key: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"state_dict must have a tensor for {where}, got {value!r}")
    if value.shape != like.shape:
        raise ValueError(
            f"state_dict must have {name} of shape {tuple(like.shape)} for parameter "
            f"{key}, got {tuple(value.shape)}"
        )
    if like.is_complex():
        legal = value.dtype in _COMPLEX_DTYPES
    elif like.is_floating_point():
        legal = value.dtype in _DTYPES
    else:
        legal = value.dtype == like.dtype
    if not legal:
        raise ValueError(
            f"state_dict must have numbers like {like.dtype} for {where}, got {value.dtype}"
        )
    kinds = (Tensor, torch.nn.Parameter) if type(like) is Tensor else (type(like),)
    if type(value) not in kinds or value.layout != like.layout or value.is_meta != like.is_meta:
        raise ValueError(
            f"state_dict must have a {type(like).__name__} like its parameter's, in memory and "
            f"dense, for {where}, got a {type(value).__name__} on {value.device}, {value.layout}"
        )


def _is_code(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_code(entry) for entry in value)
    return callable(value) or isinstance(value, Preconditioner)
