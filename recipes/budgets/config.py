"""Cells, algorithms, their trials, and the runs."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.grid import Value
from recipes.heterogeneity import config as heterogeneity
from recipes.heterogeneity.config import ALGORITHMS, CLIENTS
from recipes.heterogeneity.paper import TABLE

__all__ = ["CHOSEN", "PRESETS", "TITLES", "TRIALS", "TWICE"]
__all__ += ["Config", "Settings", "Trial", "chosen", "plan", "read_chosen"]

CHOSEN = Path(__file__).with_name("chosen.json")
TITLES = {**ALGORITHMS, "misa_local": "MISA, local steps"}
TWICE = ("scaffold", "fedmuon", "misa_local")
"""Algorithms that send two tensors per parameter in each direction."""


@dataclass(frozen=True)
class Trial:
    """Settings of an algorithm.

    Attributes:
        options: arguments of its class in `torchpisa.federated`.
        steps: local steps among which a client divides the samples of a round.
    """

    options: Mapping[str, Value]
    steps: int = 1


def _grid(steps: int, fixed: Mapping[str, Value], **values: tuple[Value, ...]) -> list[Trial]:
    """Return a trial for each place of the values, which are taken side by side."""
    rows = zip(*values.values(), strict=True)
    return [Trial({**fixed, **dict(zip(values, row, strict=True))}, steps) for row in rows]


_DAMPED: dict[str, Value] = {"momentum": 0.9, "damping": 0.003}

# Six for everybody. Rates fall linearly to zero in all of them. Not among them: FedNova, which is
# FedAvg where all clients take as many steps, and FedADMM and FedPD, which are FedDyn where nobody
# is absent.
TRIALS: dict[str, list[Trial]] = {
    "fedavg": [*_grid(1, {}, lr=(0.1, 0.3, 1.0)), *_grid(4, {}, lr=(0.03, 0.1, 0.3))],
    "fedavgm": [*_grid(1, {}, lr=(0.03, 0.1, 0.3)), *_grid(4, {}, lr=(0.01, 0.03, 0.1))],
    "fedadam": [
        *_grid(1, {"lr": 1.0, "tau": 1e-4}, server_lr=(0.003, 0.01, 0.03)),
        *_grid(4, {"lr": 0.1, "tau": 1e-3}, server_lr=(0.003, 0.01, 0.03)),
    ],
    "scaffold": _grid(
        4, {}, lr=(0.01, 0.03, 0.03, 0.1, 0.1, 0.3), server_lr=(5.0, 1.0, 3.0, 1.0, 3.0, 1.0)
    ),
    "feddyn": _grid(
        4, {}, lr=(0.03, 0.03, 0.1, 0.1, 0.1, 0.3), alpha=(0.3, 1.0, 0.1, 0.3, 1.0, 1.0)
    ),
    "fedmuon": _grid(
        2, {}, lr=(0.003, 0.01, 0.03, 0.003, 0.01, 0.03), alpha=(0.1, 0.1, 0.1, 0.3, 0.3, 0.3)
    ),
    "server_muon": _grid(
        *(1, {"lr": 1.0}),
        server_lr=(0.01, 0.03, 0.1, 0.01, 0.03, 0.1),
        vector_lr=(0.003, 0.003, 0.003, 0.01, 0.01, 0.01),
    ),
    "sisa": _grid(1, {}, sigma=(0.3, 1.0, 3.0) * 2, rho=(300.0,) * 3 + (1000.0,) * 3),
    "misa": _grid(1, _DAMPED, rho=(10.0, 20.0, 30.0, 50.0, 100.0, 200.0)),
    "misa_local": _grid(4, _DAMPED, rho=(20.0, 40.0, 60.0, 80.0, 120.0, 160.0)),
}


@dataclass(frozen=True)
class Config:
    """Settings that all runs share.

    Attributes:
        cells: data set and labels per client.
        rounds: the rounds of every run.
        samples_per_round: the samples that a client uses in a round.
        every: rounds from one evaluation to the next.
        seeds: runs per cell and algorithm.
        seed: the first of them.
        algorithms: in every cell.
        local_steps: in place of those of the trials, where these have several; 0 for theirs.
        trials: run all trials on validation data instead of the chosen ones on test data.
        half: also run those that send twice as much, with half of the rounds.
        chosen: name of the settings in `chosen.json`.
    """

    cells: tuple[tuple[str, int], ...]
    rounds: int = 500
    samples_per_round: int = 32
    every: int = 25
    seeds: int = 3
    seed: int = 0
    algorithms: tuple[str, ...] = tuple(name for name in TRIALS if name != "misa_local")
    local_steps: int = 0
    trials: bool = False
    half: bool = True
    chosen: str = "many rounds"


_ALL = {"algorithms": tuple(TRIALS), "half": False}
_FEW = {"rounds": 50, "samples_per_round": 320, "every": 5, "local_steps": 10, **_ALL}
_DIGITS = {**_FEW, "samples_per_round": 130, "chosen": "few rounds, digits"}
PRESETS = {
    "quick": Config(
        (("digits", 1),), rounds=100, samples_per_round=16, seeds=1, chosen="untuned", **_ALL
    ),
    "trials": Config((("mnist", 1),), every=100, seeds=1, half=False, trials=True),
    "table": Config(tuple(TABLE)),
    # A tenth of the rounds, with ten times the samples in each; with digits also for a laptop.
    "few-rounds-trials": Config((("mnist", 1),), seeds=1, trials=True, chosen="few rounds", **_FEW),
    "few-rounds": Config(tuple(TABLE), chosen="few rounds", **_FEW),
    "digits-trials": Config((("digits", 1),), seeds=1, trials=True, **_DIGITS),
    "digits": Config(tuple(("digits", labels) for labels in (1, 2, 3)), **_DIGITS),
}


@dataclass(frozen=True)
class Settings(heterogeneity.Settings):
    """The settings of one run; `steps` mini-batches of `batch_size` samples in every round."""

    steps: int = 1

    @property
    def name(self) -> str:
        return f"{super().name}_rounds{self.rounds}"


def chosen(name: str) -> dict[str, Trial]:
    """Return the best trial of every algorithm; the second of its trials if none was chosen.

    Args:
        name: in `chosen.json`.
    """
    saved = read_chosen().get(name, {})
    return {
        algorithm: trials[saved.get(algorithm, {"trial": 1})["trial"]]
        for algorithm, trials in TRIALS.items()
    }


def read_chosen() -> dict[str, dict[str, Any]]:
    """Return what `choose` has written: number of the trial and accuracies, by algorithm."""
    return json.loads(CHOSEN.read_text(encoding="utf-8")) if CHOSEN.exists() else {}


def plan(config: Config) -> dict[str, Settings]:
    """Return all runs by name, seed by seed, so that an early end leaves complete tables."""
    runs: dict[str, Settings] = {}
    best = chosen(config.chosen)
    for seed, cell, name in itertools.product(
        range(config.seed, config.seed + config.seeds), config.cells, config.algorithms
    ):
        if config.trials:
            for number, trial in enumerate(TRIALS[name]):
                run = settings(config, *cell, name, trial, seed, config.rounds)
                runs[f"{run.name}_trial{number}"] = run
            continue
        halved = config.half and name in TWICE
        for rounds in (config.rounds, config.rounds // 2) if halved else (config.rounds,):
            run = settings(config, *cell, name, best[name], seed, rounds)
            runs[run.name] = run
    return runs


def settings(
    config: Config, dataset: str, labels: int, algorithm: str, trial: Trial, seed: int, rounds: int
) -> Settings:
    """Return the settings of a run of a trial."""
    steps = config.local_steps if config.local_steps and trial.steps > 1 else trial.steps
    return Settings(
        dataset=dataset,
        labels=labels,
        clients=CLIENTS.get(dataset, 10),
        algorithm=algorithm,
        options=dict(trial.options),
        epochs=0,
        batch_size=config.samples_per_round // steps,
        steps=steps,
        rounds=rounds,
        every=config.every,
        seed=seed,
        validation=config.trials,
    )
