"""Names of the optimizers' state, made and parsed here and nowhere else.

A parameter's state is a flat dictionary, as torch has it. What a batch has of its own carries the
batch's slot: `dual.0`, `moment.0`, `step.0`, `dual.1`, ... What belongs to the round as a whole,
`pending` and `arrived`, does not. A checkpoint of many ranks has one entry per tensor, under the
name of the parameter and the number of the node: `optimizer.state.NAME.dual.3`.
"""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple, TypeVar

__all__ = ["SlotKeys", "model_key", "node_key", "of_slot", "slot_keys", "split_key", "state_key"]

T = TypeVar("T")

_MODEL, _STATE = "model.", "optimizer.state."


def state_key(name: str, slot: int) -> str:
    """Return the name of a batch's own state, such as `dual.0`."""
    return f"{name}.{slot}"


def split_key(key: str) -> tuple[str, int | None]:
    """Return the name and the slot in a key; None for what does not belong to one batch."""
    name, dot, slot = key.rpartition(".")
    return (name, int(slot)) if dot and slot.isdigit() else (key, None)


def of_slot(state: Mapping[str, T], slot: int) -> dict[str, T]:
    """Return the state of one batch, by name."""
    suffix = f".{slot}"
    return {key.removesuffix(suffix): value for key, value in state.items() if key.endswith(suffix)}


class SlotKeys(NamedTuple):
    """The keys that kernels use for one batch."""

    dual: str
    step: str
    moment: str
    momentum: str
    average: str
    sigma: str
    level: str


@cache
def slot_keys(slot: int) -> SlotKeys:
    """Return the keys of a batch; made once, because every step needs them."""
    return SlotKeys(*(state_key(name, slot) for name in SlotKeys._fields))


def model_key(name: str) -> str:
    """Return the name of an entry of the model's state in a checkpoint of many ranks."""
    return f"{_MODEL}{name}"


def node_key(name: str, kind: str, number: int) -> str:
    """Return the name, in a checkpoint of many ranks, of a parameter's state.

    Args:
        name: the parameter.
        kind: `dual`, `moment`, ...; or `pending`.
        number: the node; of `pending`, the rank.
    """
    return f"{_STATE}{name}.{kind}.{number}"
