"""Texts, windows, the model, runs on Python's documentation, and what is said of wrong data."""

import dataclasses
import gzip
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import __main__ as command
from recipes.datasets import CorruptFileError
from recipes.rnn import RECIPE, corpus
from recipes.rnn.config import MILESTONES, PRESETS, Settings, Task, milestones, plan
from recipes.rnn.model import LanguageModel, Sizes
from recipes.rnn.results import TABLE
from recipes.rnn.run import RnnTraining, run, windows
from recipes.training import run_training

TINY = dataclasses.replace(PRESETS["quick"], limit=3000, sizes=Sizes(12, 16))
CPU = torch.device("cpu")


def tiny(name: str, layers: int = 1, epochs: int = 3) -> Settings:
    (only,) = plan(dataclasses.replace(TINY, tasks=(Task(layers, (name,), epochs),))).values()
    return only


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "elapsed"} for line in lines]


# Texts


@pytest.fixture
def treebank(tmp_path: Path) -> Path:
    folder = tmp_path / "ptb"
    folder.mkdir()
    (folder / "ptb.train.txt").write_text(" a b c \n b <unk> \n", encoding="utf-8")
    with gzip.open(folder / "ptb.valid.txt.gz", "wt", encoding="utf-8") as file:
        file.write(" c d \n")
    (folder / "ptb.test.txt").write_text(" a \n", encoding="utf-8")
    return tmp_path


def test_sentences_end_and_words_are_numbered(treebank: Path) -> None:
    text = corpus.load("ptb", str(treebank))
    assert text.train.tolist() == [0, 1, 2, 3, 1, 4, 3]  # 3 is the end of a sentence
    assert text.valid.tolist() == [2, 5, 3]
    assert text.test.tolist() == [0, 3]
    assert text.words == 6


def test_columns_are_parts_of_the_stream() -> None:
    assert corpus.columns(torch.arange(7), 3).t().tolist() == [[0, 1], [2, 3], [4, 5]]


def test_documentation_is_a_text() -> None:
    text = corpus.load("python", None, 5000)
    assert len(text.train) == 5000
    assert len(text.valid) == len(text.test) == 500
    assert 500 < text.words <= corpus.WORDS
    with pytest.raises(ValueError, match="corpus must be 'ptb' or 'python', got 'wiki'"):
        corpus.load("wiki")


def test_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no ptb\.train\.txt or ptb\.train\.txt\.gz") as caught:
        command.main(["rnn", "--preset", "short", "--data", str(tmp_path), "--runs-only"])
    assert str(tmp_path / "ptb") in str(caught.value)


def test_damaged_text_is_refused(treebank: Path) -> None:
    with pytest.raises(SystemExit, match=r"ptb\.train\.txt is damaged or another text: its SHA"):
        command.main(["rnn", "--preset", "short", "--data", str(treebank), "--runs-only"])
    with pytest.raises(SystemExit, match=r"ptb\.train\.txt is damaged or another text: its SHA"):
        command.main(["rnn", "--data", str(treebank), "--runs-only"])  # nor is it replaced
    (treebank / "ptb" / "ptb.train.txt").unlink()
    with pytest.raises(SystemExit, match=r"no ptb\.train\.txt or ptb\.train\.txt\.gz"):
        command.main(["rnn", "--data", str(treebank), "--runs-only"])
    (treebank / "ptb" / "ptb.train.txt.gz").write_bytes(b"no gzip")
    with pytest.raises(CorruptFileError, match=r"ptb\.train\.txt\.gz is damaged: Not a gzip"):
        corpus.verify(str(treebank))


# Windows


@pytest.mark.parametrize("parts", [1, 4])
def test_windows_take_every_word_once(parts: int) -> None:
    made = list(windows(1000, 24, parts, random.Random(0)))
    edges = [(part.start, part.stop) for window in made for part in window]
    assert edges[0][0] == 0
    assert edges[-1][1] == 999  # the last word is a target only
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    assert {len(window) for window in made} == {parts}
    sizes = [window[-1].stop - window[0].start for window in made]
    assert 18 < sum(sizes) / len(sizes) < 28
    assert len(set(sizes)) > 5
    for window in made:
        lengths = [part.stop - part.start for part in window]
        assert len(set(lengths[:-1])) <= 1
        assert 0 <= lengths[-1] - lengths[0] < parts


# The model


@pytest.mark.parametrize(
    ("layers", "count"),
    [(1, 5_293_200), (2, 13_632_400), (3, 24_221_600)],
)
def test_sizes(layers: int, count: int) -> None:
    with torch.device("meta"):
        model = LanguageModel(10_000, layers, Sizes())
    assert sum(param.numel() for param in model.parameters()) == count


def test_hidden_states_are_carried() -> None:
    model = LanguageModel(20, 2, Sizes(6, 8)).eval()
    words = torch.randint(20, (9, 3))
    whole, _ = model(words[:-1], words[1:], model.start(3))
    hidden = model.start(3)
    parts = []
    for start in (0, 4):
        plain, _ = model(words[start : start + 4], words[start + 1 : start + 5], hidden)
        parts.append(plain)
    torch.testing.assert_close(sum(parts) / 2, whole)
    assert all(state.abs().sum() > 0 and not state.requires_grad for state in hidden)


def test_regularisation_and_dropout_are_of_training() -> None:
    model = LanguageModel(20, 1, Sizes(6, 8))
    words = torch.randint(20, (9, 3))
    args = words[:-1], words[1:]
    losses = [model(*args, model.start(3))[0].item() for _ in range(2)]
    assert losses[0] != losses[1]
    plain, loss = model(*args, model.start(3))
    assert loss > plain
    model.eval()
    losses = [model(*args, model.start(3))[0].item() for _ in range(2)]
    assert losses[0] == losses[1]


# Runs


def test_quick_preset_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rnn", "--out", str(tmp_path), "--data", str(tmp_path), "--device", "cpu"]
    command.main([*words, "--only", "*isa*"])  # Adam is not ours
    output = capsys.readouterr().out
    assert output.startswith(f"Penn Treebank is not in {tmp_path / 'ptb'}: Python's documentation")
    assert "FAILS" not in output
    results = json.loads((tmp_path / "rnn.json").read_text(encoding="utf-8"))
    for name, run_ in results["runs"].items():
        assert run_["documentation"]
        assert run_["valid"] < 700, name  # of 2,000 words
    assert results["runs"]["lstm1_sisa_e2_seed0"]["valid"] < 400
    assert "| SISA | m 4, sigma 0.04, rho 400" in (tmp_path / "rnn.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["sisa", "misa", "adam"])
def test_a_stopped_run_ends_like_one_that_was_not(name: str, tmp_path: Path) -> None:
    settings = tiny(name, layers=2)
    whole = RnnTraining(settings, CPU, None)
    lines = list(run_training(whole, None))
    next(run_training(RnnTraining(settings, CPU, None), tmp_path, save_every=1))
    resumed = RnnTraining(settings, CPU, None)
    assert untimed(list(run_training(resumed, tmp_path))) == untimed(lines)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_sisa_takes_a_window_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    training = RnnTraining(tiny("sisa"), CPU, None)
    seen: list[slice] = []
    step = training.step
    monkeypatch.setattr(training, "step", lambda part: seen.append(part) or step(part))
    training.advance()
    assert len(seen) == 4 * training.optimizer.iteration
    assert seen[0].start == 0
    assert seen[3].stop == seen[4].start


@pytest.mark.parametrize("name", ["sisa", "misa", "sgd"])
@pytest.mark.parametrize("trained", [True, False])
def test_recurrent_matrices_can_stay_as_drawn(name: str, trained: bool) -> None:
    settings = dataclasses.replace(tiny(name, layers=2), train_recurrent=trained)
    training = RnnTraining(settings, CPU, None)
    before = {key: value.clone() for key, value in training.model.named_parameters()}
    training.advance()
    for key, value in training.model.named_parameters():
        stays = key.endswith("weight_hh_l0") and not trained
        assert torch.equal(value, before[key]) == stays, key


def test_the_log_is_of_numbers() -> None:
    (line, *_) = run(TINY, tiny("misa", epochs=1), device="cpu", data="nowhere")
    assert line["epoch"] == 1
    assert line["perplexity"] == pytest.approx(math.exp(math.log(line["perplexity"] or 0)))
    json.dumps(line)


# Plans


def test_milestones_keep_their_place_in_a_shorter_run() -> None:
    assert milestones(1, 200).steps == MILESTONES[1]
    assert [at for at, _ in milestones(1, 20).steps] == [9, 12, 16, 20]


def test_paper_has_the_table() -> None:
    runs = plan(PRESETS["paper"])
    for layers in (1, 2, 3):
        found = {run.choice.label for run in runs.values() if run.layers == layers}
        assert set(TABLE[layers]) <= found
    assert runs["lstm3_sisa_e200_seed0"].schedule.steps == MILESTONES[3]
    assert not any(run.train_recurrent for run in runs.values())
    assert plan(PRESETS["short_frozen"]) == {
        name: dataclasses.replace(run, train_recurrent=False)
        for name, run in plan(PRESETS["short"]).items()
    }
    short = [run for run in plan(PRESETS["short"]).values() if run.layers == 1]
    assert {run.choice.label for run in short} == {"sisa", "misa", "adam", "adabelief", "sgd"}
    assert len({(run.epochs, run.schedule) for run in short}) == 1
    assert RECIPE.length is not None
    assert RECIPE.length(short[0]) == short[0].epochs
