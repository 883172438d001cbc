"""Turn texts into files of GPT-2's tokens that the recipe reads.

    python -m recipes language prepare BOOK.txt ... --bpe FOLDER --out DIR
    python -m recipes language --preset nano --tokens prepared --data DIR

FOLDER has GPT-2's vocabulary and merges, as OpenAI names the files (`encoder.json`, `vocab.bpe`) or
as Hugging Face does (`vocab.json`, `merges.txt`). Every text begins with the token of the end of
text, and its last part is kept for validation.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.datasets import CorruptFileError
from recipes.language.tokens import Tokens, write_shard

__all__ = ["encode", "load_tokenizer", "main", "pieces", "prepare"]

END = "<|endoftext|>"
FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
PIECE = 2**22  # characters that are encoded at once
SHARD = 100_000_000  # tokens of a file, 200 MB
# Between two lines of text there is a boundary of tokens, whatever stands before and after them.
BOUNDARY = re.compile(r"(?<=\S)\n(?=\S)")


def load_tokenizer(folder: str | Path) -> Any:
    """Return GPT-2's tokenizer from a folder with its two files.

    Raises:
        FileNotFoundError: they are not there.
        CorruptFileError: they are damaged.
        ImportError: the package tokenizers is not installed.
    """
    folder = Path(folder)
    for vocabulary, merges in FILES:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            try:
                from tokenizers import ByteLevelBPETokenizer
            except ImportError:
                raise ImportError("prepare needs tokenizers: pip install tokenizers") from None
            try:
                return ByteLevelBPETokenizer(str(folder / vocabulary), str(folder / merges))
            except Exception as error:  # the package has no class of its own for these
                raise CorruptFileError(
                    f"{vocabulary} or {merges} in {folder.resolve()} is damaged: {error}. "
                    "Get both again."
                ) from None
    pairs = " or ".join(" and ".join(pair) for pair in FILES)
    raise FileNotFoundError(f"--bpe must be a folder with {pairs}, got {folder}")


def pieces(path: Path, size: int = PIECE) -> Iterator[str]:
    """Yield a text in pieces that may be encoded one by one, with the same tokens as the whole."""
    rest = ""
    with path.open(encoding="utf-8", newline="") as file:
        while chunk := file.read(size):
            rest += chunk
            cut = max((match.end() for match in BOUNDARY.finditer(rest)), default=0)
            if cut:
                yield rest[:cut]
                rest = rest[cut:]
    if rest:
        yield rest


def encode(path: Path, tokenizer: Any, size: int = PIECE) -> Tokens:
    """Return the tokens of a text, after the token of the end of text.

    Raises:
        ValueError: the file is empty or not text in UTF-8, or the vocabulary has no such token.
    """
    end = tokenizer.token_to_id(END)
    if end is None:
        raise ValueError(f"the vocabulary must have the token {END}, which separates texts")
    parts = [np.array([end], np.uint16)]
    try:
        for piece in pieces(path, size):
            parts.append(np.array(tokenizer.encode(piece).ids, np.uint16))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8: {error}") from None
    if len(parts) == 1:
        raise ValueError(f"{path} is empty")
    return np.concatenate(parts)


def prepare(
    texts: Sequence[Path], tokenizer: Any, out: Path, share: float, shard: int = SHARD
) -> dict[str, int]:
    """Write files of tokens to train and to validate on; return how many tokens each kind has.

    Args:
        texts: files.
        tokenizer: see `load_tokenizer`.
        out: folder for `train_*.bin` and `val_*.bin`, made if needed. It must have none yet.
        share: of every text, at its end, for validation.
        shard: the most tokens of a file.
    """
    if not 0 < share < 1:
        raise ValueError(f"validation must be in (0, 1), got {share}")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob("train_*")) or any(out.glob("val_*")):
        raise ValueError(f"out must be a folder without files of tokens, got {out}")
    writers = {kind: ShardWriter(out, kind, shard) for kind in ("train", "val")}
    for path in texts:
        tokens = encode(path, tokenizer)
        kept = max(1, round(share * len(tokens)))
        writers["train"].add(tokens[:-kept])
        writers["val"].add(tokens[-kept:])
    for writer in writers.values():
        writer.close()
    return {kind: writer.count for kind, writer in writers.items()}


class ShardWriter:
    """A stream of tokens, written as numbered files.

    Args:
        folder: of the files.
        kind: what their names begin with.
        size: tokens of each but the last.
    """

    def __init__(self, folder: Path, kind: str, size: int) -> None:
        self.folder, self.kind, self.size = folder, kind, size
        self.count = 0
        self._files = 0
        self._waiting: list[Tokens] = []

    def add(self, tokens: Tokens) -> None:
        """Take on tokens, and write the files that are full."""
        self.count += len(tokens)
        self._waiting.append(tokens)
        if sum(map(len, self._waiting)) >= self.size:
            together = np.concatenate(self._waiting)
            full = len(together) // self.size * self.size
            for start in range(0, full, self.size):
                self._write(together[start : start + self.size])
            self._waiting = [together[full:]]

    def close(self) -> None:
        """Write what is left."""
        if any(map(len, self._waiting)):
            self._write(np.concatenate(self._waiting))

    def _write(self, tokens: Tokens) -> None:
        write_shard(self.folder / f"{self.kind}_{self._files:06}.bin", tokens)
        self._files += 1


def files_in(paths: Iterable[Path]) -> list[Path]:
    """Return files as they are and all `.txt` files below folders, sorted."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"TEXT must be a file or a folder of .txt files, got {path}")
        found += sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare texts."""
    parser = argparse.ArgumentParser(
        "python -m recipes language prepare", description="Texts to files of GPT-2's tokens"
    )
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT", help="file, or folder")
    parser.add_argument("--bpe", type=Path, required=True, metavar="FOLDER", help="GPT-2's files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--validation", type=float, default=0.05, help="share of every text; default %(default)s"
    )
    args = parser.parse_args(argv)
    try:
        texts, tokenizer = files_in(args.texts), load_tokenizer(args.bpe)
        counts = prepare(texts, tokenizer, args.out, args.validation)
    except (FileNotFoundError, ImportError, ValueError) as error:
        sys.exit(str(error))
    print(f"{args.out}: {counts['train']:,} tokens to train on, {counts['val']:,} to validate on")
