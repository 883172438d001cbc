"""Files of tokens in both forms, streams across them, and what a step takes."""

import lzma
from pathlib import Path

import numpy as np
import pytest

from recipes.datasets import CorruptFileError
from recipes.language import tokens
from recipes.language.tokens import Batches, Stream, locate, read_shard, windows

NUMBERS = np.arange(50_000, 50_100, dtype=np.uint16)


def header(count: int, magic: int = 20240520, version: int = 1) -> bytes:
    fields = np.zeros(256, "<i4")
    fields[:3] = magic, version, count
    return fields.tobytes()


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


# Files


@pytest.mark.parametrize("suffix", [".bin", ".bin.xz"])
@pytest.mark.parametrize("begins", [b"", header(100)])
def test_shard_in_every_form(tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = write(tmp_path / f"a{suffix}", begins + NUMBERS.tobytes())
    read = read_shard(path)
    assert read.dtype == np.uint16
    assert np.array_equal(read, NUMBERS)


@pytest.mark.parametrize("suffix", [".bin", ".bin.xz"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no tokens"),
        (header(0), "has no tokens"),
        (b"abc", "must be whole tokens of 2 bytes, got 3 bytes"),
        (header(100)[:200], "cut off in its header: 200 of 1024 bytes"),
        (header(101) + NUMBERS.tobytes(), "has 100 tokens, but its header says 101"),
        (header(100, version=7) + NUMBERS.tobytes(), "version 1 in its header, got 7"),
    ],
)
def test_odd_files(tmp_path: Path, suffix: str, data: bytes, message: str) -> None:
    path = write(tmp_path / f"a{suffix}", data)
    with pytest.raises(CorruptFileError, match=message) as caught:
        read_shard(path)
    assert str(path) in str(caught.value)
    assert "Copy the file again" in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file of tokens .*a\.bin"):
        read_shard(tmp_path / "a.bin")
    text = write(tmp_path / "a.txt", b"abcd")
    with pytest.raises(ValueError, match=r"must end in \.bin or \.bin\.xz"):
        read_shard(text)
    damaged = tmp_path / "a.bin.xz"
    damaged.write_bytes(lzma.compress(NUMBERS.tobytes())[:-20])
    with pytest.raises(CorruptFileError, match=r"a\.bin\.xz is damaged: it is not an xz file"):
        read_shard(damaged)


def test_files_are_found_in_order_and_uncompressed_first(tmp_path: Path) -> None:
    for name in (
        "train_gpt2_b.bin.xz",
        "train_gpt2_a.bin.xz",
        "train_gpt2_b.bin",
        "val_gpt2_a.bin",
    ):
        write(tmp_path / "gutenberg" / name, NUMBERS.tobytes())
    train, validation = locate("gutenberg", tmp_path)
    assert [path.name for path in train] == ["train_gpt2_a.bin.xz", "train_gpt2_b.bin"]
    assert [path.name for path in validation] == ["val_gpt2_a.bin"]
    both = tokens.load("gutenberg", str(tmp_path))
    assert [len(stream) for stream in both] == [200, 100]


def test_missing_tokens_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        locate("gutenberg", tmp_path)
    for part in ("gutenberg/train_gpt2_*.bin or .bin.xz", str(tmp_path), "--data", "Project"):
        assert part in str(caught.value)
    write(tmp_path / "gutenberg/train_gpt2_1.bin", NUMBERS.tobytes())
    with pytest.raises(FileNotFoundError, match="val_gpt2"):
        locate("gutenberg", tmp_path)
    with pytest.raises(ValueError, match="tokens must be one of gutenberg, fineweb, prepared"):
        locate("wikipedia", tmp_path)


def test_tokens_must_suit_the_run(tmp_path: Path) -> None:
    write(tmp_path / "train_0.bin", NUMBERS.tobytes())
    write(tmp_path / "val_0.bin", NUMBERS[:31].tobytes())
    run = {"sequences": 3, "validation": 2, "context": 15, "vocabulary": 50_100}
    tokens.verify("prepared", str(tmp_path), **run)
    for change, message in (
        ({"sequences": 7}, r"at least 106 to train on, 7 sequences of 15; got 100\. Prepare more"),
        ({"validation": 3}, r"at least 46 to validate on, 3 sequences of 15; got 31\. Prepare"),
        ({"vocabulary": 50_045}, r"below 50045, the model's vocabulary, got 50045\. Choose"),
    ):
        with pytest.raises(CorruptFileError, match=message) as caught:
            tokens.verify("prepared", str(tmp_path), **{**run, **change})
        assert f"the tokens 'prepared' in {tmp_path}" in str(caught.value)


def test_text_of_the_library_needs_no_file() -> None:
    assert locate("python", "nowhere") == ()
    train, validation = tokens.load("python")
    assert len(train) > 500_000
    assert len(validation) > 50_000
    assert train.read(0, 1000).max() < 256


# Streams


def test_stream_reads_across_shards() -> None:
    whole = np.arange(60, dtype=np.uint16)
    stream = Stream([whole[:10], whole[10:11], whole[11:40], whole[40:]])
    assert len(stream) == 60
    for start in range(61):
        for length in range(61 - start):
            assert np.array_equal(stream.read(start, length), whole[start : start + length])
    with pytest.raises(ValueError, match="must lie in the 60 tokens, got 50 and 11"):
        stream.read(50, 11)


def test_windows_share_one_token() -> None:
    stream = Stream([np.arange(100, dtype=np.uint16)])
    assert windows(stream, 10, 3, 4).tolist() == [
        [10, 11, 12, 13, 14],
        [14, 15, 16, 17, 18],
        [18, 19, 20, 21, 22],
    ]
    with pytest.raises(ValueError, match="tokens must be below 20, the vocabulary, got 22"):
        windows(stream, 10, 3, 4, vocabulary=20)


def test_validation_tokens_are_split_in_two() -> None:
    stream = Stream([np.arange(100, dtype=np.uint16)])
    to_choose, to_report = tokens.held_out(stream, 3, 10)
    assert to_choose[:, 0].tolist() == [0, 10, 20]
    assert to_report[:, 0].tolist() == [30, 40, 50]
    _, rest = tokens.held_out(stream, 7, 10)
    assert rest[:, 0].tolist() == [70, 80]  # what there is
    _, nothing = tokens.held_out(stream, 9, 10)
    assert len(nothing) == 0


def test_batches_go_through_contiguous_parts() -> None:
    stream = Stream([np.arange(200, dtype=np.uint16)])
    data = Batches(stream, parts=2, sequences=3, context=4)
    assert data.steps == 8  # (199 // 4) // 6
    for part in range(2):
        drawn = np.concatenate([data.draw(step, part) for step in range(8)])
        assert drawn.shape == (24, 5)
        inputs = np.sort(drawn[:, :-1].ravel())
        assert inputs.tolist() == list(range(96 * part, 96 * (part + 1)))  # each token once
    # One stripe follows its text from step to step, and begins again.
    assert data.draw(0, 1)[0, -1] == data.draw(1, 1)[0, 0]
    assert np.array_equal(data.draw(8, 1), data.draw(0, 1))
    with pytest.raises(ValueError, match=r"part must be in \[0, 2\), got 2"):
        data.draw(0, 2)


def test_number_of_parts_changes_no_step() -> None:
    stream = Stream([np.arange(5000, dtype=np.uint16)])
    one, four = Batches(stream, 1, 16, 8), Batches(stream, 4, 4, 8)
    for step in (0, 7, 100):
        together = np.concatenate([four.draw(step, part) for part in range(4)])
        assert np.array_equal(one.draw(step, 0), together)


def test_too_few_tokens() -> None:
    enough = Stream([np.zeros(2 * 3 * 4 + 1, np.uint16)])
    assert Batches(enough, 2, 3, 4).steps == 1
    short = Stream([np.zeros(2 * 3 * 4, np.uint16)])
    with pytest.raises(ValueError, match="need at least 25 tokens, got 24"):
        Batches(short, 2, 3, 4)
