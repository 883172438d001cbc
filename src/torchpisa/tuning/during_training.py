"""Change sigma during training: balance residuals, or restart with a larger sigma."""

import copy
import math
import statistics
import warnings
from typing import Any

from torch import nn

from torchpisa.checks import check_count, check_range
from torchpisa.diagnostics import Diagnostics
from torchpisa.optim.pisa import PISA
from torchpisa.tuning.loss_trend import loss_trend
from torchpisa.tuning.restoring import ModelSnapshot

__all__ = ["ResidualBalancing", "Restart"]


def _check_sigma_is_given(optimizer: PISA) -> None:
    if not isinstance(optimizer, PISA):
        raise ValueError(
            "optimizer must be a PISA, SISA or NSISA, which have a sigma, got "
            f"{type(optimizer).__name__}"
        )
    if any(part.sigma_follows for part in optimizer.parts()):
        raise ValueError(
            "optimizer must have been given sigma and rho, but its sigma follows the gradients"
        )


def _multiply_sigma(optimizer: PISA, factor: float) -> None:
    for part in optimizer.parts():
        part.group[part.rule.sigma] = [factor * sigma for sigma in part.sigmas]


class Restart:
    """A restart with a larger sigma if the first iterations oscillate or diverge (Appendix A.2).

    Args:
        model: the model, before training.
        optimizer: its optimizer, before training.
        iterations: the number of iterations to watch.
        factor: the factor on sigma at a restart.
        restarts: the largest number of restarts.

    Examples:
        >>> import torch, torchpisa
        >>> from torchpisa.tuning import Restart
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = torchpisa.SISA(model.parameters(), sigma=0.5)
        >>> restart = Restart(model, opt)
        >>> for step in range(5):
        ...     opt.zero_grad()
        ...     loss = model(torch.ones(1, 2)).square().sum()
        ...     loss.backward()
        ...     opt.step()
        ...     if restart.update(loss.item()):
        ...         print("again, with sigma", opt.param_groups[0]["sigma"])
    """

    _WINDOWS = 20  # over which losses are averaged before they are judged

    def __init__(
        self,
        model: nn.Module,
        optimizer: PISA,
        *,
        iterations: int = 300,
        factor: float = 2.0,
        restarts: int = 8,
    ) -> None:
        check_count("iterations", iterations, 2 * self._WINDOWS)
        check_range("factor", factor, 1, low_open=True, high_open=True)
        check_count("restarts", restarts)
        _check_sigma_is_given(optimizer)
        if optimizer.iteration or not optimizer.synced:
            raise ValueError(
                f"optimizer must not have taken a step yet, got one at iteration "
                f"{optimizer.iteration}"
            )
        self.restarts = 0
        self._optimizer = optimizer
        self._weights = ModelSnapshot(model)
        self._state = copy.deepcopy(optimizer.state_dict())
        self._iterations = iterations
        self._factor = factor
        self._max_restarts = restarts
        self._losses: list[float] = []

    def update(self, loss: float) -> bool:
        """Record the loss of a step; return True if training was restarted.

        Weights and state are then the initial ones, with a larger sigma. Restarting the data is up
        to the caller.
        """
        if len(self._losses) >= self._iterations or self.restarts >= self._max_restarts:
            return False
        self._losses.append(float(loss))
        if not self._is_unsteady():
            return False
        self.restarts += 1
        if self.restarts == self._max_restarts:
            warnings.warn(
                f"the loss is not steady after {self.restarts} restarts; this was the last",
                RuntimeWarning,
                stacklevel=2,
            )
        self._losses.clear()
        self._weights.restore()
        self._optimizer.load_state_dict(copy.deepcopy(self._state))
        _multiply_sigma(self._optimizer, self._factor**self.restarts)
        return True

    def _is_unsteady(self) -> bool:
        if not math.isfinite(self._losses[-1]):
            return True
        size = self._iterations // self._WINDOWS
        if len(self._losses) % size or len(self._losses) < 2 * size:
            return False
        windows = [
            self._losses[start : start + size] for start in range(0, len(self._losses), size)
        ]
        variance = statistics.fmean(map(statistics.variance, windows)) / size
        trend = loss_trend([statistics.fmean(window) for window in windows], math.sqrt(variance))
        complete = len(windows) == self._WINDOWS
        return trend == "diverges" or (complete and trend == "oscillates")


class ResidualBalancing:
    """A rule that keeps primal and dual residual comparable by changing sigma in training.

    If the copies of the batches are far apart (large primal residual, relative to the weights)
    sigma grows. If the weights still move a lot (large dual residual, relative to the duals) it
    shrinks. This is the classical rule for ADMM, not part of the paper. With mini-batches the
    residuals never vanish, so `ratio` must leave room for their noise.

    Args:
        optimizer: the optimizer whose sigma is changed, in all parameter groups.
        every: iterations between two changes.
        ratio: the ratio of the residuals beyond which sigma changes.
        factor: the factor by which sigma is multiplied or divided.
    """

    def __init__(
        self,
        optimizer: PISA,
        *,
        every: int = 50,
        ratio: float = 10.0,
        factor: float = 2.0,
    ) -> None:
        check_range("ratio", ratio, 1, high_open=True)
        check_range("factor", factor, 1, low_open=True, high_open=True)
        _check_sigma_is_given(optimizer)
        if not all(group["dual_decay"] for group in optimizer.param_groups):
            raise ValueError(
                "dual_decay must be in (0, 1], got 0: the duals, from which residuals are "
                "computed, are not kept"
            )
        self._optimizer = optimizer
        self._ratio = ratio
        self._factor = factor
        self._diagnostics = Diagnostics(optimizer, every=every, callback=self._balance)

    def close(self) -> None:
        """Stop observing; sigma stays as it is."""
        self._diagnostics.close()

    def _balance(self, row: dict[str, Any]) -> None:
        primal, dual = row["primal_relative"], row["dual_relative"]
        if primal > self._ratio * dual:
            _multiply_sigma(self._optimizer, self._factor)
        elif dual > self._ratio * primal:
            _multiply_sigma(self._optimizer, 1 / self._factor)
