"""What an optimizer hands to a kernel: tensors, and the numbers of one round."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.preconditioners import Preconditioner

__all__ = ["LocalJob", "Member", "Move", "state_key"]


def state_key(name: str, slot: int) -> str:
    """Name of a batch's own state, such as `dual.0`."""
    return f"{name}.{slot}"


class Member(NamedTuple):
    """One parameter, its gradient (None means zero) and all of its state."""

    param: Tensor
    grad: Tensor | None
    state: dict[str, Any]


class Move(NamedTuple):
    """Numbers of a consensus: S, lambda and the relative learning rate."""

    total_sigma: Scalar
    consensus_decay: float
    lr: Scalar


@dataclass(frozen=True)
class LocalJob:
    """One batch's local step over some members of a parameter group.

    Attributes:
        members: the parameters, with the gradient of this batch.
        preconditioner: solves for d.
        slot: the batch, i.
        sigma: its penalty in this round.
        rho: its weight of the preconditioner.
        weight: alpha_i.
        weight_decay: mu - lambda.
        dual_decay: factor on the new dual.
        maximize: negate the gradients.
        grad_scale: what the gradients were multiplied by (GradScaler), or None.
        clip_scale: factor on the residual, or None.
        keep: a 0-d bool tensor that is False if the batch counts as absent, or None for True. It
            is a tensor where asking for its value would make the host wait for the device.
        move: consensus to take at once (one batch), or None to add to `pending` (several).
    """

    members: list[Member]
    preconditioner: Preconditioner
    slot: int
    sigma: Scalar
    rho: Scalar
    weight: float
    weight_decay: float
    dual_decay: float
    maximize: bool
    grad_scale: Tensor | None
    clip_scale: Tensor | None
    keep: Tensor | None
    move: Move | None


def real(tensor: Tensor) -> Tensor:
    """A complex tensor seen as pairs of real numbers; a real one as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def compute_dtype(param: Tensor, dual: Tensor) -> torch.dtype:
    """At least float32, so that half-precision state is rounded once per step."""
    return torch.promote_types(torch.promote_types(param.dtype, dual.dtype), torch.float32)
