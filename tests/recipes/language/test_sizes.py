"""From runs at several sizes to statements, tables and the picture."""

from argparse import Namespace
from pathlib import Path

import pytest

from recipes.language import RECIPE
from recipes.language.config import PRESETS, Settings, configure
from recipes.recipe import Results
from tests.recipes.language.synthetic import results

LOSSES = {"nsisa": 4.01, "muon": 4.0, "misa": 3.96, "adamw": 4.3}


def loss_of(settings: Settings) -> float | None:
    return LOSSES.get(settings.choice.name, 4.5) + 0.02 * settings.seed


@pytest.fixture
def nano() -> Results:
    return results(PRESETS["nano"], loss_of)


@pytest.fixture
def sizes() -> Results:
    done = results(PRESETS["sizes"], loss_of)
    for run in done["runs"].values():
        name = run["settings"]["choice"]["name"]
        run["peak_bytes"] = {"nsisa": 1020, "adamw": 1000, "misa": 931, "muon": 910}[name] * 2**20
    return done


def test_statements_at_124_million(nano: Results) -> None:
    checks = {check.paper: check for check in RECIPE.check(nano)}
    assert checks["NSISA at least 0.2 below AdamW's loss"].holds
    assert checks["NSISA at most 0.03 above Muon's loss"].holds
    assert checks["MISA at most Muon's loss"].holds
    # On the tokens to report on, 0.01 above those to choose on, over the seeds.
    expected = "4.030 (4.020 to 4.040) and 4.310"
    assert checks["NSISA at least 0.2 below AdamW's loss"].here == expected
    for run in nano["runs"].values():
        if run["settings"]["label"] == "nsisa":
            run["test"] += 0.11
    assert sum(not check.holds for check in RECIPE.check(nano)) == 2


def test_statements_name_what_they_compare(nano: Results) -> None:
    """The paper's row and the script's have runs of their own, which stand for nothing else."""
    for run in nano["runs"].values():
        if run["settings"]["label"] in ("nsisa_script", "nsisa_paper"):
            run["test"] = 1.0
    expected = "4.030 (4.020 to 4.040) and 4.310"
    assert RECIPE.check(nano)[0].here == expected


def test_statements_about_larger_models(sizes: Results) -> None:
    checks = [(check.panel, check.paper, check.holds) for check in RECIPE.check(sizes)]
    assert ("Medium", "NSISA (paper) below AdamW's loss", True) in checks
    assert ("XL", "NSISA (paper) below Muon's loss", False) in checks
    assert ("XL", "NSISA's peak memory at most 2 % above AdamW's", True) in checks
    assert ("Medium", "MISA's peak memory at most 2 % above Muon's", False) in checks


def test_statements_are_about_the_setting_that_was_chosen(sizes: Results) -> None:
    for name, run in sizes["runs"].items():
        if name.startswith("gpt2-medium_adamw_higher"):
            run["last"], run["test"] = 3.9, 4.2  # chosen by the former, compared by the latter
    checks = {(check.panel, check.paper): check.here for check in RECIPE.check(sizes)}
    assert checks["Medium", "NSISA (paper) below AdamW's loss"] == "4.020 and 4.200"
    assert checks["XL", "NSISA (paper) below AdamW's loss"] == "4.020 and 4.310"


def test_report(nano: Results, sizes: Results) -> None:
    text = RECIPE.report(nano) if RECIPE.report else ""
    lines = text.splitlines()
    rows = [line for line in lines if line.startswith("| Nano |")]
    assert rows[0].startswith("| Nano | MISA")
    muon = next(row for row in rows if row.startswith("| Nano | Muon |"))
    assert "| 5 | **4.020 (4.010 to 4.030)** | +0.000 |" in muon
    assert any("| NSISA, the paper's row, m = 4 |" in row for row in rows)
    assert any(row.startswith("| Nano | Adam-mini | lr 0.0012, betas ") for row in rows)
    text = RECIPE.report({**sizes, "missing": ["a", "b"]}) if RECIPE.report else ""
    assert "| Medium | NSISA |" in text
    assert "| XL | MISA |" in text
    assert "Planned and not run: a, b." in text


def test_times_are_those_of_the_fastest_seed(nano: Results) -> None:
    nano["runs"]["muon_m1_seed0"] |= {"optimizer_ms": 31.0, "step_ms": 170.0}
    nano["runs"]["muon_m1_seed1"] |= {"optimizer_ms": 24.0, "step_ms": 159.0}
    text = RECIPE.report(nano) if RECIPE.report else ""
    row = next(line for line in text.splitlines() if line.startswith("| Nano | Muon |"))
    assert "| +0.000 | 24.0 | 159 |" in row


def test_labels_of_another_model_are_taken_apart() -> None:
    """The paper's row stays the paper's row."""
    args = Namespace(model="transformers/gpt2-medium", tokens=None, steps=None)
    config = configure(PRESETS["nano"], args)
    text = RECIPE.report(results(config, loss_of)) if RECIPE.report else ""
    assert "| transformers/gpt2-medium | NSISA, the paper's row, m = 4 |" in text


def test_runs_that_diverged(nano: Results, tmp_path: Path) -> None:
    diverged = results(PRESETS["nano"], lambda s: None if s.choice.name == "sisa" else 4.0)
    text = RECIPE.report(diverged) if RECIPE.report else ""
    assert "**diverged** | +inf" in text
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    RECIPE.draw(diverged, tmp_path / "a.svg")


def test_picture(sizes: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    RECIPE.draw(sizes, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for word in ("Medium", "XL", "million tokens", "seconds of training", "NSISA"):
        assert word in text
