"""Trainings with one malicious client of ten, and the page that reports them."""

import json
from pathlib import Path

import pytest

from benchmarks import robust as script

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("story", ["scaling", "sign flip", "label flip", "replay", "counts"])
def test_one_malicious_client_of_ten_with_like_data(story, monkeypatch):
    """It costs at most two points, where the plain sum loses more; the other rules are below."""
    monkeypatch.setattr(script, "ROUNDS", 30)
    honest = script.run("iid", "SISA", "honest nine", "plain sum")["accuracy"]
    assert script.run("iid", "SISA", story, "geometric median")["accuracy"] >= honest - 2


def test_the_page_has_the_table_of_the_results():
    result = json.loads((ROOT / "docs/results/robust.json").read_text(encoding="utf-8"))
    assert script.show(result) in (ROOT / "docs/robust.md").read_text(encoding="utf-8")
