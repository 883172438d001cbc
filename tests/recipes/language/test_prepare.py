"""Texts become files of tokens, with GPT-2's BPE or one of the same kind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes import __main__ as command
from recipes.datasets import CorruptFileError, data_folder
from recipes.language import tokens
from recipes.language.prepare import END, encode, load_tokenizer, prepare

tokenizers = pytest.importorskip("tokenizers")

TEXT = "The whale  swam.\n\n\tIt swam on,\nand on;\r\n  it's 1851 — \n\nthe sea.\n" * 20


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a vocabulary of 300 tokens, in the files that GPT-2's has."""
    folder = tmp_path_factory.mktemp("bpe")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator([TEXT], vocab_size=300, special_tokens=[END], show_progress=False)
    trained.save_model(str(folder))
    return folder


@pytest.fixture
def tokenizer(bpe: Path) -> Any:
    return load_tokenizer(bpe)


def test_files_have_the_names_of_either_house(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "encoder.json").write_bytes((bpe / "vocab.json").read_bytes())
    (tmp_path / "vocab.bpe").write_bytes((bpe / "merges.txt").read_bytes())
    assert load_tokenizer(tmp_path).encode(TEXT).ids == load_tokenizer(bpe).encode(TEXT).ids
    with pytest.raises(FileNotFoundError, match=r"encoder.json and vocab.bpe or vocab.json"):
        load_tokenizer(tmp_path / "elsewhere")


def test_damaged_files_are_named(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_bytes((bpe / "vocab.json").read_bytes()[:100])
    (tmp_path / "merges.txt").write_bytes((bpe / "merges.txt").read_bytes())
    with pytest.raises(CorruptFileError, match=r"vocab\.json or merges\.txt in .* is damaged: "):
        load_tokenizer(tmp_path)


def test_tokens_of_gpt2() -> None:
    try:
        tokenizer = load_tokenizer(data_folder() / "gpt2-bpe")
    except FileNotFoundError:
        pytest.skip("GPT-2's vocabulary is not in the data folder")
    assert tokenizer.encode("Hello world").ids == [15496, 995]
    assert tokenizer.token_to_id(END) == 50256


@pytest.mark.parametrize("size", [7, 60, 10_000])
def test_pieces_do_not_change_the_tokens(tmp_path: Path, tokenizer: Any, size: int) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    found = encode(path, tokenizer, size)
    assert found[0] == tokenizer.token_to_id(END)
    assert found[1:].tolist() == tokenizer.encode(TEXT).ids
    assert tokenizer.decode(found[1:].tolist()) == TEXT


def test_shards_are_what_the_recipe_reads(tmp_path: Path, tokenizer: Any) -> None:
    texts = [tmp_path / f"{name}.txt" for name in "ab"]
    for text in texts:
        text.write_bytes(TEXT.encode())
    counts = prepare(texts, tokenizer, tmp_path / "out", 0.1, shard=100)
    whole = encode(texts[0], tokenizer)
    kept = round(0.1 * len(whole))
    assert counts == {"train": 2 * (len(whole) - kept), "val": 2 * kept}
    train, validation = tokens.load("prepared", str(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("train_*.bin"))) == -(-counts["train"] // 100)
    assert np.array_equal(train.read(0, len(train)), np.tile(whole[:-kept], 2))
    assert np.array_equal(validation.read(0, len(validation)), np.tile(whole[-kept:], 2))
    with pytest.raises(ValueError, match="out must be a folder without files of tokens"):
        prepare(texts, tokenizer, tmp_path / "out", 0.1)
    with pytest.raises(ValueError, match=r"validation must be in \(0, 1\), got 1.0"):
        prepare(texts, tokenizer, tmp_path / "new", 1.0)


def test_files_that_are_no_text(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="must be text in UTF-8"):
        encode(path, tokenizer)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        encode(path, tokenizer)


def test_command(tmp_path: Path, bpe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT, encoding="utf-8")
    words = ["language", "prepare", str(tmp_path / "texts"), "--bpe", str(bpe)]
    command.main([*words, "--out", str(tmp_path / "out")])
    assert "tokens to train on" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="TEXT must be a file or a folder"):
        command.main(["language", "prepare", "no.txt", "--bpe", str(bpe), "--out", "out"])
