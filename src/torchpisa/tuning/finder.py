"""Find sigma as the paper does, by short runs with a growing sigma."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from torchpisa.checks import check_count, check_range
from torchpisa.optim import MISA, NSISA, SISA
from torchpisa.optim.pisa import PISA
from torchpisa.tuning.calibration import calibrate
from torchpisa.tuning.loss_trend import LossTrend, loss_trend
from torchpisa.tuning.restoring import (
    check_arguments,
    random_state,
    restored_afterwards,
    set_random_state,
)

__all__ = ["Finding", "Trial", "find_sigma"]

# Evaluations of the loss during a run, and the batches they use.
_EVALUATIONS = 25
_PROBE_BATCHES = 4
# The first sigma, relative to that of `calibrate`.
_SMALLEST = 1 / 32
# sigma and rho of the published GPT-2 script.
_PUBLISHED_NSISA = {"sigma": 80.0, "rho": 100.0}
# Runs after the best one, all of them worse, that end the search.
_PATIENCE = 2


@dataclass(frozen=True)
class Trial:
    """A short run with one sigma.

    Attributes:
        sigma: its sigma.
        steps: the steps at which the loss was measured.
        losses: the losses then, always on the same batches.
        verdict: `"steady"`, `"oscillates"` or `"diverges"`.
    """

    sigma: float
    steps: list[int]
    losses: list[float]
    verdict: LossTrend


@dataclass(frozen=True)
class Finding:
    """The result of `find_sigma`.

    Attributes:
        sigma: the sigma of the steady run that ended lowest.
        rho: the rho of all runs.
        trials: all runs, from the smallest sigma upward.
    """

    sigma: float
    rho: float
    trials: list[Trial]

    def draw(self, path: str | PathLike[str]) -> None:
        """Save a picture of the losses at the end of the runs over sigma, and of all curves."""
        from torchpisa.tuning.plot import draw_search

        draw_search(self, path)


def find_sigma(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    data: Iterable[Any],
    optimizer: Callable[..., Any] = SISA,
    *,
    smallest: float | None = None,
    factor: float = 2.0,
    trials: int = 12,
    steps: int = 200,
    **settings: Any,
) -> Finding:
    """Run with a growing sigma until the loss decreases steadily (Appendix A.2).

    A run that oscillates or diverges ends early. The search ends when larger sigmas only make
    training slower. Model, gradients, random numbers and order of the data stay as they were.

    Args:
        model: the model, as training will start from it.
        loss: a function of the model and a batch that returns the loss.
        data: batches to train on, such as a DataLoader; iterated again for every run.
        optimizer: makes the optimizer, given parameters, `sigma` and `settings`.
        smallest: sigma of the first run; by default a 32nd of the sigma of `calibrate`, or of the
            published 80 for `NSISA`.
        factor: the factor from one run's sigma to the next, above 1.
        trials: the largest number of runs.
        steps: the length of a run in calls of `optimizer.step()`.
        **settings: passed on to `optimizer`. Without `rho`, that of `calibrate` is used.

    Raises:
        RuntimeError: no run was steady.
    """
    check_range("factor", factor, 1, low_open=True, high_open=True)
    check_count("trials", trials)
    check_count("steps", steps, _EVALUATIONS)
    check_arguments(model, loss, data)
    if not callable(optimizer):
        raise TypeError(
            "optimizer must be a class, such as SISA, or a function that makes one, got "
            f"{optimizer!r}"
        )
    if "sigma" in settings:
        raise TypeError(
            f"sigma is what the runs look for, got {settings['sigma']!r}: smallest is the first"
        )
    if optimizer is MISA:
        raise ValueError("optimizer must have a sigma to find, got MISA: choose its lr instead")
    # NSISA's sigma is for orthogonalised matrices, whose scale is that of no gradient.
    guess = calibrate(model, loss, data) if optimizer is not NSISA else _PUBLISHED_NSISA
    settings = {"rho": guess["rho"], **settings}
    if smallest is None:
        smallest = guess["sigma"] * _SMALLEST
    check_range("smallest", smallest, 0, low_open=True, high_open=True)
    done: list[Trial] = []
    with restored_afterwards(model, data):
        probes = list(itertools.islice(data, _PROBE_BATCHES))
        if not probes:
            raise ValueError("data must have at least one batch, got none")
        for number in range(trials):
            sigma = smallest * factor**number
            with restored_afterwards(model, data):
                opt = optimizer(model.parameters(), sigma=sigma, **settings)
                done.append(_run(model, loss, data, probes, opt, sigma, steps))
            if _is_past_the_best(done):
                break
    steady = [trial for trial in done if trial.verdict == "steady"]
    if not steady:
        raise RuntimeError(
            f"no run was steady for sigma from {smallest:.3g} to {done[-1].sigma:.3g} "
            f"({', '.join(trial.verdict for trial in done)}): allow more trials, or check the loss"
        )
    best = min(steady, key=lambda trial: trial.losses[-1])
    return Finding(best.sigma, float(settings["rho"]), done)


def _run(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    data: Iterable[Any],
    probes: list[Any],
    opt: PISA,
    sigma: float,
    steps: int,
) -> Trial:
    # With the same random numbers each time, so that only the weights make a difference.
    start = random_state(data)

    def evaluate() -> float:
        current = random_state(data)
        set_random_state(data, start)
        with torch.no_grad():
            total = math.fsum(float(loss(model, batch)) for batch in probes)
        set_random_state(data, current)
        return total / len(probes)

    steps_evaluated, losses = [0], [evaluate()]
    every = steps // _EVALUATIONS
    for step, batch in zip(range(1, steps + 1), _endless(data), strict=False):
        opt.zero_grad()
        try:
            with torch.enable_grad():
                loss(model, batch).backward()  # type: ignore[no-untyped-call]
            opt.step()
        except FloatingPointError:
            steps_evaluated.append(step)
            losses.append(math.inf)
            break
        if step % every == 0:
            steps_evaluated.append(step)
            losses.append(evaluate())
            if loss_trend(losses) == "diverges":
                break
    return Trial(sigma, steps_evaluated, losses, loss_trend(losses))


def _endless(data: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from data


def _is_past_the_best(done: list[Trial]) -> bool:
    ends = [trial.losses[-1] for trial in done if trial.verdict == "steady"]
    if not ends:
        return False
    return len(ends) - 1 - ends.index(min(ends)) >= _PATIENCE
