"""What a checkpoint says about an optimizer, besides its tensors; and the names of those.

Nodes are numbered through, node = rank * batches + slot, whichever process held them, and
parameters have the names that the model gives them.
"""

import ctypes
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchpisa.optim import arguments, checkpoint, rounds
from torchpisa.optim.rounds import Group

__all__ = ["PER_NODE", "Contents", "from_bytes", "joined", "pack", "to_bytes", "unpack"]

# Settings for which every node may have a value of its own.
PER_NODE = ("sigma", "rho", "gamma", "sisa_sigma", "sisa_rho")


@dataclass(frozen=True)
class Contents:
    """An optimizer without its large tensors, in plain values.

    Attributes:
        optimizer: name of its class.
        batches: number of every rank's nodes.
        groups: settings and progress of the parameter groups, by rank.
        names: the parameters, by group.
        state: what each parameter has for every node: `dual` and so on, but `step` apart.
        steps: `step` of each parameter, by node.
        arrived: slots that have contributed to each parameter in this round, as bits, by rank.
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
        """How many ranks (replicas, if they are sharded) held the nodes."""
        return len(self.groups)

    @property
    def shares(self) -> list[float]:
        """alpha_i of all nodes."""
        return [share for own in self.groups for share in own[0]["weights"]]

    @property
    def open(self) -> bool:
        """Whether it was saved in the middle of a round."""
        return bool(self.groups[0][0]["visited"])

    def per_node(self, number: int, name: str) -> list[float] | None:
        """A setting of group `number` for all nodes; None if it was code on some rank."""
        values: list[float] = []
        for own in self.groups:
            if name not in own[number]:
                return None
            value = own[number][name]
            values += value if isinstance(value, list | tuple) else [value] * self.batches
        return values

    def took_part(self, number: int) -> list[bool]:
        """Whether each node's batch was stepped in this round, in group `number`."""
        found: list[bool] = []
        for own in self.groups:
            kept, present = own[number]["kept"], own[number]["present"]
            found += kept or [bool(present >> slot & 1) for slot in range(self.batches)]
        return found

    def as_one_rank(self) -> "Contents":
        """The same, as a process that holds all nodes would have it."""

        def shifted(bits: Sequence[int]) -> int:
            return sum(own << rank * self.batches for rank, own in enumerate(bits))

        groups = []
        for number, first in enumerate(self.groups[0]):
            of_ranks = [own[number] for own in self.groups]
            group = {
                **first,
                "ranks": 1,
                "batches": self.batches * self.ranks,
                "weights": self.shares,
                "visited": shifted([own["visited"] for own in of_ranks]),
                "present": shifted([own["present"] for own in of_ranks]),
            }
            if any(own["kept"] for own in of_ranks):
                group["kept"] = self.took_part(number)
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
    """What all ranks hold together, from what each of them does.

    Raises:
        ValueError: they do not stand at the same point, or do not hold the same.
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


# Names of tensors


def model_key(name: str) -> str:
    """An entry of the model's state."""
    return f"model.{name}"


def state_key(name: str, kind: str, number: int) -> str:
    """A parameter's state: of a node, or the `pending` sum of a rank."""
    return f"optimizer.state.{name}.{kind}.{number}"


# Plain values


def pack(group: Group) -> Group:
    """A parameter group in plain values, without its parameters and without code."""
    own = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    packed: Group = checkpoint.packed({"param_groups": [own]})["param_groups"][0]
    for name, value in packed.items():
        if name in ("sigma", "rho") and value is not None:
            packed[name] = [float(entry) for entry in rounds.per_batch(group, name)]
        elif name == "kept":
            packed[name] = None if value is None else value.tolist()
        elif isinstance(value, Tensor):
            packed[name] = value.detach().cpu()
        elif isinstance(value, float):
            packed[name] = float(value)  # that of numpy is one, too, but does not load everywhere
    return packed


def unpack(packed: Group, device: torch.device) -> Group:
    """The opposite of `pack`; what has to be tensors is on `device`."""
    group = dict(packed)
    if group["kept"] is not None:
        group["kept"] = torch.tensor(group["kept"], dtype=torch.bool, device=device)
    if group["capturable"]:
        for name in ("sigma", "rho"):
            if group[name] is not None:
                group[name] = arguments.numbers(group[name], device)
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].to(device)
    return group


def to_bytes(what: str, value: object) -> Tensor:
    """`value` as a tensor of bytes, because objects in a distributed checkpoint are unpickled.

    Raises:
        ValueError: torch would not read it with `weights_only=True`.
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
    """The opposite of `to_bytes`."""
    data = ctypes.string_at(stored.data_ptr(), stored.numel())
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
