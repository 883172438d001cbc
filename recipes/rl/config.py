"""The tasks, Tianshou's settings, the paper's rows, and the runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.optimizers import Choice
from torchpisa.presets import PAPER_TABLE

__all__ = ["ALGORITHMS", "EXTRA", "OPTIMIZERS", "PRESETS", "TASKS"]
__all__ += ["Algorithm", "Config", "Settings", "Task", "choose", "label", "plan", "settings"]

OPTIMIZERS = ("sisa", "misa", "adam")
# Beside them: SISA in place of Adam as MISA is, with its learning rate and minibatches, m = 1.
EXTRA = ("sisa_lr",)


@dataclass(frozen=True)
class Task:
    """An environment.

    Attributes:
        environment: its id in gymnasium.
        title: as pictures and tables have it.
        algorithm: the one that the paper trains on it.
        epochs: how far the preset `paper` goes; the paper itself goes to 100.
    """

    environment: str
    title: str
    algorithm: str
    epochs: int


TASKS = {
    "ant": Task("Ant-v5", "Ant", "ppo", 10),
    "humanoid": Task("Humanoid-v5", "Humanoid", "ppo", 10),
    "half_cheetah": Task("HalfCheetah-v5", "HalfCheetah", "a2c", 20),
    "double_pendulum": Task("InvertedDoublePendulum-v5", "InvertedDoublePendulum", "a2c", 20),
}


@dataclass(frozen=True)
class Algorithm:
    """Tianshou's settings for MuJoCo, of its examples `mujoco_ppo.py` and `mujoco_a2c.py`.

    Attributes:
        environments: that collect side by side.
        collect: steps in all of them between two updates.
        repeat: passes over these in an update.
        minibatch: samples in a gradient; None for all that were collected.
        lr: Adam's, at the beginning; it goes down to zero linearly in 100 epochs.
        options: arguments of Tianshou's class.
    """

    environments: int
    collect: int
    repeat: int
    minibatch: int | None
    lr: float
    options: Mapping[str, Any]


_SHARED = {"gamma": 0.99, "gae_lambda": 0.95, "max_grad_norm": 0.5, "return_scaling": True}
ALGORITHMS = {
    "ppo": Algorithm(
        **{"environments": 8, "collect": 2048, "repeat": 10, "minibatch": 64, "lr": 3e-4},
        options={
            **_SHARED,
            **{"vf_coef": 0.25, "ent_coef": 0.0, "eps_clip": 0.2, "value_clip": False},
            **{"advantage_normalization": False, "recompute_advantage": True},
        },
    ),
    "a2c": Algorithm(
        **{"environments": 16, "collect": 80, "repeat": 1, "minibatch": None, "lr": 7e-4},
        options={**_SHARED, "vf_coef": 0.5, "ent_coef": 0.01},
    ),
}

# Where the paper trains a task with the other algorithm, SISA takes the row of another task.
ROW = {"ppo": "ant", "a2c": "half_cheetah"}


@dataclass(frozen=True)
class Config:
    """Settings that all runs share.

    Attributes:
        tasks: some of `TASKS`.
        algorithm: one of `ALGORITHMS`, or None for the one that the paper trains on a task.
        optimizers: some of `OPTIMIZERS` and `EXTRA`.
        epochs: the epochs of a run; None for those in `TASKS`.
        horizon: epochs in which learning rates go down to zero, the paper's E.
        epoch_steps: environment steps between two evaluations.
        episodes: in an evaluation.
        seeds: runs per task and optimizer.
        seed: the first of them.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    algorithm: str | None = None
    optimizers: tuple[str, ...] = (*OPTIMIZERS, *EXTRA)
    epochs: int | None = None
    horizon: int = 100
    epoch_steps: int = 30_000
    episodes: int = 10
    seeds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "seeds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.epochs is not None and self.epochs > self.horizon:
            raise ValueError(
                f"epochs must be <= {self.horizon}, where learning rates are zero, "
                f"got {self.epochs}"
            )


PRESETS = {
    "quick": Config(
        *(("double_pendulum",), "ppo", OPTIMIZERS),
        **{"epochs": 6, "epoch_steps": 2048, "episodes": 5, "seeds": 1},
    ),
    "paper": Config(),
}


@dataclass(frozen=True)
class Settings:
    """The settings of one run: everything that its result depends on.

    Attributes:
        task: one of `TASKS`.
        environment: its id in gymnasium.
        algorithm: one of `ALGORITHMS`.
        algorithm_options: arguments of Tianshou's class.
        choice: the optimizer.
        environments: see `Algorithm`; likewise `collect`, `repeat` and `minibatch`.
        epochs: see `Config`; likewise `horizon`, `epoch_steps` and `episodes`.
        seed: seed of the first weights, the environments and the order of the samples.
    """

    task: str
    environment: str
    algorithm: str
    algorithm_options: Mapping[str, Any]
    choice: Choice
    environments: int
    collect: int
    repeat: int
    minibatch: int | None
    epochs: int
    horizon: int
    epoch_steps: int
    episodes: int
    seed: int

    @property
    def name(self) -> str:
        return label(self.task, self.algorithm, self.choice.label, self.seed)

    @property
    def collects(self) -> int:
        """Return the number of collections in an epoch, which end as in Tianshou's trainer."""
        return -(-self.epoch_steps // self.collect)

    @property
    def rounds(self) -> int:
        """Return the rounds in an epoch: the paper's n, counting every pass over samples."""
        minibatches = self.collect // self.minibatch if self.minibatch else 1
        return self.collects * self.repeat * minibatches // self.choice.batches


def label(task: str, algorithm: str, optimizer: str, seed: int) -> str:
    """Return the name of a run."""
    return f"{task}_{algorithm}_{optimizer}_seed{seed}"


def choose(task: str, algorithm: str, optimizer: str) -> Choice:
    """Return an optimizer's settings: `sisa` has the paper's row, others Tianshou's learning rate.

    Nothing was tuned for any of them.
    """
    if optimizer != "sisa":
        name = optimizer.partition("_")[0]
        return Choice(name, {"lr": ALGORITHMS[algorithm].lr}, label=optimizer)
    row = PAPER_TABLE[f"rl/{task if TASKS[task].algorithm == algorithm else ROW[algorithm]}"]
    return Choice("sisa", {"sigma": row.sigma, "rho": row.rho, "beta": row.beta}, row.batches)


def settings(config: Config, task: str, optimizer: str, seed: int) -> Settings:
    """Return one run of a configuration."""
    algorithm = config.algorithm or TASKS[task].algorithm
    tianshou, choice = ALGORITHMS[algorithm], choose(task, algorithm, optimizer)
    collect, minibatch = tianshou.collect, tianshou.minibatch
    if choice.batches > 1:
        minibatch = PAPER_TABLE[f"rl/{task}"].samples
        # If Tianshou takes one gradient of all that it collected, a collection is a round here.
        collect = collect if tianshou.minibatch else choice.batches * minibatch
    return Settings(
        task=task,
        environment=TASKS[task].environment,
        algorithm=algorithm,
        algorithm_options=dict(tianshou.options),
        choice=choice,
        environments=tianshou.environments,
        collect=collect,
        repeat=tianshou.repeat,
        minibatch=minibatch,
        epochs=config.epochs or TASKS[task].epochs,
        horizon=config.horizon,
        epoch_steps=config.epoch_steps,
        episodes=config.episodes,
        seed=seed,
    )


def plan(config: Config) -> dict[str, Settings]:
    """Return all runs by name, task by task, so that an early end leaves complete comparisons."""
    runs = [
        settings(config, task, optimizer, seed)
        for optimizers in (OPTIMIZERS, EXTRA)
        for task in config.tasks
        for seed in range(config.seed, config.seed + config.seeds)
        for optimizer in optimizers
        if optimizer in config.optimizers
    ]
    return {run.name: run for run in runs}
