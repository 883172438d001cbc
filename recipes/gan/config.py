"""The presets and their runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipes.optimizers import Choice
from recipes.recipe import shared_settings
from torchpisa.presets import PAPER_TABLE

__all__ = ["KINDS", "PRESETS", "Config", "Settings", "Task", "choices", "plan"]

KINDS = {"wgan": "WGAN", "wgan_gp": "WGAN-GP"}
# Of the AdaBelief experiments. RMSProp has its own smoothing, as there.
BETAS: dict[str, Any] = {"lr": 2e-4, "betas": (0.5, 0.999)}
BASELINES: dict[str, dict[str, Any]] = {
    "adam": BETAS,
    "rmsprop": {"lr": 2e-4},
    "adabelief": {**BETAS, "eps": 1e-12},
}


def choices(kind: str, names: Sequence[str]) -> tuple[Choice, ...]:
    """Return the optimizers of both networks.

    Besides the names of `recipes.optimizers`: "sisa" is the paper's row, "sisa_defaults" SISA with
    its defaults, "misa_adam_rate" MISA with the rate and the momentum that Adam has here.
    """
    row = PAPER_TABLE[f"gan/{kind}"]
    chosen = []
    for name in names:
        if name == "sisa":
            chosen.append(Choice("sisa", row.options(), row.batches))
        elif name == "sisa_defaults":
            chosen.append(Choice("sisa", label=name))
        elif name == "misa_adam_rate":
            options = {"lr": BETAS["lr"], "momentum": BETAS["betas"][0]}
            chosen.append(Choice("misa", options, label=name))
        else:
            chosen.append(Choice(name, BASELINES.get(name, {})))
    return tuple(chosen)


@dataclass(frozen=True)
class Task:
    """Runs of a kind of GAN.

    Attributes:
        kind: one of `KINDS`.
        names: of the optimizers, see `choices`.
    """

    kind: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Config:
    """Settings that all runs share.

    Attributes:
        tasks: in the order in which they are run.
        epochs: passes over all images.
        seeds: runs per kind and optimizer.
        features: network of the distance, see `recipes.gan.features`.
        fid_every: epochs from one distance to the next.
        fid_images: pictures for it.
        last_images: pictures for the distance at the end.
        pixels: of a side; images are enlarged to it.
        width: channels of the critic's first layer.
        batch: images of a round.
        critic_rounds: rounds of the critic for one of the generator.
        precision: of forward passes on a GPU: "bfloat16" or "float32".
        limit: images; 0 for all.
        fallback: whether digits take the place of images that are not there.
        save_every: epochs between checkpoints, where they are asked for.
        seed: the first; it gives weights, order and noise.
    """

    tasks: tuple[Task, ...]
    epochs: int
    seeds: int
    features: str = "efficientnet_lite0"
    fid_every: int = 10
    fid_images: int = 6400
    last_images: int = 64_000
    pixels: int = 64
    width: int = 64
    batch: int = 64
    critic_rounds: int = 1
    precision: str = "float32"
    limit: int = 0
    fallback: bool = False
    save_every: int = 10
    seed: int = 0


SHORT = ("sisa", "misa", "misa_adam_rate", "adam")
ALL = ("sisa", "sisa_defaults", "misa", "misa_adam_rate", "adam", "rmsprop", "adabelief")

PRESETS = {
    "quick": Config(
        (Task("wgan", ("sisa", "adam")), Task("wgan_gp", ("misa", "adam"))),
        *(4, 1, "pixels"),
        **{"fid_every": 1, "fid_images": 512, "last_images": 512, "pixels": 16, "width": 16},
        **{"batch": 32, "limit": 960, "fallback": True, "save_every": 1},
    ),
    "short": Config(
        *((Task("wgan_gp", SHORT), Task("wgan", SHORT)), 10, 3),
        **{"fid_every": 2, "last_images": 10_000, "pixels": 32},
    ),
    "paper": Config((Task("wgan", ALL), Task("wgan_gp", ALL)), 100, 5),
}


@dataclass(frozen=True)
class Settings:
    """The settings of one run: everything that its result depends on; see `Config`."""

    kind: str
    choice: Choice
    epochs: int
    features: str
    fid_every: int
    fid_images: int
    last_images: int
    pixels: int
    width: int
    batch: int
    critic_rounds: int
    precision: str
    limit: int
    fallback: bool
    seed: int

    def __post_init__(self) -> None:
        if self.batch % self.choice.batches:
            raise ValueError(
                f"batch must be a multiple of batches, {self.choice.batches}, got {self.batch}"
            )

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.choice.label}_e{self.epochs}_seed{self.seed}"


def plan(config: Config) -> dict[str, Settings]:
    """Return all runs by name, seed by seed, so that the first ones can be compared already."""
    shared = shared_settings(config, Settings)
    runs = [
        Settings(**{**shared, "kind": task.kind, "choice": choice, "seed": seed})
        for seed in range(config.seed, config.seed + config.seeds)
        for task in config.tasks
        for choice in choices(task.kind, task.names)
    ]
    return {run.name: run for run in runs}
