"""Token shards: files of uint16 tokens, read as one stream that is cut into parts.

| name | files in the data folder |
|---|---|
| gutenberg | `gutenberg/train_gpt2_*` and `val_gpt2_*`, public-domain books |
| fineweb | `fineweb10B/fineweb_train_*` and `fineweb_val_*`, as prepared for GPT-2 speed runs |
| prepared | `train_*` and `val_*`, what `python -m recipes language prepare` writes |
| python | nothing: bytes of modules of Python's standard library |

A file is `.bin`, tokens and nothing else or after the header of 256 int32 that the speed runs'
files have, or `.bin.xz`, the same compressed. Where both are there, `.bin` is read. Files that are
not compressed stay on the disk, so a stream may be longer than memory.

What a step trains on is a function of the step alone: a resumed run needs nothing but its number.
"""

import lzma
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from recipes.datasets import CorruptFileError, data_folder

__all__ = ["SOURCES", "Batches", "Source", "Stream", "held_out", "load", "locate"]
__all__ += ["Tokens", "read_shard", "verify", "windows", "write_shard"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Tokens = np.ndarray[Any, np.dtype[np.uint16]]
Windows = np.ndarray[Any, np.dtype[np.int64]]

HEADER = 256  # int32: magic number, version, number of tokens, zeros
# As two tokens it would begin with 55432, which GPT-2's vocabulary does not have: no file without
# a header is taken for one that has it.
MAGIC = 20240520
VERSION = 1
SUFFIXES = (".bin", ".bin.xz")
REMEDY = "Copy the file again, or write it again with `python -m recipes language prepare`"


# Files


def read_shard(path: Path) -> Tokens:
    """Return the tokens of a file.

    Raises:
        FileNotFoundError: there is none.
        CorruptFileError: it is empty, cut off, or not a file of tokens.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of tokens {path}")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"a file of tokens must end in {' or '.join(SUFFIXES)}, got {path}")
    try:
        return without_header(read_bytes(path))
    except ValueError as error:
        raise CorruptFileError(f"{path.resolve()} is damaged: {error}. {REMEDY}") from None


def read_bytes(path: Path) -> Bytes:
    if path.name.endswith(".xz"):
        try:
            return np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8)
        except lzma.LZMAError as error:
            raise ValueError(f"it is not an xz file, or cut off: {error}") from None
    if path.stat().st_size:
        return np.memmap(path, np.uint8, "r")
    return np.zeros(0, np.uint8)  # an empty file cannot be mapped


def write_shard(path: Path, tokens: Tokens) -> None:
    """Write tokens to a file with a header."""
    header = np.zeros(HEADER, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2").tobytes())


def without_header(data: Bytes) -> Tokens:
    size = 4 * HEADER
    if len(data) % 2:
        raise ValueError(f"it must be whole tokens of 2 bytes, got {len(data)} bytes")
    if len(data) < 4 or int(data[:4].view("<i4")[0]) != MAGIC:
        tokens: Tokens = data.view("<u2")
    elif len(data) < size:
        raise ValueError(f"it is cut off in its header: {len(data)} of {size} bytes")
    else:
        version, count = map(int, data[4:12].view("<i4"))
        if version != VERSION:
            raise ValueError(f"it must have version {VERSION} in its header, got {version}")
        tokens = data[size:].view("<u2")
        if len(tokens) != count:
            raise ValueError(f"it has {len(tokens)} tokens, but its header says {count}")
    if not len(tokens):
        raise ValueError("it has no tokens")
    return tokens


@dataclass(frozen=True)
class Source:
    """The files of a token stream.

    Attributes:
        train: pattern of the files to train on, in a data folder, without their suffix; "" if
            nothing is needed.
        validation: likewise, to validate on.
        instructions: where to get them.
    """

    train: str
    validation: str
    instructions: str


SOURCES = {
    "gutenberg": Source(
        "gutenberg/train_gpt2_*",
        "gutenberg/val_gpt2_*",
        "Put GPT-2 tokens of books of Project Gutenberg into its folder gutenberg, as uint16: "
        "about 20 million to train on and 1 million to validate on.",
    ),
    "fineweb": Source(
        "fineweb10B/fineweb_train_*",
        "fineweb10B/fineweb_val_*",
        "Put the shards kjj0/fineweb10B-gpt2 of Hugging Face into its folder fineweb10B.",
    ),
    "prepared": Source(
        "train_*",
        "val_*",
        "`python -m recipes language prepare TEXT ...` writes them from texts.",
    ),
    "python": Source("", "", ""),
}


def locate(name: str, folder: str | os.PathLike[str] | None = None) -> tuple[list[Path], ...]:
    """Return the files to train on and to validate on, each sorted by name.

    Raises:
        FileNotFoundError: one kind is missing.
    """
    if name not in SOURCES:
        raise ValueError(f"tokens must be one of {', '.join(SOURCES)}, got {name!r}")
    source, top = SOURCES[name], data_folder(folder)
    files = []
    for pattern in filter(None, (source.train, source.validation)):
        shards: dict[str, Path] = {}
        for suffix in reversed(SUFFIXES):  # the one that needs no decoding comes last, and stays
            for path in top.glob(pattern + suffix):
                shards[path.name.removesuffix(suffix)] = path
        if not shards:
            raise FileNotFoundError(
                f"tokens {name!r} need {pattern}{' or '.join(SUFFIXES)} in the folder {top}. "
                f"{source.instructions} --data or TORCHPISA_DATA names another folder."
            )
        files.append([shards[key] for key in sorted(shards)])
    return tuple(files)


def verify(
    name: str,
    folder: str | None,
    *,
    sequences: int,
    validation: int,
    context: int,
    vocabulary: int,
) -> None:
    """Check that a source has tokens enough for a run, and of its model's vocabulary.

    Args:
        name: one of `SOURCES`.
        folder: the data folder.
        sequences: of a step, all batches together.
        validation: sequences to validate on.
        context: their length.
        vocabulary: what tokens must be below; checked for so many from the beginning.

    Raises:
        FileNotFoundError: files are missing.
        CorruptFileError: a file is damaged, or the tokens do not suit the run.
    """
    where = f"the tokens {name!r} in {data_folder(folder).resolve()}"
    kinds = (("train on", sequences), ("validate on", validation))
    for stream, (kind, count) in zip(load(name, folder), kinds, strict=True):
        needed = count * context + 1
        if len(stream) < needed:
            raise CorruptFileError(
                f"{where} must be at least {needed:,} to {kind}, {count} sequences of {context}; "
                f"got {len(stream):,}. Prepare more text; --model gpt2-tiny needs the least"
            )
        largest = int(stream.read(0, needed).max())
        if largest >= vocabulary:
            raise CorruptFileError(
                f"{where} must be below {vocabulary}, the model's vocabulary, got {largest}. "
                "Choose another --model, or other --tokens"
            )


@cache  # one process does many runs
def load(name: str, folder: str | None = None) -> tuple["Stream", "Stream"]:
    """Return the streams to train on and to validate on."""
    if name == "python":
        return Stream([library_text(TRAIN)]), Stream([library_text(VALIDATION)])
    train, validation = locate(name, folder)
    return Stream(list(map(read_shard, train))), Stream(list(map(read_shard, validation)))


# Text that is everywhere. Modules of about one age and style, so that the parts are much alike.
TRAIN = ("_pydecimal", "argparse", "ast", "configparser", "difflib", "doctest", "inspect", "locale")
TRAIN += ("mailbox", "optparse", "pickle", "pickletools", "pydoc", "statistics", "subprocess")
TRAIN += ("tarfile", "threading", "typing", "zipfile/__init__", "zipfile")
VALIDATION = ("_pyio", "shutil", "socket")


def library_text(modules: Sequence[str]) -> Tokens:
    """Return modules of this Python's standard library, a token per byte."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{module}.py" for module in modules]
    text = b"".join(file.read_bytes() for file in files if file.is_file())
    return np.frombuffer(text, np.uint8).astype(np.uint16)


# Streams


class Stream:
    """Shards, one after the other.

    Args:
        shards: of tokens.
    """

    def __init__(self, shards: Sequence[Tokens]) -> None:
        self._shards = list(shards)
        self._ends = np.cumsum([len(shard) for shard in shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, length: int) -> Tokens:
        """Return `length` tokens from `start` on, across the ends of shards."""
        if not 0 <= start <= start + length <= len(self):
            raise ValueError(
                f"start and length must lie in the {len(self)} tokens, got {start} and {length}"
            )
        pieces = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while length > 0:
            shard = self._shards[number]
            first = start - (int(self._ends[number]) - len(shard))
            pieces.append(shard[first : first + length])
            start, length, number = start + len(pieces[-1]), length - len(pieces[-1]), number + 1
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)


def windows(
    stream: Stream, start: int, count: int, context: int, vocabulary: int = 2**16
) -> Windows:
    """Return consecutive windows of `context` tokens, each with the first token of the next.

    Raises:
        ValueError: a token is not in the vocabulary; on a GPU it would end the process.
    """
    tokens = stream.read(start, count * context + 1).astype(np.int64)
    if tokens.max() >= vocabulary:
        raise ValueError(f"tokens must be below {vocabulary}, the vocabulary, got {tokens.max()}")
    return np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context].copy()


def held_out(
    stream: Stream, count: int, context: int, vocabulary: int = 2**16
) -> tuple[Windows, Windows]:
    """Return the first `count` windows of a stream, and as many of the next as there are up to it.

    Settings are chosen on the former and reported on the latter.
    """
    rest = min(count, (len(stream) - 1) // context - count)
    to_choose = windows(stream, 0, count, context, vocabulary)
    if rest <= 0:
        return to_choose, to_choose[:0]
    return to_choose, windows(stream, count * context, rest, context, vocabulary)


class Batches:
    """A stream cut into contiguous parts, one per batch of a round (or rank).

    Each part is cut again into as many stripes as a step takes sequences from it, and each sequence
    goes through its stripe from front to back. Books are long: sequences that follow each other
    would all be of one. The number of parts decides only which sequences make a batch; together, a
    step's batches are the same for any number of them.

    Args:
        stream: the tokens.
        parts: number of parts, of equal size.
        sequences: that a step takes from each part.
        context: their length.
        vocabulary: what tokens must be below.

    Raises:
        ValueError: there are fewer tokens than one step takes.
    """

    def __init__(
        self, stream: Stream, parts: int, sequences: int, context: int, vocabulary: int = 2**16
    ) -> None:
        self._stream, self._context, self._vocabulary = stream, context, vocabulary
        self.parts, self.sequences = parts, sequences
        self.steps = (len(stream) - 1) // context // (parts * sequences)
        """Steps until every stripe begins again."""
        if not self.steps:
            raise ValueError(
                f"{parts} parts with {sequences} sequences of {context} tokens need at least "
                f"{parts * sequences * context + 1} tokens, got {len(stream)}"
            )

    def draw(self, step: int, part: int) -> Windows:
        """Return the sequences that a step takes from a part: (sequences, context + 1).

        Args:
            step: from 0.
            part: from 0.
        """
        if not 0 <= part < self.parts:
            raise ValueError(f"part must be in [0, {self.parts}), got {part}")
        stripes = range(part * self.sequences, (part + 1) * self.sequences)
        starts = ((stripe * self.steps + step % self.steps) * self._context for stripe in stripes)
        drawn = [windows(self._stream, at, 1, self._context, self._vocabulary) for at in starts]
        return np.concatenate(drawn)
