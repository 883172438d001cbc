"""Commands that are killed and given once more."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes import __main__ as command
from recipes import training
from recipes.gan import features
from tests.distributed.processes import CONTEXT, TIMEOUT

RUNS = {"vision": "resnet34_sisa_e2_seed0", "gan": "wgan_sisa_e4_seed0"}
RUNS["rnn"] = "lstm1_sisa_e2_seed0"
# Two of them on a part of what their presets take, and less often measured.
FEWER: dict[str, dict[str, Any]] = {
    "vision": {"limit": 8},
    "gan": {"limit": 192, "fid_images": 128, "last_images": 128},
}


def small(recipe: str) -> Any:
    """Return a recipe whose preset `quick` takes less."""
    whole = command.RECIPES[recipe]
    quick = dataclasses.replace(whole.presets["quick"], **FEWER[recipe])
    return dataclasses.replace(whole, presets={"quick": quick})


def die_with_the_first_checkpoint(recipe: str, words: Sequence[str]) -> None:
    """Give a command, and be killed as soon as a checkpoint is written."""
    save = training.save_atomically

    def save_and_die(*arguments: Any) -> None:
        save(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    training.save_atomically = save_and_die
    command.RECIPES[recipe] = small(recipe)
    command.main([*words])


def kill_with_the_first_checkpoint(words: Sequence[str], file: Path) -> None:
    """Give a command in a process of its own, and kill it as soon as there is a checkpoint."""
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes", *words],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        limit = time.monotonic() + 240
        while not file.is_file():
            assert process.poll() is None, "it was done before it could be killed"
            assert time.monotonic() < limit
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(("recipe", "name"), RUNS.items())
def test_a_killed_command_ends_like_one_that_was_not(
    recipe: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed as soon as there is a checkpoint: what it logs is equal to the bit."""
    if recipe == "gan" and features.missing_requirement("pixels"):
        pytest.skip("no torchmetrics")
    words = [recipe, "--only", name, "--data", str(tmp_path), "--device", "cpu", "--runs-only"]
    words += ["--checkpoints", str(tmp_path / "saved"), "--out"]
    file = tmp_path / "saved" / f"{name}.pt"
    if recipe in FEWER:
        monkeypatch.setitem(command.RECIPES, recipe, small(recipe))
        process = CONTEXT.Process(
            target=die_with_the_first_checkpoint,
            args=(recipe, [*words, str(tmp_path / "killed")]),
            daemon=True,
        )
        process.start()
        process.join(TIMEOUT)
        assert process.exitcode == -signal.SIGKILL
    else:
        kill_with_the_first_checkpoint([*words, str(tmp_path / "killed")], file)
    assert file.is_file()
    log = tmp_path / "killed" / recipe / f"{name}.jsonl"
    assert '"seconds"' not in log.read_text(encoding="utf-8")
    runs = []
    for folder in ("killed", "whole"):
        command.main([*words, str(tmp_path / folder)])
        text = (tmp_path / folder / f"{recipe}.json").read_text(encoding="utf-8")
        runs.append(json.loads(text)["runs"][name])
        assert not file.exists()
    for run in runs:
        del run["seconds"], run["epoch_seconds"]
    assert runs[0] == runs[1]
