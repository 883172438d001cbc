"""One run: the partition, the model, the algorithm, and the accuracy by round."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recipes import datasets
from recipes.heterogeneity.config import Config, Settings
from recipes.heterogeneity.models import build
from recipes.heterogeneity.paper import target
from recipes.recipe import Line
from torchpisa import federated
from torchpisa.data import permutation
from torchpisa.federated.partition import by_label

__all__ = ["algorithm", "condense", "require_data", "run"]

CLASSES = {
    "fedavg": federated.FedAvg,
    "fedprox": federated.FedProx,
    "fednova": federated.FedNova,
    "scaffold": federated.Scaffold,
    "fedsgd": federated.FedAvg,
    "sisa": federated.SISA,
    "misa": federated.MISA,
    "scaffold_warm": federated.Scaffold,
    "fedavgm": federated.FedAvgM,
    "fedadagrad": federated.FedAdagrad,
    "fedadam": federated.FedAdam,
    "fedyogi": federated.FedYogi,
    "feddyn": federated.FedDyn,
    "fedpd": federated.FedPD,
    "fedadmm": federated.FedADMM,
    "fedadmm_adaptive": federated.AdaptiveFedADMM,
    "fedmuon": federated.FedMuon,
    "server_muon": federated.ServerMuon,
}
# Of the saved runs; the package has other ones now.
OLD_DEFAULTS = {"misa": {"momentum": 0.95, "match_rms": False}}
COLUMNS = ("round", "accuracy", "loss", "gradients", "samples", "bytes_up", "bytes_down")
POINTS = 50  # of a curve in the saved results


@functools.cache  # one process does many runs
def load(name: str, folder: str, validation: bool, device: str) -> datasets.Dataset:
    return datasets.load(name, folder, hold_out=validation).to(device)


def algorithm(settings: Settings) -> federated.Algorithm:
    """Return the algorithm of a run."""
    local = (
        federated.Epochs(settings.epochs, settings.batch_size)
        if settings.epochs
        else federated.FullGradient()
    )
    options = {**OLD_DEFAULTS.get(settings.algorithm, {}), **settings.options}
    return CLASSES[settings.algorithm](**options, local=local)


def run(config: Config, settings: Settings, *, device: str, data: str) -> Iterator[Line]:
    """Yield accuracy and costs so far, every few rounds; one that diverges ends early."""
    return trace(settings, algorithm(settings), device=device, data=data)


def trace(
    settings: Settings, algorithm: federated.Algorithm, *, device: str, data: str
) -> Iterator[Line]:
    """Yield accuracy and costs of an algorithm so far, as `run`."""
    dataset = load(settings.dataset, data, settings.validation, device)
    held_out = dataset.validation if settings.validation else dataset.test
    assert held_out is not None
    x, y = dataset.train
    if settings.samples:
        chosen = permutation(len(y), "tuning")[: settings.samples].to(device)
        x, y = x[chosen], y[chosen]
    parts = by_label(y, settings.clients, settings.labels, seed=settings.seed)
    simulation = federated.Simulation(
        build(dataset.name, x.shape[1:], dataset.classes, settings.seed).to(device),
        [(x[part], y[part]) for part in (indices.to(device) for indices in parts.indices)],
        algorithm,
        seed=settings.seed,
        device=torch.device(device),
    )
    evaluate = federated.accuracy(*held_out)
    simulation.model.eval()
    # Not by simulation.run, which hands out its rows at the end, and none after a divergence.
    while True:
        line = {"round": simulation.iteration, **evaluate(simulation.model)}
        line |= dataclasses.asdict(simulation.counts)
        diverged = not math.isfinite(line["loss"])
        yield {**line, "loss": None} if diverged else line
        if diverged or simulation.iteration == settings.rounds:
            return
        for _ in range(min(settings.every, settings.rounds - simulation.iteration)):
            simulation.round()


def require_data(settings: Sequence[Settings], *, device: str, data: str) -> None:
    """Raise FileNotFoundError if a data set is missing, CorruptFileError if it is damaged."""
    for name in dict.fromkeys(run.dataset for run in settings):
        datasets.verify(name, data)


def condense(log: dict[str, Any]) -> dict[str, Any]:
    """Return best and last accuracy, when the paper's was reached, total costs, a thinned curve."""
    settings, rounds, accuracy = log["settings"], log["round"], log["accuracy"]
    best = max(range(len(rounds)), key=lambda i: accuracy[i])
    goal = target(settings["dataset"], settings["labels"])
    reached = [r for r, a in zip(rounds, accuracy, strict=True) if goal is not None and a >= goal]
    step = max(1, math.ceil(len(rounds) / POINTS))
    points = range((len(rounds) - 1) % step, len(rounds), step)  # the last is among them
    return {
        **{name: log[name] for name in ("settings", "versions", "hardware", "seconds")},
        "best": round(accuracy[best], 2),
        "best_round": rounds[best],
        "last": round(accuracy[-1], 2),
        "reached": reached[0] if reached else None,
        **{name: log[name][-1] for name in COLUMNS[3:]},
        **{name: [log[name][i] for i in points] for name in COLUMNS[:3]},
    }
