"""Commands that are killed and given once more."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import __main__ as command
from recipes.gan import features

RUNS = {"vision": "resnet34_sisa_e2_seed0", "gan": "wgan_sisa_e4_seed0"}
RUNS["rnn"] = "lstm1_sisa_e2_seed0"


@pytest.mark.parametrize(("recipe", "name"), RUNS.items())
def test_a_killed_command_ends_like_one_that_was_not(
    recipe: str, name: str, tmp_path: Path
) -> None:
    """A process is killed as soon as there is a checkpoint: what it logs is equal to the bit."""
    if recipe == "gan" and features.missing_requirement("pixels"):
        pytest.skip("no torchmetrics")
    words = [recipe, "--only", name, "--data", str(tmp_path), "--device", "cpu", "--runs-only"]
    words += ["--checkpoints", str(tmp_path / "saved"), "--out"]
    file = tmp_path / "saved" / f"{name}.pt"
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes", *words, str(tmp_path / "killed")],
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
