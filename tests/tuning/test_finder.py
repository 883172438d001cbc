"""Short runs from a small sigma upward."""

import math
import sys
from pathlib import Path

import pytest

from tests.tuning.problem import loader, model, scaled
from torchpisa import MISA, NSISA, PISA, SISA
from torchpisa.tuning import Finding, Trial, find_sigma
from torchpisa.tuning.loss_trend import loss_trend


@pytest.mark.parametrize("scale", [1e-2, 1e2])
def test_finds_a_sigma_that_trains(scale: float) -> None:
    net, data = model(), loader()
    finding = find_sigma(net, scaled(scale), data)
    verdicts = [trial.verdict for trial in finding.trials]
    assert verdicts[-1] == "steady"
    chosen = next(trial for trial in finding.trials if trial.sigma == finding.sigma)
    ends = [trial.losses[-1] for trial in finding.trials if trial.verdict == "steady"]
    assert chosen.losses[-1] == min(ends) < 0.7 * chosen.losses[0]
    sigmas = [trial.sigma for trial in finding.trials]
    assert sigmas == pytest.approx([sigmas[0] * 2**k for k in range(len(sigmas))])


def test_runs_that_diverge_end_early() -> None:
    finding = find_sigma(model(), scaled(), loader(), PISA, smallest=1e-6, factor=10.0, rho=0.0)
    assert finding.trials[0].verdict == "diverges"
    assert finding.trials[0].steps[-1] < 200
    assert finding.rho == 0.0


def test_several_batches_per_round() -> None:
    finding = find_sigma(model(), scaled(), loader(), SISA, batches=4, rho=100.0)
    assert finding.sigma > 0
    assert finding.rho == 100.0


def test_no_steady_run() -> None:
    with pytest.raises(RuntimeError, match=r"no run was steady for sigma from 1e-08 to 2e-08"):
        find_sigma(model(), scaled(), loader(), PISA, smallest=1e-8, trials=2, rho=0.0)


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    finding = find_sigma(model(), scaled(), loader(), steps=50)
    finding.draw(tmp_path / "sigma.png")
    assert (tmp_path / "sigma.png").stat().st_size > 5000


def test_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'torchpisa\[demo\]'"):
        Finding(1.0, 100.0, [Trial(1.0, [0], [2.0], "steady")]).draw(tmp_path / "sigma.png")


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([4.0, 3.0, 2.5, 2.0, 1.8, 1.7], "steady"),
        ([4.0, 6.0, 3.0, 2.0, 1.9, 1.8], "steady"),
        ([4.0, 3.0, 2.0, 3.5, 1.5, 3.0], "oscillates"),
        ([4.0, 4.0, 4.0, 4.1, 4.2, 4.3], "oscillates"),
        ([4.0, 3.0, 20.0], "diverges"),
        ([4.0, math.nan], "diverges"),
        ([4.0, 3.0, math.inf], "diverges"),
        ([-4.0, -5.0, -6.0, -7.0], "steady"),
    ],
)
def test_judge(losses: list[float], verdict: str) -> None:
    assert loss_trend(losses) == verdict
    assert loss_trend([1e-6 * loss for loss in losses]) == verdict


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"factor": 1.0}, r"factor must be a finite number > 1, got 1\.0"),
        ({"steps": 10}, r"steps must be an integer >= 25, got 10"),
        ({"trials": 0}, r"trials must be an integer >= 1, got 0"),
        ({"smallest": -1.0}, r"smallest must be a finite number > 0, got -1\.0"),
    ],
)
def test_bad_arguments(more: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_sigma(model(), scaled(), loader(), **more)


def test_bad_optimizers() -> None:
    net = model()
    for wrong in ("sisa", SISA(net.parameters())):
        with pytest.raises(TypeError, match="optimizer must be a class, such as SISA, or a func"):
            find_sigma(net, scaled(), loader(), wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"sigma is what the runs look for, got 0\.5"):
        find_sigma(net, scaled(), loader(), sigma=0.5)


def test_each_optimizer_has_its_scale() -> None:
    net = model()
    finding = find_sigma(net, scaled(), loader(), NSISA, trials=10, steps=40)
    assert finding.trials[0].sigma == 80 / 32
    with pytest.raises(ValueError, match="got MISA: choose its lr instead"):
        find_sigma(net, scaled(), loader(), MISA)
    with pytest.raises(ValueError, match="data must have at least one batch, got none"):
        find_sigma(net, scaled(), [], NSISA)
