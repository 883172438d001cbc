"""The description of an optimizer in a checkpoint: everything but its tensors, in plain values.

Nodes are numbered as rank * batches + slot, and parameters have their names in the model.
"""

import ctypes
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchpisa.optim import arguments
from torchpisa.optim.arguments import PENALTIES
from torchpisa.optim.round import PROGRESS, Group, Round
from torchpisa.optim.state import packed

__all__ = ["PER_NODE", "Contents", "from_bytes", "joined", "pack", "to_bytes", "unpack"]

# Settings for which every node may have a value of its own.
PER_NODE = (*PENALTIES, "gamma")


@dataclass(frozen=True)
class Contents:
    """An optimizer without its large tensors, in plain values.

    Attributes:
        optimizer: the name of its class.
        batches: the number of nodes of each rank.
        groups: settings and progress of the parameter groups, by rank.
        names: the names of the parameters, by group.
        state: for each parameter the kinds of state of a node (`dual`, ...), except `step`.
        steps: for each parameter `step`, by node.
        arrived: for each parameter the slots that have contributed to the open round, as bits, by
            rank.
    """

    optimizer: str
    batches: int
    groups: list[list[Group]]
    names: list[list[str]]
    state: dict[str, list[str]]
    steps: dict[str, list[float]]
    arrived: dict[str, list[int]]

    @property
    def ranks(self) -> int:
        """The number of ranks, or of replicas if they are sharded."""
        return len(self.groups)

    @property
    def shares(self) -> list[float]:
        """alpha_i of all nodes."""
        return [share for each in self.groups for share in each[0]["weights"]]

    @property
    def open(self) -> bool:
        """True if it was saved in the middle of a round."""
        return bool(self.groups[0][0]["visited"])

    def per_node(self, number: int, name: str) -> list[float] | None:
        """Return a setting of group `number` by node; None if it was a function on some rank."""
        values: list[float] = []
        for each in self.groups:
            if name not in each[number]:
                return None
            value = each[number][name]
            values += value if isinstance(value, list | tuple) else [value] * self.batches
        return values

    def present(self, number: int) -> list[bool]:
        """Return by node whether its batch is present in the open round, for group `number`."""
        stepped: list[bool] = []
        for each in self.groups:
            kept, present = each[number]["kept"], each[number]["present"]
            stepped += kept or [bool(present >> slot & 1) for slot in range(self.batches)]
        return stepped

    def as_one_rank(self) -> "Contents":
        """Return the contents that a single process with all nodes would have."""

        def shifted(bits: Sequence[int]) -> int:
            return sum(each << rank * self.batches for rank, each in enumerate(bits))

        groups = []
        for number, first in enumerate(self.groups[0]):
            of_ranks = [each[number] for each in self.groups]
            group = {
                **first,
                "ranks": 1,
                "batches": self.batches * self.ranks,
                "weights": self.shares,
                "visited": shifted([each["visited"] for each in of_ranks]),
                "present": shifted([each["present"] for each in of_ranks]),
            }
            if any(each["kept"] for each in of_ranks):
                group["kept"] = self.present(number)
            for name in PER_NODE:
                values = self.per_node(number, name)
                if values is None:
                    group.pop(name, None)
                elif any(value != first[name] for value in values):
                    group[name] = values
            groups.append(group)
        return Contents(
            optimizer=self.optimizer,
            batches=self.batches * self.ranks,
            groups=[groups],
            names=self.names,
            state=self.state,
            steps=self.steps,
            arrived={name: [shifted(bits)] for name, bits in self.arrived.items()},
        )


def joined(parts: Sequence[Contents]) -> Contents:
    """Return the contents of all ranks together.

    Args:
        parts: the contents of each rank.

    Raises:
        ValueError: ranks are at different points of the training, or their parameters differ.
    """
    first = parts[0]
    for rank, part in enumerate(parts):
        if _point(part) != _point(first):
            raise ValueError(
                "all ranks must save at the same point, got rank 0 "
                f"{_point(first)} and rank {rank} {_point(part)}"
            )
        if (part.names, part.state) != (first.names, first.state):
            raise ValueError(
                "all ranks must have the same parameters with the same state, in the same order, "
                f"but rank {rank} differs from rank 0"
            )
    return Contents(
        optimizer=first.optimizer,
        batches=first.batches,
        groups=[part.groups[0] for part in parts],
        names=first.names,
        state=first.state,
        steps={name: [s for part in parts for s in part.steps[name]] for name in first.steps},
        arrived={name: [b for part in parts for b in part.arrived[name]] for name in first.arrived},
    )


def _point(part: Contents) -> str:
    where = "in the middle of" if part.open else "before"
    return f"{where} iteration {part.groups[0][0]['iteration']}"


# Plain values


def pack(group: Group, round: Round) -> Group:
    """Return a group and the round as plain values, without parameters, names and functions."""
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    plain: Group = packed({"param_groups": [settings]}, round)["param_groups"][0]
    for name, value in plain.items():
        if name in PENALTIES and value is not None:
            values = value if isinstance(value, list) else [value] * group["batches"]
            plain[name] = [float(entry) for entry in values]
        elif name == "kept":
            plain[name] = None if value is None else value.tolist()
        elif isinstance(value, Tensor):
            plain[name] = value.detach().cpu()
        elif isinstance(value, float):
            plain[name] = float(value)  # numpy's float64 is a float too, but loads only with numpy
    return plain


def unpack(plain: Group, device: torch.device) -> tuple[Group, Round]:
    """Return the group and round that `pack` was given, with tensors on `device`."""
    group = dict(plain)
    progress = {name: group.pop(name) for name in PROGRESS}
    if progress["kept"] is not None:
        progress["kept"] = torch.tensor(progress["kept"], dtype=torch.bool, device=device)
    if group["capturable"]:
        for name in PENALTIES:
            if group.get(name) is not None:
                group[name] = arguments.numbers(group[name], device)
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].to(device)
    return group, Round.unpacked(progress)


def to_bytes(what: str, value: object) -> Tensor:
    """Return `value` as a tensor of bytes; torch would unpickle an object, which is not safe.

    Args:
        what: name of the value, for the error message.
        value: the value.

    Raises:
        ValueError: `torch.load(..., weights_only=True)` cannot read it.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(
            f"{what} must be made of tensors, numbers, strings, lists, tuples and dictionaries "
            f"(what torch.load reads with weights_only=True), got {value!r}"
        ) from error
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def from_bytes(stored: Tensor) -> Any:
    """Return the value that `to_bytes` was given."""
    data = ctypes.string_at(stored.data_ptr(), stored.numel())
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
