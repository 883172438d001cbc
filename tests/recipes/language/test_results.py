"""From logs to statements, tables and the picture, on results that are made up."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from recipes.language import RECIPE
from recipes.language.config import PRESETS, Settings, plan
from recipes.language.results import best, by_optimizer, condense, loss_at, muon
from recipes.recipe import Results
from tests.recipes.language.synthetic import log, results

CONFIG = PRESETS["pilot"]
SETTINGS = plan(CONFIG)["muon_lr0.02_m1_seed0"]


LOSSES = {"muon": 3.983, "nsisa": 4.011, "misa": 3.964, "adamw": 4.329}


def some_losses(settings: Settings) -> float:
    """Return a loss per optimizer, and more for trials with other settings than the best."""
    name, options = settings.choice.name, settings.choice.options
    worse = name == "muon" and options["lr"] != 0.02
    return LOSSES.get(name, 4.5) + (0.1 if worse else 0.0)


@pytest.fixture
def done() -> Results:
    return results(CONFIG, some_losses)


def test_plan_of_the_pilot() -> None:
    runs = plan(CONFIG)
    assert len(runs) == len(CONFIG.trials)  # no two have one name
    names = {run.choice.name for run in runs.values()}
    assert names == {"adamw", "muon", "soap", "sisa", "nsisa", "misa"}
    assert {run.batches for run in runs.values()} == {1, 4}
    rates = {r.choice.options["lr"] for r in runs.values() if r.choice.name == "muon"}
    assert rates == {0.014, 0.02, 0.03}
    for run in runs.values():
        assert (run.steps, run.sequences, run.model) == (320, 64, "gpt2")
    assert "nsisa_dual_decay0.25_m4_seed0" in runs
    other = plan(dataclasses.replace(CONFIG, seed=3))
    assert "muon_lr0.02_m1_seed3" in other


def test_settings_must_fit() -> None:
    with pytest.raises(ValueError, match="sequences must be a multiple of batches, 3, got 64"):
        dataclasses.replace(SETTINGS, batches=3)
    with pytest.raises(ValueError, match="validate_every must be a multiple of log_every, 10"):
        dataclasses.replace(CONFIG, validate_every=15)


def test_condensed_run() -> None:
    run = condense(log(SETTINGS, 3.98768))
    assert (run["last"], run["diverged"]) == (3.9877, False)
    assert run["optimizer_ms"] == 10.0  # without the first lines
    assert run["step_ms"] == pytest.approx(100)
    assert run["parameters"] == 123_568_128
    assert loss_at(run, 160) == run["val_loss"][16]
    assert loss_at(run, 50) is None
    assert loss_at(run, 161) is None
    ended = condense(log(SETTINGS, None))
    assert (ended["last"], ended["diverged"]) == (None, True)


def test_best_and_muon(done: Results) -> None:
    groups = by_optimizer(done)
    assert best(groups["nsisa", 1])["last"] == 4.011
    against = muon(done, 4)
    assert against is not None
    assert against["settings"]["label"] == "muon_lr0.02"
    diverged = condense(log(SETTINGS, None))
    assert best([diverged, against]) is against
    assert muon({**done, "runs": {}}, 1) is None


def test_statements_compare_named_runs(done: Results) -> None:
    checks = {(check.panel, check.paper): check for check in RECIPE.check(done)}
    assert len(checks) == 5  # loss and time of both, state of one
    claim = "best trial at or below Muon's best, 3.983, at equal tokens"
    assert checks["MISA", claim].holds
    nsisa = checks["NSISA", claim]
    assert not nsisa.holds
    assert nsisa.here == "4.011 (nsisa_dual_decay1; Muon's is muon_lr0.02)"


def test_statements_that_do_not_hold() -> None:
    diverged = results(CONFIG, lambda settings: None if settings.choice.name != "muon" else 4.0)
    assert not any(check.holds for check in RECIPE.check(diverged) if "best" in check.paper)


def test_ahead_of_muon_with_half_the_state() -> None:
    ahead = results(CONFIG, lambda s: 3.9 if s.choice.name == "misa" else some_losses(s))
    for run in ahead["runs"].values():
        if run["settings"]["choice"]["name"] == "misa":
            run["state_bytes"], run["optimizer_ms"] = 1011, 14.0
    checks = [check for check in RECIPE.check(ahead) if check.panel == "MISA"]
    verdicts = {" ".join(c.paper.split(" ")[:2]): c.holds for c in checks}
    assert verdicts == {"best trial": True, "at most": False, "a step": False}  # 1.4 x the time


def test_times_of_a_cpu_make_no_statement(done: Results) -> None:
    for run in done["runs"].values():
        run["hardware"]["gpu"] = None
    assert not [check for check in RECIPE.check(done) if "takes at most" in check.paper]


def test_quick_says_only_that_it_learns() -> None:
    checks = RECIPE.check(results(PRESETS["quick"], lambda settings: 3.0))
    assert {check.paper for check in checks} == {"ends below 3.33"}
    assert all(check.holds for check in checks)


def test_report(done: Results) -> None:
    text = RECIPE.report(done) if RECIPE.report else ""
    assert "123.6M parameters after 320 steps of 64 sequences (21.0M tokens" in text
    lines = text.splitlines()
    row = next(line for line in lines if line.startswith("| Muon |"))
    tried = Counter(each.choice.name for each in CONFIG.trials)
    assert f"| {tried['muon']} | lr 0.02, momentum 0.95, nesterov, adjust_lr_fn original, " in row
    assert "rest by AdamW 0.0036 |" in row
    assert "**3.983** | +0.000 | 10.00 (1.00)" in row
    ours = next(line for line in lines if line.startswith("| NSISA, m = 4 |"))
    assert "+0.028" in ours
    assert sum(line.startswith("| adamw_") for line in lines) == tried["adamw"]
    assert "warm-down 0.6" in text
    assert "rest by its own rule" in text
    assert f"{len(CONFIG.trials)} runs" in text
    assert "| panel | expected | here | holds |" in text


def test_report_counts_trials_that_are_no_runs() -> None:
    quick = results(PRESETS["quick"], lambda settings: 3.0)
    text = RECIPE.report(quick) if RECIPE.report else ""
    assert "| SISA | 15 |" in text
    assert "| AdamW | 1 |" in text


def test_report_without_muon_and_with_a_divergence(tmp_path: Path) -> None:
    some = results(CONFIG, lambda s: None if s.choice.name == "sisa" else 4.0)
    kept = {n: run for n, run in some["runs"].items() if not n.startswith("muon")}
    partial = {**some, "runs": kept, "missing": ["muon_lr0.02_m1_seed0"]}
    text = RECIPE.report(partial) if RECIPE.report else ""
    assert "**diverged** | -" in text
    assert f"{len(kept)} of {len(kept) + 1} runs" in text
    assert "| muon_lr0.02_m1_seed0 |  |  | not run |" in text
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    RECIPE.draw(partial, tmp_path / "a.svg")


def test_picture_is_the_same_for_the_same_results(tmp_path: Path, done: Results) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    for name in ("a.svg", "b.svg"):
        RECIPE.draw(done, tmp_path / name)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text == (tmp_path / "b.svg").read_text(encoding="utf-8")
    for word in ("NSISA", "Muon", "m = 4", "million tokens"):
        assert word in text
