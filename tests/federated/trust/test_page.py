"""The page about trust has the table of the results."""

import json
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Flower's own imports are not ours to mend
    pytest.importorskip("flwr.serverapp", reason="needs Flower: pip install torchpisa[flower]")

from benchmarks import robust as script

ROOT = Path(__file__).parents[3]


def test_the_page_has_the_table_of_the_results() -> None:
    result = json.loads((ROOT / "docs/results/robust_mnist.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/robust.md").read_text(encoding="utf-8")
    assert script.show(result) in page
    for beside in ("honest", "honest nine"):
        worst = max(script.costs(result, "with a reference", beside).values())
        assert f"{worst:.1f} points beside *{beside}*" in page


def test_one_malicious_client_of_ten() -> None:
    """Digits, clients with one label each: a flipped sign costs 30 points, or two at most."""
    honest = script.run("digits", "one label", "SISA", "honest nine", "plain sum")["accuracy"]
    plain = script.run("digits", "one label", "SISA", "sign flip", "plain sum")
    robust = script.run("digits", "one label", "SISA", "sign flip", "robust")
    assert plain["accuracy"] < honest - 15
    assert robust["accuracy"] >= honest - 2
    assert robust["liar_rejected"] >= 30


def test_labels_that_nobody_else_has() -> None:
    """With reference data, flipped ones are told from true ones."""
    honest = script.run("digits", "one label", "MISA", "honest nine", "plain sum")["accuracy"]
    found = script.run("digits", "one label", "MISA", "counts", "with a reference")
    assert found["accuracy"] >= honest - 2
    assert found["liar_rejected"] >= 30
    assert found["honest_rejected"] == 0
