"""The animated picture of clients with one digit each: it is that of its numbers, and moves."""

import json
import re
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]
SAVED = json.loads((ROOT / "docs" / "results" / "one_label.json").read_text(encoding="utf-8"))
PICTURE = (ROOT / "docs" / "results" / "one_label.svg").read_text(encoding="utf-8")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return runpy.run_path(str(ROOT / "examples" / "one_label.py"))


def test_the_picture_is_that_of_the_saved_numbers(module: dict[str, Any]) -> None:
    assert module["draw"](SAVED) == PICTURE


def test_the_numbers_come_from_the_trainings(module: dict[str, Any]) -> None:
    for name, saved in SAVED["runs"].items():
        run = module["train"](name, 2)
        assert run["algorithm"] == saved["algorithm"]
        assert run["samples_per_round"] == saved["samples_per_round"] == 1000
        for key in ("accuracy", "recall", "memory"):
            expected = [pytest.approx(value, rel=0.01, abs=1) for value in saved[key][:3]]
            assert run[key] == expected, (name, key)
    assert not any(SAVED["runs"]["FedAvg"]["memory"][-1])
    assert all(SAVED["runs"]["MISA"]["memory"][-1])


def test_every_round_is_a_frame_and_motion_can_be_refused() -> None:
    root = ElementTree.fromstring(PICTURE)
    space = "{http://www.w3.org/2000/svg}"
    moving, still = root.findall(f"{space}g")
    rounds = len(SAVED["runs"]["MISA"]["accuracy"]) - 1
    moves = list(moving.iter(f"{space}animate"))
    assert len(moves) > 100
    for move in moves:
        values, times = (move.attrib[key].split(";") for key in ("values", "keyTimes"))
        assert len(values) == len(times) == rounds + 2
        assert times == sorted(times, key=float)
        assert (times[0], times[-1]) == ("0", "1")
    assert not list(still.iter(f"{space}animate"))
    style = root.find(f"{space}style")
    assert style is not None
    assert style.text is not None
    assert re.search(r"prefers-reduced-motion:reduce\)\{\.moving\{display:none\}", style.text)
    assert "prefers-color-scheme:dark" in style.text
    assert len(PICTURE) < 1_000_000


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["one_label.py", "--rounds", "1", "--save", "one.json"])
    runpy.run_path(str(ROOT / "examples" / "one_label.py"), run_name="__main__")
    drawn = (tmp_path / "one_label.svg").read_text(encoding="utf-8")
    assert "MISA" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["one_label.py", "--show", "one.json", "--out", "again.svg"])
    runpy.run_path(str(ROOT / "examples" / "one_label.py"), run_name="__main__")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == drawn
