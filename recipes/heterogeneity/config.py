"""The cells of the table, the algorithms and their settings, and the runs."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.grid import Value
from recipes.heterogeneity.paper import BASELINES, TABLE

__all__ = ["ALGORITHMS", "CHOICES", "CLIENTS", "DATASETS", "PRESETS", "RIVALS"]
__all__ += ["Choice", "Config", "Settings", "choice", "plan", "settings", "tuning"]

# Not in the paper: relatives of a dual method, and servers with an optimizer.
RIVALS = {
    "scaffold_warm": "Scaffold, warm",
    "fedavgm": "FedAvgM",
    "fedadagrad": "FedAdagrad",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "feddyn": "FedDyn",
    "fedpd": "FedPD",
    "fedadmm": "FedADMM",
    "fedadmm_adaptive": "FedADMM, adaptive",
    "fedmuon": "FedMuon",
    "server_muon": "server Muon",
}
# The paper's in the order of its columns; FedSGD and MISA are ours.
ALGORITHMS = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "scaffold": "Scaffold",
    "fedsgd": "FedSGD",
    "sisa": "SISA",
    "misa": "MISA",
    **RIVALS,
}
DATASETS = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "fashion_mnist": "Fashion-MNIST",
    "adult": "Adult",
    "digits": "digits",
}
CLIENTS = {"adult": 4}  # everywhere else 10


@dataclass(frozen=True)
class Choice:
    """The settings of an algorithm for a data set.

    Attributes:
        options: arguments of its class in `torchpisa.federated`.
        epochs: local passes per round in mini-batches; 0 is one gradient of all local data.
        batch_size: the size of mini-batches.
        rounds: None for the preset's.
    """

    options: Mapping[str, Value]
    epochs: float = 0
    batch_size: int = 64
    rounds: int | None = None


# Where tuning.json has nothing. Mini-batches of 64 are the published script's; a fifth of an epoch
# is some twenty local steps per round.
_LOCAL = {"epochs": 0.2, "batch_size": 64}
_START = {
    "fedavg": Choice({"lr": 0.1}, **_LOCAL),
    "fedprox": Choice({"lr": 0.1, "mu": 0.01}, **_LOCAL),
    "fednova": Choice({"lr": 0.1}, **_LOCAL),
    "scaffold": Choice({"lr": 0.03}, **_LOCAL),
    "fedsgd": Choice({"lr": 0.1}),
    "sisa": Choice({"sigma": 5.0, "rho": 1.0, "gamma": 1.0, "beta": 0.999}),
    "misa": Choice({"sigma": 0.1, "rho": 30.0}),
    "scaffold_warm": Choice({"lr": 0.03, "server_lr": 2.0, "warm_start": True}, **_LOCAL),
    "fedavgm": Choice({"lr": 0.1, "server_momentum": 0.9}, **_LOCAL),
    "fedadagrad": Choice({"lr": 0.1, "server_lr": 0.01}, **_LOCAL),
    "fedadam": Choice({"lr": 0.1, "server_lr": 0.01}, **_LOCAL),
    "fedyogi": Choice({"lr": 0.1, "server_lr": 0.01}, **_LOCAL),
    "feddyn": Choice({"lr": 0.1, "alpha": 0.1}, **_LOCAL),
    "fedpd": Choice({"lr": 0.1, "eta": 10.0}, **_LOCAL),
    "fedadmm": Choice({"lr": 0.1, "rho": 0.1}, **_LOCAL),
    "fedadmm_adaptive": Choice({"lr": 0.1, "rho": 0.1}, **_LOCAL),
    "fedmuon": Choice({"lr": 0.003, "alpha": 0.1}, **_LOCAL),
    "server_muon": Choice({"server_lr": 0.02, "vector_lr": 0.01}),
}
CHOICES: dict[str, dict[str, Choice]] = {
    "mnist": {**_START},
    "cifar10": {**_START},
    "fashion_mnist": {**_START},
    "adult": {**_START},
    # The best of eight trials each: the grids of tune.py, 200 rounds, one label, one seed.
    "digits": {
        "fedavg": Choice({"lr": 0.3}, epochs=1),
        "fedprox": Choice({"lr": 0.3, "mu": 0.01}, epochs=1),
        "fednova": Choice({"lr": 0.3}, epochs=1),
        "scaffold": Choice({"lr": 0.3}, epochs=5),
        "fedsgd": Choice({"lr": 1.0}),
        "sisa": Choice({"sigma": 2.0, "rho": 100.0, "beta": 0.999}),
        "misa": Choice({"sigma": 0.1, "rho": 10.0}),  # the defaults
        # The best of nine trials each, 100 rounds.
        "scaffold_warm": Choice({"lr": 0.3, "server_lr": 5.0, "warm_start": True}, epochs=1),
        "fedavgm": Choice({"lr": 0.3, "server_momentum": 0.9}, epochs=1),
        "fedadagrad": Choice({"lr": 0.1, "server_lr": 0.1}, epochs=1),
        "fedadam": Choice({"lr": 0.3, "server_lr": 0.1}, epochs=1),
        "fedyogi": Choice({"lr": 0.3, "server_lr": 0.1}, epochs=1),
        "feddyn": Choice({"lr": 0.3, "alpha": 0.1}, epochs=1),
        "fedpd": Choice({"lr": 0.3, "eta": 1.0}, epochs=1),
        "fedadmm": Choice({"lr": 0.3, "rho": 0.1}, epochs=1),
        "fedadmm_adaptive": Choice({"lr": 0.3, "rho": 0.01}, epochs=1),
        "fedmuon": Choice({"lr": 0.003, "alpha": 0.3}, epochs=1),
        "server_muon": Choice({"server_lr": 0.08, "vector_lr": 0.01}),
    },
}
TUNING = Path(__file__).with_name("tuning.json")


def choice(dataset: str, labels: int, algorithm: str) -> Choice:
    """Return the settings of an algorithm: the best trial on validation data, if there were any."""
    return tuned().get((dataset, labels, algorithm), CHOICES[dataset][algorithm])


def tuning() -> list[dict[str, Any]]:
    """Return all trials of tune.py and its choices, a dictionary per cell and algorithm."""
    return json.loads(TUNING.read_text(encoding="utf-8")) if TUNING.exists() else []


@functools.cache
def tuned() -> dict[tuple[str, int, str], Choice]:
    """Return the choices of tune.py by cell and algorithm."""
    return {
        (entry["dataset"], entry["labels"], entry["algorithm"]): Choice(
            **{name: entry["chosen"][name] for name in ("options", "epochs", "batch_size")}
        )
        for entry in tuning()
    }


@dataclass(frozen=True)
class Config:
    """Settings that all runs share.

    Attributes:
        cells: data set and labels per client.
        rounds: the rounds of algorithms whose `Choice` has none of its own.
        every: rounds from one evaluation to the next.
        seeds: runs per cell and algorithm; they differ in partition, first weights and shuffles.
        seed: the first of them.
        algorithms: in every cell.
        extra: data set, labels and algorithm of what is run beside them.
    """

    cells: tuple[tuple[str, int], ...]
    rounds: int
    every: int = 1
    seeds: int = 3
    seed: int = 0
    algorithms: tuple[str, ...] = (*BASELINES, "sisa")
    extra: tuple[tuple[str, int, str], ...] = ()


PRESETS = {
    "quick": Config(
        *((("digits", 1), ("digits", 2)), 200, 4, 1),
        extra=tuple(("digits", labels, name) for labels in (1, 2) for name in ("fedsgd", "misa")),
    ),
    "paper": Config(
        *(tuple(TABLE), 500, 5),
        extra=(
            ("mnist", 1, "fedsgd"),  # once: it costs what SISA costs, more than all others
            *((dataset, 1, "misa") for dataset, labels in TABLE if labels == 1),
        ),
    ),
    # The table with everybody in every cell; `rivals-digits` is the same for a laptop.
    "rivals": Config(tuple(TABLE), 500, 5, algorithms=tuple(ALGORITHMS)),
    "rivals-digits": Config((("digits", 1),), 200, 10, 3, algorithms=tuple(ALGORITHMS)),
}


@dataclass(frozen=True)
class Settings:
    """The settings of one run: everything that its result depends on.

    Attributes:
        validation: train without the validation split and evaluate on it, for choosing settings.
            False: train on all training data, evaluate on the test data.
        samples: train on so many samples, drawn with a fixed seed; 0 for all.
    """

    dataset: str
    labels: int
    clients: int
    algorithm: str
    options: Mapping[str, Value]
    epochs: float
    batch_size: int
    rounds: int
    every: int
    seed: int
    validation: bool = False
    samples: int = 0

    @property
    def name(self) -> str:
        return f"{self.dataset}_{self.labels}label_{self.algorithm}_seed{self.seed}"


def settings(
    dataset: str, labels: int, algorithm: str, chosen: Choice, config: Config, **others: Any
) -> Settings:
    """Return the settings of a run of an algorithm as chosen."""
    return Settings(
        dataset=dataset,
        labels=labels,
        clients=CLIENTS.get(dataset, 10),
        algorithm=algorithm,
        options=dict(chosen.options),
        epochs=chosen.epochs,
        batch_size=chosen.batch_size,
        rounds=chosen.rounds or config.rounds,
        every=config.every,
        **others,
    )


def plan(config: Config) -> dict[str, Settings]:
    """Return all runs by name, seed by seed, so that an early end leaves complete tables."""
    rows = [(*cell, algorithm) for cell in config.cells for algorithm in config.algorithms]
    runs = [
        settings(*row, choice(*row), config, seed=seed)
        for seed in range(config.seed, config.seed + config.seeds)
        for row in (*rows, *config.extra)
    ]
    return {run.name: run for run in runs}
