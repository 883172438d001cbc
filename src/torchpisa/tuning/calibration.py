"""Calibrate sigma and rho from the first gradients, independently of the scale of the loss."""

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from torchpisa.checks import check_count, check_range
from torchpisa.optim import NSISA, SISA
from torchpisa.optim.arguments import Calibrated
from torchpisa.optim.pisa import PISA
from torchpisa.tuning.restoring import check_arguments, restored_afterwards

__all__ = ["calibrate"]

# Lower bound of the noise, relative to the gradient, for batches that are almost equal.
_MIN_NOISE = 0.1


def calibrate(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    data: Iterable[Any],
    *,
    lr: float = 2e-3,
    momentum: float = 0.75,
    batches: int = 8,
    optimizer: type[PISA] = SISA,
) -> dict[str, Any]:  # of floats; Any, because ** may meet every argument of an optimizer
    r"""Return sigma and rho of SISA's rule for a model before training.

    With q the typical size of the noise in a gradient's entry, and b the `momentum`,

    \[
    \sigma = \frac{q}{\mathrm{lr}}, \qquad \rho = \frac{b}{(1 - b)\,\mathrm{lr}}.
    \]

    A coordinate with \(\sqrt{m_i} = q\) then has momentum \(\rho q/(\sigma + \rho q) = b\), and a
    constant gradient entry of size q moves its weight by \(q/\sigma = \mathrm{lr}\) in every step,
    as with Adam. Multiplying the loss by a number multiplies sigma by it, and changes nothing else.

    Model, gradients, random numbers and order of the data stay as they were.

    Args:
        model: the model, as training will start from it.
        loss: a function of the model and a batch that returns the loss.
        data: batches to train on, such as a DataLoader.
        lr: step size, comparable to Adam's.
        momentum: \(b\), in (0, 1).
        batches: the number of batches to use, at least two.
        optimizer: `SISA`, or `NSISA`, whose vectors take SISA's rule. Other optimizers refuse the
            result.

    Returns:
        `sigma` and `rho`, as arguments of `SISA` and of a `PISA` with its preconditioner, or
        `sisa_sigma` and `sisa_rho` of `NSISA`.

    Examples:
        >>> import torch, torchpisa
        >>> from torchpisa.tuning import calibrate
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1)
        >>> data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(20)]
        >>> def loss(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        >>> opt = torchpisa.SISA(model.parameters(), **calibrate(model, loss, data))
    """
    if optimizer not in (SISA, NSISA):
        raise ValueError(
            "optimizer must be SISA or NSISA, which have sigma and rho (MISA has only lr), got "
            f"{getattr(optimizer, '__name__', repr(optimizer))}"
        )
    check_range("lr", lr, 0, low_open=True, high_open=True)
    check_range("momentum", momentum, 0, 1, low_open=True, high_open=True)
    check_count("batches", batches, 2)
    check_arguments(model, loss, data)
    params = [param for param in model.parameters() if param.requires_grad]
    sums = [torch.zeros_like(param, dtype=_accumulation_dtype(param)) for param in params]
    squares = [torch.zeros_like(total) for total in sums]
    count = 0
    with restored_afterwards(model, data):
        for batch in islice(data, batches):
            with torch.enable_grad():
                value = loss(model, batch)
                if not isinstance(value, Tensor):
                    raise TypeError(f"loss must return a tensor, got {value!r}")
                gradients = torch.autograd.grad(value, params, allow_unused=True)
            count += 1
            for total, square, gradient in zip(sums, squares, gradients, strict=True):
                if gradient is not None:
                    total += gradient
                    square += gradient.abs().square()
    if count < 2:
        raise ValueError(f"data must have two batches at least, got {count}")
    elements = sum(param.numel() for param in params)
    mean_square = math.fsum(float(square.real.sum()) for square in squares) / count
    square_of_mean = math.fsum(float(total.abs().square().sum()) for total in sums) / count**2
    noise = (mean_square - square_of_mean) * count / (count - 1)
    q = math.sqrt(max(noise, _MIN_NOISE**2 * mean_square) / max(1, elements))
    if not 0 < q < math.inf:
        raise ValueError(f"gradients must be finite and not all zero, got a typical size of {q}")
    prefix = "sisa_" if optimizer is NSISA else ""
    return {
        f"{prefix}sigma": Calibrated(q / lr, optimizer.__name__),
        f"{prefix}rho": Calibrated(momentum / ((1 - momentum) * lr), optimizer.__name__),
    }


def _accumulation_dtype(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)
