"""Read checkpoints from disk: a folder that all ranks wrote, or a single file."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchpisa.distributed import dtensor
from torchpisa.distributed.checkpoint.contents import Contents, from_bytes
from torchpisa.state_keys import model_key, node_key, split_key

__all__ = ["MARK", "METADATA", "Checkpoint", "File", "Folder", "TensorKind", "open_checkpoint"]

# The entry that marks a checkpoint as torchpisa's; it holds the contents.
MARK = "torchpisa"
# The file that torch writes last into a folder.
METADATA = ".metadata"
_LEGAL = "a folder of torchpisa.distributed.save or a file of torchpisa.distributed.export"


class TensorKind(NamedTuple):
    """The shape and dtype of a stored tensor."""

    shape: torch.Size
    dtype: torch.dtype


class Checkpoint(Protocol):
    """A checkpoint that is open for reading.

    Attributes:
        contents: the description of the optimizer.
        objects: entries of the model's state that are not tensors.
        extra: what the user added.
        kinds: shape and dtype of all tensors.
    """

    contents: Contents
    objects: dict[str, Any]
    extra: dict[str, Any]
    kinds: dict[str, TensorKind]

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill tensors with the stored values; of sharded ones the local parts."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`; raise ValueError if there is none or it is incomplete."""
    if path.is_file():
        return File(path)
    if path.is_dir():
        return Folder(path)
    raise ValueError(f"path must be {_LEGAL}, got {str(path)!r}, where nothing is")


def _foreign(path: Path) -> ValueError:
    return ValueError(
        f"path must be {_LEGAL}, got {str(path)!r}, which is cut off or which something else wrote"
    )


def _contents(held: dict[str, Any], path: Path) -> Contents:
    try:
        return Contents(**held)
    except TypeError as error:
        raise ValueError(
            f"path must be a checkpoint of this version of torchpisa, got {str(path)!r}: {error}"
        ) from error


class Folder:
    """A checkpoint in a folder, as `save` writes it."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        if not (path / METADATA).is_file():
            raise ValueError(
                f"path must be a complete checkpoint, got {str(path)!r} without {METADATA}: "
                "whatever wrote it did not finish"
            )
        self._reader = FileSystemReader(path)
        try:
            self._metadata = metadata = self._reader.read_metadata()
        except (pickle.UnpicklingError, EOFError) as error:
            raise ValueError(
                f"path must be a complete checkpoint, got {str(path)!r}, whose {METADATA} is cut "
                "off or damaged"
            ) from error
        self.kinds = {
            key: TensorKind(entry.size, entry.properties.dtype)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        if MARK not in self.kinds:
            raise _foreign(path)
        for part in metadata.storage_data.values():
            file = path / part.relative_path
            if not file.is_file() or file.stat().st_size < part.offset + part.length:
                raise ValueError(
                    f"path must be a complete checkpoint, got {str(path)!r}, of which "
                    f"{part.relative_path} is missing or cut off"
                )
        shape, dtype = self.kinds[MARK]
        mark = torch.empty(shape, dtype=dtype)
        self.read({MARK: mark})
        held = from_bytes(mark)
        self.contents = _contents(held["contents"], path)
        self.objects, self.extra = held["objects"], held["extra"]

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill tensors with the stored values, see `Checkpoint`."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        # What torch's `load` does, but without communication: each process reads what it needs.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(into), self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plans = [self._reader.prepare_local_plan(planner.create_local_plan())]
        (plan,) = self._reader.prepare_global_plan(planner.create_global_plan(plans))
        self._reader.read_data(planner.finish_plan(plan), planner).wait()


class File:
    """A checkpoint in a single file, as `export` writes it."""

    def __init__(self, path: Path) -> None:
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except PermissionError:
            raise
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            raise _foreign(path) from error  # torch.load maps a file that is cut off: OSError
        if not isinstance(held, dict) or MARK not in held:
            raise _foreign(path)
        self.contents = _contents(held[MARK], path)
        self.extra = held["extra"]
        self.objects = {}
        self._tensors: dict[str, Tensor] = {}
        for name, value in held["model"].items():
            if isinstance(value, Tensor):
                self._tensors[model_key(name)] = value
            else:
                self.objects[name] = value
        names = [name for of_group in self.contents.names for name in of_group]
        for number, state in held["optimizer"]["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    kind, node = split_key(key)
                    self._tensors[node_key(names[number], kind, node or 0)] = value
        self.kinds = {
            key: TensorKind(tensor.shape, tensor.dtype) for key, tensor in self._tensors.items()
        }

    @torch.no_grad()
    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill tensors with the stored values, see `Checkpoint`."""
        for key, tensor in into.items():
            stored = self._tensors[key]
            if dtensor.is_sharded(tensor):
                stored = dtensor.local_shard(stored, tensor)
            dtensor.local(tensor).copy_(stored)
