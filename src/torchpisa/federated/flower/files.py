"""Files that are either the old ones or the new ones, whatever happens while they are written."""

import os
from pathlib import Path
from typing import Any, cast

import torch

__all__ = ["load", "save"]


def save(file: Path, value: Any) -> None:
    """Write `value`; when this returns, it survives a crash of the machine."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # With the process in its name: a second one that was started by mistake spoils nothing.
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        with new.open("wb") as stream:
            torch.save(value, stream)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    _sync_folder(file.parent)


def load(file: Path) -> dict[str, Any] | None:
    """What was saved, on the CPU, or None if there is no such file."""
    if not file.exists():
        return None
    # weights_only: a file that somebody else wrote cannot run code.
    value = torch.load(file, map_location="cpu", weights_only=True)
    return cast(dict[str, Any], value)


def _sync_folder(folder: Path) -> None:
    # The name of a file is part of its folder, which reaches the disk on its own.
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
