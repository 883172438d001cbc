"""Means over seeds, the range of a panel, and words of tables."""

from pathlib import Path
from typing import Any

import pytest

from recipes.curves import (
    Panel,
    check_column_falls,
    describe_settings,
    display_name,
    draw,
    epoch_times,
    line_styles,
    list_not_run,
    mean_curve,
    outlier_limits,
)
from recipes.tables import markdown, mean_sd


def test_mean_and_deviation() -> None:
    assert mean_sd([1.0, 3.0]) == "2.00 ± 1.41"
    assert mean_sd([2.0], 1) == "2.0"
    assert mean_sd([]) == "-"


def test_average_takes_what_there_is() -> None:
    runs = [
        {"epoch": [1, 2, 3], "loss": [4.0, None, 2.0]},
        {"epoch": [1, 2], "loss": [2.0, 3.0]},
    ]
    panel = Panel("t", "l", {}, "epoch", "loss", scale=10.0)
    x, mean, deviation = mean_curve(panel, runs)
    assert x == [1, 2, 3]
    assert mean == [30.0, 30.0, 20.0]
    assert deviation == pytest.approx([14.142, 0, 0], abs=1e-3)


def test_a_training_that_failed_does_not_set_the_range() -> None:
    assert outlier_limits([[2.0, 1.0], [3.0, 1.0]]) is None
    assert outlier_limits([[2.0, 1.0, 1.0], [3.0, 2.0, 1.0], [3.0, 1e4, 1e5]]) == pytest.approx(
        (0.9, 3.1)
    )
    assert outlier_limits([]) is None


def test_a_picture_can_do_without_values(tmp_path: Path) -> None:
    """Every run has diverged in its first epoch."""
    pytest.importorskip("matplotlib")
    curves = {"sgd": [{"epoch": [1], "loss": [None]}]}
    row = [
        Panel("t", "l", curves, "epoch", "loss", log=True),
        Panel("t", "l", curves, "epoch", "loss", percent=True),
    ]
    draw([row], tmp_path / "panels.svg", "test", "epoch")
    assert (tmp_path / "panels.svg").stat().st_size


def test_usual_optimizers_look_alike_in_all_pictures() -> None:
    few, many = line_styles(["adam", "misa"]), line_styles(["x", "sisa", "misa", "y", "adam"])
    assert few["adam"] == many["adam"]
    assert few["misa"] == many["misa"]
    assert len(set(map(str, many.values()))) == 5
    assert len(set(map(str, line_styles([str(n) for n in range(24)]).values()))) == 24


def test_times_on_a_gpu_are_not_mixed_with_others() -> None:
    def runs(**seconds: float) -> list[dict[str, Any]]:
        return [
            {"hardware": {"gpu": device if device == "h200" else None}, "epoch_seconds": value}
            for device, value in seconds.items()
        ]

    both = {"sisa": runs(h200=4.0, cpu=200.0), "misa": runs(cpu=220.0)}
    assert epoch_times(both) == {"sisa": "4.00", "misa": "-"}
    assert epoch_times({"misa": runs(cpu=220.0)}) == {"misa": "220.00"}


def test_what_only_the_paper_has() -> None:
    paper = {"sisa": "91.25", "sgd": "91.51", "adam": "88.40"}
    assert list_not_run(paper, ["sisa_steps", "misa", "sgd"]) == ["In the paper only: Adam 88.40."]
    assert list_not_run(paper, paper) == []


def test_words() -> None:
    assert [display_name(name) for name in ("sisa", "sisa_steps")] == [
        "SISA",
        "SISA, published steps",
    ]
    options = {"lr": 0.1, "gamma": [0.9, 10], "betas": [0.5, 0.999], "weight_decouple": False}
    settings = {"choice": {"batches": 4, "options": options}}
    words = "m 4, lr 0.1, gamma 0.9 every 10 epochs, betas 0.5, 0.999"
    assert describe_settings(settings) == words
    assert describe_settings({"choice": {"batches": 1, "options": {}}}) == "defaults"
    bounded = {"choice": {"batches": 1, "options": {"lr": 0.1, "gamma": 1e-3}}}  # AdaBound's
    assert describe_settings(bounded) == "lr 0.1, gamma 0.001"
    assert markdown(["a", "b"], [[1, 2]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_learning_is_a_fall() -> None:
    runs = {"a": {"loss": [2.0, 1.0]}, "b": {"loss": [1.0, 1.0]}, "c": {"loss": [1.0, None]}}
    assert [check.holds for check in check_column_falls({"runs": runs}, "loss", "loss")] == [
        True,
        False,
        False,
    ]
