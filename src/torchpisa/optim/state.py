"""Write and read state_dicts: add the round to torch's entries, and check them all on loading.

`unpacked` changes nothing: it either returns groups and state that are complete and checked, or
raises.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchpisa.checks import check_count
from torchpisa.optim import arguments
from torchpisa.optim.round import PROGRESS, Group, Round
from torchpisa.preconditioners import Preconditioner
from torchpisa.preconditioners.consensus import Stage
from torchpisa.state_keys import SlotKeys, split_key, state_key

if TYPE_CHECKING:
    from torchpisa.optim.optimizer import RoundOptimizer

__all__ = ["Loaded", "packed", "unpacked"]

# Legal dtypes of state; others would load and then fail in a step.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX_DTYPES = (torch.complex64, torch.complex128)
# State that kernels compute with together, and expect in one dtype.
_OF_ONE_DTYPE = frozenset({*SlotKeys._fields, "rows"})

State = dict[str, Any]


class Loaded(NamedTuple):
    """The checked groups, state and round of a state_dict."""

    param_groups: list[Group]
    state: defaultdict[Tensor, State]
    round: Round


def packed(state_dict: dict[str, Any], round: Round) -> dict[str, Any]:
    """Return a state_dict with the round, and without functions and preconditioners."""
    progress = round.packed()
    groups = [
        {
            name: value if name == "params" else arguments.plain(value)
            for name, value in {**group, **progress}.items()
            if not _is_code(value)
        }
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def unpacked(
    state_dict: object, optimizer: "RoundOptimizer", check_group: Callable[[Group], None]
) -> Loaded:
    """Return what `state_dict` holds for an optimizer, without changing either.

    Args:
        state_dict: the result of `packed`, perhaps of an earlier version.
        optimizer: the optimizer to load into.
        check_group: raises if the settings of a group are wrong.

    Raises:
        ValueError: an entry does not fit; the message names it.
    """
    groups = optimizer.param_groups
    given = optimizer.upgrade_state_dict(_checked(state_dict))
    saved_groups, saved_state = given["param_groups"], given["state"]
    for number, saved in enumerate(saved_groups):
        _check_origin(saved)
        with _naming(f"param_groups[{number}]"):
            check_count("batches", saved["batches"])
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"state_dict must have {len(groups)} parameter groups, got {len(saved_groups)}: make "
            "the optimizer as the saved one was made (torchpisa.create makes groups of its own)"
        )
    one_batch = all(saved["batches"] == 1 for saved in saved_groups)
    if one_batch and not any(saved.keys() & PROGRESS for saved in saved_groups):
        progress = Round(_most_steps(saved_state)).packed()
        saved_groups = [{**saved, **progress} for saved in saved_groups]
    if optimizer.one_dual:
        saved_groups = [
            _with_batches_of(current, saved)
            for saved, current in zip(saved_groups, groups, strict=True)
        ]
    copied: dict[int, Any] = {}
    pairs = [
        (saved, _taken_over(saved, current, number, optimizer.defaults, check_group, copied))
        for number, (saved, current) in enumerate(zip(saved_groups, groups, strict=True))
    ]
    new_groups = [group for _, group in pairs]
    for number, group in enumerate(new_groups):
        for name in (*optimizer.shared, "iteration", "visited", "present"):
            if name in group and group[name] != new_groups[0][name]:
                raise ValueError(
                    f"state_dict must have one {name} for all groups, got {new_groups[0][name]!r} "
                    f"in group 0 and {group[name]!r} in group {number}"
                )
    state: defaultdict[Tensor, State] = defaultdict(dict)
    seen: set[Hashable] = set()
    for saved, group in pairs:
        fresh, fresh_of_one = optimizer.fresh_state(group), optimizer.fresh_state(group, 1)
        for key, param in zip(saved["params"], group["params"], strict=True):
            if not isinstance(key, Hashable) or key in seen:
                raise ValueError(
                    f"state_dict must name every parameter once in 'params', got {key!r}"
                )
            seen.add(key)
            entries = saved_state.get(key)
            if entries is not None and not isinstance(entries, dict):
                raise ValueError(
                    f"state_dict must have a dictionary for parameter {key}: {entries!r}"
                )
            if entries:
                state[param] = _checked_state(entries, fresh_of_one(param), group, key)
            elif param.requires_grad:
                state[param] = fresh(param)
    for key in saved_state:
        if key not in seen:
            raise ValueError(f"state_dict must have state of parameters only, got {key!r}")
    rounds = [{name: group.pop(name, None) for name in PROGRESS} for group in new_groups]
    return Loaded(new_groups, state, Round.unpacked(rounds[0]) if rounds else Round())


def _most_steps(state: Mapping[Any, Any]) -> int:
    """Return the largest step counter: with one batch per round, the number of rounds.

    torch leaves the round out of a state_dict that it has flattened
    (`flatten_optimizer_state_dict=True`). With one batch no round is open between steps.
    """
    name = state_key("step", 0)
    counters: list[Any] = [
        entries.get(name, entries.get("step"))
        for entries in state.values()
        if isinstance(entries, dict)
    ]
    most = max((counter.item() for counter in counters if _is_number(counter)), default=0)
    return int(most) if math.isfinite(most) else 0  # all are checked later


def _checked(state_dict: object) -> Mapping[str, Any]:
    """Return `state_dict` if it has the two entries of torch's state_dicts."""
    for name, kind in (("param_groups", list), ("state", dict)):
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get(name), kind):
            raise ValueError(
                f"state_dict must have {name!r}, a {kind.__name__}, got {_shown(state_dict)}"
            )
    assert isinstance(state_dict, Mapping)
    return state_dict


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dictionary with {', '.join(sorted(map(str, value))) or 'nothing in it'}"
    return f"a {type(value).__name__}"


# Groups


def _taken_over(
    saved: Any,
    current: Group,
    number: int,
    defaults: Group,
    check_group: Callable[[Group], None],
    copied: dict[int, Any],
) -> Group:
    """Return a group with the saved settings; what is code stays as `current` has it.

    Args:
        saved: the saved group.
        current: the optimizer's own group.
        number: its index.
        defaults: the optimizer's defaults.
        check_group: raises if the settings of a group are wrong.
        copied: the memory of `copy.deepcopy`: groups that share a tensor, as lr, share its copy.
    """
    if saved["batches"] != current["batches"]:
        raise ValueError(
            f"state_dict must be for batches={current['batches']}, got batches="
            f"{saved['batches']}: make the optimizer with as many batches, or begin with a new one"
        )
    ranks = saved.get("ranks", 1)  # early versions had no ranks
    if type(ranks) is not int or ranks != current.get("ranks", 1):
        raise ValueError(
            f"state_dict must be that of one of {current.get('ranks', 1)} ranks, got one of "
            f"{ranks}: use torchpisa.distributed.load, which shares the duals out anew"
        )
    params = saved.get("params")
    if not isinstance(params, list) or len(params) != len(current["params"]):
        got = len(params) if isinstance(params, list) else repr(params)
        raise ValueError(
            f"state_dict must have {len(current['params'])} parameters in group {number}, got {got}"
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
        settings = arguments.normalized(copy.deepcopy(settings, copied), defaults)
        for name, value in settings.items():
            if not isinstance(name, str):
                raise ValueError(f"names of settings must be strings, got {name!r}")
            if _is_code(value):
                raise ValueError(f"{name} must be a value, not code, got {value!r}")
        group = {**current, **settings}
        check_group(group)
        _check_progress(group)
        arguments.normalize_penalties(group)
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        if group["capturable"] and isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].to(device)
        if isinstance(group.get("kept"), Tensor):
            group["kept"] = group["kept"].to(device)
    return group


def _with_batches_of(current: Group, saved: Group) -> Group:
    """Return a group saved between rounds with the number of batches, and weights, of `current`."""
    if saved["batches"] == current["batches"]:
        return saved
    if saved.get("visited"):
        raise ValueError(
            f"state_dict must be for batches={current['batches']}, or saved between rounds, got "
            f"batches={saved['batches']} in the middle of a round: load it with as many batches, "
            "and save it again after flush()"
        )
    return {**saved, "batches": current["batches"], "weights": current["weights"]}


def _check_origin(saved: Any) -> None:
    """Raise ValueError unless a saved group is one of an optimizer of this package."""
    if not isinstance(saved, dict) or "batches" not in saved:
        raise ValueError(
            "state_dict must come from a torchpisa optimizer, got one whose groups have "
            f"{', '.join(sorted(map(str, saved))) if isinstance(saved, dict) else repr(saved)}: "
            "load the model's weights, and begin with a new optimizer"
        )


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Prefix errors with the place in the state_dict that they are about."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"state_dict does not fit in {where}: {error}") from error


def _check_progress(group: Group) -> None:
    """Check the progress of the round, and the shares of the batches."""
    batches = group["batches"]
    for name in ("iteration", "visited", "present"):
        if name not in group:
            raise ValueError(
                f"{name} must be there; with flatten_optimizer_state_dict=True torch leaves it "
                "out, so batches must be 1"
            )
    _check_bits("iteration", group["iteration"], math.inf)
    # A round whose last slot has been used is over, and its bits are zero again.
    _check_bits("visited", group["visited"], (1 << batches) - 2)
    _check_bits("present", group["present"], (1 << batches) - 1, within=group["visited"])
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


# State


def _checked_state(held: State, initial: State, group: Group, key: object) -> State:
    """Return checked copies of a parameter's saved state, on the right devices.

    Args:
        held: the saved state.
        initial: the initial state for one batch, to compare with.
        group: the loaded group.
        key: the parameter's key in the state_dict.
    """
    expected: State = {}
    for name, value in initial.items():
        kind, slot = split_key(name)
        if slot is None:
            expected[name] = value
        else:
            for batch in range(group["batches"]):
                expected[state_key(kind, batch)] = value
    if "pending" in held and "dual" in initial:  # of MISA, while a round is open
        dtype = torch.promote_types(initial["dual"].dtype, torch.float32)
        expected["pending"] = initial["dual"].to(dtype)
    if held.keys() != expected.keys():
        raise ValueError(
            f"state_dict must have {', '.join(sorted(expected))} for parameter {key}, "
            f"got {', '.join(sorted(map(str, held)))}: make the optimizer as the saved one was "
            "made, the same class with the same settings"
        )
    loaded: State = {}
    dtypes: dict[torch.dtype, torch.dtype] = {}
    for name, like in expected.items():
        where, value = f"{name} of parameter {key}", held[name]
        if name == "arrived":
            with _naming(f"state of parameter {key}"):
                _check_bits(name, value, (1 << group["batches"]) - 1, within=group["visited"])
            loaded[name] = value
        elif split_key(name)[0] == "step":
            loaded[name] = _counter(value, like, where)
        else:
            _check_tensor(value, like, where, name, key)
            together = split_key(name)[0] in _OF_ONE_DTYPE
            if together and dtypes.setdefault(like.dtype, value.dtype) != value.dtype:
                raise ValueError(
                    f"state_dict must have one dtype for the state of parameter {key}, got "
                    f"{value.dtype} for {name} and {dtypes[like.dtype]} before"
                )
            loaded[name] = value.detach().resolve_conj().to(like.device, copy=True)
    return loaded


def _counter(value: Any, like: Tensor, where: str) -> Tensor:
    """Return a step counter in float32, whatever its saved dtype."""
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
    return callable(value) or isinstance(value, Preconditioner | Stage)
