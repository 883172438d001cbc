r"""Rules for the penalty: \(\sigma_i^{\ell+1} = \sigma_i^\ell / \gamma_i\), equation (2.12).

`gamma` of an optimizer is a number in (0, 1] or any function that returns one for the iteration
\(\ell = 0, 1, 2, \dots\) The rules of the paper that are not constant are here. Growth ends at
`LARGEST_SIGMA`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchpisa.checks import check_count, check_range

__all__ = ["LARGEST_SIGMA", "Every", "Gamma", "WarmDown", "gamma_l", "grown", "k0"]

LARGEST_SIGMA = 1e30
"""Up to where a penalty grows: the steps it leaves are lost in the rounding of any weight by then,
and float32 ends at 3.4e38."""

Scalar = float | Tensor

Gamma = float | Callable[[int], float]
"""A number in (0, 1], or a function of the iteration that returns one."""


def grown(sigma: Scalar, gamma: Scalar, largest: float = LARGEST_SIGMA) -> Scalar:
    r"""Return \(\sigma_i / \gamma_i\), equation (2.12), but no more than `largest`.

    A sigma that was larger from the start stays what it is.

    Examples:
        >>> grown(2.0, 0.5), grown(8e29, 0.5), grown(1e35, 0.5)
        (4.0, 1e+30, 1e+35)
    """
    new = sigma / gamma
    if not isinstance(new, Tensor):
        return max(sigma, min(new, largest))
    if isinstance(sigma, Tensor):
        return torch.maximum(sigma, new.clamp(max=largest))
    return new.clamp(max=max(sigma, largest))


def k0(gamma: float) -> int:
    r"""Return \(k_0 = \lceil \ln\gamma / \ln 0.99 \rceil\), Appendix A.2.

    Dividing by `gamma` every \(k_0\) iterations grows sigma about as fast as dividing by 0.99 every
    time.

    Examples:
        >>> [k0(gamma) for gamma in (0.5, 0.7, 0.9, 0.99)]
        [69, 36, 11, 1]
    """
    check_range("gamma", gamma, 0, 1, low_open=True)
    return max(1, math.ceil(math.log(gamma) / math.log(0.99)))


@dataclass(frozen=True)
class Every:
    r"""`gamma` every `k0` iterations, 1 otherwise.

    The sigmas with an index that is a multiple of \(k_0\) are the ones that change: the first
    change is in the \(k_0\)-th round, and `k0=1` is the constant rule.

    Args:
        gamma: \(\gamma\) in (0, 1].
        k0: \(k_0 \ge 1\); by default the paper's `k0(gamma)`.
    """

    gamma: float
    k0: int | None = None

    def __post_init__(self) -> None:
        check_range("gamma", self.gamma, 0, 1, low_open=True)
        if self.k0 is None:
            object.__setattr__(self, "k0", k0(self.gamma))
        check_count("k0", self.k0)

    def __call__(self, iteration: int) -> float:
        assert self.k0 is not None
        return self.gamma if (iteration + 1) % self.k0 == 0 else 1.0


def gamma_l(t: float, s: int, n: int) -> Every:
    r"""Return \(\gamma_\ell(t, s)\) of the hyperparameter table: t every s epochs.

    Args:
        t: \(\gamma\) when it applies.
        s: number of epochs between two changes.
        n: iterations in an epoch (rounds, not steps).
    """
    check_count("s", s)
    check_count("n", n)
    return Every(t, s * n)


@dataclass(frozen=True)
class WarmDown:
    r"""\(\gamma_\ell = 1 - 1/(E - \lfloor \ell/n \rfloor)\) of the hyperparameter table.

    With one iteration per epoch sigma grows as \(1/(1 - \ell/E)\), which is a linear decay of the
    step to zero. With n it grows by \((E/(E - k))^n\) in k epochs: with n = 112 by 100,000 in the
    first tenth of the training, which ends it. In the last epoch the printed rule is 0 (an infinite
    sigma); from there on sigma stays.

    Args:
        epochs: \(E\), the number of epochs of the whole training.
        n: iterations in an epoch (rounds, not steps).
    """

    epochs: int
    n: int = 1

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs)
        check_count("n", self.n)

    def __call__(self, iteration: int) -> float:
        left = self.epochs - iteration // self.n
        return 1 - 1 / left if left > 1 else 1.0
