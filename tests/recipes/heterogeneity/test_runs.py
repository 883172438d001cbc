"""Plans, models, and runs from end to end on digits."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from recipes import __main__ as command
from recipes import datasets
from recipes.grid import parse_grid
from recipes.heterogeneity import RECIPE, config, tune
from recipes.heterogeneity.config import (
    ALGORITHMS,
    CHOICES,
    PRESETS,
    Choice,
    Config,
    Settings,
    plan,
)
from recipes.heterogeneity.models import build, lenet, mlp
from recipes.heterogeneity.run import CLASSES, algorithm, run
from torchpisa import federated
from torchpisa.federated.partition import by_label, label_counts

QUICK = plan(PRESETS["quick"])
CPU = {"device": "cpu", "data": "nowhere"}


def lines(settings: Settings, **changes: object) -> list[dict[str, float | None]]:
    return list(run(PRESETS["quick"], dataclasses.replace(settings, **changes), **CPU))


# The plan


def test_plan_is_the_papers_table() -> None:
    runs = plan(PRESETS["paper"])
    assert len(runs) == (10 * 5 + 1 + 4) * 3  # FedSGD in one cell, MISA in those of one label
    adult = runs["adult_1label_fednova_seed2"]
    assert (adult.clients, adult.labels, adult.seed) == (4, 1, 2)
    assert runs["cifar10_3label_sisa_seed0"].clients == 10
    assert not any(settings.validation for settings in runs.values())
    # Whole tables first, then the next seed.
    assert [s.seed for s in runs.values()] == sorted(s.seed for s in runs.values())


def test_seeds_start_where_told() -> None:
    moved = plan(dataclasses.replace(PRESETS["paper"], seed=5))
    assert {settings.seed for settings in moved.values()} == {5, 6, 7}


def test_more_seeds_leave_finished_runs_as_they_are() -> None:
    fewer, more = (dataclasses.replace(PRESETS["paper"], seeds=n) for n in (1, 5))
    assert plan(fewer).items() <= plan(more).items()
    assert RECIPE.run_key(fewer) == RECIPE.run_key(more)


@pytest.mark.parametrize("dataset", CHOICES)
def test_settings_make_algorithms(dataset: str) -> None:
    assert list(CHOICES[dataset]) == list(ALGORITHMS) == list(CLASSES)
    rows = tuple((dataset, 1, name) for name in ALGORITHMS)
    for settings in plan(Config((), 1, seeds=1, extra=rows)).values():
        made = algorithm(settings)
        assert isinstance(made, CLASSES[settings.algorithm])
        one_gradient = settings.algorithm in ("sisa", "misa", "fedsgd", "server_muon")
        assert isinstance(made.local, federated.FullGradient) == one_gradient
        if one_gradient:
            assert made.local == federated.FullGradient(steps=1)
        else:
            assert made.local == federated.Epochs(settings.epochs, settings.batch_size)


# Models


def test_models_are_the_published_ones() -> None:
    assert lenet(1, 28)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert lenet(3, 32)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert mlp(123, 2)(torch.zeros(2, 123)).shape == (2, 2)

    def size(model: torch.nn.Module) -> int:
        return sum(p.numel() for p in model.parameters())

    assert size(lenet(1, 28)) == 44_426
    assert size(lenet(3, 32)) == 62_006
    assert size(mlp(123, 2)) == 123 * 32 + 32 + 32 * 16 + 16 + 16 * 8 + 8 + 8 * 2 + 2


def test_first_weights_are_the_seeds_alone() -> None:
    shape = torch.Size([123])
    state = torch.random.get_rng_state()
    first = build("adult", shape, 2, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(3)
    again, other = build("adult", shape, 2, seed=1), build("adult", shape, 2, seed=2)
    assert torch.equal(first[0].weight, again[0].weight)  # type: ignore[index]
    assert not torch.equal(first[0].weight, other[0].weight)  # type: ignore[index]


# A run


def test_run_logs_accuracy_and_costs() -> None:
    rows = lines(QUICK["digits_1label_sisa_seed0"], rounds=5, every=2)
    assert [row["round"] for row in rows] == [0, 2, 4, 5]
    assert list(rows[0]) == [
        *("round", "accuracy", "loss"),
        *("gradients", "samples", "bytes_up", "bytes_down"),
    ]
    # All ten clients, a gradient of all their data each; weights down, as much up.
    parameters = sum(p.numel() for p in mlp(64, 10, hidden=(128,)).parameters())
    assert rows[-1]["gradients"] == 5 * 10
    assert rows[-1]["samples"] == 5 * 1297
    assert rows[-1]["bytes_up"] == rows[-1]["bytes_down"] == 5 * 10 * 4 * parameters
    assert all(math.isfinite(row["loss"] or math.nan) for row in rows)


def test_fedsgd_costs_what_sisa_costs() -> None:
    costs = [
        {name: value for name, value in lines(QUICK[f"digits_1label_{name}_seed0"], rounds=2)[-1]
         .items() if name not in ("accuracy", "loss")}
        for name in ("sisa", "misa", "fedsgd")
    ]  # fmt: skip
    assert costs[0] == costs[1] == costs[2]


def test_run_repeats() -> None:
    settings = QUICK["digits_2label_fedavg_seed0"]
    assert lines(settings, rounds=3) == lines(settings, rounds=3)
    assert lines(settings, rounds=3) != lines(settings, rounds=3, seed=1)


def test_tuning_keeps_away_from_the_test_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    true = federated.accuracy

    def accuracy(inputs: torch.Tensor, targets: torch.Tensor):
        seen.append((len(inputs), len(targets)))
        return true(inputs, targets)

    monkeypatch.setattr(federated, "accuracy", accuracy)
    settings = QUICK["digits_1label_sisa_seed0"]
    assert lines(settings, rounds=1, validation=True)[-1]["samples"] == 1000
    assert lines(settings, rounds=1)[-1]["samples"] == 1297
    assert seen == [(297, 297), (500, 500)]


def test_run_that_diverges_ends_early_and_is_kept() -> None:
    rows = lines(QUICK["digits_1label_fedsgd_seed0"], options={"lr": 1e30}, rounds=50, every=1)
    assert rows[-1]["loss"] is None
    assert rows[-1]["round"] < 50
    json.dumps(rows, allow_nan=False)


def test_clients_hold_as_many_labels_as_said() -> None:
    targets = datasets.load("digits", hold_out=False).train.targets
    for labels in (1, 2, 3):
        counts = label_counts(by_label(targets, 10, labels, seed=0), targets)
        assert ((counts > 0).sum(1) == labels).all()
        assert counts.sum() == 1297


def test_command_from_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    some = {"algorithms": ("fedavg", "sisa"), "extra": (("digits", 1, "misa"),)}
    small = dataclasses.replace(PRESETS["quick"], rounds=6, every=3, **some)
    recipe = dataclasses.replace(RECIPE, presets={"quick": small})
    monkeypatch.setitem(command.RECIPES, "heterogeneity", recipe)
    arguments = ["heterogeneity", "--out", str(tmp_path), "--device", "cpu"]
    with pytest.raises(SystemExit, match="statements do not hold"):  # after so few rounds
        command.main(arguments)
    saved = json.loads((tmp_path / "heterogeneity.json").read_text(encoding="utf-8"))
    assert len(saved["runs"]) == 5
    assert saved["missing"] == []
    assert "| digits | 1 |" in (tmp_path / "heterogeneity.md").read_text(encoding="utf-8")
    assert "digits, 2 labels" in (tmp_path / "heterogeneity.svg").read_text(encoding="utf-8")
    shown = tmp_path / "shown"
    shown.mkdir()
    copy = shown / "heterogeneity.json"
    copy.write_text(json.dumps(saved), encoding="utf-8")
    with pytest.raises(SystemExit):
        command.main(["heterogeneity", "--show", str(copy)])
    for suffix in (".md", ".svg"):
        again = copy.with_suffix(suffix).read_bytes()
        assert again == (tmp_path / "heterogeneity").with_suffix(suffix).read_bytes()


def test_missing_data_is_said_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["heterogeneity", "--preset", "paper", "--device", "cpu", "--jobs", "2"]
    with pytest.raises(SystemExit, match=r"mnist: there is no mnist/.* TORCHPISA_DATA"):
        command.main([*arguments, "--data", str(tmp_path / "no"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    arguments = ["--dataset", "adult", "--algorithm", "sisa", "--device", "cpu"]
    with pytest.raises(SystemExit):
        tune.main([*arguments, "--data", str(tmp_path)])
    assert "adult: there is no a9a/a9a.gz" in capsys.readouterr().err


def test_sisa_learns_from_clients_with_one_label() -> None:
    rows = lines(QUICK["digits_1label_sisa_seed0"], rounds=100, every=100)
    accuracy = rows[-1]["accuracy"]
    assert accuracy is not None
    assert accuracy > 88


# Tuning


def test_grid_of_words() -> None:
    grid = parse_grid(["sigma=2", "scheme=adam,adagrad"])
    assert grid == {"sigma": (2.0,), "scheme": ("adam", "adagrad")}
    made = tune.trials("mnist", 1, "sisa", grid, Config((), 9))
    first = [trial.options["scheme"] for trial in made.values() if trial.seed == 0]
    assert first == ["adam", "adagrad"]
    assert sum("scheme_adagrad" in name for name in made) == 3  # seeds


def test_grid_makes_trials() -> None:
    shared = Config((), rounds=20, every=5, seeds=2)
    grid = {"lr": (0.1, 0.2), "epochs": (1.0, 3.0)}
    made = tune.trials("mnist", 2, "fedprox", grid, shared)
    assert len(made) == 2 * 2 * 2
    trial = made["mnist_2label_fedprox_seed1_lr0.2_mu0.01_epochs3_batch64_rounds20"]
    assert (trial.epochs, trial.rounds, trial.labels, trial.seed) == (3, 20, 2, 1)
    assert trial.options == {"lr": 0.2, "mu": 0.01}  # the rest is as chosen before
    assert all(settings.validation for settings in made.values())


def test_everybody_is_tuned_by_equally_many_trials() -> None:
    assert list(tune.GRIDS) == list(ALGORITHMS)
    counts = {math.prod(len(values) for values in grid.values()) for grid in tune.GRIDS.values()}
    assert counts == {9}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_trial_is_a_legal_setting(name: str) -> None:
    for settings in tune.trials(
        "mnist", 1, name, tune.GRIDS[name], Config((), 1, seeds=1)
    ).values():
        algorithm(settings)


def test_the_rivals_table_has_everybody_in_every_cell() -> None:
    runs = plan(PRESETS["rivals"])
    assert len(runs) == 10 * len(ALGORITHMS) * 3
    assert {settings.algorithm for settings in runs.values()} == set(ALGORITHMS)


def test_tune_writes_every_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--dataset", "digits", "--algorithm", "sisa", "--grid", "sigma=2,1e4", "rho=100"]
    arguments += ["--rounds", "20", "--every", "10", "--out", str(tmp_path), "--device", "cpu"]
    tune.main([*arguments, "--samples", "600"])
    (saved,) = json.loads((tmp_path / "tuning.json").read_text(encoding="utf-8"))
    assert (saved["dataset"], saved["labels"], saved["algorithm"]) == ("digits", 1, "sisa")
    assert saved["count"] == len(saved["trials"]) == 2
    assert [trial["options"]["sigma"] for trial in saved["trials"]] == [2, 1e4]
    assert {trial["settings"]["samples"] for trial in saved["trials"]} == {600}
    assert all(trial["settings"]["validation"] for trial in saved["trials"])
    assert saved["chosen"]["options"] == {"sigma": 2.0, "rho": 100.0, "beta": 0.999}
    assert saved["chosen"]["accuracy"] == max(trial["last"] for trial in saved["trials"])
    assert "digits, 1, sisa" in capsys.readouterr().out
    tune.main([*arguments, "--samples", "600"])
    assert capsys.readouterr().out.count("in the log") == 2


def test_later_trials_join_earlier_ones(tmp_path: Path) -> None:
    arguments = ["--dataset", "digits", "--algorithm", "fedsgd", "--rounds", "10"]
    arguments += ["--out", str(tmp_path), "--device", "cpu", "--grid"]
    for values in ("lr=0.001,0.3", "lr=0.3,0.002"):
        tune.main([*arguments, values])
    (saved,) = json.loads((tmp_path / "tuning.json").read_text(encoding="utf-8"))
    assert [trial["options"]["lr"] for trial in saved["trials"]] == [0.001, 0.3, 0.002]
    assert saved["count"] == 3
    assert saved["chosen"]["options"] == {"lr": 0.3}


def test_the_recipe_takes_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"options": {"lr": 0.7}, "epochs": 0.5, "batch_size": 8, "rounds": 9, "accuracy": 1}
    cell = {"dataset": "mnist", "labels": 2, "algorithm": "fedavg"}
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps([{**cell, "chosen": chosen}]), encoding="utf-8")
    monkeypatch.setattr(config, "TUNING", path)
    config.tuned.cache_clear()
    try:
        assert config.choice("mnist", 2, "fedavg") == Choice({"lr": 0.7}, 0.5, 8)
        assert config.choice("mnist", 1, "fedavg") == config.CHOICES["mnist"]["fedavg"]
    finally:
        config.tuned.cache_clear()


def test_several_are_tuned_at_once(tmp_path: Path) -> None:
    arguments = ["--dataset", "digits", "--algorithm", "fedavg", "fednova", "--grid", "lr=0.1"]
    arguments += ["--rounds", "2", "--out", str(tmp_path), "--device", "cpu", "--labels", "1", "2"]
    tune.main(arguments)
    saved = json.loads((tmp_path / "tuning.json").read_text(encoding="utf-8"))
    cells = [(entry["labels"], entry["algorithm"]) for entry in saved]
    assert cells == [(1, "fedavg"), (1, "fednova"), (2, "fedavg"), (2, "fednova")]
    assert all(entry["chosen"]["epochs"] == 1 for entry in saved)


def test_choice_is_by_the_mean_over_seeds() -> None:
    def trial(sigma: float, best: float, last: float, samples: int = 50) -> dict[str, object]:
        work = {"epochs": 0, "batch_size": 64, "rounds": 9, "settings": {"samples": samples}}
        return {"options": {"sigma": sigma}, **work, "best": best, "last": last}

    done = [trial(1, 99, 10), trial(1, 50, 10), trial(2, 80, 70), trial(2, 80, 5)]
    assert tune.choose(done, "best")["options"] == {"sigma": 2}
    assert tune.choose(done, "best")["accuracy"] == 80
    assert tune.choose(done, "last")["accuracy"] == 37.5
    # Trials on all data come before those on some.
    assert tune.choose([*done, trial(3, 30, 20, samples=0)], "best")["options"] == {"sigma": 3}


def test_bad_grid_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["--dataset", "digits", "--algorithm", "sisa", "--grid", "sigma"])
    assert "--grid must look like sigma=1,2,5, got 'sigma'" in capsys.readouterr().err
    for word, message in {
        "scheme=foo": "--grid: scheme must be one of 'adagrad', 'rmsprop', 'adam', got 'foo'",
        "sigma=1,abc": "--grid: sigma must be a finite number > 0, got 'abc'",
        "slope=1": "--grid: SISA.__init__() got an unexpected keyword argument 'slope'",
    }.items():
        with pytest.raises(SystemExit):
            tune.main(["--dataset", "digits", "--algorithm", "sisa", "--grid", word])
        assert message in capsys.readouterr().err
