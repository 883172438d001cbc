"""Data of the tasks: scikit-learn's digits, a novel that comes with the scripts, and noise."""

import lzma
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes import datasets

__all__ = ["chapters", "digits", "generator", "place", "prepare"]

FOLDER = Path(__file__).parents[2] / "runs"  # git ignores it
SPLITS = ("train", "validation", "test")


def generator(seed: int = 0) -> torch.Generator:
    """Return a source of random numbers that nothing else draws from."""
    return torch.Generator().manual_seed(seed)


def prepare() -> Path:
    """Write what scikit-learn has to a file that `digits` finds on machines without it."""
    path = FOLDER / "cache" / "digits.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **datasets.read("digits", FOLDER)._asdict())
    return path


@cache
def digits() -> dict[str, tuple[Tensor, Tensor]]:
    """Return 1,000, 297 and 500 images of 64 pixels from 0 to 1, with their labels.

    Raises:
        ModuleNotFoundError: there is neither scikit-learn nor a file by `prepare`.
    """
    try:
        arrays = datasets.read("digits", FOLDER)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits need scikit-learn, or the file that `python -m benchmarks defaults "
            f"prepare` writes on a machine that has it: {FOLDER / 'cache' / 'digits.npz'}"
        ) from error
    train, test = (
        (datasets.scaled("digits", x), torch.tensor(y).long()) for x, y in (arrays[:2], arrays[2:])
    )
    x, y = train
    return {"train": (x[:1000], y[:1000]), "validation": (x[1000:], y[1000:]), "test": test}


def place(images: Tensor, random: torch.Generator) -> Tensor:
    """Put every 8 x 8 image somewhere on an empty canvas of 16 x 16."""
    count = len(images)
    corner = torch.randint(9, (2, count, 1), generator=random) + torch.arange(8)
    canvas = torch.zeros(count, 1, 16, 16)
    rows, columns = corner[0][:, :, None], corner[1][:, None, :]
    canvas[torch.arange(count)[:, None, None], 0, rows, columns] = images.view(-1, 8, 8)
    return canvas


@cache
def chapters(half: int) -> dict[str, str]:
    """Return one half of the novel: its first 80 %, the next 10 % and the rest."""
    path = Path(__file__).with_name("warden.txt.xz")
    novel = lzma.decompress(path.read_bytes()).decode("ascii")
    middle = len(novel) // 2
    text = novel[:middle] if half == 0 else novel[middle:]
    cuts = [0, len(text) * 8 // 10, len(text) * 9 // 10, len(text)]
    return {name: text[cuts[i] : cuts[i + 1]] for i, name in enumerate(SPLITS)}
