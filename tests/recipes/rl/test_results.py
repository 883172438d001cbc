"""Plans, and the way from logs to statements, tables and the picture, on results made up."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes import __main__ as command
from recipes.recipe import Results
from recipes.rl import RECIPE
from recipes.rl.config import ALGORITHMS, PRESETS, Settings, plan, settings
from recipes.rl.results import condense
from recipes.rl.run import missing_requirement
from torchpisa.presets import PAPER_TABLE

CONFIG = PRESETS["paper"]
REWARDS = {"sisa": 2000.0, "misa": 500.0, "adam": 1000.0, "sisa_lr": 1000.0}


def log(run_settings: Settings, reward: float) -> dict[str, Any]:
    count = run_settings.epochs + 1
    versions = {"torch": "2", "tianshou": "2.0.1", "gymnasium": "1.4.0", "mujoco": "4.0.0"}
    return {
        "settings": json.loads(json.dumps(dataclasses.asdict(run_settings))),
        "versions": versions,
        "hardware": {"gpu": None, "cpu": "a processor", "cores": 1},
        "seconds": 100.0,
        "epoch": list(range(count)),
        "steps": [run_settings.collects * run_settings.collect * epoch for epoch in range(count)],
        "reward": [reward * epoch / run_settings.epochs for epoch in range(count)],
        "spread": [1.0] * count,
        "length": [10.0] * count,
        "training_reward": [None, *[1.0] * run_settings.epochs],
        "elapsed": [2.0 * epoch for epoch in range(count)],
        "diverged": [False] * count,
    }


def results(rewards: dict[str, float]) -> Results:
    """Return results in which seeds differ by 10, and the final reward is below the last one."""
    runs = {
        name: condense(
            log(run_settings, rewards[run_settings.choice.label] + 10 * run_settings.seed)
        )
        for name, run_settings in plan(CONFIG).items()
    }
    shared = json.loads(json.dumps(dataclasses.asdict(CONFIG)))
    return {"config": shared, "runs": runs, "missing": []}


def test_plan_of_the_paper() -> None:
    runs = plan(CONFIG)
    assert len(runs) == 4 * 4 * 3
    assert not any("sisa_lr" in name for name in list(runs)[:36])  # what is beside comes last
    assert {(run.task, run.algorithm) for run in runs.values()} == {
        ("ant", "ppo"),
        ("humanoid", "ppo"),
        ("half_cheetah", "a2c"),
        ("double_pendulum", "a2c"),
    }
    for run in runs.values():
        assert run.epochs * run.epoch_steps >= (300_000 if run.algorithm == "ppo" else 600_000)
        assert (run.episodes, run.epoch_steps, run.horizon) == (10, 30_000, 100)


@pytest.mark.parametrize("task", ["ant", "humanoid", "half_cheetah", "double_pendulum"])
def test_sisa_has_the_row_of_the_paper(task: str) -> None:
    run_settings, row = settings(CONFIG, task, "sisa", 0), PAPER_TABLE[f"rl/{task}"]
    assert run_settings.choice.options == {"sigma": row.sigma, "rho": row.rho, "beta": 0.999}
    assert (run_settings.choice.batches, run_settings.minibatch, run_settings.horizon) == (
        4,
        row.samples,
        row.epochs,
    )
    # The paper's n is rounded down and counts one pass over the samples.
    assert row.rounds == 30_000 // run_settings.collect * run_settings.collect // (4 * 64)
    assert (
        run_settings.rounds
        == run_settings.repeat * run_settings.collects * run_settings.collect // (4 * 64)
    )


def test_others_have_tianshous_learning_rate_and_data() -> None:
    for run in plan(CONFIG).values():
        tianshou = ALGORITHMS[run.algorithm]
        if run.choice.label != "sisa":
            assert run.choice.options == {"lr": tianshou.lr}
            assert (run.collect, run.minibatch) == (tianshou.collect, tianshou.minibatch)


def test_gamma_is_the_linear_decay_of_the_step() -> None:
    pytest.importorskip("tianshou", reason="needs Tianshou: pip install torchpisa[rl]")
    from recipes.rl.optimizers import EpochDecay

    gamma, sigma, seen = EpochDecay(horizon=10, rounds=3), 1.0, []
    for iteration in range(30):
        sigma /= gamma(iteration)
        seen.append(sigma)
    assert seen[2::3][:9] == pytest.approx([10 / (10 - k) for k in range(1, 10)])
    assert seen[3:6] == [seen[3], seen[3], pytest.approx(10 / 8)]
    assert seen[-1] == pytest.approx(10)  # the printed rule divides by zero in the last epoch


def test_condensed_run() -> None:
    run_settings = settings(CONFIG, "ant", "adam", 0)
    run = condense(log(run_settings, 1000.0))
    assert (run["final"], run["best"], run["diverged"]) == (900.0, 1000.0, False)
    assert run["steps_per_second"] == round(307_200 / 20)
    broken = log(run_settings, 1000.0)
    broken["diverged"][-1], broken["reward"][-1] = True, None
    assert (condense(broken)["final"], condense(broken)["diverged"]) == (None, True)


def test_statements_are_about_means_over_seeds() -> None:
    checks = RECIPE.check(results(REWARDS))
    assert len(checks) == 12
    assert [check.holds for check in checks] == [True, False, False] * 4
    assert checks[0].panel == "Ant, PPO"
    assert checks[0].paper == "SISA above Adam"
    assert checks[0].here == "1,809 and 909"
    assert "not in the paper" in checks[1].paper


def test_missing_runs_make_no_statements() -> None:
    saved = results(REWARDS)
    saved["runs"] = {name: run for name, run in saved["runs"].items() if "adam" not in name}
    assert RECIPE.check(saved) == []
    assert "SISA" in RECIPE.report(saved)


def test_report_and_picture(tmp_path: Path) -> None:
    saved = results(REWARDS)
    text = RECIPE.report(saved)
    assert "| SISA | m 4, sigma 5, rho 20000, beta 0.999 | 3 | 307,200 |" in text
    assert "**1809 ± 9**" in text
    assert "48 runs on one core each" in text
    assert "tianshou 2.0.1" in text
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install torchpisa[rl]")
    for name in ("first", "second"):
        RECIPE.draw(saved, tmp_path / f"{name}.svg")
    first, second = ((tmp_path / f"{name}.svg").read_text() for name in ("first", "second"))
    assert first == second
    assert all(title in first for title in ("Ant, PPO", "HalfCheetah, A2C", "Adam", "MISA"))


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    command.main(["rl", "--list", *words])
    return [line.split()[-1] for line in capsys.readouterr().out.splitlines()]


def test_options_choose_a_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--preset", "paper", "--out", str(tmp_path)]
    chosen = [*words, "--task", "ant", "--algorithm", "a2c", "--optimizer", "sisa"]
    assert listed(capsys, *chosen) == [f"ant_a2c_sisa_seed{seed}" for seed in range(3)]
    assert listed(capsys, *chosen, "--seeds", "1", "--seed", "5") == ["ant_a2c_sisa_seed5"]
    assert len(listed(capsys, *words, "--optimizer", "misa", "--optimizer", "adam")) == 24
    # The row of a task that the paper trains with this algorithm.
    config = dataclasses.replace(CONFIG, algorithm="a2c")
    assert settings(config, "ant", "sisa", 0).choice.options["rho"] == 2e2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "0"], "epochs must be >= 1, got 0"),
        (["--epochs", "101"], "epochs must be <= 100, where learning rates are zero, got 101"),
        (["--seeds", "0"], "seeds must be >= 1, got 0"),
        (["--task", "chess"], "invalid choice: 'chess'"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        command.main(["rl", *words])
    assert message in capsys.readouterr().err


def test_without_the_extra_runs_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("gymnasium")
    monkeypatch.setitem(sys.modules, "tianshou", None)
    assert missing_requirement() == "tianshou not installed: pip install 'torchpisa[rl]'"
    command.main(["rl", "--out", str(tmp_path), "--runs-only", "--optimizer", "adam"])
    said = capsys.readouterr().out
    assert "left out, tianshou not installed: pip install 'torchpisa[rl]'" in said
