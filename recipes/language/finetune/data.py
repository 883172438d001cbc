"""The 1,000 recipes that the paper fine-tunes on, as tokens.

`recipes/recipes_1000.csv`, plain or gzipped, and for GPT-2's tokens `gpt2-bpe/encoder.json` and
`gpt2-bpe/vocab.bpe`, all in the data folder. A model learns the text

    Ingredients: flour, eggs. Instructions: Mix the flour and ...

between two end tokens, and writes the instructions for ingredients that it has not seen.
"""

import csv
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.datasets import CorruptFileError, data_folder, read_bytes
from recipes.language.prepare import END, load_tokenizer

__all__ = ["Codec", "Example", "Parts", "Recipe", "collate", "load", "load_codec", "read"]
__all__ += ["locate", "verify"]

INSTRUCTIONS = (
    "Put recipes_1000.csv, plain or gzipped, into its folder recipes: the recipes of GPT2/ in "
    "https://github.com/Tracy-Wang7/PISA"
)
BPE_INSTRUCTIONS = "Put GPT-2's encoder.json and vocab.bpe into its folder gpt2-bpe"
CHECKSUM = "672d7956e2ff47dc7e26b71a445c0af8022e04755441d456e2978d952e0b4e0c"
IGNORED = -100  # labels that the loss leaves out


class Recipe(NamedTuple):
    """Ingredients, separated by commas, and instructions."""

    ingredients: str
    instructions: str

    @property
    def prompt(self) -> str:
        """Return the text that a model continues with the instructions."""
        return f"Ingredients: {self.ingredients}. Instructions:"


def locate(folder: str | Path | None = None) -> Path:
    """Return the file of recipes.

    Raises:
        FileNotFoundError: it is not there.
    """
    place = data_folder(folder) / "recipes"
    names = [place / "recipes_1000.csv", place / "recipes_1000.csv.gz"]
    path = next((path for path in names if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"there is no {names[0].name} or {names[1].name} in {place.resolve()}. {INSTRUCTIONS}. "
            "The data folder is that of --data, or of the environment variable TORCHPISA_DATA"
        )
    return path


def verify(folder: str | Path | None = None) -> None:
    """Check that the recipes are there and are the published ones.

    Raises:
        FileNotFoundError: see `locate`.
        CorruptFileError: they are others.
    """
    path = locate(folder)
    checksum = hashlib.sha256(read_bytes(path, INSTRUCTIONS)).hexdigest()
    if checksum != CHECKSUM:
        raise CorruptFileError(
            f"{path.resolve()} is damaged or another file: its SHA-256, unzipped, must be "
            f"{CHECKSUM}, got {checksum}. {INSTRUCTIONS}"
        )


def read(folder: str | Path | None = None) -> list[Recipe]:
    """Return all recipes in the order of the file."""
    rows = csv.DictReader(io.StringIO(read_bytes(locate(folder)).decode(), newline=""))
    return [Recipe(row["ingredients"].strip(), row["instructions"].strip()) for row in rows]


# Tokens


@dataclass(frozen=True)
class Codec:
    """Text as tokens.

    Attributes:
        encode: returns the tokens of a text.
        decode: returns the text of tokens.
        end: the token before and after a text.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end: int

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens; the end token is the last one."""
        return self.end + 1


BYTES = Codec(
    encode=lambda text: list(text.encode()),
    decode=lambda tokens: bytes(tokens).decode(errors="replace"),
    end=256,
)


@cache
def load_codec(name: str, folder: str | None = None) -> Codec:
    """Return "bytes", a token per byte, or "gpt2", GPT-2's byte-pair encoding.

    Raises:
        FileNotFoundError: GPT-2's files are not in the data folder.
        CorruptFileError: they are damaged.
    """
    if name == "bytes":
        return BYTES
    if name != "gpt2":
        raise ValueError(f"tokens must be 'bytes' or 'gpt2', got {name!r}")
    place = data_folder(folder) / "gpt2-bpe"
    try:
        bpe = load_tokenizer(place)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"GPT-2's tokens are not in {place.resolve()}. {BPE_INSTRUCTIONS}"
        ) from None
    end = bpe.token_to_id(END)
    return Codec(lambda text: bpe.encode(text).ids, lambda tokens: bpe.decode(list(tokens)), end)


class Example(NamedTuple):
    """A recipe with its tokens, int64, cut off at some length, and those of its prompt."""

    recipe: Recipe
    tokens: Tensor
    prompt: list[int]


@dataclass(frozen=True)
class Parts:
    """Recipes to train on, to choose settings on, and to report on."""

    train: list[Example]
    validation: list[Example]
    test: list[Example]


def load(
    folder: str | None, codec: Codec, sizes: tuple[int, int, int], length: int, limit: int = 0
) -> Parts:
    """Return the recipes as examples, dealt out in an order that is always the same.

    Args:
        folder: the data folder.
        codec: see `Codec`.
        sizes: numbers of recipes to train on, to validate on and to test on.
        length: longest text, in tokens with those at its ends; the rest of a recipe is cut off.
        limit: how many recipes there are at most, the first ones of the file; 0 for all.
    """
    recipes = read(folder)
    recipes = recipes[: limit or len(recipes)]
    if sum(sizes) > len(recipes):
        raise ValueError(f"there are {len(recipes)} recipes, {sum(sizes)} are asked for: {sizes}")
    order = torch.randperm(len(recipes), generator=torch.Generator().manual_seed(0)).tolist()
    examples = []
    for index in order[: sum(sizes)]:
        recipe = recipes[index]
        text = codec.encode(f"{recipe.prompt} {recipe.instructions}")
        tokens = [codec.end, *text, codec.end][:length]
        prompt = [codec.end, *codec.encode(recipe.prompt)]
        examples.append(Example(recipe, torch.tensor(tokens), prompt))
    train, validation, _ = sizes
    held_out = examples[train:]
    return Parts(examples[:train], held_out[:validation], held_out[validation:])


def collate(examples: Sequence[Example], pad: int) -> dict[str, Tensor]:
    """Return a batch of texts, padded at their ends, as `input_ids` and `labels`.

    No text sees what is behind it, so the padding needs no mask. The first token is no label, since
    nothing comes before it: Trainer divides by the number of labels.
    """
    tokens = [example.tokens for example in examples]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=pad)
    labels = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=IGNORED)
    labels[:, 0] = IGNORED
    return {"input_ids": padded, "labels": labels}
