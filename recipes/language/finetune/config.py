"""The presets and their runs; every trial of every optimizer is named here."""

from dataclasses import dataclass, field
from typing import Any

from recipes.optimizers import Choice, Schedule
from recipes.recipe import shared_settings
from torchpisa.penalty import WarmDown
from torchpisa.presets import PAPER_TABLE

__all__ = ["MODELS", "PRESETS", "PUBLISHED", "ROW", "Config", "Model", "Settings", "plan"]

BATCHES = 4  # m of the paper's rows, and micro-batches of a step for everyone


@dataclass(frozen=True)
class Model:
    """The sizes of a GPT-2.

    Attributes:
        layers: blocks.
        heads: of attention, per block.
        width: of the residual stream.
        positions: the longest text.
        tokens: "gpt2" or "bytes", see `recipes.language.finetune.data.load_codec`.
        pretrained: whether training begins with weights from a folder; otherwise with random ones.
    """

    layers: int
    heads: int
    width: int
    positions: int = 1024
    tokens: str = "gpt2"
    pretrained: bool = True


MODELS = {
    "tiny": Model(2, 4, 64, positions=256, tokens="bytes", pretrained=False),
    "124m": Model(12, 12, 768),
    "335m": Model(24, 16, 1024),
}

# The published script: 4 steps per epoch, 100 steps of warm-up, so 25 epochs.
PUBLISHED = Choice(
    "adamw",
    {"lr": 3e-3, "weight_decay": 0.01},
    label="adamw_published",
    schedule=Schedule(warm_up=25),
)
COSINE = Schedule("cosine", warm_up=1)
ROW = "sisa_row"  # label of the paper's row


def paper_row(model: str, rounds: int, label: str = ROW, **changes: Any) -> Choice:
    """Return SISA with the paper's row for a model, or some of its settings changed."""
    row = PAPER_TABLE[f"finetune/gpt2_{model}"]
    gamma = WarmDown(row.epochs, rounds)
    return Choice("sisa", {**row.options(), "gamma": gamma, **changes}, row.batches, label)


def at_rate(name: str, lr: float, **options: Any) -> Choice:
    """Return an optimizer with a learning rate in AdamW's terms."""
    batches = BATCHES if name == "sisa" else 1
    options = {"lr": lr, "weight_decay": 0.0, **options}
    return Choice(name, options, batches, f"{name}_lr{lr:g}", COSINE)


def quick_trials(model: str, rounds: int) -> tuple[Choice, ...]:
    return at_rate("adamw", 3e-3), at_rate("sisa", 3e-3), at_rate("misa", 1e-2)


def short_trials(model: str, rounds: int) -> tuple[Choice, ...]:
    """Return four trials of every optimizer, in turn."""
    adamw = PUBLISHED, *(at_rate("adamw", lr) for lr in (1e-3, 3e-4, 3e-3))
    # As printed, and with the second moment of the published script, which has no bias correction.
    sisa = (
        paper_row(model, rounds),
        paper_row(model, rounds, "sisa_row_scheme2", scheme="rmsprop"),
        *(at_rate("sisa", lr) for lr in (1e-3, 3e-3)),
    )
    misa = (at_rate("misa", lr) for lr in (2e-3, 1e-3, 4e-3, 8e-3))
    return tuple(trial for turn in zip(adamw, sisa, misa, strict=True) for trial in turn)


def paper_trials(model: str, rounds: int) -> tuple[Choice, ...]:
    return PUBLISHED, paper_row(model, rounds), at_rate("misa", 2e-3)


TRIALS = {"quick": quick_trials, "short": short_trials, "paper": paper_trials}


@dataclass(frozen=True)
class Config:
    """Settings that all runs share.

    Attributes:
        models: names of `MODELS`, in the order in which they are run.
        trials: name of a list of trials, "quick", "short" or "paper".
        epochs: of a run.
        sizes: recipes to train on, to choose settings on, and to report on.
        batch: recipes of a micro-batch. A step has `BATCHES` of them, each from a part of the
            training recipes of its own.
        length: longest text, in tokens.
        dropout: GPT-2's.
        sample_epochs: epochs after which models write instructions for the test recipes.
        new_tokens: longest instructions that they write.
        limit: how many recipes of the file there are at most; 0 for all.
        save_every: epochs between checkpoints, where they are asked for.
        weights: which weights the models begin with, from `--weights`.
        seeds: runs of every trial.
        seed: the first; gives dropout, the order of recipes and what is sampled.
    """

    models: tuple[str, ...]
    trials: str
    epochs: int
    sizes: tuple[int, int, int] = (800, 100, 100)
    batch: int = 50
    length: int = 180
    dropout: float = 0.1
    sample_epochs: tuple[int, ...] = (2, 5, 15)
    new_tokens: int = 96
    limit: int = 0
    save_every: int = 5
    weights: dict[str, str] = field(default_factory=dict)
    seeds: int = 1
    seed: int = 0

    @property
    def rounds(self) -> int:
        """Return the steps of an epoch."""
        return self.sizes[0] // (BATCHES * self.batch)


PRESETS = {
    "quick": Config(
        *(("tiny",), "quick"),
        **{"epochs": 5, "sizes": (64, 16, 16), "batch": 2, "length": 160, "dropout": 0.0},
        **{"sample_epochs": (2, 5), "new_tokens": 48, "limit": 96, "save_every": 1},
    ),
    "short": Config(("124m",), "short", epochs=15),
    "paper": Config(("124m", "335m"), "paper", epochs=25),
}


@dataclass(frozen=True)
class Settings:
    """The settings of one run: everything but the weights it begins with; see `Config`."""

    model: str
    choice: Choice
    epochs: int
    sizes: tuple[int, int, int]
    batch: int
    length: int
    dropout: float
    sample_epochs: tuple[int, ...]
    new_tokens: int
    limit: int
    seed: int

    def __post_init__(self) -> None:
        per_step = BATCHES * self.batch
        if self.sizes[0] % per_step:
            raise ValueError(
                f"sizes must begin with a multiple of {BATCHES} * batch, {per_step}, "
                f"got {self.sizes[0]}"
            )

    @property
    def name(self) -> str:
        return f"{self.model}_{self.choice.label}_e{self.epochs}_seed{self.seed}"

    @property
    def rounds(self) -> int:
        """Return the steps of an epoch."""
        return self.sizes[0] // (BATCHES * self.batch)


def plan(config: Config) -> dict[str, Settings]:
    """Return all runs by name."""
    shared = shared_settings(config, Settings)
    runs = [
        Settings(**{**shared, "seed": seed}, model=model, choice=choice)
        for model in config.models
        for seed in range(config.seed, config.seed + config.seeds)
        for choice in TRIALS[config.trials](model, config.rounds)
    ]
    return {run.name: run for run in runs}
