"""From logs to statements, tables and the picture, on results that are made up."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.heterogeneity import RECIPE, config
from recipes.heterogeneity.cells import Spread, Summary, cells
from recipes.heterogeneity.config import PRESETS, Settings, plan
from recipes.heterogeneity.paper import BASELINES, TABLE, target
from recipes.heterogeneity.report import at_equal_samples, report
from recipes.heterogeneity.run import condense
from recipes.recipe import Check, Results
from tests.recipes.heterogeneity.synthetic import log, results

PAPER = dataclasses.replace(PRESETS["paper"], every=50)
SETTINGS = plan(PAPER)["mnist_1label_sisa_seed0"]


def like_the_paper(settings: Settings) -> list[float]:
    """Return one point above the paper's number, plus a tenth per seed; MISA is best."""
    top = TABLE[settings.dataset, settings.labels].get(settings.algorithm, 50.0)
    top += 1 + settings.seed / 10
    if settings.dataset == "mnist" and settings.algorithm == "sisa":
        top = 98.0
    if settings.algorithm == "misa":
        top = 99.0
    return [10.0, top, top, top + 0.5, top]


@pytest.fixture
def done() -> Results:
    return results(PAPER, like_the_paper)


# A run


def test_condensed_run() -> None:
    run = condense(log(SETTINGS, [10.0, 94.0, 95.0, 97.123, 94.9]))
    assert (run["best"], run["best_round"], run["last"]) == (97.12, 150, 94.9)
    assert run["reached"] == 100  # the first at or above 94.97
    assert run["gradients"] == run["bytes_down"] == 40
    assert run["settings"]["algorithm"] == "sisa"
    assert condense(log(SETTINGS, [10.0, 94.96]))["reached"] is None
    other = dataclasses.replace(SETTINGS, dataset="digits")
    assert condense(log(other, [99.0]))["reached"] is None


@pytest.mark.parametrize("count", [1, 49, 50, 51, 99, 501])
def test_curve_is_thinned_and_keeps_its_end(count: int) -> None:
    accuracies = [float(i) / 10 for i in range(count)]
    run = condense(log(SETTINGS, accuracies))
    assert len(run["round"]) <= 50
    assert len(run["round"]) == len(run["accuracy"]) == len(run["loss"])
    assert run["round"][-1] == 50 * (count - 1)
    assert run["accuracy"][-1] == accuracies[-1]
    assert run["best"] == pytest.approx(accuracies[-1], abs=0.005)  # of all rounds, not the kept


def test_saved_results_are_small() -> None:
    whole = results(PAPER, lambda s: [50.1234 + i / 1000 for i in range(501)])
    assert len(json.dumps(whole)) < 1_000_000


# Over seeds


def test_spread() -> None:
    assert str(Spread.of([1.0, 2.0, 3.0])) == "2.00 ± 1.00"
    assert str(Spread.of([1.5])) == "1.50"


def test_mean_curve_holds_the_end_of_a_run_that_diverged() -> None:
    runs = [log(SETTINGS, [10.0, 20.0, 30.0]), log(SETTINGS, [10.0, 0.0])]
    rounds, means = Summary(tuple(map(condense, runs))).curve()
    assert rounds == [0, 50, 100]
    assert means == [10.0, 10.0, 15.0]


def test_cells_are_the_papers(done: Results) -> None:
    table = cells(done)
    assert list(table) == list(TABLE)
    assert {len(summary.runs) for row in table.values() for summary in row.values()} == {3}
    assert str(table["adult", 1]["fednova"].last) == "86.25 ± 0.10"


# Statements


def test_statements_hold_on_results_like_the_papers(done: Results) -> None:
    checks = RECIPE.check(done)
    assert len(checks) == 3 * 10 + 2 + 4  # MISA is in the cells with one label
    assert not [check for check in checks if not check.holds]


def test_adult_is_not_said_to_beat_fednova(done: Results) -> None:
    about = [c for c in RECIPE.check(done) if c.panel.startswith("Adult")]
    (check,) = [c for c in about if c.paper.startswith("SISA is above")]
    assert "FedNova" not in check.paper
    assert "Scaffold" in check.paper


def set_all(done: Results, cell: str, algorithm: str, **values: float | None) -> None:
    for name, run in done["runs"].items():
        if name.startswith(f"{cell}_{algorithm}_"):
            run.update(values)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: set_all(d, "cifar10_2label", "sisa", best=30.5), ["SISA reaches 30.53 %"]),
        (lambda d: set_all(d, "mnist_2label", "scaffold", best=99.0), ["SISA is above"]),
        (lambda d: set_all(d, "adult_1label", "fedprox", best=78.0), ["baselines reach"]),
        (lambda d: set_all(d, "adult_1label", "misa", last=80.0), ["last round MISA is above"]),
        (lambda d: set_all(d, "adult_1label", "misa", best=0.0), []),  # ours: the last round only
        (lambda d: set_all(d, "mnist_1label", "sisa", last=97.4), ["in the last round"]),
        (lambda d: set_all(d, "mnist_1label", "sisa", reached=151), ["within 150 rounds"]),
        (lambda d: d["runs"]["mnist_1label_sisa_seed2"].update(reached=None), ["within 150"]),
    ],
)
def test_checks_notice(done: Results, spoil: Callable[[Results], None], words: list[str]) -> None:
    spoil(done)
    failed = [check for check in RECIPE.check(done) if not check.holds]
    assert len(failed) == len(words)
    for check, part in zip(failed, words, strict=True):
        assert part in check.paper


def test_fedsgd_is_compared_by_the_reader_only(done: Results) -> None:
    set_all(done, "mnist_1label", "fedsgd", last=99.9)
    assert all(check.holds for check in RECIPE.check(done))
    assert RECIPE.report is not None
    assert "**99.90 ± 0.00**" in RECIPE.report(done)


def test_missing_runs_make_no_statements(done: Results) -> None:
    done["runs"] = {n: r for n, r in done["runs"].items() if n.startswith("mnist_1label_sisa")}
    checks: list[Check] = RECIPE.check(done)
    assert [check.panel for check in checks] == ["MNIST, 1 label"] * 3
    done["runs"] = {n: r for n, r in done["runs"].items() if n.endswith("seed1")}
    assert RECIPE.check(done)
    assert RECIPE.report is not None
    assert "| MNIST | 1 |" in RECIPE.report(done)


def test_papers_table() -> None:
    assert target("mnist", 1) == 94.97
    assert target("digits", 1) is None
    assert TABLE["adult", 1]["fednova"] == 85.15
    assert all(set(row) == {*BASELINES, "sisa"} for row in TABLE.values())


# The report and the picture


def test_report_shows_ours_beside_the_papers(done: Results) -> None:
    assert RECIPE.report is not None
    text = RECIPE.report(done)
    tables = [part for part in text.split("\n\n") if part.startswith("| data | labels")]
    last, best, samples, equal, trials, rounds = (table.splitlines()[2] for table in tables)
    assert best.startswith("| MNIST | 1 | 54.79 ± 0.10 (53.19) | 55.93 ± 0.10 (54.33) |")
    assert best.endswith("| 98.50 ± 0.00 (94.97) | 99.50 ± 0.00 |")
    assert last.endswith("| 98.00 ± 0.00 | **99.00 ± 0.00** |")  # not the best round's half point
    assert samples.split(" | ")[2:] == ["0"] * 6 + ["0 |"]  # 10 samples in 50 rounds
    assert equal.split(" | ")[2] == "54.29 ± 0.10 (500)"
    assert trials.split(" | ")[2:] == ["3", "3", "3", "9", "4", "99", "6 |"]
    assert rounds.split(" | ")[2:] == ["never"] * 5 + ["50", "50 |"]
    assert "mean ± standard deviation of 3 seeds" in text
    assert "| MNIST | SISA | sigma" in text
    assert "abacus" in text
    assert "165 runs, 165 minutes if added up" in text


def test_equal_sample_gradients_end_earlier_for_those_who_take_more(done: Results) -> None:
    for name, run in done["runs"].items():
        if "_sisa_" in name:
            run["samples"] *= 2  # so that half of the rounds cost what FedAvg's 200 cost
    row = cells(done)["cifar10", 1]
    assert at_equal_samples(row, row["fedavg"]).endswith("(500)")
    assert at_equal_samples(row, row["fedavg"]).startswith(str(row["fedavg"].last))
    assert row["sisa"].samples_per_round == 2 * row["fedavg"].samples_per_round
    assert row["sisa"].rounds_within(40) == 100
    done["runs"]["cifar10_1label_sisa_seed0"]["accuracy"][2] += 3
    assert at_equal_samples(row, row["sisa"]) == f"{30.16 + 1 + 0.1 + 1:.2f} ± 1.65 (100)"


def test_report_says_what_was_not_tried(
    done: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No trial of FedAvg, FedProx, FedNova, Scaffold varied the server's" in report(done)
    path = tmp_path / "tuning.json"
    monkeypatch.setattr(config, "TUNING", path)
    assert "**Trials**" not in report(done)
    tried = {"options": {"server_lr": 3.0}, "settings": {"seed": 0}}
    cell = {"dataset": "mnist", "labels": 1, "algorithm": "scaffold", "count": 1}
    path.write_text(json.dumps([{**cell, "trials": [tried]}]), encoding="utf-8")
    text = report(done)
    assert "1 of 1 of them had one seed. No trial of FedAvg, FedProx, FedNova varied" in text


def test_rounds_count_the_seeds_that_got_there(done: Results) -> None:
    done["runs"]["mnist_1label_sisa_seed0"]["reached"] = None
    assert RECIPE.report is not None
    assert "| 50 (2) |" in RECIPE.report(done)


def test_failed_statement_is_in_the_report(done: Results) -> None:
    set_all(done, "cifar10_2label", "sisa", best=30.5)
    assert RECIPE.report is not None
    assert RECIPE.report(done).count("**no**") == 1


def test_picture(done: Results, tmp_path: Path) -> None:
    shown = ("mnist_1label", "cifar10_3label", "adult_1label")
    done["runs"] = {name: run for name, run in done["runs"].items() if name.startswith(shown)}
    path = tmp_path / "curves.svg"
    RECIPE.draw(done, path)
    text = path.read_text(encoding="utf-8")
    for words in ("MNIST, 1 label<", "CIFAR-10, 3 labels<", "Adult, 1 label<", "FedSGD<", "SISA<"):
        assert words in text
    assert "Adult, 2 labels" not in text
    assert len(text) < 300_000
    again = tmp_path / "again.svg"
    RECIPE.draw(done, again)
    assert again.read_bytes() == path.read_bytes()
