"""The presets and their runs; every trial of every optimizer is named here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recipes import grid
from recipes.language.optimizers import Choice, choose
from recipes.recipe import shared_settings

__all__ = ["PRESETS", "Config", "Settings", "Trial", "label", "plan"]


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
    """

    choice: Choice
    label: str
    batches: int = 1
    tried: int = 1
    seed: int | None = None


def trial(
    name: str,
    batches: int = 1,
    label: str = "",
    tried: int = 1,
    seed: int | None = None,
    **settings: Any,
) -> Trial:
    """Return the defaults of an optimizer with some settings changed, which make the label."""
    choice = choose(name, **settings)
    return Trial(choice, label or name_of(name, settings), batches, tried, seed)


def name_of(name: str, settings: Mapping[str, Any]) -> str:
    shown = grid.run_label({key: value for key, value in settings.items() if key != "warm_up"})
    return f"{name}_{shown}" if shown else name


@dataclass(frozen=True)
class Config:
    """Settings that all runs share.

    Attributes:
        model: one of `recipes.language.model.SIZES`.
        tokens: one of `recipes.language.tokens.SOURCES`.
        trials: of the optimizers.
        steps: rounds; the weights change once in each.
        sequences: of a step, all batches together.
        micro: sequences of a forward pass, or 0 for as many as memory has room for. Losses depend
            on it by rounding only.
        validation: sequences to validate on, the first of the validation tokens.
        validate_every: steps from one validation to the next.
        log_every: steps from one line of the log to the next.
        save_every: steps between checkpoints, a multiple of `log_every`, where they are asked for.
        seed: of the first weights. The tokens come in the same order for every seed.
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
AGAIN = {  # another setting each
    "misa_whiten_half": trial("misa", before={**WHITEN, "power": 0.5}, **MISA),
    "misa_both_sides_lr3.6": trial("misa", before=BOTH_SIDES, **{**MISA, "lr": 3.6e-3}),
    "soap_muon_lr3": trial("soap_muon", before=BOTH_SIDES, **{**BESIDE_ADAMW, "lr": 3e-3}),
    "misa_one_side_lr3.6": trial("misa", before=ONE_SIDE, **{**MISA, "lr": 3.6e-3}),
    "normuon_lr3": trial("normuon", **{**BESIDE_ADAMW, "lr": 3e-3}),
}
# A queue that may be cut anywhere: all once, two more seeds of those that are expected to win, and
# of what they are held against, the other settings, and then the other seeds.
WINNERS, RIVALS = ("misa_whiten", "misa_both_sides"), ("soap_muon", "muon")
QUEUE = dict.fromkeys(
    [
        *((name, 0) for name in ONCE),
        *((name, seed) for names in (WINNERS, RIVALS) for seed in (1, 2) for name in names),
        *((name, 0) for name in AGAIN),
        *((name, seed) for seed in (1, 2) for name in (*ONCE, *AGAIN)),
    ]
)
STAGES = tuple(replace((ONCE | AGAIN)[name], label=name, seed=seed) for name, seed in QUEUE)

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
        **{"steps": 400, "sequences": 16, "micro": 16, "validation": 64},
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


def plan(config: Config) -> dict[str, Settings]:
    """Return all runs by name."""
    shared = shared_settings(config, Settings)
    runs = []
    for trial in config.trials:
        seed = config.seed if trial.seed is None else trial.seed
        own = {"choice": trial.choice, "batches": trial.batches, "seed": seed}
        runs.append(Settings(label=trial.label, **{**shared, **own}))
    return {run.name: run for run in runs}
