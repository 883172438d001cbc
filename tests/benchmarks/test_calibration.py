"""The committed comparison of calibrated settings with a random search."""

import json
from pathlib import Path

import pytest

from benchmarks import calibration

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SAVED = json.loads((RESULTS / "calibration.json").read_text())


def test_the_page_shows_what_was_saved() -> None:
    assert (RESULTS / "calibration.md").read_text() == calibration.markdown(SAVED)


def test_calibrated_settings_keep_up_with_the_search() -> None:
    rows = calibration.rows(SAVED["runs"])
    assert len(rows) == 4 * len(calibration.SCALES)
    assert all(row["holds"] for row in rows)
    for task in calibration.TASKS:
        search = [r for r in SAVED["runs"] if r["task"] == task and r["kind"] == "search"]
        tried = {tuple(run["used"].values()) for run in search}
        drawn = (calibration.random_settings(trial) for trial in range(calibration.TRIALS))
        assert tried == {tuple(settings.values()) for settings in drawn}


def run(kind: str, seed: int, value: float, scale: float = 1.0, sigma: float = 1.0) -> dict:
    used = {"sigma": sigma, "rho": 1.0}
    return {
        "task": "mlp",
        "kind": kind,
        "seed": seed,
        "validation": value,
        "scale": scale,
        "used": used,
        "metric": "accuracy (%)",
        "better": 1,
    }


def test_rows_compare_means_over_seeds() -> None:
    search = [run("search", 0, 90.0, sigma=2.0), run("search", 0, 95.0), run("search", 1, 93.0)]
    calibrated = [run("calibrated", 0, 92.5, scale) for scale in calibration.SCALES]
    row = calibration.rows([*search, *calibrated])[0]
    assert row["search"] == 94.0
    assert row["search_best_run"] == 95.0
    assert row["behind"] == pytest.approx(1.5)
    assert not row["holds"]
