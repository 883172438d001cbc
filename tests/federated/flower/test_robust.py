"""Trainings with one malicious client of ten, and the page that reports them."""

import json
from pathlib import Path

from benchmarks import robust as script

ROOT = Path(__file__).parents[3]


def test_one_malicious_client_of_ten_with_like_data(monkeypatch):
    """It costs at most two points. The other rules and the plain sum are in the results."""
    monkeypatch.setattr(script, "ROUNDS", 25)
    without_it = script.run("iid", "SISA", "honest nine", "plain sum")["accuracy"]
    stories = ("scaling", "sign flip", "label flip", "replay", "counts")
    found = {s: script.run("iid", "SISA", s, "geometric median")["accuracy"] for s in stories}
    assert min(found.values()) >= without_it - 2, found


def test_the_page_has_the_table_of_the_results():
    result = json.loads((ROOT / "docs/results/robust.json").read_text(encoding="utf-8"))
    assert script.show(result) in (ROOT / "docs/robust.md").read_text(encoding="utf-8")
