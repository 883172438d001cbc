"""The data sets of the recipes, read from their published files.

`load("mnist", folder)` gives tensors that are split and normalised, `read` the bytes as published.
Without a folder it is that of the environment variable TORCHPISA_DATA, or else `data`. In it:

| name | files |
|---|---|
| mnist | `mnist/*.gz`, the four idx files |
| fashion_mnist | `fashion-mnist/*.gz`, or where Debian's package dataset-fashion-mnist has them |
| cifar10 | `cifar-10-python.tar.gz` or what is in it, `cifar-10-batches-py`, or `cifar10/*.zip` |
| adult | `a9a/a9a.gz` and `a9a.t.gz`, in libsvm's form |
| digits | nothing: comes with scikit-learn |

If there is a folder `cache`, what was read is kept there as NAME.npz, and read from there the next
time: faster, and enough for a machine without the files or without a decoder for them.
"""

import dataclasses
import gzip
import hashlib
import io
import os
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["NAMES", "Arrays", "CorruptFileError", "Dataset", "Split"]
__all__ += ["check_checksum", "data_folder", "digits", "is_missing", "load", "locate", "read"]
__all__ += ["read_bytes", "scaled", "verify"]

Array = np.ndarray[Any, np.dtype[np.uint8]]


class Arrays(NamedTuple):
    """A data set as published, all uint8: images (N, C, H, W) or features (N, F), and labels."""

    train: Array
    train_labels: Array
    test: Array
    test_labels: Array


class Split(NamedTuple):
    """Inputs, float32 (or uint8 as published), and labels, int64."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, eq=False)  # == on tensors is elementwise, so a generated __eq__ would raise
class Dataset:
    """A data set, split; `validation` is None if nothing was held out."""

    name: str
    classes: int
    train: Split
    validation: Split | None
    test: Split

    def to(self, device: torch.device | str) -> "Dataset":
        """Return the same data set on a device."""

        def move(split: Split) -> Split:
            return Split(split.inputs.to(device), split.targets.to(device))

        held_out = self.validation and move(self.validation)
        return dataclasses.replace(
            self, train=move(self.train), validation=held_out, test=move(self.test)
        )


@dataclass(frozen=True)
class Source:
    """The way in which a data set is found and read.

    Attributes:
        find: returns the place of the files in a data folder, or None if they are not there.
        read: reads them.
        needs: the files that `find` looks for, in words.
        instructions: instructions for getting the files.
        classes: number of labels.
        mean: per channel, of the training data in [0, 1]; without it inputs stay in [0, 1].
        deviation: likewise, the standard deviation.
        largest: the value that becomes 1.
        held_out: samples of the training data that become the validation split.
    """

    find: Callable[[Path], Path | None]
    read: Callable[[Path], Arrays]
    needs: str
    instructions: str
    classes: int
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    largest: int = 255
    held_out: int = 5000


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder, or by default that of TORCHPISA_DATA, or `data`."""
    return Path(folder or os.environ.get("TORCHPISA_DATA") or "data")


def load(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    hold_out: bool = True,
    normalise: bool = True,
) -> Dataset:
    """Return a data set as tensors.

    Args:
        name: one of `NAMES`.
        folder: see the module.
        hold_out: keep a part of the training data, drawn with a fixed seed, for validation. False,
            for final runs: train on everything.
        normalise: images get mean 0 and standard deviation 1 per channel, with constants that were
            computed on all training data; features go from 0 to 1. False leaves the inputs uint8.

    Raises:
        FileNotFoundError: the files are not there.
        CorruptFileError: see `read`.
    """
    arrays, source = read(name, folder), _source(name)

    def split(inputs: Array, labels: Array) -> Split:
        x = scaled(name, inputs) if normalise else torch.from_numpy(inputs)
        return Split(x, torch.from_numpy(labels).long())

    train, validation = split(arrays.train, arrays.train_labels), None
    if hold_out:
        order = torch.randperm(len(arrays.train), generator=torch.Generator().manual_seed(0))
        held_out, rest = order[: source.held_out], order[source.held_out :].sort().values
        validation = Split(train.inputs[held_out], train.targets[held_out])
        train = Split(train.inputs[rest], train.targets[rest])
    return Dataset(name, source.classes, train, validation, split(arrays.test, arrays.test_labels))


def scaled(name: str, inputs: Array) -> Tensor:
    """Return published inputs of a data set as float32, normalised."""
    source = _source(name)
    x = torch.tensor(inputs, dtype=torch.float32) / source.largest
    if not source.mean:
        return x
    mean, deviation = (torch.tensor(c).view(-1, 1, 1) for c in (source.mean, source.deviation))
    return (x - mean) / deviation


def locate(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the place of a data set: its file in the cache, or its published files.

    Raises:
        FileNotFoundError: neither is there; says where it looked and how to get the data.
    """
    source, folder = _source(name), data_folder(folder)
    cached = _cached(name, folder)
    place = cached if cached.is_file() else source.find(folder)
    if place is None:
        raise FileNotFoundError(
            f"{name}: there is no {source.needs} in {folder.resolve()}. {source.instructions} The "
            "folder is that of --data, or of the environment variable TORCHPISA_DATA"
        )
    return place


def is_missing(name: str, folder: str | os.PathLike[str] | None = None) -> bool:
    """Return True if a data set is not there."""
    try:
        locate(name, folder)
    except FileNotFoundError:
        return True
    return False


def read(name: str, folder: str | os.PathLike[str] | None = None) -> Arrays:
    """Return a data set as published, from the cache or from its files.

    Raises:
        FileNotFoundError: see `locate`.
        CorruptFileError: a file, or what is in the cache, cannot be read or does not fit.
    """
    place, cached = locate(name, folder), _cached(name, data_folder(folder))
    source = _source(name)
    if place == cached:
        try:
            with cached.open("rb") as file, np.load(file) as saved:
                return Arrays(*(saved[field] for field in Arrays._fields))
        except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise CorruptFileError(
                f"{cached.resolve()} is damaged: {error}. Remove it; it is made anew from the "
                f"published files. {source.instructions}"
            ) from None
    try:
        arrays = source.read(place)
    except CorruptFileError:
        raise
    except (IndexError, ValueError) as error:
        message = f"{place.resolve()} is damaged: {error}. {source.instructions}"
        raise CorruptFileError(message) from None
    for samples, labels in (arrays[:2], arrays[2:]):
        if len(samples) != len(labels):
            raise CorruptFileError(
                f"{place.resolve()} must have a label for each of {len(samples)} samples, got "
                f"{len(labels)} labels. {source.instructions}"
            )
    if cached.parent.is_dir() and name != "digits":
        # Atomic, because other processes may be reading or writing the same file.
        part = cached.with_name(f".{name}.{os.getpid()}.npz")
        np.savez_compressed(part, **arrays._asdict())
        part.replace(cached)
    return arrays


class CorruptFileError(ValueError):
    """A file that is damaged, not the published one, or does not fit what it is for."""


def read_bytes(path: Path, instructions: str = "Get it again.") -> bytes:
    """Return the content of a file, unzipped if it is gzipped.

    Args:
        path: the file; gzipped if its name ends in `.gz`.
        instructions: instructions for getting the file again.

    Raises:
        CorruptFileError: it cannot be unzipped.
    """
    raw = path.read_bytes()
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        message = f"{path.resolve()} is damaged: {error}. {instructions}"
        raise CorruptFileError(message) from None


# SHA-256, or MD5 where that is what the publisher gives, by the name of the file.
CHECKSUMS = {
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "train_a.zip": "fdbbcc67b7e51056d128568ded8a6ed43cd7046aa62928f905b9478ae32806ed",
    "train_b.zip": "faae7ad6ddf0b66236e5711e461ba5a6b94a2d95a12b17f845ca55601fba6a3c",
    "test.zip": "d2135cece2c333ad19db27c1a8ba17ca69e9ee3e9a8a0b1b232771dacdd21068",
}


def verify(name: str, folder: str | os.PathLike[str] | None = None) -> None:
    """Check that the files of a data set are intact; the cache is not checked.

    Raises:
        FileNotFoundError: see `locate`; or one of its files is missing.
        CorruptFileError: a file is not the published one.
    """
    place = locate(name, folder)
    if place == _cached(name, data_folder(folder)):
        return
    if place.is_file():
        check_checksum(place, CHECKSUMS, _source(name).instructions)
        return
    if name == "cifar10":
        zips = (place / "train_a.zip").is_file()
        for file in ("train_a.zip", "train_b.zip", "test.zip") if zips else BATCHES:
            check_checksum(place / file, CHECKSUMS, _source(name).instructions)


def check_checksum(path: Path, checksums: Mapping[str, str], instructions: str) -> None:
    """Check a file against the checksum for its name, if there is one.

    Args:
        path: the file.
        checksums: SHA-256 or MD5 by name.
        instructions: instructions for getting the file again.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: the checksum differs.
    """
    expected = checksums.get(path.name)
    if not path.is_file():
        raise FileNotFoundError(f"{path.resolve()} is missing. {instructions}")
    if expected is None:
        return
    algorithm = "md5" if len(expected) == 32 else "sha256"
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    actual = digest.hexdigest()
    if actual != expected:
        raise CorruptFileError(
            f"{path.resolve()} is damaged or another file: its {algorithm.upper()} must be "
            f"{expected}, got {actual}. Remove it and get it again: {instructions}"
        )


def _cached(name: str, folder: Path) -> Path:
    return folder / "cache" / f"{name}.npz"


# MNIST and Fashion-MNIST


def read_idx(path: Path) -> Array:
    """Read a gzipped idx file of bytes."""
    raw = read_bytes(path)
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":  # 8: unsigned bytes
        raise ValueError(f"{path} must be a gzipped idx file of unsigned bytes")
    dims = raw[3]
    shape = np.frombuffer(raw, ">u4", dims, 4).astype(int)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape).copy()


IDX = [
    f"{part}-{kind}-ubyte.gz"
    for part in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]


def read_idx_folder(folder: Path) -> Arrays:
    images, labels, test, test_labels = (read_idx(folder / name) for name in IDX)
    return Arrays(images[:, None], labels, test[:, None], test_labels)


def find_idx(*places: str) -> Callable[[Path], Path | None]:
    def find(folder: Path) -> Path | None:
        existing = (folder / place for place in places if (folder / place / IDX[0]).is_file())
        return next(existing, None)

    return find


# CIFAR-10


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that loads arrays only, which is all that the published files need."""

    allowed = frozenset({"_reconstruct", "ndarray", "dtype", "encode"})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] not in ("numpy", "_codecs") or name not in self.allowed:
            raise pickle.UnpicklingError(
                f"a CIFAR-10 batch must hold arrays only, got {module}.{name}"
            )
        return super().find_class(module, name)


def read_batches(place: Path) -> Arrays:
    """Read the published batches, from `cifar-10-batches-py` or from the archive."""
    names = BATCHES
    if place.is_dir():
        raw = [(place / name).read_bytes() for name in names]
    else:
        with tarfile.open(place) as archive:
            members = (archive.extractfile(f"cifar-10-batches-py/{name}") for name in names)
            raw = [member.read() for member in members if member is not None]
    batches = [_ArrayUnpickler(io.BytesIO(data), encoding="bytes").load() for data in raw]
    images = [batch[b"data"].reshape(-1, 3, 32, 32) for batch in batches]
    labels = [np.array(batch[b"labels"], np.uint8) for batch in batches]
    return Arrays(np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1])


def read_strips(folder: Path) -> Arrays:
    """Read zips of lossless WebP images, each a strip of images, and of `labels.u8`."""
    from PIL import Image

    def read_zip(name: str) -> tuple[list[Array], Array]:
        with zipfile.ZipFile(folder / name) as archive:
            strips = sorted(entry for entry in archive.namelist() if entry.endswith(".webp"))
            images = [
                Image.open(io.BytesIO(archive.read(strip))).convert("RGB") for strip in strips
            ]
            labels = np.frombuffer(archive.read("labels.u8"), np.uint8)
        return [np.asarray(image, np.uint8).reshape(-1, 32, 32, 3) for image in images], labels

    def join(*names: str) -> tuple[Array, Array]:
        images, labels = zip(*map(read_zip, names), strict=True)
        stacked = np.concatenate([strip for part in images for strip in part])
        return np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)), np.concatenate(labels)

    return Arrays(*join("train_a.zip", "train_b.zip"), *join("test.zip"))


def find_cifar10(folder: Path) -> Path | None:
    inside = [folder, folder / "cifar10"]
    published = [place / name for place in inside for name in ("cifar-10-batches-py", TAR)]
    places = [path for path in published if path.exists()]
    places += [place for place in inside if (place / "train_a.zip").is_file()]
    return next(iter(places), None)


def read_cifar10(place: Path) -> Arrays:
    return read_strips(place) if (place / "train_a.zip").is_file() else read_batches(place)


TAR = "cifar-10-python.tar.gz"
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


# Adult


def read_libsvm(path: Path, features: int = 123) -> tuple[Array, Array]:
    """Read rows of a label (-1 or +1, here 0 or 1) and the indices of the features that are 1."""
    rows = [line.split() for line in read_bytes(path).decode("ascii").splitlines()]
    x = np.zeros((len(rows), features), np.uint8)
    for row, (_, *entries) in enumerate(rows):
        x[row, [int(entry.split(":")[0]) - 1 for entry in entries]] = 1
    return x, np.array([int(label) > 0 for label, *_ in rows], np.uint8)


def find_adult(folder: Path) -> Path | None:
    return folder / "a9a" if (folder / "a9a" / "a9a.gz").is_file() else None


# Digits


def digits() -> tuple[Array, Array]:
    """Return scikit-learn's 1,797 digits, 8x8 with values up to 16, shuffled once."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).numpy()
    return images.astype(np.uint8).reshape(-1, 8, 8)[order], labels.astype(np.uint8)[order]


def read_digits(folder: Path) -> Arrays:
    images, labels = digits()
    pixels = images.reshape(-1, 64)
    return Arrays(pixels[:1297], labels[:1297], pixels[1297:], labels[1297:])


SOURCES = {
    "mnist": Source(
        find_idx("mnist"),
        read_idx_folder,
        f"mnist/{IDX[0]}",
        "Put the four published gz files of MNIST into its folder mnist.",
        classes=10,
        mean=(0.1307,),
        deviation=(0.3081,),
    ),
    "fashion_mnist": Source(
        find_idx("fashion-mnist", "/usr/share/datasets/fashion-mnist"),
        read_idx_folder,
        f"fashion-mnist/{IDX[0]}",
        "Put the four published gz files of Fashion-MNIST into its folder fashion-mnist, or on "
        "Debian: apt-get install dataset-fashion-mnist.",
        classes=10,
        mean=(0.2860,),
        deviation=(0.3530,),
    ),
    "cifar10": Source(
        find_cifar10,
        read_cifar10,
        f"{TAR}, cifar-10-batches-py or cifar10/train_a.zip",
        f"Put {TAR} into it, from https://www.cs.toronto.edu/~kriz/cifar.html.",
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        deviation=(0.2470, 0.2435, 0.2616),
    ),
    "adult": Source(
        find_adult,
        lambda place: Arrays(*read_libsvm(place / "a9a.gz"), *read_libsvm(place / "a9a.t.gz")),
        "a9a/a9a.gz",
        "Put a9a and a9a.t, gzipped, into its folder a9a; they are on "
        "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html.",
        classes=2,
        largest=1,
    ),
    "digits": Source(
        lambda folder: folder,
        read_digits,
        "scikit-learn",
        "",
        classes=10,
        largest=16,
        held_out=297,
    ),
}
NAMES = tuple(SOURCES)


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise ValueError(f"name must be one of {', '.join(SOURCES)}, got {name!r}")
    return SOURCES[name]
