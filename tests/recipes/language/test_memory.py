"""The memory table: state by formula and as it is, peaks, and what fits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import __main__ as command
from recipes.language import memory
from recipes.language.memory import CHOICES, GIB, Cell, check, formula, measure, plan, report
from recipes.language.model import SIZES
from recipes.language.optimizers import missing_requirement
from recipes.recipe import Results

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "batches"), [*((n, 1) for n in CHOICES), *((n, 4) for n in memory.CONSENSUS)]
)
def test_state_is_what_the_formula_says(name: str, batches: int) -> None:
    reason = missing_requirement(CHOICES[name])
    if reason is not None:
        pytest.skip(reason)
    line = measure(Cell("tiny", name, batches, micro=1), CPU)
    assert line["state_bytes"] == formula(name, SIZES["tiny"], batches)
    assert line["pass_bytes"] is None  # there is no such count on a CPU


def test_formulas_of_gpt2() -> None:
    per_parameter = {
        name: round(formula(name, SIZES["gpt2"]) / SIZES["gpt2"].parameters, 2) for name in CHOICES
    }
    # All but Shampoo's were measured in runs on a GPU, see docs/results/language.md.
    assert per_parameter == {
        **{"adamw": 8.0, "nsisa": 8.0, "sisa": 8.0, "muon": 5.25, "misa": 5.25, "adam_mini": 5.25},
        **{"soap": 27.25, "shampoo": 22.05},
    }


def synthetic() -> Results:
    """Return cells in which a sequence needs 3 GiB beside state, weights and gradients."""
    cells = []
    for cell in plan(list(memory.BATCHES)):
        sizes = cell.sizes
        state = formula(cell.optimizer, sizes, cell.batches)
        sequences = cell.micro * (0.5 if cell.recompute else 3.0)
        passes = int(8 * sizes.parameters + state + GIB * sequences * sizes.layers / 48)
        step = 8 * sizes.parameters + state + 1000
        line: dict[str, Any] = {**dataclasses.asdict(cell), "error": None, "seconds": 1.0}
        line |= {"pass_bytes": passes, "step_bytes": step, "state_bytes": state}
        cells.append({**line, "parameters": sizes.parameters})
    config = {"models": list(memory.BATCHES), "compile": True, "rounds": 3}
    versions = {"torch": "2.0"}
    hardware = {"gpu": "abacus", "cpu": "slide rule"}
    return {"config": config, "versions": versions, "hardware": hardware, "cells": cells}


def test_few_layers_say_what_all_need() -> None:
    results = synthetic()
    cell = memory.full_size(results["cells"], "gpt2-xl", "soap")
    assert cell is not None
    assert cell["state_bytes"] == formula("soap", SIZES["gpt2-xl"])
    assert cell["pass_bytes"] == pytest.approx(
        8 * SIZES["gpt2-xl"].parameters + cell["state_bytes"] + 12 * GIB, rel=1e-6
    )
    assert memory.full_size([], "gpt2-xl", "soap") is None


def test_statements() -> None:
    results = synthetic()
    assert [c.holds for c in check(results)] == [True] * 6
    for cell in results["cells"]:
        if cell["optimizer"] == "nsisa" and cell["model"] == "gpt2":
            cell["step_bytes"] *= 20
    assert [c.panel for c in check(results) if not c.holds] == ["Nano"]


def test_largest_batch() -> None:
    cells = synthetic()["cells"]
    fixed = 16 * SIZES["gpt2-xl"].parameters / GIB  # AdamW's state, weights and gradients
    assert fixed == pytest.approx(23.2, abs=0.1)
    fits = memory.largest_batch
    assert fits(cells, "gpt2-xl", "adamw", 80, False) == (79 - fixed) // 3
    assert fits(cells, "gpt2-xl", "adamw", 80, True) == (79 - fixed) // 0.5
    assert fits(cells, "gpt2-xl", "adamw", 24, False) == 0
    muon, misa = (fits(cells, "gpt2-xl", name, 24, True) for name in ("muon", "misa"))
    assert muon == misa > 0  # for MISA's rows there is room, for a second moment there is not
    assert fits(cells, "gpt2-xl", "soap", 40, True) == 0
    assert fits([], "gpt2-xl", "adamw", 80, False) is None
    one_batch = [cell for cell in cells if cell["micro"] == 4 and not cell["recompute"]]
    assert fits(one_batch, "gpt2-xl", "adamw", 80, False) == (79 - fixed) // 3
    assert fits(one_batch, "gpt2-xl", "adamw", 80, True) is None


def test_report() -> None:
    text = report(synthetic())
    row = next(line for line in text.splitlines() if line.startswith("| XL | SOAP | 1 |"))
    assert row.endswith("** † | +39,375 | 93,630 | +40,502 |")
    assert "Medium 1 x 16, XL 4 x 4" in text
    assert "| AdamW | no / no | 5 / 31 | 18 / 111 |" in text
    assert "abacus, torch 2.0" in text


def test_report_of_a_cpu_has_state_only() -> None:
    done = synthetic()
    for cell in done["cells"]:
        cell["pass_bytes"] = cell["step_bytes"] = None
    text = report(done)
    assert "| XL | AdamW | 1 | 11,864 | 11,864 | - | - | - | - | 53,128 | +0 |" in text
    row = next(line for line in text.splitlines() if line.startswith("| XL | SOAP | 1 |"))
    assert row.startswith("| XL | SOAP | 1 | 51,239 | 51,239 | - |")  # from one and two blocks
    assert "Statements" not in text
    assert "fit XL" not in text


def test_memory_that_does_not_suffice_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(memory, "take_steps", fail)
    line = measure(Cell("tiny", "adamw"), CPU)
    assert line["error"] == "out of memory"
    results = synthetic()
    results["cells"].append(line)
    assert "tiny_adamw_m1_16x1: out of memory." in report(results)


def test_command_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [Cell("tiny", "adamw", micro=1), Cell("tiny", "misa", micro=1)]
    monkeypatch.setattr(memory, "plan", lambda models: cells)
    measured = []
    monkeypatch.setattr(
        memory,
        "measure",
        lambda cell, *rest: measured.append(cell) or measure(cell, *rest),
    )
    words = ["language", "memory", "--device", "cpu", "--models", "tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(memory, "missing_requirement", lambda choice: None, raising=False)
    command.main([*words, "--time-limit", "1000"])
    cells.append(Cell("tiny", "sisa", micro=1))
    command.main(words)
    assert [cell.optimizer for cell in measured] == [cell.optimizer for cell in cells]
    saved = json.loads((tmp_path / "language_memory.json").read_text(encoding="utf-8"))
    assert [cell["optimizer"] for cell in saved["cells"]] == ["adamw", "misa", "sisa"]
    command.main(["language", "memory", "--show", str(tmp_path / "language_memory.json")])
    assert "language_memory.md" in capsys.readouterr().out
    other = tmp_path / "other.json"
    for text, message in (("[1]", "which has no config"), ("half", "Expecting value")):
        other.write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit):
            command.main(["language", "memory", "--show", str(other)])
        said = capsys.readouterr().err
        assert f"--show must be written by language memory, got {other}" in said
        assert message in said
