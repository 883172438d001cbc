"""The benchmark of defaults: its tasks, what is run and what is skipped, and how it counts."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.defaults import cartpole, command, data, report, run
from benchmarks.defaults.run import Key
from benchmarks.defaults.tasks import TASKS

pytest.importorskip("sklearn")
pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon yet")

USUAL = "adamw-0.001"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(run, "MEASUREMENTS", 1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def short(task: str, steps: int) -> float:
    return min(1.0, steps / TASKS[task].steps)


# Tasks


def test_tasks_are_divided_evenly() -> None:
    halves = [task.half for task in TASKS.values()]
    assert len(halves) >= 14
    assert halves.count("choose") == halves.count("judge") == len(halves) / 2
    assert all(task.about and task.metric for task in TASKS.values())


@pytest.mark.parametrize("name", TASKS)
def test_task_is_learned(name: str) -> None:
    steps = {"cartpole": 4, "cnn": 100, "gan": 100, "poisson": 100}.get(name, 40)
    result = run.train(Key(name, "adamw-0.01", "cosine", 0), short(name, steps))
    assert not result["diverged"]
    assert result["curve"][-1] < 0.95 * result["untrained"]
    assert 0 < result["test"] < 1.2 * result["untrained"]


@pytest.mark.parametrize("name", TASKS)
def test_task_depends_on_its_seed_only(name: str) -> None:
    def train(seed: int) -> dict[str, Any]:
        result = run.train(Key(name, USUAL, "constant", seed), short(name, 2))
        return {key: result[key] for key in ("untrained", "validation", "test")}

    torch.manual_seed(5)
    first = train(0)
    torch.manual_seed(6)
    assert train(0) == first
    assert train(1)["test"] != first["test"]


@pytest.mark.parametrize("name", TASKS)
def test_splits_share_no_sample_and_no_seed_changes_them(name: str) -> None:
    samples = TASKS[name].make(0).samples
    rows = {split: set(map(str, x.tolist())) for split, x in samples.items()}
    assert set(rows) == {"train", "validation", "test"}
    assert rows["validation"]
    assert rows["test"]
    assert not rows["train"] & rows["validation"]
    assert not rows["train"] & rows["test"]
    assert not rows["validation"] & rows["test"]
    again = TASKS[name].make(1).samples
    assert all(torch.equal(again[split], samples[split]) for split in samples)


def test_cart_is_pushed_as_by_hand() -> None:
    state = torch.zeros(2, 4, dtype=torch.float64)
    after = cartpole.move(state, torch.tensor([1, 0]))
    # 10 / 1.1 over 0.5 (4/3 - 0.1 / 1.1) is the acceleration of the angle, to the other side.
    twist = -(10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1))
    right = [0, 0.02 * (10 / 1.1 - 0.05 * twist / 1.1), 0, 0.02 * twist]
    torch.testing.assert_close(after[0], torch.tensor(right, dtype=torch.float64))
    torch.testing.assert_close(after[1], -after[0])
    # Falling without a push cannot be told from gravity: a leaning pole leans further.
    leaning = cartpole.move(torch.tensor([[0.0, 0.0, 0.1, 0.0]]), torch.tensor([0.5]))
    assert leaning[0, 3] > 0
    assert cartpole.fallen(
        torch.tensor([[2.5, 0, 0, 0], [0, 9, 0.2, 9.0], [0, 0, 0.22, 0]])
    ).tolist() == [
        True,
        False,
        True,
    ]


def test_poles_at_random_fall_after_about_twenty_steps() -> None:
    assert 15 < cartpole.balanced(None, cartpole.starts(200, data.generator())) < 30


def test_digits_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = data.digits.__wrapped__
    expected = load()
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match="benchmarks defaults prepare"):
        load()
    monkeypatch.undo()
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    command.main(["prepare"])
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    for split, tensors in load().items():
        assert all(map(torch.equal, tensors, expected[split]))


# Runs


def test_muon_gets_hidden_matrices_only() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Conv2d(1, 1, 2), nn.Linear(4, 3), nn.Linear(3, 2))
    muon, adamw = run.OPTIMIZERS["muon"](model)
    assert muon.param_groups[0]["params"] == [model[2].weight]
    everything = [*muon.param_groups[0]["params"], *adamw.param_groups[0]["params"]]
    assert {id(p) for p in everything} == {id(p) for p in model.parameters()}
    assert len(everything) == len(list(model.parameters()))


def test_frozen_weights_are_left_out() -> None:
    (model,) = TASKS["lora"].make(0).modules
    for name, make in run.OPTIMIZERS.items():
        given = [p for opt in make(model) for group in opt.param_groups for p in group["params"]]
        assert all(p.requires_grad for p in given), name
        assert len(given) == 6, name


def test_cosine_multiplies_the_optimizers_own_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            rates.append(self.param_groups[0]["lr"])

    monkeypatch.setitem(run.OPTIMIZERS, "sgd", lambda model: [Watched(model.parameters(), lr=8.0)])
    run.train(Key("sparse", "sgd", "cosine", 0), short("sparse", 4))
    assert rates == pytest.approx([8.0, 4 + 4 * math.sqrt(0.5), 4.0, 4 - 4 * math.sqrt(0.5)])


def test_divergence_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        run.OPTIMIZERS, "wild", lambda model: [torch.optim.SGD(model.parameters(), lr=10.0)]
    )
    line = run.train(Key("regression", "wild", "constant", 0), short("regression", 20))
    assert line["diverged"]
    assert line["test"] is None
    json.dumps(line, allow_nan=False)


def test_finished_runs_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, fraction = tmp_path / "runs.jsonl", short("sparse", 2)
    keys = [Key("sparse", name, "cosine", 0) for name in ("misa", USUAL)]
    assert run.run(keys[:1], path, jobs=1, fraction=fraction) == 0
    assert "1/1 sparse misa cosine 0: 0." in capsys.readouterr().out
    (line,) = run.read(path)
    assert line["settings"]["MISA"]
    assert {"torch", "torchpisa"} <= set(line["versions"])
    assert list(run.missing(keys, [line], fraction)) == keys[1:]
    assert run.run([keys[1]], path, jobs=1, limit_seconds=-1, fraction=fraction) == 1

    # Other steps, other settings or an error: not the run that is wanted.
    assert list(run.missing(keys[:1], [line])) == keys[:1]
    changed = {**line, "settings": {"MISA": {"lr": 0.5}}}
    assert list(run.missing(keys[:1], [changed], fraction)) == keys[:1]
    failed = {**keys[0]._asdict(), "error": "no memory", "diverged": True}
    assert list(run.missing(keys[:1], [failed], fraction)) == keys[:1]

    # The last line of a key counts, and one that was cut off does not.
    with path.open("a") as file:
        file.write(json.dumps({**line, "test": 0.25}) + "\n" + json.dumps(line)[:50])
    (line,) = run.read(path)
    assert line["test"] == 0.25


def test_error_of_a_run_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: nn.Module) -> list[torch.optim.Optimizer]:
        raise ValueError("sigma must be > 0")

    monkeypatch.setattr(run, "current_settings", lambda optimizer: {})
    monkeypatch.setitem(run.OPTIMIZERS, "broken", fail)
    line = run._train_or_explain(Key("sparse", "broken", "cosine", 0), 0.01)
    assert line["error"] == "ValueError: sigma must be > 0"
    assert line["diverged"]


# Report


def result(task: str, optimizer: str, test: float | None, seed: int = 0, **more: Any) -> run.Run:
    return {
        **Key(task, optimizer, "cosine", seed)._asdict(),
        "validation": test,
        "test": test,
        "diverged": test is None,
        "settings": {optimizer: {"lr": 1.0}},
        "cpu": "a processor",
        "versions": {"torch": "2.9"},
        **more,
    }


def table() -> list[run.Run]:
    # AdamW at 3e-4, 1e-3, 3e-3, 1e-2; Muon; MISA
    rows = {
        "sparse": (4.0, 2.0, 1.0, 3.0, 1.5, 1.04),  # better, near, ahead
        "cnn": (4.0, 2.0, 1.0, 3.0, 1.5, 1.06),  # better, ahead
        "words": (4.0, 2.0, 1.0, 3.0, 1.5, 2.0),  # level with 1e-3: not better
        "lora": (4.0, 2.0, 5.0, 3.0, 1.5, 1.9),  # better, near; not ahead
        "graph": (4.0, 2.0, 1.0, 3.0, 1.5, None),  # diverged
    }
    names = ["adamw-0.0003", USUAL, "adamw-0.003", "adamw-0.01", "muon", "misa"]
    runs = [
        result(task, name, value, seed)
        for task, values in rows.items()
        for name, value in zip(names, values, strict=True)
        for seed in (0, 1)
    ]
    runs[-1] = result("graph", "misa", 0.1, 1)  # the other seed went well, which does not help
    return runs


def test_report_counts() -> None:
    scores = report.Scores(table())
    everything = report.standing(scores, TASKS, "misa", "cosine")
    assert everything == report.Standing(
        tasks=5, runs=10, diverged=1, better=3, near=2, ahead=2, median=0.95
    )
    judge = [name for name, task in TASKS.items() if task.half == "judge"]
    line = report.standing(scores, judge, "misa", "cosine")
    assert line == report.Standing(2, 4, 1, better=1, near=1, ahead=0, median=math.inf)
    assert report.standing(scores, judge, "misa", "constant").tasks == 0


def test_best_rate_is_chosen_on_validation_data() -> None:
    runs = table()
    for line in runs:
        if (line["task"], line["optimizer"]) == ("sparse", "adamw-0.01"):
            line["validation"] = 0.5
    scores = report.Scores(runs)
    assert scores.test("sparse", report.BEST, "cosine") == 3.0
    assert scores.test("cnn", report.BEST, "cosine") == 1.0
    assert scores.ratio("sparse", "misa", "cosine", report.BEST) == pytest.approx(1.04 / 3)


def test_page_says_what_was_counted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in table()))
    command.main(["report", "--runs", str(path), "--results", str(tmp_path)])
    page = (tmp_path / "defaults.md").read_text()
    row = "| MISA | judge | 1 of 4 | 1 of 2 (50 %) | 1 of 2 (50 %) | 0 of 2 (0 %) | inf |"
    assert row in page.splitlines()
    assert "| MISA | choose | 0 of 6 | 2 of 3 (67 %) |" in page
    assert "1 of 2 diverged" in page
    assert "1 ± 0 (lr 0.003)" in page
    assert "One core of a processor; torch 2.9." in page
    saved = json.loads((tmp_path / "defaults.json").read_text())
    assert len(saved["runs"]) == len(table())
    assert saved["settings"]["misa"] == {"misa": {"lr": 1.0}}
    picture = (tmp_path / "defaults.svg").read_text()
    assert picture.count("<!-- div. -->") == 1
    assert "<!-- MISA -->" in picture


def test_saved_results_count(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.write(table(), tmp_path)
    known, path = tmp_path / "defaults.json", tmp_path / "runs.jsonl"
    new = [result(task, "misa", 0.5, 1, cpu="another") for task in ("sparse", "gan")]
    path.write_text("".join(json.dumps(line) + "\n" for line in new))
    arguments = ["--runs", str(path), "--known", str(known), "--results", str(tmp_path)]
    command.main(["report", *arguments])
    saved = json.loads(known.read_text())
    tests = {run.key_of(line): line["test"] for line in saved["runs"]}
    assert len(saved["runs"]) == len(tests) == len(table()) + 1
    assert tests[Key("sparse", "misa", "cosine", 1)] == 0.5  # the newer run, not the saved one
    assert [machine["cpu"] for machine in saved["machines"]] == ["a processor", "another"]
    assert "One core of a processor, another; torch 2.9." in (tmp_path / "defaults.md").read_text()


@pytest.mark.parametrize("text", [None, "no JSON", "[]", '{"runs": []}'])
def test_foreign_results_are_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = tmp_path / "other.json"
    if text is not None:
        known.write_text(text)
    with pytest.raises(SystemExit):
        command.main(["run", "--runs", str(tmp_path / "none"), "--known", str(known)])
    assert f"--known must be written by python -m benchmarks defaults report, got {known}" in (
        capsys.readouterr().err
    )


def test_runs_with_different_settings_are_not_averaged(tmp_path: Path) -> None:
    runs = [*table(), result("gan", "misa", 1.0, settings={"misa": {"lr": 2.0}})]
    with pytest.raises(ValueError, match="misa have different settings"):
        report.write(runs, tmp_path)


@pytest.mark.parametrize("option", ["--seeds", "--jobs"])
def test_options_are_checked(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([option, "0"])
    assert f"{option} must be >= 1, got 0" in capsys.readouterr().err
