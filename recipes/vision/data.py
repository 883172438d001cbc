"""Images on the device, shuffled and augmented there, an epoch at a time."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes import datasets
from recipes.execution import print_line

__all__ = ["Images", "augment", "load", "normalise", "require"]

PADDING = 4  # pixels around an image from which a crop of its size is taken
STATISTICS = {
    # CIFAR-10's deviations are those of the AdaBelief experiments.
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "digits": ((0.3053,) * 3, (0.3757,) * 3),
}


@dataclass(frozen=True, eq=False)
class Images:
    """A data set on a device.

    Attributes:
        name: "cifar10" or "digits".
        train: uint8, (N, 3, 32, 32).
        labels: int64.
        test: like `train`.
        test_labels: like `labels`.
        scale: per channel; with `shift` it turns bytes into numbers of mean 0 and deviation 1.
        shift: likewise.
    """

    name: str
    train: Tensor
    labels: Tensor
    test: Tensor
    test_labels: Tensor
    scale: Tensor
    shift: Tensor

    @property
    def count(self) -> int:
        """Return the number of training images."""
        return len(self.train)

    @property
    def classes(self) -> int:
        """Return the number of labels."""
        return 10

    def batches(
        self, batch: int, share: int, seed: int, epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the shares, one after the other, of an epoch's whole batches."""
        inputs, targets = self.epoch(seed * 100_003 + epoch)
        used = self.count // batch * batch
        yield from zip(inputs[:used].split(share), targets[:used].split(share), strict=True)

    def tests(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the test images in batches."""
        yield from zip(self.test.split(size), self.test_labels.split(size), strict=True)

    def epoch(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return all training images, shuffled, cropped and flipped at random, and their labels."""
        device = self.train.device
        generator = torch.Generator(device).manual_seed(seed)
        order = torch.randperm(len(self.train), generator=generator, device=device)
        images = self.train[order]
        if self.name == "cifar10":
            images = augment(images, generator)
        return images, self.labels[order]

    def normalise(self, images: Tensor) -> Tensor:
        """Return bytes as float32 of mean 0 and deviation 1 per channel."""
        return normalise(images, self.scale, self.shift)


def normalise(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return bytes as float32, scaled and shifted; on a GPU with channels last."""
    x = images.float() * scale + shift
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Crop squares of the images' size after padding with zeros, and mirror every other one.

    Args:
        images: uint8, (N, C, S, S).
        generator: of the offsets and of who is mirrored, on the images' device.
    """
    count, size, device = len(images), images.shape[-1], images.device

    def draw(high: int) -> Tensor:
        return torch.randint(high, (count, 1), generator=generator, device=device)

    steps = torch.arange(size, device=device)
    rows, columns = (draw(2 * PADDING + 1) + steps for _ in range(2))
    columns = torch.where(draw(2).bool(), columns.flip(1), columns)
    padded = F.pad(images, (PADDING,) * 4)
    cropped = padded.gather(
        2, rows[:, None, :, None].expand(-1, padded.shape[1], -1, padded.shape[3])
    )
    return cropped.gather(3, columns[:, None, None, :].expand(-1, padded.shape[1], size, -1))


def require(name: str, folder: str | None, fallback: bool) -> None:
    """Check that a data set is there and intact; say so if digits take its place.

    Args:
        name: of the data set.
        folder: see `recipes.datasets`.
        fallback: whether digits may take its place.

    Raises:
        FileNotFoundError: a file is missing.
        CorruptFileError: a file is not the published one.
    """
    if fallback and datasets.is_missing(name, folder):
        place = datasets.data_folder(folder).resolve()
        print_line(f"{name} is not in {place}: digits take its place")
    else:
        datasets.verify(name, folder)


@functools.lru_cache(maxsize=2)  # runs that follow each other in a process share it
def load(name: str, folder: str | None, device: str, limit: int = 0) -> Images:
    """Load a data set onto a device.

    Args:
        name: "cifar10" or "digits"; digits are enlarged to 32 x 32 pixels.
        folder: see `recipes.datasets`.
        device: where.
        limit: training images of each class, and test images half as many; 0 for all.
    """
    if name not in STATISTICS:
        raise ValueError(f"dataset must be one of {', '.join(STATISTICS)}, got {name!r}")
    arrays = datasets.read(name, folder)

    def move(
        images: datasets.Array, labels: datasets.Array, per_class: int
    ) -> tuple[Tensor, Tensor]:
        x, y = torch.from_numpy(images), torch.from_numpy(labels).long()
        if per_class:
            x, y = first_of_each_class(x, y, per_class)
        if name == "digits":
            pixels = (x.view(-1, 1, 8, 8).int() * 255 // 16).to(torch.uint8)
            x = pixels.repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
        return x.contiguous().to(device), y.to(device)

    train = move(arrays.train, arrays.train_labels, limit)
    test = move(arrays.test, arrays.test_labels, limit // 2)
    mean, deviation = (torch.tensor(c, device=device).view(-1, 1, 1) for c in STATISTICS[name])
    return Images(name, *train, *test, 1 / (255 * deviation), -mean / deviation)


def first_of_each_class(images: Tensor, labels: Tensor, per_class: int) -> tuple[Tensor, Tensor]:
    chosen = torch.cat([(labels == label).nonzero()[:per_class, 0] for label in labels.unique()])
    return images[chosen], labels[chosen]
