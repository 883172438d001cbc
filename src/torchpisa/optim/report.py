"""Reports on an optimizer: memory of its state, step size and momentum in familiar terms."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.distributed import dtensor
from torchpisa.kernels.job import real
from torchpisa.optim.round import Group, Part
from torchpisa.preconditioners import Preconditioner
from torchpisa.state_keys import of_slot, split_key, state_key

__all__ = ["Effective", "Memory", "Picture", "Range", "diagonal", "effective", "memory", "picture"]

# Enough for quantiles of a report, few enough to cost nothing.
_SAMPLES_PER_TENSOR = 4096


@dataclass(frozen=True)
class Memory:
    """Memory of an optimizer's state.

    Attributes:
        bytes: the total.
        bytes_per_parameter: the total per element of the parameters.
        by_name: bytes by kind of state, summed over batches.
    """

    bytes: int
    bytes_per_parameter: float
    by_name: dict[str, int]


class Range(NamedTuple):
    """Smallest, median and largest value."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class Effective:
    r"""The motion of a parameter group, in the terms of gradient descent with momentum.

    With \(q\) the diagonal of Q, over all coordinates and batches; None where Q has no diagonal or
    no step was taken yet.

    Attributes:
        step: \(\mathrm{lr}/S\), the factor on a constant gradient in the long run; S is averaged
            over parameters where sigma follows their gradients. With the consensus of
            `SpectralConsensus` it holds for singular values far below \(S/\rho\); large ones become
            \(\mathrm{lr}/\rho\).
        first_step: \(2\,\mathrm{lr}/(\sigma + \rho q)\), the factor on a new gradient.
        momentum: \(\rho q/(\sigma + \rho q)\), the momentum coefficient of each coordinate.
        stable_curvature: \(\frac{2}{3}(\sigma + 2 \rho q)/\mathrm{lr}\), the curvature up to which
            the iteration is stable.
    """

    step: float
    first_step: Range | None
    momentum: Range | None
    stable_curvature: Range | None


class Picture(NamedTuple):
    """The quantities whose ranges `Effective` gives, coordinate by coordinate."""

    first_step: Tensor
    momentum: Tensor
    stable_curvature: Tensor


def memory(state: Mapping[Tensor, Mapping[str, Any]], groups: Sequence[Group]) -> Memory:
    """Return the memory of `state`."""
    by_name: dict[str, int] = {}
    for param_state in state.values():
        for key, value in param_state.items():
            if isinstance(value, Tensor):
                name, _ = split_key(key)
                size = value.numel() * value.element_size()
                by_name[name] = by_name.get(name, 0) + size
    total = sum(by_name.values())
    elements = sum(param.numel() for group in groups for param in group["params"])
    return Memory(total, total / max(1, elements), by_name)


@torch.no_grad()
def effective(part: Part, state: Mapping[Tensor, Mapping[str, Any]]) -> Effective:
    """Return step size and momentum of a part, from the state of all parameters."""
    group, preconditioner, follows = part.group, part.preconditioner, part.sigma_follows
    lr = float(part.lr)
    sigmas, rhos = part.sigmas, part.rhos
    scales: list[tuple[float, Tensor]] = []
    for param in part.params:
        param_state = state.get(param, {})
        for slot, (sigma, rho) in enumerate(zip(sigmas, rhos, strict=True)):
            step = param_state.get(state_key("step", slot))
            if step is None or not step or not param.numel():
                continue
            q = diagonal(preconditioner, param_state, slot)
            if q is not None:
                q = q.reshape(-1)[:: max(1, q.numel() // _SAMPLES_PER_TENSOR)]
                if follows:
                    sigma = param_state[state_key("sigma", slot)]
                scales.append((float(sigma), float(rho) * q.double().cpu()))
    # The sigmas of other ranks are taken to be like those of this one.
    share = sum(group["weights"]) if group["ranks"] > 1 else 1.0
    if follows:
        elements = sum(len(rq) for _, rq in scales)
        total = sum(s * len(rq) for s, rq in scales) / max(1, elements) or math.nan
    else:
        total = float(part.total(sigmas))
    step_size = lr * share / total
    if not scales:
        return Effective(step_size, None, None, None)
    sigma = torch.cat([torch.full_like(rq, s) for s, rq in scales])
    rq = torch.cat([rq for _, rq in scales])
    heavy_ball = picture(sigma, rq, lr)
    return Effective(
        step=step_size,
        first_step=_range(heavy_ball.first_step),
        momentum=_range(heavy_ball.momentum),
        stable_curvature=_range(heavy_ball.stable_curvature) if lr else None,
    )


def diagonal(
    preconditioner: Preconditioner, param_state: Mapping[str, Any], slot: int
) -> Tensor | None:
    """Return the diagonal of Q of a batch; of a sharded parameter the local part.

    Args:
        preconditioner: Q.
        param_state: all state of a parameter.
        slot: the batch.
    """
    saved = of_slot(param_state, slot)
    state = {name: real(dtensor.local(value)) for name, value in saved.items()}
    step = state["step"]
    return preconditioner.diagonal(
        state["dual"], state, step.item() if step.device.type == "cpu" else step
    )


def picture(sigma: Tensor, rq: Tensor, lr: Scalar) -> Picture:
    """Return the formulas of `Effective`, from sigma and rho q."""
    return Picture(
        first_step=2 * lr / (sigma + rq),
        momentum=rq / (sigma + rq),
        stable_curvature=(2 / 3) * (sigma + 2 * rq) / lr,
    )


def _range(values: Tensor) -> Range:
    return Range(float(values.min()), float(values.median()), float(values.max()))
