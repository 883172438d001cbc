"""What a checkpoint holds, and the two forms that it is read from: a folder, or a single file.

Nodes are numbered through, node = rank * batches + slot, whichever process held them, and
parameters have the names that the model gives them.
"""

import io
import math
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchpisa.kernels import sharded
from torchpisa.optim import checkpoint, rounds
from torchpisa.optim.rounds import Group

__all__ = ["Contents", "Folder", "Kind", "Stored", "joined", "opened", "pack_group", "unpack_group"]

MARK = "torchpisa"
METADATA = ".metadata"
# Settings that every node may have a value of its own for.
PER_NODE = ("sigma", "rho", "gamma", "sisa_sigma", "sisa_rho")


@dataclass(frozen=True)
class Contents:
    """Everything of an optimizer but its large tensors; plain values only.

    Attributes:
        optimizer: name of its class.
        batches: number of every rank's nodes.
        groups: settings and progress of the parameter groups, by rank.
        names: the parameters, by group.
        state: what each parameter has for every node (`dual` and so on; its `step` apart).
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
    def shares(self) -> list[float]:
        """alpha_i of all nodes."""
        return [share for own in self.groups for share in own[0]["weights"]]

    @property
    def open(self) -> bool:
        """Whether it was saved in the middle of a round."""
        return any(own[0]["visited"] for own in self.groups)

    def per_node(self, number: int, name: str) -> list[Any] | None:
        """A setting of group `number` for all nodes; None if it is code, and so was not saved."""
        values: list[Any] = []
        for own in self.groups:
            if name not in own[number]:
                return None
            value = own[number][name]
            values += value if isinstance(value, list | tuple) else [value] * self.batches
        return values

    def as_one_rank(self) -> "Contents":
        """The same, as one process that holds all nodes would have it."""
        nodes = len(self.groups) * self.batches
        groups = []
        for number, first in enumerate(self.groups[0]):
            group = {**first, "ranks": 1, "batches": nodes, "weights": self.shares}
            for name in PER_NODE:
                values = self.per_node(number, name)
                if values is None:
                    group.pop(name, None)
                elif isinstance(first[name], list | tuple) or any(v != first[name] for v in values):
                    group[name] = values
            own = [of_rank[number] for of_rank in self.groups]
            for bits in ("visited", "present"):
                group[bits] = self._shifted([other[bits] for other in own])
            if any(other["kept"] is not None for other in own):
                group["kept"] = [kept for other in own for kept in took_part(other)]
            groups.append(group)
        arrived = {name: [self._shifted(bits)] for name, bits in self.arrived.items()}
        return Contents(
            self.optimizer, nodes, [groups], self.names, self.state, self.steps, arrived
        )

    def _shifted(self, bits: Sequence[int]) -> int:
        return sum(own << rank * self.batches for rank, own in enumerate(bits))


def took_part(group: Group) -> list[bool]:
    """For each slot of a packed group, whether its batch was stepped in this round."""
    if group["kept"] is not None:
        return list(group["kept"])
    return [bool(group["present"] >> slot & 1) for slot in range(group["batches"])]


def joined(parts: Sequence[Contents]) -> Contents:
    """What all ranks hold, from what each of them does."""
    first = parts[0]
    for rank, part in enumerate(parts):
        mine, theirs = part.groups[0][0], first.groups[0][0]
        if (mine["iteration"], part.open) != (theirs["iteration"], first.open):
            raise ValueError(
                "all ranks must save at the same point, got rank 0 "
                f"{_point(theirs)} and rank {rank} {_point(mine)}"
            )
        if (part.names, part.state) != (first.names, first.state):
            raise ValueError(
                "all ranks must have the same parameters with the same state, in the same order, "
                f"but rank {rank} differs from rank 0"
            )
    return Contents(
        first.optimizer,
        first.batches,
        [part.groups[0] for part in parts],
        first.names,
        first.state,
        {name: [step for part in parts for step in part.steps[name]] for name in first.steps},
        {name: [bits for part in parts for bits in part.arrived[name]] for name in first.arrived},
    )


def _point(group: Group) -> str:
    where = "in the middle of" if group["visited"] else "before"
    return f"{where} iteration {group['iteration']}"


# Groups


def pack_group(group: Group) -> Group:
    """A parameter group in plain values, without parameters and code."""
    own = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    (packed,) = checkpoint.packed({"param_groups": [own]})["param_groups"]
    for name, value in packed.items():
        if name in ("sigma", "rho"):
            packed[name] = [float(entry) for entry in rounds.per_batch(group, name)]
        elif name == "kept":
            packed[name] = None if value is None else value.tolist()
        elif isinstance(value, Tensor):
            packed[name] = value.detach().cpu()
        elif isinstance(value, float):
            packed[name] = float(value)  # numpy's float is one too, but loads with numpy only
    return packed


def unpack_group(packed: Group, device: torch.device) -> Group:
    """The opposite of `pack_group`: a group whose tensors are on `device`."""
    group = dict(packed)
    if group["kept"] is not None:
        group["kept"] = torch.tensor(group["kept"], dtype=torch.bool, device=device)
    if group["capturable"]:
        for name in ("sigma", "rho"):
            group[name] = [torch.tensor(entry, device=device) for entry in group[name]]
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].to(device)
    return group


# Names


def model_key(name: str) -> str:
    """Where an entry of the model's state is."""
    return f"model.{name}"


def state_key(name: str, kind: str, number: int) -> str:
    """Where a parameter's state is: of a node, or the `pending` sum of a rank."""
    return f"optimizer.state.{name}.{kind}.{number}"


# Plain values, as bytes


def to_bytes(what: str, value: object) -> Tensor:
    """`value` as a tensor; ValueError if reading it again would need more than torch's own types.

    Bytes in a tensor, because what the distributed checkpoint takes for an object it unpickles
    without restrictions.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(
            f"{what} must be made of tensors, numbers, strings, lists, tuples and dictionaries, "
            f"which torch.load reads with weights_only=True, got {value!r}"
        ) from error
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def from_bytes(tensor: Tensor) -> Any:
    """The opposite of `to_bytes`."""
    return torch.load(io.BytesIO(bytes(tensor.tolist())), weights_only=True, map_location="cpu")


# Where it is read from


class Kind(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: torch.Size
    dtype: torch.dtype


class Stored(Protocol):
    """A checkpoint that is there to be read.

    Attributes:
        contents: what it holds of the optimizer, tensors apart.
        objects: entries of the model's state that are not tensors.
        extra: what the user had saved with it.
        kinds: all tensors.
    """

    contents: Contents
    objects: dict[str, Any]
    extra: dict[str, Any]
    kinds: Mapping[str, Kind]

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill tensors, sharded ones with the parts that belong there."""


class Folder:
    """What `save` wrote; see `Stored`."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        if not (path / METADATA).is_file():
            raise ValueError(
                f"path must be a complete checkpoint, got {str(path)!r}, which has no {METADATA}: "
                "what wrote it was interrupted, or it was not written by torchpisa"
            )
        self._reader = FileSystemReader(path)
        metadata = self._reader.read_metadata()
        # It would be read again for every part that is read.
        self._reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
        self.kinds = {
            key: Kind(entry.size, entry.properties.dtype)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        if MARK not in self.kinds:
            raise ValueError(
                f"path must be a checkpoint of torchpisa.distributed.save, got {str(path)!r}, "
                "which something else wrote"
            )
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            end = info.offset + info.length
            ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
        for name, end in ends.items():
            if not (path / name).is_file() or (path / name).stat().st_size < end:
                raise ValueError(
                    f"path must be a complete checkpoint, got {str(path)!r}, where {name} is "
                    "missing or too short"
                )
        mark = self._empty(MARK)
        self.read({MARK: mark})
        held = from_bytes(mark)
        self.contents = Contents(**held["contents"])
        self.objects, self.extra = held["objects"], held["extra"]

    def read(self, into: Mapping[str, Tensor]) -> None:
        """See `Stored`."""
        from torch.distributed.checkpoint import DefaultLoadPlanner, load

        # Every process reads what it needs, at its own pace.
        with without_warning():
            load(
                dict(into),
                storage_reader=self._reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,
            )

    def whole(self) -> dict[str, Any]:
        """All of it, as `export` stores it in a file."""
        contents = self.contents.as_one_rank()
        model = {key: self._empty(key) for key in self.kinds if key.startswith(model_key(""))}
        self.read(model)
        state: dict[int, dict[str, Any]] = {}
        numbers = range(sum(map(len, contents.names)))
        names = [name for own in contents.names for name in own]
        for number, name in zip(numbers, names, strict=True):
            if name in contents.state:
                state[number] = self._whole_state(name, contents)
        groups = []
        for own, packed in zip(contents.names, contents.groups[0], strict=True):
            group = unpack_group(packed, torch.device("cpu"))
            group["params"] = [numbers[names.index(name)] for name in own]
            groups.append(group)
        return {
            "model": {key.removeprefix(model_key("")): value for key, value in model.items()}
            | self.objects,
            "optimizer": {"state": state, "param_groups": groups},
            "extra": self.extra,
            MARK: {"contents": asdict(contents), "objects": list(self.objects)},
        }

    def _whole_state(self, name: str, contents: Contents) -> dict[str, Any]:
        """One parameter's state for all nodes, in one process."""
        nodes = range(contents.batches)
        keys = {
            f"{kind}.{node}": state_key(name, kind, node)
            for kind in contents.state[name]
            for node in nodes
        }
        state: dict[str, Any] = {own: self._empty(key) for own, key in keys.items()}
        self.read({key: state[own] for own, key in keys.items()})
        for node in nodes:
            state[f"step.{node}"] = torch.tensor(contents.steps[name][node])
        state["arrived"] = contents.arrived[name][0]
        if contents.batches > 1:
            total = torch.zeros_like(state["dual.0"])
            state["pending"] = self.pending(name, total)
        return state

    def pending(self, name: str, total: Tensor) -> Tensor:
        """Add to `total` what all ranks have contributed to a parameter in this round."""
        return add_pending(self, name, total)

    def _empty(self, key: str) -> Tensor:
        shape, dtype = self.kinds[key]
        return torch.empty(shape, dtype=dtype)
