"""The presets and their runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.optimizers import Choice, Schedule
from recipes.recipe import shared_settings
from recipes.rnn.model import Sizes
from torchpisa.presets import PAPER_TABLE

__all__ = ["PRESETS", "Config", "Settings", "Task", "choices", "plan"]

DECAY: dict[str, Any] = {"weight_decay": 1.2e-6}
COUPLED: dict[str, Any] = {**DECAY, "weight_decouple": False}
# Settings of the AdaBelief experiments, with one layer and with more. Their SGD has no momentum.
BASELINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": ({"lr": 30.0, **DECAY}, {"lr": 30.0, **DECAY}),
    "adabound": (
        {"lr": 0.01, "final_lr": 30.0, "gamma": 1e-3, **COUPLED},
        {"lr": 0.01, "final_lr": 30.0, "gamma": 1e-3, **COUPLED},
    ),
    "adam": ({"lr": 1e-3, "eps": 1e-12, **DECAY}, {"lr": 0.01, **DECAY}),
    "radam": ({"lr": 1e-3, "eps": 1e-12, **DECAY}, {"lr": 0.01, **DECAY}),
    "msvag": ({"lr": 30.0, "beta": 0.9, **DECAY}, {"lr": 30.0, "beta": 0.9, **DECAY}),
    "adamw": ({"lr": 1e-3, "eps": 1e-12, **DECAY}, {"lr": 0.01, **DECAY}),
    "adabelief": (
        {"lr": 1e-3, "eps": 1e-16, **COUPLED},
        {"lr": 0.01, "eps": 1e-12, **COUPLED},
    ),
    "yogi": ({"lr": 0.01, "eps": 1e-3, **COUPLED}, {"lr": 0.01, "eps": 1e-3, **COUPLED}),
    "padam": ({"lr": 0.1, **COUPLED}, {"lr": 0.1, **COUPLED}),
}
# Of the published commands: sigma and rho are divided at these epochs.
MILESTONES = {
    1: tuple((epoch, 0.5) for epoch in (90, 120, 160, 195)),
    2: tuple((epoch, 0.15) for epoch in (140, 165, 190, 198)),
    3: tuple((epoch, 0.15) for epoch in (140, 165, 190, 198)),
}
PAPER_EPOCHS = 200
FULL = Sizes()


def milestones(layers: int, epochs: int) -> Schedule:
    """Return the published steps of SISA, at the same fractions of a shorter run."""
    scaled = ((round(at * epochs / PAPER_EPOCHS), by) for at, by in MILESTONES[layers])
    return Schedule("steps", tuple(scaled))


def choices(
    layers: int, names: Sequence[str], epochs: int, published_steps: bool
) -> tuple[Choice, ...]:
    """Return the optimizers of a model.

    Args:
        layers: of the model.
        names: as in `recipes.optimizers`; "sisa" is the paper's row, "sisa_defaults" SISA with its
            defaults.
        epochs: of the run.
        published_steps: whether "sisa" has the published `milestones` instead of the task's
            schedule.
    """
    row = PAPER_TABLE[f"rnn/{layers}"]
    chosen = []
    for name in names:
        if name == "sisa":
            steps = milestones(layers, epochs) if published_steps else None
            chosen.append(Choice("sisa", row.options(), row.batches, schedule=steps))
        elif name == "sisa_defaults":
            chosen.append(Choice("sisa", DECAY, label=name))
        elif name in ("misa", "nsisa"):
            chosen.append(Choice(name, DECAY))
        else:
            chosen.append(Choice(name, BASELINES[name][layers > 1]))
    return tuple(chosen)


@dataclass(frozen=True)
class Task:
    """Runs of a model.

    Attributes:
        layers: of the model.
        names: of the optimizers, see `choices`.
        epochs: of every run.
        seeds: how many runs an optimizer has.
        schedule: of those that have none of their own.
        published_steps: see `choices`.
    """

    layers: int
    names: tuple[str, ...]
    epochs: int
    seeds: int = 1
    schedule: Schedule = field(default_factory=Schedule)
    published_steps: bool = False


@dataclass(frozen=True)
class Config:
    """Settings that all runs share.

    Attributes:
        tasks: in the order in which they are run.
        sizes: of the models.
        count: sequences side by side.
        bptt: words of a window, on average.
        clip: largest norm of a gradient.
        limit: training words; 0 for all.
        fallback: whether Python's documentation takes the place of a corpus that is not there.
        train_recurrent: whether the recurrent matrices are trained. In the published code they stay
            as they were drawn, see the README.
        save_every: epochs between checkpoints, where they are asked for.
        seed: the first; it gives weights, windows and dropout.
    """

    tasks: tuple[Task, ...]
    sizes: Sizes = FULL
    count: int = 20
    bptt: int = 70
    clip: float = 0.25
    limit: int = 0
    fallback: bool = False
    train_recurrent: bool = True
    save_every: int = 10
    seed: int = 0


COSINE = Schedule("cosine")
AT_100_145 = Schedule("steps", ((100, 0.1), (145, 0.1)))  # of the AdaBelief experiments
SHORT = ("sisa", "misa", "adam", "adabelief", "sgd")
SHORT_TASKS = (
    Task(1, SHORT, 20, schedule=COSINE),
    Task(2, SHORT[:3], 8, schedule=COSINE),
    Task(3, SHORT[:3], 8, schedule=COSINE),
)
ALL = ("sisa", "sisa_defaults", "misa", "nsisa", *BASELINES)

PRESETS = {
    "quick": Config(
        (
            Task(1, ("sisa", "misa", "adam"), 2, schedule=COSINE),
            Task(2, ("misa",), 2, schedule=COSINE),
        ),
        **{"sizes": Sizes(48, 64), "count": 10, "bptt": 24, "limit": 20_000, "fallback": True},
        save_every=1,
    ),
    "short": Config(SHORT_TASKS),
    "short_frozen": Config(SHORT_TASKS, train_recurrent=False),
    "paper": Config(
        tuple(
            Task(n, ALL, PAPER_EPOCHS, schedule=AT_100_145, published_steps=True) for n in (1, 2, 3)
        ),
        train_recurrent=False,
    ),
}


@dataclass(frozen=True)
class Settings:
    """The settings of one run: everything that its result depends on; see `Config` and `Task`."""

    layers: int
    choice: Choice
    epochs: int
    schedule: Schedule
    sizes: Sizes
    count: int
    bptt: int
    clip: float
    limit: int
    fallback: bool
    train_recurrent: bool
    seed: int

    @property
    def name(self) -> str:
        return f"lstm{self.layers}_{self.choice.label}_e{self.epochs}_seed{self.seed}"


def plan(config: Config) -> dict[str, Settings]:
    """Return all runs by name, in the order of the tasks."""
    shared = shared_settings(config, Settings)
    runs = [
        Settings(
            **{**shared, "seed": seed},
            layers=task.layers,
            choice=choice,
            epochs=task.epochs,
            schedule=choice.schedule or task.schedule,
        )
        for task in config.tasks
        for seed in range(config.seed, config.seed + task.seeds)
        for choice in choices(task.layers, task.names, task.epochs, task.published_steps)
    ]
    return {run.name: run for run in runs}
