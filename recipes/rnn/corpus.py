"""Text as indices of words: Penn Treebank from its files, or Python's documentation.

Penn Treebank is `ptb/ptb.train.txt`, `ptb.valid.txt` and `ptb.test.txt` in the data folder, plain
or gzipped: one sentence per line, 10,000 different words. Python's documentation, which is
everywhere, takes its place where that is allowed.
"""

import functools
import hashlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recipes.datasets import CorruptFileError, data_folder, read_bytes

__all__ = ["Corpus", "columns", "is_missing", "load", "locate", "verify"]

END = "<eos>"
PARTS = ("train", "valid", "test")
WORDS = 2000  # of Python's documentation; the rest are <unk>
INSTRUCTIONS = (
    "Put ptb.train.txt, ptb.valid.txt and ptb.test.txt, plain or gzipped, into its folder ptb: the "
    "Penn Treebank of Mikolov's language models, with 10,000 words"
)
CHECKSUMS = {
    "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
"""SHA-256 of the plain texts."""


class Corpus(NamedTuple):
    """Indices of the words, int64, and the number of different words."""

    train: Tensor
    valid: Tensor
    test: Tensor
    words: int


def locate(folder: str | None = None) -> dict[str, Path]:
    """Return the files of Penn Treebank by part.

    Raises:
        FileNotFoundError: one is not there; says where it looked and what to do.
    """
    place = data_folder(folder) / "ptb"
    files = {}
    for part in PARTS:
        names = [place / f"ptb.{part}.txt", place / f"ptb.{part}.txt.gz"]
        path = next((path for path in names if path.is_file()), None)
        if path is None:
            raise FileNotFoundError(
                f"ptb: there is no {names[0].name} or {names[1].name} in {place.resolve()}. "
                f"{INSTRUCTIONS}. The folder is that of --data, or of the environment variable "
                "TORCHPISA_DATA"
            )
        files[part] = path
    return files


def is_missing(folder: str | None = None) -> bool:
    """Return True if none of the files of Penn Treebank is there."""
    return not any((data_folder(folder) / "ptb").glob("ptb.*.txt*"))


def verify(folder: str | None = None) -> None:
    """Check that the files are there and intact.

    Raises:
        FileNotFoundError: see `locate`.
        CorruptFileError: a file is not the published one.
    """
    for part, path in locate(folder).items():
        checksum = hashlib.sha256(read_bytes(path, INSTRUCTIONS)).hexdigest()
        if checksum != CHECKSUMS[part]:
            raise CorruptFileError(
                f"{path.resolve()} is damaged or another text: its SHA-256, unzipped, must be "
                f"{CHECKSUMS[part]}, got {checksum}. {INSTRUCTIONS}"
            )


@functools.lru_cache(maxsize=2)
def load(name: str, folder: str | None = None, limit: int = 0) -> Corpus:
    """Load a text.

    Args:
        name: "ptb" or "python".
        folder: the data folder.
        limit: words of the training part, and a tenth as many of the others; 0 for all.
    """
    if name == "ptb":
        texts = [read_bytes(path).decode() for path in locate(folder).values()]
        parts = [text.replace("\n", f" {END} ").split() for text in texts]
    elif name == "python":
        parts = documentation()
    else:
        raise ValueError(f"corpus must be 'ptb' or 'python', got {name!r}")
    if limit:
        sizes = limit, limit // 10, limit // 10
        parts = [words[:size] for words, size in zip(parts, sizes, strict=True)]
    numbers: dict[str, int] = {}
    streams = [[numbers.setdefault(word, len(numbers)) for word in words] for words in parts]
    train, valid, test = (torch.from_numpy(np.array(stream, np.int64)) for stream in streams)
    return Corpus(train, valid, test, len(numbers))


def documentation() -> list[list[str]]:
    """Return the topics of Python's help in three parts, with its most frequent words."""
    from pydoc_data.topics import topics

    words = " ".join(topics[name] for name in sorted(topics)).lower().split()
    common = {word for word, _ in Counter(words).most_common(WORDS - 1)}
    words = [word if word in common else "<unk>" for word in words]
    tenth = len(words) // 10
    return [words[: 8 * tenth], words[8 * tenth : 9 * tenth], words[9 * tenth :]]


def columns(stream: Tensor, count: int) -> Tensor:
    """Cut a stream into `count` parts, which become the columns; the remainder is dropped."""
    length = len(stream) // count
    return stream[: length * count].view(count, length).t().contiguous()
