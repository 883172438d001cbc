"""Files that survive crashes: each holds either the old or the new content.

A file begins with a line with a checksum of the rest and a generation number, which reveal damage
and a second writer. Only the owner may read it. The generation before the last is kept beside it,
with the suffix `.previous`.
"""

import hashlib
import io
import os
import re
import shutil
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

__all__ = [
    "DamagedFileError",
    "generation",
    "load",
    "previous",
    "private_folder",
    "replace",
    "save",
    "sync_folder",
]

_HEADER = "torchpisa-file 1 {digest:64} {generation:020d}\n"
_HEADER_SIZE = len(_HEADER.format(digest="", generation=0))
_PATTERN = re.compile(rb"torchpisa-file 1 ([0-9a-f]{64}) (\d{20})\n")


class DamagedFileError(ValueError):
    """Raised for a file that was damaged after it was written."""


class _HashingStream:
    """A stream to write to that hashes what passes through."""

    def __init__(self, stream: BinaryIO, generation: int) -> None:
        self._stream = stream
        self.digest = _digest(generation)

    def write(self, part: Any) -> int:
        self.digest.update(part)
        return self._stream.write(part)

    def flush(self) -> None:
        self._stream.flush()


def save(file: Path, value: Any, generation: int = 0) -> None:
    """Write `value`. Once this returns, it survives a crash of the machine."""
    private_folder(file.parent)
    # With the process id in its name, so that a second process started by mistake spoils nothing.
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(_HEADER.format(digest="", generation=generation).encode())
            hashed = _HashingStream(cast(BinaryIO, stream), generation)
            torch.save(value, cast(Any, hashed))
            stream.seek(0)
            digest = hashed.digest.hexdigest()
            stream.write(_HEADER.format(digest=digest, generation=generation).encode())
            stream.flush()
            os.fsync(stream.fileno())
        _keep_previous(file)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    sync_folder(file.parent)


def load(file: Path) -> dict[str, Any] | None:
    """Return what was saved, on the CPU, or None if there is no such file.

    Raises:
        DamagedFileError: it is not what was written.
    """
    if not file.exists():
        return None
    content = file.read_bytes()
    header = _PATTERN.match(content)
    if header is None:
        raise DamagedFileError(_damaged(file, "it does not begin as a file of torchpisa does"))
    digest = _digest(int(header[2]))
    digest.update(memoryview(content)[_HEADER_SIZE:])
    if digest.hexdigest().encode() != header[1]:
        raise DamagedFileError(_damaged(file, "its checksum is wrong"))
    # weights_only: a file that somebody else wrote cannot run code.
    value = torch.load(io.BytesIO(content[_HEADER_SIZE:]), map_location="cpu", weights_only=True)
    return cast(dict[str, Any], value)


def generation(file: Path) -> int | None:
    """Return the generation number of a file, reading its first line only; None without a file."""
    try:
        with file.open("rb") as stream:
            header = _PATTERN.match(stream.read(_HEADER_SIZE))
    except FileNotFoundError:
        return None
    if header is None:
        raise DamagedFileError(_damaged(file, "it does not begin as a file of torchpisa does"))
    return int(header[2])


def previous(file: Path) -> Path:
    """Return the path of the generation before the last."""
    return file.with_name(file.name + ".previous")


def private_folder(folder: Path) -> None:
    """Make a folder, and missing ones above it, accessible to the owner only."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(mode=0o700, exist_ok=True)


def _digest(generation: int) -> "hashlib._Hash":
    return hashlib.sha256(str(generation).encode())


def _damaged(file: Path, reason: str) -> str:
    older = previous(file)
    remedy = (
        f"The generation before it is {older}: to go on from there, move that file to this place"
        if older.exists()
        else "There is no generation before it: restore it from a backup, or remove it"
    )
    return f"{file} is damaged: {reason}. {remedy}."


def _keep_previous(file: Path) -> None:
    if not file.exists():
        return
    link = file.with_name(f"{file.name}.{os.getpid()}.old")
    link.unlink(missing_ok=True)
    try:
        os.link(file, link)
    except OSError:  # a file system without hard links
        shutil.copy2(file, link)
    link.replace(previous(file))


def replace(new: Path, file: Path) -> None:
    """Put a written file in the place of another. Once this returns, it survives a crash."""
    with new.open("rb+") as stream:
        os.fsync(stream.fileno())
    new.replace(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk; the contents of a file are written separately."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
