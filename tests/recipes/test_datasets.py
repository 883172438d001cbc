"""The readers, on small files of the published formats, and on the real ones where they are."""

import dataclasses
import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes import datasets

RANDOM = np.random.default_rng(0)


def images(count: int, *shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(count: int, classes: int = 10) -> np.ndarray:
    return (np.arange(count) % classes).astype(np.uint8)


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()))


def write_mnist(folder: Path, train: int = 40, test: int = 10) -> datasets.Arrays:
    made = datasets.Arrays(
        images(train, 1, 28, 28), labels(train), images(test, 1, 28, 28), labels(test)
    )
    for prefix, x, y in (("train", made[0], made[1]), ("t10k", made[2], made[3])):
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", x[:, 0])
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", y)
    return made


def same(a: datasets.Arrays, b: datasets.Arrays) -> bool:
    return all(x.dtype == np.uint8 and np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "mnist"), ("fashion_mnist", "fashion-mnist")]
)
def test_idx_files(tmp_path: Path, name: str, folder: str) -> None:
    made = write_mnist(tmp_path / folder)
    assert same(datasets.read(name, tmp_path), made)


def test_file_that_is_no_idx_file_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(b"<html>not found</html>"))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz must be a gzipped idx file"):
        datasets.read("mnist", tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-9], lambda raw: raw[:60] + bytes(9) + raw[69:]]
)
def test_gzipped_file_that_is_damaged_is_named(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    write_mnist(tmp_path / "mnist")
    path = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(datasets.CorruptFileError, match=r"t10k-images-idx3-ubyte\.gz is damaged"):
        datasets.read("mnist", tmp_path)


def test_labels_of_other_samples_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", train=40, test=10)
    write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte.gz", labels(10))
    with pytest.raises(datasets.CorruptFileError, match="each of 40 samples, got 10 labels"):
        datasets.read("mnist", tmp_path)


def test_other_features_than_published_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a9a").mkdir()
    for name in ("a9a.gz", "a9a.t.gz"):
        (tmp_path / "a9a" / name).write_bytes(gzip.compress(b"+1 3:1 999:1\n"))
    with pytest.raises(datasets.CorruptFileError, match="a9a is damaged: index 998"):
        datasets.read("adult", tmp_path)


def cifar_batches() -> tuple[dict[str, bytes], datasets.Arrays]:
    """Return six batches as published: by Python 2, with bytes as keys, labels in a list."""
    rows = [images(4, 3072) for _ in range(6)]
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    files = {
        name: pickle.dumps({b"data": data, b"labels": labels(4).tolist()}, protocol=2)
        for name, data in zip(names, rows, strict=True)
    }
    x = [data.reshape(-1, 3, 32, 32) for data in rows]
    train, y = np.concatenate(x[:5]), np.concatenate([labels(4)] * 5)
    return files, datasets.Arrays(train, y, x[5], labels(4))


@pytest.mark.parametrize("inside", ["", "cifar10"])
def test_cifar10_as_published(tmp_path: Path, inside: str) -> None:
    files, made = cifar_batches()
    top = tmp_path / "archive" / inside
    top.mkdir(parents=True)
    with tarfile.open(top / "cifar-10-python.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert same(datasets.read("cifar10", tmp_path / "archive"), made)

    folder = tmp_path / "unpacked" / inside / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert same(datasets.read("cifar10", tmp_path / "unpacked"), made)


def test_pickle_of_anything_but_arrays_is_refused(tmp_path: Path) -> None:
    files, _ = cifar_batches()
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in files:
        (folder / name).write_bytes(pickle.dumps({b"data": print}))
    with pytest.raises(pickle.UnpicklingError, match=r"arrays only, got builtins\.print"):
        datasets.read("cifar10", tmp_path)


def test_cifar10_in_strips(tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    features = pytest.importorskip("PIL.features")
    if not features.check("webp"):
        pytest.skip("this Pillow cannot write WebP")
    folder = tmp_path / "cifar10"
    folder.mkdir()
    made = {}
    for part in ("train_a", "train_b", "test"):
        strips, made[part] = [images(3, 32, 32, 3), images(2, 32, 32, 3)], []
        with zipfile.ZipFile(folder / f"{part}.zip", "w") as archive:
            for number, strip in enumerate(strips):
                file = io.BytesIO()
                pil.fromarray(strip.reshape(-1, 32, 3)).save(file, "webp", lossless=True)
                archive.writestr(f"{number:03}.webp", file.getvalue())
            archive.writestr("labels.u8", labels(5).tobytes())
        made[part] = np.concatenate(strips).transpose(0, 3, 1, 2)
    expected = datasets.Arrays(
        np.concatenate([made["train_a"], made["train_b"]]),
        np.concatenate([labels(5)] * 2),
        made["test"],
        labels(5),
    )
    assert same(datasets.read("cifar10", tmp_path), expected)


def test_adult(tmp_path: Path) -> None:
    folder = tmp_path / "a9a"
    folder.mkdir()
    (folder / "a9a.gz").write_bytes(gzip.compress(b"-1 1:1 3:1 123:1 \n+1 2:1 \n"))
    (folder / "a9a.t.gz").write_bytes(gzip.compress(b"+1 122:1 \n"))
    x, y, test, test_labels = datasets.read("adult", tmp_path)
    assert x.shape == (2, 123)
    assert np.flatnonzero(x[0]).tolist() == [0, 2, 122]
    assert np.flatnonzero(x[1]).tolist() == [1]
    assert y.tolist() == [0, 1]
    assert np.flatnonzero(test[0]).tolist() == [121]
    assert test_labels.tolist() == [1]
    assert torch.equal(datasets.scaled("adult", x), torch.tensor(x).float())


# Splits


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, datasets.Arrays]:
    small = dataclasses.replace(datasets.SOURCES["mnist"], held_out=15)
    monkeypatch.setitem(datasets.SOURCES, "mnist", small)
    return tmp_path, write_mnist(tmp_path / "mnist")


def test_validation_is_a_fixed_part_of_the_training_data(
    mnist: tuple[Path, datasets.Arrays],
) -> None:
    folder, made = mnist
    data = datasets.load("mnist", folder, normalise=False)
    assert data.validation is not None
    assert [len(split.targets) for split in (data.train, data.validation, data.test)] == [
        25,
        15,
        10,
    ]
    assert data.train.inputs.dtype == torch.uint8
    assert data.train.targets.dtype == torch.int64

    def rows(*splits: datasets.Split) -> list[tuple[bytes, int]]:
        return [
            (bytes(x.numpy().tobytes()), int(y))
            for split in splits
            for x, y in zip(split.inputs, split.targets, strict=True)
        ]

    everything = [(x.tobytes(), int(y)) for x, y in zip(made.train, made.train_labels, strict=True)]
    assert sorted(rows(data.train, data.validation)) == sorted(everything)
    assert np.array_equal(data.test.inputs.numpy(), made.test)
    again = datasets.load("mnist", folder, normalise=False)
    assert again.validation is not None
    assert torch.equal(again.validation.inputs, data.validation.inputs)
    everywhere = datasets.load("mnist", folder, hold_out=False, normalise=False)
    assert everywhere.validation is None
    assert np.array_equal(everywhere.train.inputs.numpy(), made.train)


def test_normalised(mnist: tuple[Path, datasets.Arrays]) -> None:
    folder, made = mnist
    data = datasets.load("mnist", folder, hold_out=False)
    expected = (torch.tensor(made.train).float() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(data.train.inputs, expected)
    moved = data.to("cpu")
    assert moved.validation is None
    assert torch.equal(moved.test.inputs, data.test.inputs)


# Places


def test_missing_files_say_where_and_how(tmp_path: Path) -> None:
    for name, needed in (("mnist", "mnist"), ("cifar10", "cifar-10-python"), ("adult", "a9a")):
        with pytest.raises(FileNotFoundError) as caught:
            datasets.load(name, tmp_path)
        for part in (name, needed, str(tmp_path), "--data", "TORCHPISA_DATA"):
            assert part in str(caught.value)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"name must be one of mnist, .*, got 'svhn'"):
        datasets.load("svhn")


def test_folder_by_argument_variable_or_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHPISA_DATA", raising=False)
    assert datasets.data_folder() == Path("data")
    monkeypatch.setenv("TORCHPISA_DATA", str(tmp_path))
    assert datasets.data_folder() == tmp_path
    assert datasets.data_folder("here") == Path("here")


def test_cache_is_used_where_its_folder_is(tmp_path: Path) -> None:
    made = write_mnist(tmp_path / "mnist")
    datasets.read("mnist", tmp_path)
    assert not (tmp_path / "cache").exists()
    (tmp_path / "cache").mkdir()
    datasets.read("mnist", tmp_path)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["mnist.npz"]
    for path in (tmp_path / "mnist").iterdir():
        path.unlink()
    assert same(datasets.read("mnist", tmp_path), made)


def test_a_damaged_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    write_mnist(tmp_path / "mnist")
    datasets.read("mnist", tmp_path)
    file = tmp_path / "cache" / "mnist.npz"
    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"no zip"):
        file.write_bytes(damaged)
        with pytest.raises(datasets.CorruptFileError, match=r"mnist\.npz is damaged.* Remove it"):
            datasets.read("mnist", tmp_path)


def test_digits_need_no_files(tmp_path: Path) -> None:
    data = datasets.load("digits", tmp_path / "nowhere")
    assert data.validation is not None
    sizes = [len(split.targets) for split in (data.train, data.validation, data.test)]
    assert sizes == [1000, 297, 500]
    assert data.train.inputs.shape == (1000, 64)
    assert data.train.inputs.min() == 0
    assert data.train.inputs.max() == 1


# The real ones


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("mnist", (60000, 1, 28, 28), 10000),
        ("fashion_mnist", (60000, 1, 28, 28), 10000),
        ("cifar10", (50000, 3, 32, 32), 10000),
        ("adult", (32561, 123), 16281),
    ],
)
def test_published_data(name: str, train: tuple[int, ...], test: int) -> None:
    try:
        arrays = datasets.read(name)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    source = datasets.SOURCES[name]
    assert arrays.train.shape == train
    assert len(arrays.test) == len(arrays.test_labels) == test
    assert set(arrays.train_labels) == set(range(source.classes))
    for channel, (mean, deviation) in enumerate(zip(source.mean, source.deviation, strict=True)):
        pixels = arrays.train[:, channel] / np.float32(255)
        assert pixels.mean(dtype=np.float64) == pytest.approx(mean, abs=6e-5)
        assert pixels.std(dtype=np.float64) == pytest.approx(deviation, abs=6e-5)
