"""Save and load a model and its optimizer on all ranks; export to a single file."""

import os
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchpisa.distributed.checkpoint import contents, matching, remap, storage
from torchpisa.distributed.checkpoint.contents import Contents
from torchpisa.distributed.checkpoint.remap import Named
from torchpisa.distributed.checkpoint.storage import MARK, METADATA, Checkpoint, Folder
from torchpisa.distributed.dtensor import is_sharded
from torchpisa.distributed.process_group import Ranks
from torchpisa.optim.pisa import PISA
from torchpisa.state_keys import model_key, node_key, state_key

__all__ = ["export", "latest", "load", "save"]

T = TypeVar("T")
Location = str | os.PathLike[str]


def save(
    directory: Location,
    model: nn.Module,
    optimizer: PISA,
    extra: dict[str, Any] | None = None,
) -> None:
    """Save a model, the state of its optimizer on all ranks, and `extra`.

    All ranks call it, at the same point, which may be in the middle of a round. Each writes its own
    duals; nothing is gathered. The folder appears, or takes the place of an earlier checkpoint,
    when it is complete: a run that is killed while it saves leaves what was there before.

    Args:
        directory: a folder on a file system that all ranks share: a new one, an empty one, or an
            earlier checkpoint. Other files in an earlier checkpoint stay.
        model: as it is trained: plain, DistributedDataParallel, or sharded. Buffers, which may
            differ from rank to rank, are those of the first.
        optimizer: the optimizer, of parameters of this model only.
        extra: anything else that a resumed run needs, such as the number of the step; that of the
            first rank is saved. Tensors, numbers, strings, and lists, tuples and dictionaries of
            those.

    Raises:
        ValueError: something cannot be saved. Nothing has been written.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

    processes = _Processes(optimizer)
    folder = Path(directory).resolve()
    partial = _beside(folder, "partial")

    def prepare() -> tuple[dict[str, Any], list[Named], Contents]:
        entries = get_model_state_dict(
            model
        )  # first, because it makes FSDP shard its parameters again
        params = matching.named_params(model, optimizer)
        described = matching.local_contents(params, optimizer)
        if extra is not None and not isinstance(extra, dict):
            raise ValueError(f"extra must be a dictionary or None, got {extra!r}")
        contents.to_bytes("extra", extra)
        contents.to_bytes("param_groups", described.groups)
        contents.to_bytes("what the model saves besides tensors", _objects(entries))
        if processes.rank == 0:
            _make_room(folder, partial)
        return entries, params, described

    entries, params, described = processes.agree(prepare)
    parts = dict(reversed(processes.gather((remap.node_rank(optimizer), described))))
    everything = contents.joined([parts[rank] for rank in range(len(parts))])
    tensors = processes.model_entries(entries, params)
    if processes.writes_state:
        tensors |= matching.local_state(params, optimizer)
    if processes.rank == 0:
        held = {"contents": asdict(everything), "extra": extra or {}, "objects": _objects(entries)}
        tensors[MARK] = contents.to_bytes("checkpoint", held)
    with warnings.catch_warnings():
        # A process that saves alone gets the first warning; the second (torch 2.6) concerns torch.
        warnings.filterwarnings("ignore", "torch.distributed is |TypedStorage is deprecated")
        save_tensors(
            tensors,
            storage_writer=FileSystemWriter(partial),
            process_group=processes.group,
        )
    processes.agree(lambda: _publish(partial, folder) if processes.rank == 0 else None)


def load(path: Location, model: nn.Module, optimizer: PISA) -> dict[str, Any]:
    """Load what `save` or `export` wrote, on as many ranks as it was saved from or on others.

    All ranks call it. On as many ranks (replicas, if they are sharded), with as many `batches` on
    each, the run goes on bit for bit. Otherwise a round that was open is closed, as by `flush()`,
    and the new nodes take means of the old ones' duals, moments, sigma and rho, such that all sums
    over nodes, weighted by their shares, stay what they were.

    Saved settings take the place of the optimizer's, as in torch. Rules for gamma and
    preconditioners are code, which is not saved: they stay. So do `weights` on other nodes.

    Load only what you trust: torch unpickles the index of a folder.

    Args:
        path: a folder of `save` or a file of `export`.
        model: the model that was saved, wrapped or sharded as it will be trained.
        optimizer: an optimizer of the saved class, with the same parameters in the same groups.

    Returns:
        The `extra` that was saved.

    Raises:
        ValueError: the checkpoint is incomplete or does not fit. Nothing has been changed.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    processes = _Processes(optimizer)

    def check() -> tuple[Checkpoint, dict[str, Any], list[Named]]:
        entries = get_model_state_dict(
            model
        )  # first, because it makes FSDP shard its parameters again
        params = matching.named_params(model, optimizer)
        source = storage.open_checkpoint(_intact(Path(path).resolve()))
        matching.check_model(source, entries)
        matching.check_optimizer(source, params, optimizer)
        return source, entries, params

    source, entries, params = processes.agree(check)

    def restore() -> None:
        tensors = {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}
        source.read({model_key(name): tensor for name, tensor in tensors.items()})
        set_model_state_dict(model, {**tensors, **source.objects})
        layout = optimizer.param_groups[0]["ranks"], optimizer.batches
        same = layout == (source.contents.ranks, source.contents.batches)
        (remap.resume if same else remap.redistribute)(source, params, optimizer)
        optimizer.reset_unsaved()

    processes.agree(restore)
    return source.extra


def export(directory: Location, file: Location) -> None:
    """Turn a folder of `save` into a single file, in one process and without the model.

    The file holds `"model"`, `"optimizer"` and `"extra"`. The first two are state dicts, that of
    the optimizer as one process has it that holds all nodes: `batches` is their number, `weights`
    are their shares. `torch.load(file, weights_only=True)` reads it, and `load` does, on any number
    of ranks.

    Args:
        directory: the folder.
        file: an existing one is replaced when the new one is complete.

    Raises:
        ValueError: the folder is not a complete checkpoint, or `file` is a folder.
    """
    if Path(file).is_dir():
        raise ValueError(f"file must be a file, got {str(file)!r}, which is a folder")
    source = Folder(_intact(Path(directory).resolve()))
    everything = source.contents.as_one_rank()
    prefix = model_key("")
    model = _read(source, [key for key in source.kinds if key.startswith(prefix)])
    state: dict[int, dict[str, Any]] = {}
    groups = []
    number = 0
    for names, packed in zip(everything.names, everything.groups[0], strict=True):
        params = list(range(number, number + len(names)))
        number += len(names)
        settings, round = contents.unpack(packed, torch.device("cpu"))
        groups.append({**settings, **round.packed(), "params": params})
        for param, name in zip(params, names, strict=True):
            if name in everything.state:
                state[param] = _whole_state(source, everything, name)
    held = {
        "model": {key.removeprefix(prefix): model[key] for key in model} | source.objects,
        "optimizer": {"state": state, "param_groups": groups},
        "extra": source.extra,
        MARK: asdict(everything),
    }
    target = Path(file).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(target, "partial")
    torch.save(held, partial)
    partial.replace(target)


def latest(root: Location) -> Path | None:
    """Return the newest complete checkpoint in `root`, or None if there is none.

    A checkpoint counts even if a run was killed while replacing it: `load` and `export` then read
    the old one.

    Args:
        root: a folder of checkpoints whose names end in a number, such as `step-000120`; the
            largest is the newest.
    """
    folder = Path(root)
    steps = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        aside = re.fullmatch(r"\.(.+)\.old", entry.name)  # see `_beside`
        path = folder / aside[1] if aside else entry
        number = re.search(r"\d+$", path.name)
        if number and (_intact(path) / METADATA).is_file():
            steps.append((int(number[0]), path))
    return max(steps)[1] if steps else None


class _Processes:
    """The processes that save or load together."""

    def __init__(self, optimizer: PISA) -> None:
        from torch import distributed

        if not isinstance(optimizer, PISA):
            raise ValueError(
                f"optimizer must be a PISA, SISA or NSISA, got {type(optimizer).__name__}; MISA is "
                "the same on all ranks: torch.distributed.checkpoint saves it as it does AdamW"
            )
        ranks = optimizer.peers
        params = (param for group in optimizer.param_groups for param in group["params"])
        split = any(is_sharded(param) for param in params)
        self.group: Any = None  # all processes
        self.rank, self.size = 0, 1
        if isinstance(ranks, Ranks) and not split:
            self.group = ranks.group
        if distributed.is_available() and distributed.is_initialized():
            self.rank = distributed.get_rank(self.group)
            self.size = distributed.get_world_size(self.group)
        # Without ranks and shards all processes have the same state, and the first writes it.
        self.writes_state = ranks is not None or split or self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes."""
        from torch import distributed

        values: list[Any] = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; if it raises in one process, all processes raise."""
        problem = None
        try:
            result = work()
        except Exception as error:
            problem = error
        problems = self.gather(problem and f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        for rank, other in enumerate(problems):
            if other is not None:
                raise ValueError(f"rank {rank} has a problem: {other}")
        return result

    def model_entries(self, entries: dict[str, Any], params: Sequence[Named]) -> dict[str, Tensor]:
        """Return the entries of the model that this process writes.

        Trained parameters may be written by any process that holds them. Everything else, such as
        buffers, which may differ, is written by the first process only.
        """
        trained = {name for named_params in params for name, _ in named_params}
        return {
            model_key(name): entry
            for name, entry in entries.items()
            if isinstance(entry, Tensor)
            if self.rank == 0 or is_sharded(entry) or (name in trained and self.writes_state)
        }


def _objects(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if not isinstance(entry, Tensor)}


# In one process


def _read(source: Checkpoint, keys: Sequence[str]) -> dict[str, Tensor]:
    tensors = {
        key: torch.empty(source.kinds[key].shape, dtype=source.kinds[key].dtype) for key in keys
    }
    source.read(tensors)
    return tensors


def _whole_state(source: Checkpoint, everything: Contents, name: str) -> dict[str, Any]:
    """Return a parameter's state, for all nodes."""
    nodes = range(everything.batches)
    keys = {
        (kind, node): node_key(name, kind, node)
        for kind in everything.state[name]
        for node in nodes
    }
    tensors = _read(source, list(keys.values()))
    state: dict[str, Any] = {
        state_key(kind, node): tensors[key] for (kind, node), key in keys.items()
    }
    for node in nodes:
        state[state_key("step", node)] = torch.tensor(
            everything.steps[name][node], dtype=torch.float32
        )
    if len(nodes) > 1:
        state["pending"] = torch.zeros_like(state[state_key("dual", 0)])
        remap.add_pending(source, {name: state["pending"]})
    state["arrived"] = everything.arrived[name][0]
    return state


# Folders


def _beside(path: Path, what: str) -> Path:
    """Return the path for a checkpoint that is not yet, or no longer, complete at `path`."""
    return path.with_name(f".{path.name}.{what}")


def _intact(path: Path) -> Path:
    """Return `path`, or its backup if a run was killed between the renames of `_publish`."""
    old = _beside(path, "old")
    return old if not path.exists() and (old / METADATA).is_file() else path


def _make_room(folder: Path, partial: Path) -> None:
    earlier = (folder / METADATA).is_file()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not earlier):
        raise ValueError(
            f"directory must be new, empty or an earlier checkpoint, got {str(folder)!r}, which "
            "holds something else"
        )
    if partial.exists():
        shutil.rmtree(partial)


def _publish(partial: Path, folder: Path) -> None:
    """Move a complete checkpoint to its place."""
    old = _beside(folder, "old")
    if folder.exists():
        _clear(old, folder)  # a run may have been killed below
        folder.rename(old)
    partial.rename(folder)
    _clear(old, folder)


def _clear(old: Path, folder: Path) -> None:
    """Remove the checkpoint at `old`, if any, but keep other files in `folder`."""
    if old.exists():
        for entry in old.iterdir():
            own = entry.name == METADATA or entry.suffix == ".distcp"
            if not own and not (folder / entry.name).exists():
                entry.rename(folder / entry.name)
        shutil.rmtree(old)
