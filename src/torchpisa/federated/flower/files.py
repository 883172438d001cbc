"""Files that are either the old ones or the new ones, whatever happens while they are written.

A file begins with a line that holds a checksum of the rest and a generation number, so that
damage is noticed and a second writer too. Nobody but the owner may read it. The generation before
the last is kept beside it, with `.previous` behind its name.
"""

import hashlib
import io
import os
import re
import shutil
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

__all__ = ["DamagedFileError", "generation", "load", "previous", "save"]

_HEADER = "torchpisa-file 1 {digest:64} {generation:020d}\n"
_SIZE = len(_HEADER.format(digest="", generation=0))
_PATTERN = re.compile(rb"torchpisa-file 1 ([0-9a-f]{64}) (\d{20})\n")


class DamagedFileError(ValueError):
    """A file is not what was written; the message names it."""


class _Hashed:
    """A stream to write to that hashes what goes through."""

    def __init__(self, stream: BinaryIO, generation: int) -> None:
        self._stream = stream
        self.digest = _digest(generation)

    def write(self, part: Any) -> int:
        self.digest.update(part)
        return self._stream.write(part)

    def flush(self) -> None:
        self._stream.flush()


def save(file: Path, value: Any, generation: int = 0) -> None:
    """Write `value`; when this returns, it survives a crash of the machine."""
    private_folder(file.parent)
    # With the process in its name: a second one that was started by mistake spoils nothing.
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(_HEADER.format(digest="", generation=generation).encode())
            hashed = _Hashed(cast(BinaryIO, stream), generation)
            torch.save(value, cast(Any, hashed))
            stream.seek(0)
            digest = hashed.digest.hexdigest()
            stream.write(_HEADER.format(digest=digest, generation=generation).encode())
            stream.flush()
            os.fsync(stream.fileno())
        _keep(file)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    _sync_folder(file.parent)


def load(file: Path) -> dict[str, Any] | None:
    """What was saved, on the CPU, or None if there is no such file.

    Raises:
        DamagedFileError: it is not what was written.
    """
    if not file.exists():
        return None
    content = file.read_bytes()
    found = _PATTERN.match(content)
    if found is None:
        raise DamagedFileError(_damaged(file, "it does not begin as a file of torchpisa does"))
    digest = _digest(int(found[2]))
    digest.update(memoryview(content)[_SIZE:])
    if digest.hexdigest().encode() != found[1]:
        raise DamagedFileError(_damaged(file, "its checksum is wrong"))
    # weights_only: a file that somebody else wrote cannot run code.
    value = torch.load(io.BytesIO(content[_SIZE:]), map_location="cpu", weights_only=True)
    return cast(dict[str, Any], value)


def generation(file: Path) -> int | None:
    """The number that a file was saved with, without reading the rest; None without a file."""
    try:
        with file.open("rb") as stream:
            found = _PATTERN.match(stream.read(_SIZE))
    except FileNotFoundError:
        return None
    if found is None:
        raise DamagedFileError(_damaged(file, "it does not begin as a file of torchpisa does"))
    return int(found[2])


def previous(file: Path) -> Path:
    """Where the generation before the last is."""
    return file.with_name(file.name + ".previous")


def private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for the owner only."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(mode=0o700, exist_ok=True)


def _digest(generation: int) -> "hashlib._Hash":
    return hashlib.sha256(str(generation).encode())


def _damaged(file: Path, reason: str) -> str:
    kept = previous(file)
    way = (
        f"The generation before it is {kept}: to go on from there, move that file to this place"
        if kept.exists()
        else "There is no generation before it: restore it from a backup, or remove it"
    )
    return f"{file} is damaged: {reason}. {way}."


def _keep(file: Path) -> None:
    if not file.exists():
        return
    link = file.with_name(f"{file.name}.{os.getpid()}.old")
    link.unlink(missing_ok=True)
    try:
        os.link(file, link)
    except OSError:  # a file system without hard links
        shutil.copy2(file, link)
    link.replace(previous(file))


def _sync_folder(folder: Path) -> None:
    # The name of a file is part of its folder, which reaches the disk on its own.
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
