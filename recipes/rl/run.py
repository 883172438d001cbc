"""One run: an agent that learns, and its reward by step."""

import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from recipes.recipe import Line
from recipes.rl.config import Config, Settings
from recipes.training import checkpoint_file, save_atomically

__all__ = ["PACKAGES", "AgentTraining", "load", "missing_requirement", "run"]

SAVE_EVERY = 30.0  # seconds that an interruption may cost
PACKAGES = ("gymnasium", "mujoco", "tianshou")


def run(config: Config, settings: Settings, *, checkpoints: Path | None = None) -> Iterator[Line]:
    """Yield rewards before the training and after every epoch; one that diverges ends early.

    Args:
        config: not used; everything is in the settings.
        settings: the settings of the run.
        checkpoints: folder to save in and to resume from; None for neither. The file of a finished
            run stays: `recipes.rl.film` plays it, and a preset with more epochs goes on from it.
    """
    training = AgentTraining(settings)
    file = checkpoint_file(checkpoints, settings)
    if file is not None:
        training.resume(file)
    # A log is written from its beginning, so the lines of a checkpoint are yielded again.
    yield from training.lines
    if not training.lines:
        yield training.line()
    while training.epoch < settings.epochs and not training.lines[-1]["diverged"]:
        training.learn(file)
        line = training.line()
        if file is not None:
            training.save(file)
        yield line


class AgentTraining:
    """An agent in training, with its log.

    Args:
        settings: the settings of the run.
    """

    def __init__(self, settings: Settings) -> None:
        if "numba" not in sys.modules:
            # Compiling Tianshou's loops takes longer than running them; the numbers are the same.
            os.environ.setdefault("NUMBA_DISABLE_JIT", "1")
        from recipes.rl.agent import Agent

        torch.set_num_threads(1)  # networks this small are slower on more
        self.settings, self.agent = settings, Agent(settings)
        self.collects = self.steps = 0
        self.elapsed = 0.0
        self.returns: list[float] = []  # of episodes that ended in training since the last line
        self.lines: list[Line] = []

    @property
    def epoch(self) -> int:
        return self.collects // self.settings.collects

    def learn(self, file: Path | None) -> None:
        """Train to the end of the epoch; save now and then if there is a file."""
        started = saved = time.perf_counter()
        while self.agent.finite():
            collected = self.agent.update()
            self.steps += collected.n_collected_steps
            self.returns += collected.returns.tolist()
            self.collects += 1
            now = time.perf_counter()
            self.elapsed, started = self.elapsed + now - started, now
            if self.collects % self.settings.collects == 0:
                return
            if file is not None and now - saved > SAVE_EVERY:
                self.save(file)
                saved = started = time.perf_counter()

    def line(self) -> Line:
        """Evaluate, append a line to the log and return it.

        `reward` is the mean over episodes and `spread` their deviation; `elapsed` are the seconds
        of training, without evaluations.
        """
        finite = self.agent.finite()
        rewards, lengths = self.agent.evaluate() if finite else (None, None)
        line: Line = {
            "epoch": self.epoch,
            "steps": self.steps,
            "reward": None if rewards is None else float(rewards.mean()),
            "spread": None if rewards is None else float(rewards.std()),
            "length": None if lengths is None else float(lengths.mean()),
            "training_reward": sum(self.returns) / len(self.returns) if self.returns else None,
            "elapsed": round(self.elapsed, 2),
            "diverged": not finite,
        }
        self.returns = []
        self.lines.append(line)
        return line

    # Checkpoints

    def save(self, file: Path) -> None:
        """Save everything; an interruption leaves the file as it was."""
        progress = {name: getattr(self, name) for name in PROGRESS}
        state = {"settings": self.settings, "agent": self.agent.state(), **progress}
        save_atomically(state, file)

    def resume(self, file: Path) -> None:
        """Load a checkpoint, if there is one of the same settings that went no further."""
        if not file.is_file():
            return
        state, settings = load(file), self.settings
        same = dataclasses.replace(state["settings"], epochs=settings.epochs) == settings
        if not same or state["collects"] > settings.epochs * settings.collects:
            return
        self.agent.load(state["agent"])
        for name in PROGRESS:
            setattr(self, name, state[name])


PROGRESS = ("collects", "steps", "elapsed", "returns", "lines")  # attributes in a checkpoint


def load(file: Path) -> dict[str, Any]:
    """Return what `AgentTraining.save` saved, unpickled: load only files that you trust."""
    state: dict[str, Any] = torch.load(file, weights_only=False)
    return state


def missing_requirement(settings: Settings | None = None) -> str | None:
    """Return why this machine cannot do a run, or None."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"{' and '.join(missing)} not installed: pip install 'torchpisa[rl]'"
