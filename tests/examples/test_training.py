"""The examples under torchrun: they learn, resume to the last bit, and say what they cannot do."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import ROOT, forked, torchrun
from torchpisa.distributed import export

EXAMPLES = ROOT / "examples"
fsdp = pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 has no FSDP2 on CPUs")
LINE = re.compile(r"^step +(\d+)  training loss ([\d.]+)  validation loss ([\d.]+)$", re.MULTILINE)


def lines(output: str) -> list[tuple[int, float, float]]:
    return [
        (int(step), float(training), float(validation))
        for step, training, validation in LINE.findall(output)
    ]


@pytest.mark.parametrize(
    ("name", "resumes"), [("ddp", False), pytest.param("hsdp", True, marks=fsdp)]
)
def test_learns_and_resumes(name: str, resumes: bool, tmp_path: Path) -> None:
    """Both by examples/text.py, so one of them is enough for resuming, and for torchrun."""
    folder = tmp_path / "checkpoints"
    command = [EXAMPLES / f"{name}.py", "--steps", 6, "--checkpoint", folder, "--every", 2]
    done = (forked if resumes else torchrun)(*command, ranks=2)
    assert done.returncode == 0, done.stderr
    whole = lines(done.stdout)
    assert [step for step, _, _ in whole] == list(range(1, 7))
    for losses in list(zip(*whole, strict=True))[1:]:
        assert losses[0] > losses[-1]
        assert losses[-1] < 4  # of the untrained model: log(256) = 5.5
    (bits,) = re.findall(r"^sisa: ([\d.]+) bits per byte", done.stdout, re.MULTILINE)
    assert float(bits) == pytest.approx(whole[-1][2] / 0.6931, rel=1e-3)
    saved = sorted(path.name for path in folder.iterdir())
    assert saved == ["step-000002", "step-000004", "step-000006"]
    if not resumes:
        return

    export(folder / "step-000006", tmp_path / "whole.pt")
    shutil.rmtree(folder / "step-000006")
    again = forked(*command, ranks=2)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith(f"resumed from {folder / 'step-000004'}\n")
    assert lines(again.stdout) == whole[-2:]
    export(folder / "step-000006", tmp_path / "resumed.pt")
    first, second = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "resumed")
    )
    assert first["model"].keys() == second["model"].keys()
    for key, value in first["model"].items():
        assert torch.equal(value, second["model"][key]), key
    for number, state in first["optimizer"]["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, second["optimizer"]["state"][number][key]), key


@pytest.mark.parametrize(
    "options",
    [
        ["ddp.py", "--optimizer", "adamw"],
        pytest.param(["hsdp.py", "--optimizer", "nsisa", "--reduce-dtype", "bfloat16"], marks=fsdp),
    ],
    ids=["adamw", "nsisa"],
)
def test_runs_alone(options: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    name, *rest = options
    done = forked(EXAMPLES / name, *rest, "--steps", 6, "--text", text)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout)[-1][2] < lines(done.stdout)[0][2]
    assert f"{rest[1]}: " in done.stdout


REFUSED = [
    ("ddp", ["--steps", "0"], "argument --steps: must be a whole number >= 1, got '0'"),
    ("ddp", ["--optimizer", "adamw", "--checkpoint", "x"], "--checkpoint and --reduce-dtype"),
    ("ddp", ["--text", "CITATION.cff"], "--text must have more than 2048 bytes, got "),
    ("hsdp", ["--replicas", "3"], "--replicas must divide the number of processes 1, got 3"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_bad_options_are_refused(name: str, options: list[str], message: str) -> None:
    done = forked(EXAMPLES / f"{name}.py", *options)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}.py: error: {message}")
    assert not done.stdout


def test_several_processes_complain_once() -> None:
    done = forked(EXAMPLES / "hsdp.py", "--text", "nowhere", ranks=2)
    assert done.returncode != 0
    assert done.stderr.count("hsdp.py: error: --text cannot be read: ") == 1, done.stderr
