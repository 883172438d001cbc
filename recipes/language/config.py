"""The presets and their runs; every trial of every optimizer is named here."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipes import grid
from recipes.language.model import NAMES as MODELS
from recipes.language.model import SIZES
from recipes.language.optimizers import Choice, choose
from recipes.language.tokens import SOURCES
from recipes.recipe import shared_settings

__all__ = ["BASES", "CHANGES", "CHOSEN", "PRESETS", "Config", "Settings", "Trial", "add_arguments"]
__all__ += ["configure", "finalist", "label", "label_prefix", "plan"]

CHOSEN = Path(__file__).with_name("chosen.json")
"""The changes that `python -m recipes language choose` chose from the trials, by optimizer."""


@dataclass(frozen=True)
class Trial:
    """A setting of an optimizer that is tried.

    Attributes:
        choice: the setting.
        label: of its runs; says what is tried.
        batches: m. The training tokens are cut into so many contiguous parts, and a step takes as
            many sequences from each.
        tried: how many settings were tried to find this one, itself included; the report adds
            them up.
        seed: of the first weights; None for the configuration's.
        model: in place of the configuration's; None for that.
        change: which of `CHANGES` it tries.
    """

    choice: Choice
    label: str
    batches: int = 1
    tried: int = 1
    seed: int | None = None
    model: str | None = None
    change: str | None = None


def trial(
    name: str,
    batches: int = 1,
    label: str = "",
    tried: int = 1,
    seed: int | None = None,
    model: str | None = None,
    change: str | None = None,
    **settings: Any,
) -> Trial:
    """Return the defaults of an optimizer with some settings changed, which make the label."""
    choice = choose(name, **settings)
    named = label or name_of(name, settings)
    return Trial(choice, named, batches, tried, seed, model, change)


def name_of(name: str, settings: Mapping[str, Any]) -> str:
    shown = grid.run_label({key: value for key, value in settings.items() if key != "warm_up"})
    return f"{name}_{shown}" if shown else name


@dataclass(frozen=True)
class Config:
    """Settings that all runs share.

    Attributes:
        model: one of `recipes.language.model.NAMES`.
        tokens: one of `recipes.language.tokens.SOURCES`.
        trials: of the optimizers.
        steps: rounds; the weights change once in each.
        sequences: of a step, all batches together.
        micro: sequences of a forward pass, or 0 for as many as memory has room for. Losses depend
            on it by rounding only.
        validation: sequences to validate on, the first of the validation tokens. The last weights
            are tested on as many of the next, or all there are.
        validate_every: steps from one validation to the next.
        log_every: steps from one line of the log to the next.
        save_every: steps between checkpoints, a multiple of `log_every`, where they are asked for.
        seed: of the first weights. The tokens come in the same order for every seed.
        compares: what the report is about: "trials", "stages", "changes" or "sizes".
    """

    model: str
    tokens: str
    trials: tuple[Trial, ...] = field(repr=False)
    steps: int
    sequences: int
    micro: int
    validation: int
    validate_every: int
    log_every: int
    save_every: int
    seed: int = 0
    compares: str = "trials"

    def __post_init__(self) -> None:
        for name in ("validate_every", "save_every"):
            if getattr(self, name) % self.log_every:
                raise ValueError(
                    f"{name} must be a multiple of log_every, {self.log_every}, "
                    f"got {getattr(self, name)}"
                )


# How many trials an optimizer had is in the report: one per line here, or as many as the line says.
PILOT = (
    *(trial("adamw", lr=lr, warm_up=40) for lr in (6e-4, 1.2e-3, 2.4e-3, 3.6e-3)),
    *(trial("muon", lr=lr) for lr in (0.014, 0.02, 0.03)),  # m = 4 is the same but for rounding
    trial("muon", lr=0.03, warm_down=0.6),
    *(trial("muon", lr=0.02, momentum=momentum) for momentum in (0.8, 0.9)),
    *(trial("soap", lr=lr, warm_up=40) for lr in (1e-3, 3e-3)),
    trial("sisa"),
    # dual_decay 1 is Algorithm 3, with the momentum and the scaling of the published script; the
    # one after these has Algorithm 3's own.
    *(trial("nsisa", m, dual_decay=decay) for m in (1, 4) for decay in (1.0, 0.25)),
    trial("nsisa", label="nsisa_literal", dual_decay=1.0, nesterov=False, aspect_scaling=False),
    trial("nsisa", dual_decay=0.25, sigma=50.0),
    trial("nsisa", dual_decay=0.25, momentum=0.9),
    *(trial("misa", rest="own", lr=lr) for lr in (3e-3, 3.6e-3, 5e-3)),
    trial("misa", rest="own", lr=3.6e-3, momentum=0.85),
    *(trial("misa", rest="own", lr=3e-3, momentum=momentum) for momentum in (0.85, 0.8)),
    trial("misa", rest="own", lr=3.6e-3, row_beta=None),
)

# The comparison of stages. Learning rate and momentum of Muon and of MISA are the best of the above
# trials; 3.6e-3 for matrices beside AdamW is Muon's 0.02 in MISA's terms.
MUON = {"lr": 0.02, "momentum": 0.8, "tried": 6}
MISA = {"rest": "own", "lr": 3e-3, "momentum": 0.85}
BESIDE_ADAMW = {"lr": 3.6e-3, "momentum": 0.85}
WHITEN = {"stage": "whiten", "power": 0.25, "every": 10}
ONE_SIDE = {"stage": "eigenbasis", "sides": "smaller", "every": 5}
BOTH_SIDES = {"stage": "eigenbasis", "sides": "both", "every": 5}
ONCE = {
    "misa_whiten": trial("misa", before=WHITEN, **MISA),
    "misa_both_sides": trial("misa", before=BOTH_SIDES, **MISA),
    "muon": trial("muon", **MUON),
    "soap_muon": trial("soap_muon", before=BOTH_SIDES, **BESIDE_ADAMW),
    "misa_one_side": trial("misa", before=ONE_SIDE, **MISA),
    "misa": trial("misa", tried=7, **MISA),
    "normuon": trial("normuon", **BESIDE_ADAMW),
    "muon_rest_misa": trial("muon", rest="misa", **MUON),
    "misa_all": trial("misa", before=BOTH_SIDES, damping=0.05, **MISA),
}
# The second trial of each: matrices decay by 0.2 % a step, Muon's customary 0.1 times 0.02.
PER_STEP = 0.002
DECAYED = {
    f"{name}_decay": replace(
        once,
        choice=replace(
            once.choice,
            options={**once.choice.options, "weight_decay": PER_STEP / once.choice.options["lr"]},
            rest_decay=0.0 if once.choice.rest == "own" else None,
        ),
    )
    for name, once in ONCE.items()
    if name != "misa_all"
}
# A queue that may be cut anywhere: all twice, then two more seeds of those that are expected to win
# and of what they are held against, then the other seeds.
FINALISTS = tuple(f"{name}_decay" for name in ("misa", "misa_whiten", "muon_rest_misa", "muon"))
QUEUE = dict.fromkeys(
    [
        *((name, 0) for name in (*ONCE, *DECAYED)),
        *((name, seed) for seed in (1, 2) for name in FINALISTS),
        *((name, seed) for seed in (1, 2) for name in ("misa_both_sides_decay", *DECAYED)),
        *((name, seed) for seed in (1, 2) for name in ONCE),
    ]
)
STAGES = tuple(replace((ONCE | DECAYED)[name], label=name, seed=seed) for name, seed in QUEUE)

# 124M parameters with every optimizer. Trials of 80 steps of 32 sequences first, then 320 steps of
# 64 with what was best.
# All optimizers have as many trials: a base, one change each of weight decay, momentum and
# warm-down, and two of the learning rate. Rates of the bases are the best of the pilot, for those
# that were in it; Shampoo and Adam-mini begin with AdamW's. SISA has no sigma and rho: its learning
# rate then means what AdamW's does.
NANO_STEPS, TRIAL_STEPS = 320, 80
WARM_UP = 1 / 8  # of the steps, for those that need it
ADAM_LIKE = {"lr": 1.2e-3, "betas": (0.9, 0.95)}
SCRIPT = {"momentum": 0.95, "dual_decay": 0.25}
LITERAL = {"momentum": 0.95, "dual_decay": 1.0, "nesterov": False, "aspect_scaling": False}
BASES: dict[str, dict[str, Any]] = {
    "misa": {"rest": "own", "lr": 3e-3, "momentum": 0.85},
    "muon": {"lr": 0.02, "momentum": 0.85},
    "nsisa": {"sigma": 80.0, "momentum": 0.85, "dual_decay": 0.25},
    "adamw": ADAM_LIKE,
    "adam_mini": ADAM_LIKE,
    "sisa": {"sigma": None, "rho": None, "lr": 1.2e-3, "momentum": 0.9},
    "soap": {"lr": 1e-3, "betas": (0.9, 0.95)},
    "shampoo": ADAM_LIKE,
}
WARMED_UP = ("adamw", "adam_mini", "sisa", "soap", "shampoo")
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "base": {name: {} for name in BASES},
    # Decoupled and 0.1 times the learning rate, which for NSISA is 1 / sigma. SISA has an L2 term
    # in its gradients, whose entries have sizes of 1e-4.
    "decay": {name: {"weight_decay": 0.1} for name in BASES}
    | {"nsisa": {"consensus_decay": 0.1}, "sisa": {"weight_decay": 1e-5}},
    "momentum": {name: {"betas": (0.8, 0.95)} for name in BASES}
    | {name: {"momentum": 0.9} for name in ("misa", "muon", "nsisa")}
    | {"sisa": {"momentum": 0.8}},
    "warm_down": {name: {"warm_down": 0.6} for name in BASES},
    "rate": {name: {"lr": 6e-4} for name in BASES}
    | {"misa": {"lr": 4e-3}, "muon": {"lr": 0.03}, "nsisa": {"sigma": 55.0}}
    | {"soap": {"lr": 2e-3}},
    # Beyond the better one of these two.
    "other_rate": {name: {"lr": 3e-4} for name in BASES}
    | {"misa": {"lr": 5e-3}, "muon": {"lr": 0.014}, "nsisa": {"sigma": 110.0}}
    | {"soap": {"lr": 5e-4}, "sisa": {"lr": 2.4e-3}},
}


def with_changes(name: str, steps: int, *changes: str, **shown: Any) -> Trial:
    """Return an optimizer's base with some of `CHANGES`, for runs of so many steps."""
    settings = dict(BASES[name])
    for change in changes:
        settings |= CHANGES[change][name]
    if name in WARMED_UP:
        settings["warm_up"] = round(WARM_UP * steps)
    return trial(name, **settings, **shown)


def finalist(name: str, batches: int = 1, seed: int = 0) -> Trial:
    """Return an optimizer with the changes that were chosen for it."""
    chosen = json.loads(CHOSEN.read_text(encoding="utf-8"))
    entry = chosen.get(name, {"changes": [], "losses": {}})
    tried = max(1, len(entry["losses"]))
    shown = {"label": name, "batches": batches, "seed": seed, "tried": tried}
    return with_changes(name, NANO_STEPS, *entry["changes"], **shown)


TRIALS = tuple(
    with_changes(name, TRIAL_STEPS, change, label=f"{name}_{change}", change=change)
    for change in CHANGES
    for name in BASES
)
BEST_THREE = ("misa", "muon", "nsisa")
NANO = (
    *(finalist(name) for name in ("misa", "muon", "nsisa", "adamw")),
    *(finalist(name, seed=1) for name in BEST_THREE),
    *(finalist(name, 4) for name in ("nsisa", "misa")),
    *(finalist(name) for name in ("adam_mini", "sisa")),
    finalist("sisa", 4),
    trial("nsisa", label="nsisa_script", seed=0, **SCRIPT),
    trial("nsisa", 4, label="nsisa_paper", seed=0, **LITERAL),
    *(finalist(name) for name in ("soap", "shampoo")),
)

# GPT-2 as transformers has it, whose weights its other tools can take on from there.
PLAIN_RUNS = tuple(finalist(name) for name in ("misa", "adamw", "muon"))

# The larger models, for 80 steps. The setting of 124M, with AdamW's learning rate in proportion to
# 1 / width, MISA's to 1 / sqrt(width), which keeps the spectral norm of its steps. Muon's and
# NSISA's steps have the same norm for every width. Then a higher rate for each, at 355M only.


def scaled(rate: float, model: str, power: float) -> float:
    """Return a learning rate of 124M for another width, rounded to two digits."""
    return float(f"{rate * (SIZES['gpt2'].width / SIZES[model].width) ** power:.2g}")


def label_prefix(model: str) -> str:
    """Return what the labels of runs begin with that are not of the preset's own model."""
    return model.replace("/", "-") + "_"


def larger(model: str, name: str, rate: float, power: float, change: str = "") -> Trial:
    """Return an optimizer's base for a larger model, with a rate of 124M."""
    option = "sigma" if name == "nsisa" else "lr"
    settings = {**BASES[name], option: scaled(rate, model, power)}
    if name in WARMED_UP:
        settings["warm_up"] = round(WARM_UP * TRIAL_STEPS)
    label = label_prefix(model) + name + (f"_{change}" if change else "")
    return trial(name, label=label, model=model, seed=0, **settings)


RATES = {"nsisa": (80.0, 0.0), "adamw": (9e-4, 1.0), "misa": (3e-3, 0.5), "muon": (0.02, 0.0)}
HIGHER = {"nsisa": (55.0, 0.0), "adamw": (1.8e-3, 1.0), "misa": (4e-3, 0.5), "muon": (0.03, 0.0)}
LARGER = (
    *(larger(m, name, *RATES[name]) for m in ("gpt2-medium", "gpt2-xl") for name in RATES),
    *(larger("gpt2-medium", name, *HIGHER[name], "higher") for name in HIGHER),
)

# First guesses, but for SISA's: it is the one that needs care here.
QUICK = (
    trial("adamw", lr=3e-3, warm_up=20),
    trial("muon", lr=0.02),
    trial("sisa", tried=15, sigma=0.1, rho=500.0),
    trial("nsisa", dual_decay=0.25),
    trial("nsisa", 4, dual_decay=0.25),
    trial("misa", rest="own"),
)

PRESETS = {
    "quick": Config(
        *("tiny", "python", QUICK),
        **{"steps": 200, "sequences": 16, "micro": 16, "validation": 64},
        **{"validate_every": 20, "log_every": 10, "save_every": 100},
    ),
    "pilot": Config(
        *("gpt2", "gutenberg", PILOT),
        **{"steps": 320, "sequences": 64, "micro": 16, "validation": 512},
        **{"validate_every": 40, "log_every": 10, "save_every": 80},
    ),
    # The same, validated less often.
    "stages": Config(
        *("gpt2", "gutenberg", STAGES),
        **{"steps": 320, "sequences": 64, "micro": 16, "validation": 512},
        **{"validate_every": 80, "log_every": 10, "save_every": 80},
    ),
    "trials": Config(
        *("gpt2", "gutenberg", TRIALS),
        **{"steps": TRIAL_STEPS, "sequences": 32, "micro": 16, "validation": 480},
        **{"validate_every": 80, "log_every": 10, "save_every": 80, "compares": "changes"},
    ),
    "nano": Config(
        *("gpt2", "gutenberg", NANO),
        **{"steps": NANO_STEPS, "sequences": 64, "micro": 16, "validation": 480},
        **{"validate_every": 40, "log_every": 10, "save_every": 80, "compares": "sizes"},
    ),
    "plain": Config(
        *("transformers/gpt2", "gutenberg", PLAIN_RUNS),
        **{"steps": NANO_STEPS, "sequences": 64, "micro": 16, "validation": 480},
        **{"validate_every": 80, "log_every": 10, "save_every": 80, "compares": "sizes"},
    ),
    "sizes": Config(
        *("gpt2-medium", "gutenberg", LARGER),
        **{"steps": 80, "sequences": 64, "micro": 16, "validation": 128},
        **{"validate_every": 20, "log_every": 5, "save_every": 20, "compares": "sizes"},
    ),
}


@dataclass(frozen=True)
class Settings:
    """The settings of one run: everything that its result depends on; see `Config` and `Trial`."""

    label: str
    choice: Choice
    batches: int
    model: str
    tokens: str
    steps: int
    sequences: int
    micro: int
    validation: int
    validate_every: int
    log_every: int
    seed: int

    def __post_init__(self) -> None:
        if self.sequences % self.batches:
            raise ValueError(
                f"sequences must be a multiple of batches, {self.batches}, got {self.sequences}"
            )

    @property
    def name(self) -> str:
        return label(self.label, self.batches, self.seed)


def label(trial: str, batches: int, seed: int) -> str:
    """Return the name of a run."""
    return f"{trial}_m{batches}_seed{seed}"


def add_arguments(parser: ArgumentParser) -> None:
    """Add options for another model, other tokens or another length than a preset's."""
    parser.add_argument("--model", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--tokens", choices=list(SOURCES), help="default: the preset's")
    parser.add_argument("--steps", type=int, help="of every run; default: the preset's")


def configure(config: Config, args: Namespace) -> Config:
    """Return a configuration with the model, the tokens and the length that were asked for."""
    if args.tokens is not None:
        config = replace(config, tokens=args.tokens)
    if args.model is not None:
        config = with_model(config, args.model)
    elif config.model == "tiny" and config.tokens != "python":  # which alone are bytes
        config = with_model(config, "gpt2-tiny")
    if args.steps is not None:
        if args.steps < 1:
            raise ValueError(f"--steps must be >= 1, got {args.steps}")
        config = replace(config, steps=args.steps)
    return config


def with_model(config: Config, model: str) -> Config:
    """Return a configuration for another model, or for one of those of its trials."""
    of_trials = dict.fromkeys(trial.model for trial in config.trials if trial.model is not None)
    if of_trials:
        if model not in of_trials:
            raise ValueError(
                f"--model must be {' or '.join(of_trials)} with this preset, got {model}"
            )
        trials = tuple(trial for trial in config.trials if trial.model == model)
        return replace(config, model=model, trials=trials)
    if model == config.model:
        return config
    prefix = label_prefix(model)
    trials = tuple(
        replace(trial, model=model, label=prefix + trial.label) for trial in config.trials
    )
    return replace(config, model=model, trials=trials)


def plan(config: Config) -> dict[str, Settings]:
    """Return all runs by name."""
    shared = shared_settings(config, Settings)
    runs = []
    for trial in config.trials:
        seed = config.seed if trial.seed is None else trial.seed
        own = {"choice": trial.choice, "batches": trial.batches, "seed": seed}
        own["model"] = trial.model or config.model
        runs.append(Settings(label=trial.label, **{**shared, **own}))
    return {run.name: run for run in runs}
