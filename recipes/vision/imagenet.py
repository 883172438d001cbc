"""ImageNet from its folders: `imagenet/train/CLASS/*` and `imagenet/val/CLASS/*`.

Processes of their own decode and crop; flipping and normalising is the device's work. What is drawn
for an image depends on seed, epoch and image only, not on which process reads it.
"""

import functools
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.datasets import CorruptFileError, data_folder
from recipes.vision.data import normalise

__all__ = ["Folders", "load", "locate"]

PIXELS = 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INSTRUCTIONS = (
    "ImageNet is there for registered users of https://www.image-net.org; sort the validation "
    "images into one folder per class, like the training images"
)


def locate(folder: str | None = None) -> Path:
    """Return the folder of the images.

    Raises:
        FileNotFoundError: they are not there; says where it looked and what is expected.
    """
    place = data_folder(folder) / "imagenet"
    for part in ("train", "val"):
        if not any((place / part).glob("*/*")):
            raise FileNotFoundError(
                f"imagenet: there are no images in {(place / part).resolve()}/CLASS. "
                f"{INSTRUCTIONS}. The folder is that of --data, or of the environment variable "
                "TORCHPISA_DATA"
            )
    return place


class Files(Dataset[tuple[Tensor, int]]):
    """The images of a part, decoded and cropped to a square.

    Args:
        paths: of the images.
        labels: of the images.
        seed: of the crops of training images; None for the middle of test images.
    """

    def __init__(self, paths: Sequence[Path], labels: Sequence[int], seed: int | None) -> None:
        self.paths, self.labels, self.seed = paths, labels, seed

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image, UnidentifiedImageError

        path = self.paths[index]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise CorruptFileError(
                f"{path.resolve()} must be an image, but it cannot be read: {error}. Remove it or "
                f"get it again. {INSTRUCTIONS}"
            ) from None
        if self.seed is None:
            box = middle(image.size)
        else:
            box = random_box(image.size, random.Random(f"{self.seed} {index}"))
        square = image.resize((PIXELS, PIXELS), Image.Resampling.BILINEAR, box=box)
        return torch.from_numpy(np.array(square)).permute(2, 0, 1), self.labels[index]


def middle(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the middle 7/8 of the shorter side, as a box."""
    width, height = size
    side = min(size) * 0.875
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(size: tuple[int, int], source: random.Random) -> tuple[float, float, float, float]:
    """Return a box of 8 to 100 % of the area, with an aspect ratio of 3/4 to 4/3."""
    width, height = size
    for _ in range(10):
        area = width * height * source.uniform(0.08, 1.0)
        ratio = math.exp(source.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = source.uniform(0, width - w), source.uniform(0, height - h)
            return left, top, left + w, top + h
    return middle(size)


@dataclass(frozen=True, eq=False)
class Folders:
    """ImageNet, read from its folders during training.

    Attributes:
        name: "imagenet".
        classes: folders.
        train: paths and labels.
        val: likewise.
        device: where batches go.
        workers: processes that decode.
        scale: see `recipes.vision.data.Images`.
        shift: likewise.
    """

    name: str
    classes: int
    train: tuple[list[Path], list[int]]
    val: tuple[list[Path], list[int]]
    device: torch.device
    workers: int
    scale: Tensor
    shift: Tensor

    @property
    def count(self) -> int:
        """Return the number of training images."""
        return len(self.train[0])

    def batches(
        self, batch: int, share: int, seed: int, epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the shares, one after the other, of an epoch's whole batches."""
        mixed = seed * 100_003 + epoch
        generator = torch.Generator().manual_seed(mixed)
        order = torch.randperm(self.count, generator=generator)
        used = order[: self.count // batch * batch].tolist()
        for images, labels in self.loader(Files(*self.train, mixed), used, share):
            mirrored = torch.rand(len(images), generator=generator) < 0.5
            mirrored = mirrored.to(self.device).view(-1, 1, 1, 1)
            yield torch.where(mirrored, images.flip(3), images), labels

    def tests(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the validation images in batches."""
        yield from self.loader(Files(*self.val, None), range(len(self.val[0])), min(size, 256))

    def loader(
        self, files: Files, order: Sequence[int], size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        options: dict[str, Any] = {"batch_size": size, "num_workers": self.workers}
        options |= {"pin_memory": self.device.type == "cuda"}
        try:
            for images, labels in DataLoader(files, sampler=list(order), **options):
                yield (
                    images.to(self.device, non_blocking=True),
                    labels.to(self.device, non_blocking=True),
                )
        except CorruptFileError as error:  # that of another process begins with its traceback
            message = str(error).rpartition("CorruptFileError: ")[2].strip()
            raise CorruptFileError(message) from None

    def normalise(self, images: Tensor) -> Tensor:
        """Return bytes as float32 of mean 0 and deviation 1 per channel."""
        return normalise(images, self.scale, self.shift)


@functools.lru_cache(maxsize=1)
def load(
    folder: str | None, device: str = "cpu", limit: int = 0, workers: int | None = None
) -> Folders:
    """List the images.

    Args:
        folder: the data folder, with `imagenet` in it.
        device: where batches go.
        limit: training images of each class; 0 for all.
        workers: processes that decode; by default all cores but one, none if there is one.
    """
    place = locate(folder)
    names = sorted(path.name for path in (place / "train").iterdir() if path.is_dir())

    def listing(part: str, per_class: int) -> tuple[list[Path], list[int]]:
        paths: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(names):
            files = sorted((place / part / name).iterdir())[: per_class or None]
            paths += files
            labels += [label] * len(files)
        return paths, labels

    in_val = sorted(path.name for path in (place / "val").iterdir() if path.is_dir())
    if in_val != names:
        raise CorruptFileError(
            f"{(place / 'val').resolve()} must have the classes of train, but "
            f"{len(set(names) ^ set(in_val))} folders are in one of them only. {INSTRUCTIONS}"
        )
    if workers is None:
        workers = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1) - 1
    mean, deviation = (torch.tensor(c, device=device).view(-1, 1, 1) for c in (MEAN, DEVIATION))
    return Folders(
        *("imagenet", len(names), listing("train", limit), listing("val", 0)),
        *(torch.device(device), workers, 1 / (255 * deviation), -mean / deviation),
    )
