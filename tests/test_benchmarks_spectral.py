"""The scripts behind docs/spectral.md run, and their results say what the page says."""

import json
import math
from pathlib import Path
from statistics import mean

import pytest
import torch

from benchmarks import resolvent, spectral
from benchmarks.spectral import CONTESTANTS, SEEDS, Trial

RESULTS = Path(__file__).parents[1] / "docs" / "results"


@pytest.fixture
def mnist(monkeypatch):
    """Noise in the place of MNIST, which is not everywhere."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 784, generator=generator), torch.arange(60) % 10
    own = spectral.load
    found = {"train": (x, y), "test": (x, y)}
    monkeypatch.setattr(
        spectral, "load", lambda data, folder: found if data == "mnist" else own(data, folder)
    )


@pytest.mark.usefixtures("mnist")
@pytest.mark.parametrize("data", CONTESTANTS)
def test_training(data):
    for name, who in CONTESTANTS[data].items():
        run = spectral.train(Trial(name, who.sigmas[-1], who.rhos[0], 0), data, rounds=3)
        assert len(run["loss"]) == 3
        assert all(map(math.isfinite, run["loss"]))
    trials = spectral.search(data)
    assert len(trials) == len(set(trials)) == 16 * len(CONTESTANTS[data])


@pytest.mark.parametrize("data", CONTESTANTS)
def test_results(data):
    """Of the grids as they are; of sorted images MISA learns more than SISA, NSISA hardly any."""
    runs = json.loads((RESULTS / f"spectral_{data}.json").read_text())["runs"]
    searched = {(r["name"], r["sigma"], r["rho"]) for r in runs if r["seed"] == 0}
    assert searched == {trial[:3] for trial in spectral.search(data)}
    loss = {
        name: mean(r["loss"][-1] for r in runs if r["name"] == name and r["seed"] in SEEDS)
        for name in CONTESTANTS[data]
    }
    if data != "mixed":
        assert loss["MISA"] < 0.1 * loss["SISA"]
        assert loss["NSISA"] > 1.5
    assert spectral.table(runs, data) in (RESULTS.parent / "spectral.md").read_text()


def test_errors_are_those_of_an_svd():
    """Within three times its own, as measured."""
    for row in json.loads((RESULTS / "resolvent_cpu.json").read_text())["errors"]:
        assert max(row["ratio"].values()) <= 3
    assert all(len(s) == 8 for s in resolvent.spectra(8))
