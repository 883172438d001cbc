"""What an optimizer hands to a kernel: tensors, and the numbers of one round."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.preconditioners import NewtonSchulz, Preconditioner, SecondMoment, Spectral
from torchpisa.state_keys import slot_keys

__all__ = [
    "TINY",
    "FindsNonfinite",
    "Kernel",
    "LocalJob",
    "Member",
    "Move",
    "check_shapes",
    "compute_dtype",
    "keys_shaped_like_params",
    "mark_changed",
    "real",
    "sigma_of",
]


class Member(NamedTuple):
    """One parameter, its gradient (None means zero) and all of its state.

    Of a sharded parameter, `whole`, the other three are the part that this process holds.
    """

    param: Tensor
    grad: Tensor | None
    state: MutableMapping[str, Any]
    whole: Tensor | None = None

    @property
    def origin(self) -> Tensor:
        """The parameter that the optimizer was given."""
        return self.param if self.whole is None else self.whole


# Stands in for a sigma that has seen no gradient yet.
TINY = 1e-30


class Move(NamedTuple):
    """A consensus: S, lambda, the relative learning rate, how it rounds, and its proximal term.

    S is one number for all parameters or, where sigma follows the gradients, one for each of them,
    by the `id` of the parameter; None if it is the sigma of the only batch there is.
    """

    total_sigma: Scalar | Mapping[int, Scalar] | None
    consensus_decay: float
    lr: Scalar
    stochastic_rounding: bool = False
    proximal: Spectral | None = None
    rho: Scalar = 0.0

    def scale(self, total_sigma: Scalar | None = None) -> Scalar:
        """Return lr / (S + lr lambda), what the consensus multiplies U - lambda w by.

        Args:
            total_sigma: S of one parameter; None if it is the same for all.
        """
        total: Any = self.total_sigma if total_sigma is None else total_sigma
        scale: Scalar = self.lr / (total + self.lr * self.consensus_decay)
        return scale

    def total(self, member: Member) -> Scalar:
        """Return S of a parameter; never zero, which it is before the first gradient."""
        if self.total_sigma is None:
            return sigma_of(member, 0)
        if isinstance(self.total_sigma, Mapping):
            return _positive(self.total_sigma[id(member.origin)])
        return self.total_sigma


@dataclass(slots=True)
class LocalJob:
    """One batch's local step over some parameters that share a rule.

    Attributes:
        members: the parameters, with the gradient of this batch.
        preconditioner: solves for d.
        slot: the batch, i.
        sigma: its penalty in this round; None if that of each parameter follows its gradients and
            is kept with its state.
        rho: its weight of the preconditioner.
        weight: alpha_i.
        weight_decay: mu - lambda.
        dual_decay: factor on the new dual.
        maximize: negate the gradients.
        keep: a 0-d bool tensor that is False if the batch counts as absent, or None for True. It
            is a tensor where asking for its value would make the host wait for the device.
        move: consensus to take at once (one batch), or None to add to `pending` (several).
        stochastic_rounding: round what is stored in bfloat16 at random instead of to nearest.
        grad_scale: what the gradients were multiplied by (GradScaler), or None.
        clip_scale: factor on the residual, or None.
        search: leave out entries of gradients that are not finite, and note whose they are; for
            kernels that search while they work.
        flags: numbers on the device, one per member, that `foreach` raises where it finds a
            gradient that is not finite, which then counts as zero; None if it need not look.
    """

    members: list[Member]
    preconditioner: Preconditioner
    slot: int
    sigma: Scalar | None
    rho: Scalar
    weight: float
    weight_decay: float
    dual_decay: float
    maximize: bool
    keep: Tensor | None
    move: Move | None
    stochastic_rounding: bool = False
    grad_scale: Tensor | None = None
    clip_scale: Tensor | None = None
    search: bool = False
    flags: Sequence[Tensor] | None = None

    @property
    def penalty(self) -> Scalar:
        """sigma where it is known to be given."""
        assert self.sigma is not None
        return self.sigma


class FindsNonfinite(Protocol):
    """The part of a kernel that deals with gradients that are not finite.

    Attributes:
        finds_nonfinite: whether it looks for such entries while it works (`LocalJob.search`), so
            that nobody has to look before.
        takes_flags: whether it can leave out whole gradients that are not finite, and say whose
            they are (`LocalJob.flags`).
    """

    finds_nonfinite: ClassVar[bool]
    takes_flags: ClassVar[bool]


class Kernel(FindsNonfinite, Protocol):
    """A way to compute local steps and consensuses; `kernels.dispatch` chooses among them.

    Attributes:
        slower: the kernel to use for jobs that this one does not support.
    """

    slower: ClassVar["Kernel | None"]

    def supports(self, job: LocalJob) -> bool:
        """Return whether `local_step` takes this job."""

    def local_step(self, job: LocalJob) -> None:
        """Take equations (2.10) to (2.14) for one batch; with `job.move` also consensus (2.9)."""

    def residual_norm(self, job: LocalJob) -> list[Tensor]:
        """Return norms of r_i, as 0-d tensors, over some of the members each."""

    def consensus(self, members: list[Member], move: Move, keep: Tensor | None) -> None:
        """Take equation (2.9) from the sum in `pending`; nothing moves if `keep` is False."""


def sigma_of(member: Member, slot: int) -> Scalar:
    """Return the sigma that follows the gradients of a parameter, on a CPU as a float."""
    sigma: Tensor = member.state[slot_keys(slot).sigma]
    return _positive(sigma.item() if sigma.device.type == "cpu" else sigma)


def _positive(sigma: Scalar) -> Scalar:
    return sigma.clamp(min=TINY) if isinstance(sigma, Tensor) else max(sigma, TINY)


def real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, and a real one as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def check_shapes(members: Iterable[Member], keys: Iterable[str]) -> None:
    """Raise ValueError if a gradient, or state under `keys`, is not shaped like its parameter.

    Kernels compute with addresses and sizes, or broadcast: neither would notice.
    """
    keys = tuple(keys)
    for param, grad, state, _ in members:
        shape = param.shape
        if grad is not None and grad.shape != shape:
            raise ValueError(
                f"gradients must be shaped like their parameters, got one of shape "
                f"{tuple(grad.shape)} for a parameter of shape {tuple(shape)}"
            )
        for key in keys:
            if key in state and state[key].shape != shape:
                raise ValueError(
                    f"a parameter must keep the shape that its state has, got a parameter of shape "
                    f"{tuple(shape)} with {key} of shape {tuple(state[key].shape)}: make a "
                    "new optimizer after parameters were resized, or give the new parameter to "
                    "add_param_group"
                )


def keys_shaped_like_params(preconditioner: Preconditioner, slot: int) -> list[str]:
    """Return the keys of state that is shaped like its parameter; other state may not be."""
    keys = slot_keys(slot)
    if isinstance(preconditioner, SecondMoment):
        return [keys.dual, keys.moment, "pending"]
    if isinstance(preconditioner, NewtonSchulz):
        return [keys.dual, keys.momentum, "pending"]
    return [keys.dual, "pending"]


def mark_changed(params: Iterable[Tensor]) -> None:
    """Tell autograd that `params` were written to by code that torch does not see.

    A backward pass through what they were before then raises, as it does after any other step.
    """
    for param in params:  # one by one: older versions of torch take no lists
        torch.autograd.graph.increment_version(param)


def compute_dtype(param: Tensor, state: Tensor) -> torch.dtype:
    """Return at least float32, so that half-precision state is rounded once per step."""
    return torch.promote_types(torch.promote_types(param.dtype, state.dtype), torch.float32)
