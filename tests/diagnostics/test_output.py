"""Output of rows: TensorBoard, and files that survive a kill."""

import csv
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.diagnostics.test_diagnostics import Rows, iterations, train
from tests.diagnostics.test_measure import network
from tests.distributed.processes import run
from torchpisa import SISA
from torchpisa.diagnostics import Diagnostics
from torchpisa.diagnostics.output import COLUMNS

# Noise and unequal data, where it is right to warn.
pytestmark = pytest.mark.filterwarnings("ignore:the . batches hardly agree:UserWarning")


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.append((tag, value, step))


def test_tensorboard() -> None:
    model, writer = network(), Writer()
    opt = SISA(model.parameters(), batches=2)
    with Diagnostics(opt, every=2, tensorboard=writer) as watch:
        train(model, opt, 2)
        row = watch.latest
    assert len(writer.written) == len(row) - 1
    for tag, value, step in writer.written:
        assert tag.startswith("torchpisa/")
        assert row[tag.removeprefix("torchpisa/")] == value
        assert step == 2


def read(path: Path) -> Rows:
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [{name: float(value) for name, value in line.items() if value} for line in lines]


def test_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, rows = network(), []  # type: tuple[nn.Module, Rows]
    opt = SISA(model.parameters())
    with Diagnostics(opt, every=1, csv="run.csv", callback=rows.append):
        assert Path("run.csv").read_text() == ",".join(COLUMNS) + "\n"
        os.mkdir("elsewhere")
        os.chdir("elsewhere")
        train(model, opt, 3)
        assert read(tmp_path / "run.csv") == rows  # flushed, and all digits
    assert "spread" not in rows[0]
    with Diagnostics(opt, every=1, csv=tmp_path / "run.csv", callback=rows.append):
        train(model, opt, 2)
    assert iterations(rows) == [1, 2, 3, 4, 5]
    assert read(tmp_path / "run.csv") == rows


def killed(path: str, kept: str) -> None:
    model = network()
    opt = SISA(model.parameters())

    def kill(row: dict[str, float]) -> None:
        if row["iteration"] == 4:
            torch.save((model.state_dict(), opt.state_dict()), kept)
        if row["iteration"] == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    Diagnostics(opt, every=2, csv=path, callback=kill)
    train(model, opt, 100)


def test_csv_of_a_killed_run_goes_on(tmp_path: Path) -> None:
    path, kept = tmp_path / "run.csv", tmp_path / "checkpoint.pt"
    assert run(killed, 1, str(path), str(kept), killed=0) == [None]
    assert iterations(read(path)) == [2, 4, 6]
    content = path.read_text()
    path.write_text(content + "8,0.12")  # as if it had been killed while it wrote
    model = network()
    opt = SISA(model.parameters())
    for target, state in zip((model, opt), torch.load(kept, weights_only=True), strict=True):
        target.load_state_dict(state)
    with Diagnostics(opt, every=2, csv=path):
        train(model, opt, 4)
    assert iterations(read(path)) == [2, 4, 6, 6, 8]
    assert path.read_text().startswith(content)


@pytest.mark.parametrize("begun", ["", "iteration,pri"])
def test_csv_without_a_complete_header_is_begun_anew(tmp_path: Path, begun: str) -> None:
    path = tmp_path / "run.csv"
    path.write_text(begun)
    Diagnostics(SISA(network().parameters()), csv=path)
    assert path.read_text() == ",".join(COLUMNS) + "\n"
