"""Plans at equal costs, the choice among trials, statements, and runs from end to end on digits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from recipes import __main__ as command
from recipes.budgets import RECIPE, config, results
from recipes.budgets.config import PRESETS, TRIALS, TWICE, Config, chosen, plan
from recipes.budgets.run import algorithm, run
from torchpisa.federated import LinearDecay

CPU = {"device": "cpu", "data": "nowhere"}


def test_everybody_has_as_many_trials() -> None:
    assert {len(trials) for trials in TRIALS.values()} == {6}
    for trials in TRIALS.values():
        assert len({json.dumps([dict(t.options), t.steps]) for t in trials}) == 6


@pytest.mark.parametrize("preset", PRESETS)
def test_everybody_has_as_many_samples_and_a_schedule(preset: str) -> None:
    settings = plan(PRESETS[preset])
    for each in settings.values():
        assert abs(each.steps * each.batch_size - PRESETS[preset].samples_per_round) < each.steps
        schedule = LinearDecay(each.rounds)
        assert schedule in vars(algorithm(each)).values()
    assert {each.validation for each in settings.values()} == {PRESETS[preset].trials}


def test_half_of_the_rounds_for_those_who_send_twice_as_much() -> None:
    runs = plan(PRESETS["table"])
    for name in PRESETS["table"].algorithms:
        lengths = {r.rounds for r in runs.values() if r.algorithm == name}
        assert lengths == ({500, 250} if name in TWICE else {500})
    sent = {}
    tiny = Config((("digits", 1),), rounds=2, seeds=1, every=1, algorithms=tuple(TRIALS))
    for each in plan(tiny).values():
        (*_, last) = run(tiny, each, **CPU)
        sent[each.algorithm, each.rounds] = last["bytes_up"], last["bytes_down"]
    for name in TRIALS:
        assert sent[name, 1 if name in TWICE else 2] == sent["fedavg", 2], name


def trial_results(accuracies: dict[str, list[float]]) -> dict[str, Any]:
    """Return results of trials that ended with these accuracies; negative: it diverged."""
    preset = PRESETS["trials"]
    runs = {}
    for label, settings in plan(preset).items():
        values = accuracies.get(settings.algorithm, [0.0] * 6)
        value = values[int(label[-1])]
        end = settings.rounds if value >= 0 else 100
        entry = {"settings": dataclasses.asdict(settings), "round": [0, end], "last": abs(value)}
        runs[label] = entry
    return {"config": dataclasses.asdict(preset), "runs": runs}


def test_the_best_trial_that_did_not_diverge_is_chosen(tmp_path: Path) -> None:
    saved = trial_results({"misa": [1, 2, 9, 4, 5, 6], "fedavg": [1, -99, 3, 2, 1, 0]})
    best = results.choose(saved)
    assert best["misa"] == {"trial": 2, "accuracies": [1, 2, 9, 4, 5, 6]}
    assert best["fedavg"]["trial"] == 2
    (tmp_path / "trials.json").write_text(json.dumps(saved), encoding="utf-8")
    out = tmp_path / "chosen.json"
    out.write_text(json.dumps({"other": {}}), encoding="utf-8")
    RECIPE.commands["choose"]([str(tmp_path / "trials.json"), "--out", str(out)])
    assert json.loads(out.read_text(encoding="utf-8")) == {"other": {}, "many rounds": best}


def test_the_plan_has_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chosen.json"
    entry = {"many rounds": {"misa": {"trial": 3, "accuracies": []}}}
    path.write_text(json.dumps(entry), encoding="utf-8")
    monkeypatch.setattr(config, "CHOSEN", path)
    assert chosen("many rounds")["misa"] == TRIALS["misa"][3]
    assert chosen("many rounds")["sisa"] == TRIALS["sisa"][1]
    assert plan(PRESETS["table"])["mnist_1label_misa_seed0_rounds500"].options["rho"] == 50.0


def table(misa: float, rival: float, halved: float) -> list[Any]:
    preset = Config((("digits", 1),), rounds=100, seeds=1)
    runs = {}
    for label, settings in plan(preset).items():
        last = {"misa": misa, "fedmuon": rival}.get(settings.algorithm, 50.0)
        if settings.rounds == 50:
            last = halved
        runs[label] = {"settings": dataclasses.asdict(settings), "last": last}
    return results.check({"config": dataclasses.asdict(preset), "runs": runs})


@pytest.mark.parametrize(
    ("misa", "rival", "halved", "holds"),
    [
        (90.0, 80.0, 70.0, [True, True]),
        (90.0, 95.0, 70.0, [False, True]),
        (90.0, 80.0, 95.0, [True, False]),
    ],
)
def test_statements(misa: float, rival: float, halved: float, holds: list[bool]) -> None:
    assert [check.holds for check in table(misa, rival, halved)] == holds


def test_runs_on_digits_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["misa", "misa_local", "fedavg", "server_muon"]
    only = [word for name in names for word in ("--only", f"*_{name}_*")]
    command.main(["budgets", "--out", str(tmp_path), *only])
    assert "FAILS" not in capsys.readouterr().out
    saved = json.loads((tmp_path / "budgets.json").read_text(encoding="utf-8"))
    last = {run["settings"]["algorithm"]: run["last"] for run in saved["runs"].values()}
    assert set(last) == set(names)
    assert min(last["misa"], last["misa_local"]) > 95
    assert {run["samples"] for run in saved["runs"].values()} == {16_000}
    page = (tmp_path / "budgets.md").read_text(encoding="utf-8")
    assert f"**{max(last.values()):.2f}**" in page
