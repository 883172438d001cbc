"""Runs of agents: what they log, resuming to the last bit, divergence, the quick preset."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tianshou", reason="needs Tianshou: pip install torchpisa[rl]")
pytest.importorskip("mujoco", reason="needs MuJoCo: pip install torchpisa[rl]")

from recipes import __main__ as command
from recipes.rl.agent import Agent
from recipes.rl.config import EXTRA, OPTIMIZERS, PRESETS, Settings, settings
from recipes.rl.run import AgentTraining, run

CONFIG = PRESETS["paper"]
pytestmark = pytest.mark.xdist_group("rl")  # one process compiles Tianshou's loops for all


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def small(task: str, optimizer: str, **changes: Any) -> Settings:
    """Return settings of two epochs of three collections, across which rounds extend."""
    run_settings = settings(CONFIG, task, optimizer, 0)
    few = {"environments": 3, "collect": 96, "minibatch": 32, "epoch_steps": 288, "repeat": 2}
    return dataclasses.replace(run_settings, epochs=2, horizon=10, episodes=2, **{**few, **changes})


def logged(run_settings: Settings, checkpoints: Path | None = None) -> list[dict[str, Any]]:
    return untimed(list(run(CONFIG, run_settings, checkpoints=checkpoints)))


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "elapsed"} for line in lines]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    state = torch.load(checkpoint, weights_only=False)["agent"]["algorithm"]
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def test_what_is_logged() -> None:
    lines = list(run(CONFIG, small("double_pendulum", "sisa")))
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert [line["steps"] for line in lines] == [0, 288, 576]
    assert all(line["reward"] > 0 and line["spread"] >= 0 and line["length"] >= 1 for line in lines)
    assert lines[0]["training_reward"] is None
    assert all(line["training_reward"] > 0 for line in lines[1:])
    assert not any(line["diverged"] for line in lines)
    assert lines[-1]["elapsed"] > 0
    json.dumps(lines)


@pytest.mark.parametrize("algorithm", ["ppo", "a2c"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *EXTRA])
def test_every_optimizer_moves_all_weights(algorithm: str, optimizer: str) -> None:
    config = dataclasses.replace(CONFIG, algorithm=algorithm)
    run_settings = settings(config, "half_cheetah", optimizer, 0)
    run_settings = dataclasses.replace(run_settings, environments=4, collect=256, repeat=2)
    agent = Agent(run_settings)
    before = [param.detach().clone() for param in agent.algorithm.parameters()]
    agent.update()
    for old, new in zip(before, agent.algorithm.parameters(), strict=True):
        assert new.isfinite().all()
        assert not torch.equal(old, new)


def test_evaluation_repeats_itself_and_leaves_the_training_alone() -> None:
    run_settings = small("half_cheetah", "adam")
    results = []
    for evaluates in (True, False):
        agent = Agent(run_settings)
        agent.update()
        if evaluates:
            first, second = agent.evaluate(), agent.evaluate()
            assert (first[0] == second[0]).all()
            assert first[0][0] != first[0][1]  # episodes begin differently
        agent.update()
        results.append([param.clone() for param in agent.algorithm.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


KILLED = """
import os, pickle, signal, sys
from pathlib import Path
from recipes.rl.run import run

settings, folder = pickle.loads(bytes.fromhex(sys.argv[1])), Path(sys.argv[2])
for count, line in enumerate(run(None, settings, checkpoints=folder)):
    if count == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_run_resumes_to_the_last_bit(tmp_path: Path) -> None:
    import pickle

    run_settings = small("ant", "sisa")
    whole = logged(run_settings, tmp_path / "whole")
    words = (pickle.dumps(run_settings).hex(), str(tmp_path / "killed"))
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *words], env={**os.environ, "PYTHONPATH": paths}, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL
    assert logged(run_settings, tmp_path / "killed") == whole
    expected, actual = (
        weights(tmp_path / each / f"{run_settings.name}.pt") for each in ("whole", "killed")
    )
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_run_resumes_within_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("recipes.rl.run"), "SAVE_EVERY", -1.0
    )  # after every update
    run_settings = small("half_cheetah", "misa")
    whole = logged(run_settings)
    update, calls = Agent.update, 0

    def breaks_off(agent: Agent) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:  # the last of the second epoch
            raise KeyboardInterrupt
        return update(agent)

    monkeypatch.setattr(Agent, "update", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        logged(run_settings, tmp_path)
    monkeypatch.setattr(Agent, "update", update)
    training = AgentTraining(run_settings)
    training.resume(tmp_path / f"{run_settings.name}.pt")
    assert (training.collects, len(training.lines)) == (5, 2)
    assert logged(run_settings, tmp_path) == whole


def test_checkpoint_of_other_settings_is_not_used(tmp_path: Path) -> None:
    run_settings = small("double_pendulum", "adam")
    logged(run_settings, tmp_path)
    other = AgentTraining(dataclasses.replace(run_settings, repeat=1))
    other.resume(tmp_path / f"{run_settings.name}.pt")
    assert (other.collects, other.lines) == (0, [])


def test_finished_run_can_be_prolonged(tmp_path: Path) -> None:
    run_settings = small("double_pendulum", "adam", collect=48, epoch_steps=96)
    logged(run_settings, tmp_path)
    longer = dataclasses.replace(run_settings, epochs=3)
    assert logged(longer, tmp_path) == logged(longer)


def test_divergence_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run_settings = small("double_pendulum", "adam")
    update = Agent.update

    def spoils(agent: Agent) -> Any:
        collected = update(agent)
        with torch.no_grad():
            next(agent.algorithm.parameters()).fill_(float("nan"))
        return collected

    monkeypatch.setattr(Agent, "update", spoils)
    lines = list(run(CONFIG, run_settings))
    assert [line["diverged"] for line in lines] == [False, True]
    assert lines[-1]["reward"] is None
    json.dumps(lines, allow_nan=False)


def test_quick_preset_learns(tmp_path: Path) -> None:
    """With SISA the reward grows to twice what it was, or the command ends badly."""
    command.main(["rl", "--preset", "quick", "--only", "*_sisa_*", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "rl.json").read_text(encoding="utf-8"))
    assert len(results["runs"]) == len(results["checks"]) == 1
    assert all(check["holds"] for check in results["checks"])
    versions = next(iter(results["runs"].values()))["versions"]
    assert {"tianshou", "gymnasium", "mujoco"} <= set(versions)
    assert (tmp_path / "rl.svg").stat().st_size > 1000
    assert "InvertedDoublePendulum" in (tmp_path / "rl.md").read_text(encoding="utf-8")
