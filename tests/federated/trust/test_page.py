"""The page about trust has the tables of the results."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import privacy, robust

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("script", "file"), [(robust, "robust_mnist"), (privacy, "privacy")])
def test_the_page_has_the_tables_of_the_results(script: Any, file: str) -> None:
    result = json.loads((ROOT / f"docs/results/{file}.json").read_text(encoding="utf-8"))
    assert script.show(result) in (ROOT / "docs/robust.md").read_text(encoding="utf-8")


def test_the_page_says_how_often_the_goal_is_met() -> None:
    result = json.loads((ROOT / "docs/results/robust_mnist.json").read_text(encoding="utf-8"))
    costs = {rule: robust.costs(result, rule, "honest nine") for rule in robust.RULES}
    met = {rule: sum(cost <= 2 for cost in cells.values()) for rule, cells in costs.items()}
    assert met == {"plain sum": 5, "robust": 19, "with a reference": 23}
    best = [c for (_, name, _), c in costs["with a reference"].items() if name == "MISA"]
    assert sum(cost <= 2 for cost in best) == 10


def test_one_malicious_client_of_ten() -> None:
    """Digits, clients with one label each: a flipped sign costs 30 points, or two at most."""
    honest = robust.run("digits", "one label", "SISA", "honest nine", "plain sum")["accuracy"]
    plain = robust.run("digits", "one label", "SISA", "sign flip", "plain sum")
    found = robust.run("digits", "one label", "SISA", "sign flip", "robust")
    assert plain["accuracy"] < honest - 15
    assert found["accuracy"] >= honest - 2
    assert found["liar_rejected"] >= 30


def test_labels_that_nobody_else_has() -> None:
    """With reference data, flipped ones are told from true ones."""
    honest = robust.run("digits", "one label", "MISA", "honest nine", "plain sum")["accuracy"]
    found = robust.run("digits", "one label", "MISA", "counts", "with a reference")
    assert found["accuracy"] >= honest - 2
    assert found["liar_rejected"] >= 30
    assert found["honest_rejected"] == 0
