"""Runs of the tiny model: what they log, resuming, divergence, memory."""

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes import __main__ as command
from recipes.language import RECIPE, tokens, tune
from recipes.language.check import QUICK_SHARE
from recipes.language.config import PRESETS, Config, Settings, Trial, plan
from recipes.language.model import SIZES, load_weights
from recipes.language.optimizers import NAMES, Choice, choose, missing_requirement
from recipes.language.run import LanguageTraining, compiled_model, micro_batch, run
from recipes.language.tokens import write_shard

CONFIG = dataclasses.replace(
    PRESETS["quick"], steps=12, sequences=8, micro=4, validation=8, trials=()
)
CONFIG = dataclasses.replace(CONFIG, log_every=2, validate_every=4, save_every=4)
TIMES = ("elapsed", "optimizer_ms")


def settings(choice: Choice, batches: int = 1, **changes: Any) -> Settings:
    config = dataclasses.replace(CONFIG, trials=(Trial(choice, choice.name, batches),))
    (only,) = plan(config).values()
    return dataclasses.replace(only, **changes)


def logged(run_settings: Settings, config: Config = CONFIG, **options: Any) -> list[dict[str, Any]]:
    return list(run(config, run_settings, device="cpu", **options))


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def test_what_is_logged() -> None:
    lines = logged(settings(choose("nsisa"), 4))
    assert [line["step"] for line in lines] == [0, 2, 4, 6, 8, 10, 12]
    assert [line["tokens"] for line in lines] == [512 * line["step"] for line in lines]
    assert [line["val_loss"] is not None for line in lines] == [1, 0, 1, 0, 1, 0, 1]
    assert lines[0]["val_loss"] == pytest.approx(math.log(256), abs=0.15)
    assert lines[-1]["val_loss"] < lines[0]["val_loss"] - 0.5
    assert lines[0]["loss"] is None
    assert all(line["loss"] > 0 and line["optimizer_ms"] > 0 for line in lines[1:])
    times = [line["elapsed"] for line in lines]
    assert times == sorted(times)
    assert not any(line["diverged"] for line in lines)
    assert lines[-1]["state_bytes"] > 4 * 8 * 12 * 64**2 * 2  # four duals and momenta
    json.dumps(lines)


def test_last_weights_are_tested_on_other_tokens() -> None:
    run_settings = settings(choose("adamw"), steps=2)
    training = LanguageTraining(run_settings, torch.device("cpu"), None)
    assert torch.equal(training.validation[-1, -1], training.test[0, 0])  # one after the other
    assert len(training.test) == len(training.validation) == 8
    *others, last = logged(run_settings)
    assert all(line["test_loss"] is None for line in others)
    assert last["test_loss"] == pytest.approx(last["val_loss"], abs=0.5)
    assert last["test_loss"] != last["val_loss"]


def test_weights_of_a_finished_run_are_left(tmp_path: Path) -> None:
    run_settings = settings(choose("adamw"), steps=4)
    stopped = run(CONFIG, run_settings, device="cpu", save_weights=str(tmp_path))
    list(itertools.islice(stopped, 2))
    stopped.close()
    assert not list(tmp_path.iterdir())
    lines = logged(run_settings, save_weights=str(tmp_path))
    training = LanguageTraining(run_settings, torch.device("cpu"), None)
    training.model = load_weights(tmp_path / f"{run_settings.name}.pt")
    assert training.evaluate(training.validation) == lines[-1]["val_loss"]


@pytest.mark.parametrize("run_settings", plan(PRESETS["quick"]).values(), ids=lambda run: run.name)
def test_quick_preset_learns_python(run_settings: Settings) -> None:
    """A third of the preset, to the losses that the whole of it has to reach and below."""
    reason = missing_requirement(run_settings.choice)
    if reason is not None:
        pytest.skip(reason)
    lines = logged(dataclasses.replace(run_settings, steps=60), PRESETS["quick"])
    # Bytes of Python's own source: a guess has 5.5 nats, frequencies of bytes 3.2. That
    # source depends on the version: MISA ends at 2.70 with Python 3.11, at 2.74 with 3.10.
    most = {"misa": 2.8, "sisa": QUICK_SHARE * math.log(256)}
    assert lines[0]["val_loss"] > 5.3
    assert lines[-1]["test_loss"] < most.get(run_settings.choice.name, 2.9)


def test_a_run_is_a_function_of_its_settings() -> None:
    run_settings = settings(choose("sisa"))
    first = untimed(logged(run_settings))
    assert untimed(logged(run_settings)) == first
    assert untimed(logged(dataclasses.replace(run_settings, seed=1))) != first


def test_micro_batches_change_rounding_only() -> None:
    run_settings = settings(choose("sisa"), steps=4)
    whole = logged(dataclasses.replace(run_settings, micro=8))
    for micro in (1, 3, 0):
        lines = logged(dataclasses.replace(run_settings, micro=micro))
        assert lines[-1]["val_loss"] == pytest.approx(whole[-1]["val_loss"], rel=1e-4)


def test_a_round_is_a_step_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    training = LanguageTraining(settings(choose("nsisa"), 4), torch.device("cpu"), None)
    (optimizer,) = training.team.consensus
    drawn: list[tuple[int, int]] = []
    draw = training.data.draw
    monkeypatch.setattr(
        training.data, "draw", lambda step, part: drawn.append((step, part)) or draw(step, part)
    )
    for _ in range(2):
        training.round()
    assert drawn == list(itertools.product(range(2), range(4)))
    assert optimizer.iteration == 2
    assert optimizer.synced
    assert training.data.sequences == 2


@pytest.mark.parametrize(("name", "batches"), [("sisa", 1), *((name, 4) for name in NAMES)])
def test_resumed_run_is_bit_equal(tmp_path: Path, name: str, batches: int) -> None:
    run_settings = settings(choose(name), batches, steps=8)
    reason = missing_requirement(run_settings.choice)
    if reason is not None:
        pytest.skip(reason)
    whole = untimed(logged(run_settings))
    interrupted = run(CONFIG, run_settings, device="cpu", checkpoints=str(tmp_path))
    before = list(itertools.islice(interrupted, 4))  # steps 0, 2, 4 (saved) and 6
    interrupted.close()
    assert [file.name for file in tmp_path.iterdir()] == [f"{run_settings.name}.pt"]
    resumed = logged(run_settings, checkpoints=str(tmp_path))
    assert untimed(resumed) == whole
    assert resumed[:3] == before[:3]  # handed out again, with their times
    assert resumed[3]["elapsed"] > resumed[2]["elapsed"]
    assert not list(tmp_path.iterdir())


def test_checkpoint_of_other_settings_is_not_used(tmp_path: Path) -> None:
    run_settings = settings(choose("sisa"), steps=8)
    list(itertools.islice(run(CONFIG, run_settings, device="cpu", checkpoints=str(tmp_path)), 3))
    other = dataclasses.replace(run_settings, choice=choose("sisa", sigma=0.5))
    assert other.name == run_settings.name
    assert untimed(logged(other, checkpoints=str(tmp_path))) == untimed(logged(other))


@pytest.mark.parametrize("lr", [1e4, 1e30])
def test_diverged_run_ends_early(lr: float) -> None:
    lines = logged(settings(choose("adamw", lr=lr)))
    assert lines[-1]["diverged"]
    assert lines[-1]["step"] < 12
    assert not any(line["diverged"] for line in lines[:-1])
    assert "NaN" not in json.dumps(lines)
    assert "Infinity" not in json.dumps(lines)


def test_first_weights_may_guess_badly() -> None:
    """Those of 1.5B parameters do; they are not for an optimizer to answer for."""
    training = LanguageTraining(settings(choose("adamw")), torch.device("cpu"), None)
    with torch.no_grad():
        for param in training.model.parameters():
            param.mul_(30)
    line = training.first_line()
    assert line["val_loss"] > 2 * math.log(SIZES["tiny"].vocabulary)
    assert not line["diverged"]


def test_compile_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("torch.compile", lambda part, **options: asked.append(part) or part)
    compiled_model.cache_clear()
    run_settings = settings(choose("sisa"), steps=2)
    try:
        assert untimed(logged(run_settings, compile=True)) == untimed(logged(run_settings))
    finally:
        compiled_model.cache_clear()
    assert len(asked) == 3  # two blocks and the output


def test_micro_batch_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert micro_batch(SIZES["tiny"], 16, cpu) == 16
    assert micro_batch(SIZES["gpt2"], 64, cpu) == 1
    for free, expected in ((139, 64), (80, 32), (24, 16), (8, 4), (0, 1)):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda d, free=free: (free * 2**30, 0))
        assert micro_batch(SIZES["gpt2"], 64, gpu) == expected
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda d: (139 * 2**30, 0))
    assert micro_batch(SIZES["gpt2"], 48, gpu) == 48


# The commands


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    trials = tuple(Trial(choose(name), name) for name in ("sisa", "misa", "soap"))
    config = dataclasses.replace(CONFIG, trials=trials, steps=4)
    recipe = dataclasses.replace(RECIPE, presets={"quick": config})
    monkeypatch.setitem(command.RECIPES, "language", recipe)
    monkeypatch.setattr("recipes.language.tune.PRESETS", {"quick": config})
    # By the module itself: the package has a function of the same name.
    monkeypatch.setattr(sys.modules["recipes.language.check"], "QUICK_SHARE", 2.0)
    monkeypatch.chdir(tmp_path)
    return config


@pytest.mark.usefixtures("small")
def test_command_leaves_out_what_cannot_be_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    reasons = {"misa": "no such thing", "soap": "sold out"}
    recipe = dataclasses.replace(
        command.RECIPES["language"],
        missing_requirement=lambda run_settings: reasons.get(run_settings.choice.name),
    )
    monkeypatch.setitem(command.RECIPES, "language", recipe)
    command.main(["language", "--device", "cpu", "--checkpoints", "saved"])
    out = capsys.readouterr().out
    assert "misa_m1_seed0: left out, no such thing" in out
    assert "2 of 3 runs are still to be done" in out
    results = json.loads(Path("runs/quick/language.json").read_text(encoding="utf-8"))
    assert list(results["runs"]) == ["sisa_m1_seed0"]
    assert results["missing"] == ["misa_m1_seed0", "soap_m1_seed0"]
    assert results["runs"]["sisa_m1_seed0"]["step"] == [0, 2, 4]
    for suffix in ("md", "svg"):
        assert Path(f"runs/quick/language.{suffix}").stat().st_size


def test_missing_tokens_end_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    words = ["language", "--preset", "pilot", "--data", str(tmp_path), "--only", "adamw*"]
    with pytest.raises(SystemExit, match="gutenberg/train_gpt2_"):
        command.main([*words, "--device", "cpu", "--out", str(tmp_path)])


def test_tokens_that_do_not_suit_end_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    write_shard(tmp_path / "val_0.bin", np.zeros(5000, np.uint16))
    words = ["language", "--tokens", "prepared", "--data", str(tmp_path), "--device", "cpu"]
    words += ["--out", str(tmp_path / "out")]
    write_shard(tmp_path / "train_0.bin", np.zeros(100, np.uint16))
    with pytest.raises(SystemExit, match="must be at least 1,025 to train on"):
        command.main(words)
    damaged = tmp_path / "train_1.bin"
    write_shard(damaged, np.zeros(5000, np.uint16))
    damaged.write_bytes(damaged.read_bytes()[:-2])
    tokens.load.cache_clear()
    with pytest.raises(SystemExit, match=r"train_1\.bin is damaged: it has 4999 tokens, but"):
        command.main(words)
    assert not list((tmp_path / "out").rglob("*.jsonl"))


def configured(*words: str) -> dict[str, Settings]:
    """Return the runs that the command would do with these words."""
    args = command.make_parser("language", RECIPE).parse_args(words)
    return plan(RECIPE.configure(RECIPE.presets[args.preset], args))


def test_two_layers_on_tokens_of_gpt2(tmp_path: Path) -> None:
    runs = configured("--tokens", "prepared")
    assert {run.model for run in runs.values()} == {"gpt2-tiny"}
    run_settings = runs["gpt2-tiny_misa_rest_own_m1_seed0"]
    counted = np.tile(np.arange(50_000, 50_257, dtype=np.uint16), 30)
    for kind in ("train", "val"):
        write_shard(tmp_path / f"{kind}_0.bin", counted)
    small = dataclasses.replace(run_settings, steps=3, log_every=3, sequences=4, validation=2)
    first, last = run(CONFIG, small, device="cpu", data=str(tmp_path))
    assert first["val_loss"] == pytest.approx(math.log(50_257), abs=0.5)
    assert last["val_loss"] < first["val_loss"]


def test_runs_of_another_model_are_named_after_it() -> None:
    """So that neither logs nor weights of two sizes get in each other's way."""
    assert list(configured("--preset", "plain", "--model", "transformers/gpt2")) == [
        *("misa_m1_seed0", "adamw_m1_seed0", "muon_m1_seed0")
    ]
    larger = configured("--preset", "plain", "--model", "transformers/gpt2-medium")
    assert next(iter(larger)) == "transformers-gpt2-medium_misa_m1_seed0"
    assert {run.model for run in larger.values()} == {"transformers/gpt2-medium"}


def test_one_of_several_sizes() -> None:
    runs = configured("--preset", "sizes", "--model", "gpt2-xl")
    assert len(runs) == 4
    everything = plan(PRESETS["sizes"])
    assert all(run == everything[name] for name, run in runs.items())
    with pytest.raises(ValueError, match="--model must be gpt2-medium or gpt2-xl with this preset"):
        configured("--preset", "sizes", "--model", "gpt2")


@pytest.mark.usefixtures("small")
def test_tuning_counts_all_trials(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--optimizer", "sisa", "--device", "cpu", "--out", "there", "--grid"]
    tune.main([*words, "sigma=0.3,3", "warm_up=2"])
    tune.main([*words, "sigma=3", "warm_down=0.5"])
    saved = json.loads(Path("there/quick_sisa_m1.json").read_text(encoding="utf-8"))
    assert saved["count"] == 3
    assert next(iter(saved["trials"])) == "sisa_sigma0.3_warm_up2_steps4_m1_seed0"
    choices = [trial["settings"]["choice"] for trial in saved["trials"].values()]
    assert [choice["options"]["sigma"] for choice in choices] == [0.3, 3.0, 3.0]
    assert [choice["warm_up"] for choice in choices] == [2, 2, 0]
    assert choices[2]["warm_down"] == 0.5
    assert "best of 3: sisa" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tune.main([*words, "sigma"])
    assert "--grid must look like sigma=1,2,5, got 'sigma'" in capsys.readouterr().err
    for word in ("scheme=foo", "sigma=-1", "slope=1", "warm_up=foo"):
        with pytest.raises(SystemExit):
            tune.main([*words, word])
        assert "error: --grid: " in capsys.readouterr().err
