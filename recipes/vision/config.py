"""The presets and their runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.optimizers import Choice, Schedule
from recipes.recipe import shared_settings
from torchpisa.presets import PAPER_TABLE

__all__ = ["PRESETS", "Config", "Settings", "Task", "choices", "plan"]

MODELS = {
    "vgg11": "VGG-11",
    "resnet34": "ResNet-34",
    "densenet121": "DenseNet-121",
    "resnet18": "ResNet-18",
    "vit_b_16": "ViT-B/16",
    "alexnet": "AlexNet",
}

# Settings of the AdaBelief experiments on CIFAR-10, where they have them; the weight decay is an L2
# term but for AdamW, LAMB and Muon. NAdam and LAMB have Adam's rate, Muon what its README has.
L2: dict[str, Any] = {"weight_decay": 5e-4}
COUPLED: dict[str, Any] = {**L2, "weight_decouple": False}
BASELINES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, **L2},
    "adabound": {"lr": 1e-3, "final_lr": 0.1, "gamma": 1e-3, **COUPLED},
    "adam": {"lr": 1e-3, **L2},
    "radam": {"lr": 1e-3, **L2},
    "msvag": {"lr": 0.1, "beta": 0.9, **L2},
    "adamw": {"lr": 1e-3, "weight_decay": 0.01},
    "adabelief": {"lr": 1e-3, "eps": 1e-8, **COUPLED},
    "yogi": {"lr": 1e-3, "eps": 1e-3, **COUPLED},
    "lamb": {"lr": 1e-3, "weight_decay": 0.01},
    "nadam": {"lr": 1e-3, **L2},
    "muon": {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.01, "rest_lr": 3e-4},
}
# VGG-11 has no normalisation; this is the rate of the repository that its layers come from.
SGD_VGG = 0.05
# On ImageNet the L2 term is that of PyTorch's example, and AdaBelief has what its experiment there
# has.
IMAGENET_BASELINES: dict[str, dict[str, Any]] = {
    name: options if name in ("adamw", "lamb", "muon") else {**options, "weight_decay": 1e-4}
    for name, options in BASELINES.items()
}
IMAGENET_BASELINES["adabelief"] = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}
# The published scripts divide rho together with sigma, at other epochs than the table says; that
# of DenseNet-121 at those of the table, 50, 100 and 150.
PUBLISHED_STEPS = {
    "vgg11": (
        *((epoch, 0.9) for epoch in (10, *range(20, 60, 5), *range(60, 150, 10))),
        *((epoch, 0.35) for epoch in (125, 150, 175)),
    ),
    "resnet34": (
        *((epoch, 0.85) for epoch in (*range(6, 61, 3), 70, 80, 90)),
        *((epoch, 0.5) for epoch in (100, 125, 150, 175)),
    ),
    "densenet121": tuple((epoch, 0.25) for epoch in (50, 100, 150)),
    "resnet18_test": tuple((epoch, 0.15) for epoch in (65, 75, 83)),
}
# The published script of VGG-11 divides local steps and, in the consensus, the dual by the norm of
# a part's first gradient; this is the mean of the four norms in its log, vgg_1.txt. In Algorithm
# 2's terms the long-run step is then that of sigma times the norm, and the momentum that of rho
# times its square. Its lambda is added to sigma there and nowhere else, so it hardly counts.
SCRIPT_NORM = 0.41


def choices(dataset: str, model: str, names: Sequence[str]) -> tuple[Choice, ...]:
    """Return the optimizers of a model.

    Besides the names of `recipes.optimizers`: "sisa" is the paper's row, "sisa_steps" the row with
    the published script's schedule instead of gamma, "sisa_script" also with the scale that the
    published script has for VGG-11, "sisa_test" the row of the table's part on testing, with that
    schedule too, where the model has one of each, "sisa_defaults" SISA with its defaults,
    "misa_adam_rate" MISA with the learning rate that Adam has here.
    """
    baselines = BASELINES if dataset == "cifar10" else IMAGENET_BASELINES
    chosen = []
    for name in names:
        if name == "sisa":
            row = PAPER_TABLE[f"{dataset}/{model}"]
            chosen.append(Choice("sisa", row.options(), row.batches))
        elif name in ("sisa_steps", "sisa_script", "sisa_test"):
            of_row = f"{model}_test" if name == "sisa_test" else model
            row = PAPER_TABLE[f"{dataset}/{of_row}"]
            options = {key: value for key, value in row.options().items() if key != "gamma"}
            if name == "sisa_script":
                options["sigma"] = round(row.sigma * SCRIPT_NORM, 6)
                options["rho"] = round(row.rho * SCRIPT_NORM**2, 6)
                options["consensus_decay"] = 0.0
            steps = Schedule("steps", tuple(sorted(PUBLISHED_STEPS[of_row])))
            chosen.append(Choice("sisa", options, row.batches, name, steps))
        elif name == "sisa_defaults":
            chosen.append(Choice("sisa", L2, label=name))
        elif name == "misa":
            chosen.append(Choice("misa"))
        elif name == "misa_adam_rate":
            chosen.append(Choice("misa", {"lr": baselines["adam"]["lr"]}, label=name))
        elif name == "nsisa":
            chosen.append(Choice("nsisa", L2))
        else:
            rate = {"lr": SGD_VGG} if (name, model) == ("sgd", "vgg11") else {}
            chosen.append(Choice(name, {**baselines[name], **rate}))
    return tuple(chosen)


@dataclass(frozen=True)
class Task:
    """Runs of a model.

    Attributes:
        model: its name.
        names: of the optimizers, see `choices`.
        epochs: of every run.
        seeds: how many runs an optimizer has.
        schedule: of those that have none of their own.
        batch: images of a round.
    """

    model: str
    names: tuple[str, ...]
    epochs: int
    seeds: int = 1
    schedule: Schedule = field(default_factory=Schedule)
    batch: int = 128


@dataclass(frozen=True)
class Config:
    """Settings that all runs share.

    Attributes:
        dataset: "cifar10" or "imagenet".
        tasks: in the order in which they are run.
        precision: of forward passes on a GPU: "bfloat16" or "float32". Always float32 on a CPU.
        width: all channels of the models times this.
        limit: training images per class; 0 for all.
        fallback: whether digits take the place of images that are not there.
        save_every: epochs between checkpoints, where they are asked for.
        seed: the first; it gives weights, order and augmentation.
    """

    dataset: str
    tasks: tuple[Task, ...]
    precision: str = "bfloat16"
    width: float = 1.0
    limit: int = 0
    fallback: bool = False
    save_every: int = 10
    seed: int = 0


COSINE = Schedule("cosine", warm_up=1)
SHORT = ("sisa", "misa", "sgd", "adam", "adamw", "adabelief", "muon")
ALL = ("sisa", "sisa_steps", "sisa_defaults", "misa", "nsisa", *BASELINES)
AFTER_150 = Schedule("steps", ((150, 0.1),))  # of the AdaBelief experiments
# Of Figure 5, and with them those that Table 3 has for ResNet-18.
IMAGENET = ("sisa", "misa", "sgd", "adam", "adamw", "adabelief", "lamb")
IMAGENET_TEST = ("sisa_test", *IMAGENET, "adabound", "radam", "msvag", "nadam")
AFTER_70_80 = Schedule("steps", ((70, 0.1), (80, 0.1)))  # of AdaBelief's experiment on ImageNet

PRESETS = {
    "quick": Config(
        "cifar10",
        (
            Task("vgg11", ("adam",), 8, schedule=COSINE, batch=16),
            Task("resnet34", ("sisa", "misa"), 2, schedule=COSINE, batch=16),
        ),
        **{"precision": "float32", "width": 0.125, "limit": 40, "fallback": True},
        save_every=1,
    ),
    "short": Config(
        "cifar10",
        (
            Task("vgg11", (*SHORT, "misa_adam_rate"), 30, seeds=3, schedule=COSINE),
            Task("resnet34", SHORT, 30, schedule=COSINE),
            Task("densenet121", SHORT, 30, schedule=COSINE),
        ),
    ),
    "paper": Config(
        "cifar10",
        (
            Task("vgg11", ("sisa_script", *ALL), 200, schedule=AFTER_150),
            Task("resnet34", ALL, 200, schedule=AFTER_150),
            Task("densenet121", ALL[3:], 200, schedule=AFTER_150),
            Task("densenet121", ALL[:3], 200, schedule=AFTER_150, batch=256),
        ),
    ),
    "imagenet": Config(
        "imagenet",
        (
            Task("resnet18", IMAGENET_TEST, 90, schedule=AFTER_70_80, batch=256),
            *(
                Task(model, IMAGENET, 90, schedule=COSINE, batch=256)
                for model in ("vit_b_16", "alexnet", "densenet121")
            ),
        ),
    ),
}


@dataclass(frozen=True)
class Settings:
    """The settings of one run: everything that its result depends on; see `Config` and `Task`."""

    dataset: str
    model: str
    choice: Choice
    epochs: int
    batch: int
    schedule: Schedule
    precision: str
    width: float
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
        return f"{self.model}_{self.choice.label}_e{self.epochs}_seed{self.seed}"


def plan(config: Config) -> dict[str, Settings]:
    """Return all runs by name, task by task and within a task seed by seed."""
    shared = shared_settings(config, Settings)
    runs = [
        Settings(
            **{**shared, "seed": seed},
            model=task.model,
            choice=choice,
            epochs=task.epochs,
            batch=task.batch,
            schedule=choice.schedule or task.schedule,
        )
        for task in config.tasks
        for seed in range(config.seed, config.seed + task.seeds)
        for choice in choices(config.dataset, task.model, task.names)
    ]
    return {run.name: run for run in runs}
