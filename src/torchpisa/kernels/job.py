"""The interface between optimizers and kernels: parameters, jobs and the kernel protocol."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.preconditioners import NewtonSchulz, Preconditioner, SecondMoment, Spectral
from torchpisa.state_keys import slot_keys

__all__ = [
    "PLAIN_TYPES",
    "TINY",
    "Consensus",
    "FindsNonfinite",
    "Kernel",
    "LocalJob",
    "Member",
    "Rows",
    "check_shapes",
    "compute_dtype",
    "keys_shaped_like_params",
    "mark_changed",
    "real",
    "sigma_of",
]


# torch's own types of parameters; one of another type may be sharded (a DTensor).
PLAIN_TYPES = {Tensor, torch.nn.Parameter}

# Stands in for a sigma that has seen no gradient yet.
TINY = 1e-30


# State of small tensors, as the rows of one tensor, by their addresses.
Rows = dict[tuple[int, ...], Tensor]


class Member(NamedTuple):
    """One parameter, its gradient (None means zero) and all of its state.

    If the parameter is sharded, `whole` is the DTensor and the other three are the part of it that
    this process holds.
    """

    param: Tensor
    grad: Tensor | None
    state: MutableMapping[str, Any]
    whole: Tensor | None = None

    @property
    def origin(self) -> Tensor:
        """The parameter as the optimizer was given it."""
        return self.param if self.whole is None else self.whole


class Consensus(NamedTuple):
    """The numbers of equation (2.9), w = w + lr (U - lambda w) / (S + lr lambda).

    Attributes:
        total_sigma: S, one number for all parameters. Where sigma follows the gradients: a number
            for each, by the `id` of the parameter, or None in a round of one batch, for the sigma
            in the parameter's state.
        consensus_decay: lambda.
        lr: the learning rate.
        stochastic_rounding: round weights in bfloat16 at random instead of to nearest.
        proximal: the preconditioner whose proximal step replaces the formula, or None.
        rho: the sum of rho over the batches, weighted by alpha, for `proximal`.
    """

    total_sigma: Scalar | Mapping[int, Scalar] | None
    consensus_decay: float
    lr: Scalar
    stochastic_rounding: bool = False
    proximal: Spectral | None = None
    rho: Scalar = 0.0

    def scale(self, total_sigma: Scalar | None = None) -> Scalar:
        """Return lr / (S + lr lambda), the factor on U - lambda w.

        Args:
            total_sigma: S for one parameter, or for several in one tensor; None if all share one.
        """
        total: Any = self.total_sigma if total_sigma is None else total_sigma
        if self.consensus_decay != 0:
            total = total + self.lr * self.consensus_decay
        scale: Scalar = self.lr / total
        return scale

    def total(self, member: Member) -> Scalar:
        """Return S for a parameter; it is above zero even before the first gradient."""
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
        sigma: the batch's penalty in this round; None if sigma follows the gradients and is part
            of each parameter's state.
        rho: the batch's weight of the preconditioner.
        weight: alpha_i.
        weight_decay: mu - lambda.
        dual_decay: factor on the new dual.
        maximize: negate the gradients.
        keep: a 0-d bool tensor, False if the batch counts as absent; None for True. Kernels do not
            read its value, because the host would wait for the device.
        consensus: the consensus to take in the same step, in a round of one batch; None to add to
            `pending` instead.
        stochastic_rounding: round what is stored in bfloat16 at random instead of to nearest.
        grad_scale: factor of a GradScaler on the gradients, or None.
        clip_scale: factor on the residual, or None.
        search: leave out single entries that are not finite and flag their member; for kernels
            with `finds_nonfinite`.
        flags: numbers on the device, one per member, to set where a gradient is not finite, which
            then counts as zero; None to not check. For kernels with `takes_flags`.
        rows: what `foreach.rows_of` remembers from step to step.
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
    consensus: Consensus | None
    stochastic_rounding: bool = False
    grad_scale: Tensor | None = None
    clip_scale: Tensor | None = None
    search: bool = False
    flags: Sequence[Tensor] | None = None
    rows: Rows | None = None

    @property
    def penalty(self) -> Scalar:
        """sigma, for code that runs only if it was given."""
        assert self.sigma is not None
        return self.sigma


class FindsNonfinite(Protocol):
    """The way a kernel deals with gradients that are not finite.

    Attributes:
        finds_nonfinite: True if it finds and leaves out single entries while it works
            (`LocalJob.search`), so that gradients need no check before.
        takes_flags: True if it can leave out whole gradients and flag them (`LocalJob.flags`).
    """

    finds_nonfinite: ClassVar[bool]
    takes_flags: ClassVar[bool]


class Kernel(FindsNonfinite, Protocol):
    """A way to compute local steps and consensuses; `kernels.dispatch` chooses among them.

    Attributes:
        slower: the fallback for jobs that this kernel does not support.
    """

    slower: ClassVar["Kernel | None"]

    def supports(self, job: LocalJob) -> bool:
        """Return whether `local_step` takes this job."""

    def local_step(self, job: LocalJob) -> None:
        """Take equations (2.10) to (2.14) for one batch; with `job.consensus` also (2.9)."""

    def residual_norm(self, job: LocalJob) -> list[Tensor]:
        """Return norms of r_i as 0-d tensors, each over one or more members."""

    def take_consensus(
        self, members: list[Member], consensus: Consensus, keep: Tensor | None
    ) -> None:
        """Take equation (2.9) with the sum in `pending`; change nothing if `keep` is False."""


def sigma_of(member: Member, slot: int) -> Scalar:
    """Return the sigma in a parameter's state: a float on a CPU, else a tensor."""
    sigma: Tensor = member.state[slot_keys(slot).sigma]
    return _positive(sigma.item() if sigma.device.type == "cpu" else sigma)


def _positive(sigma: Scalar) -> Scalar:
    return sigma.clamp(min=TINY) if isinstance(sigma, Tensor) else max(sigma, TINY)


def real(tensor: Tensor) -> Tensor:
    """Return a complex tensor viewed as pairs of real numbers; a real one as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def check_shapes(members: Iterable[Member], keys: Iterable[str]) -> None:
    """Raise ValueError if a gradient, or state under `keys`, is not shaped like its parameter.

    Kernels would not notice: they compute with addresses and sizes, or broadcast.
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
            tensor = state.get(key)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"a parameter must keep the shape that its state has, got a parameter of shape "
                    f"{tuple(shape)} with {key} of shape {tuple(tensor.shape)}: make a "
                    "new optimizer after parameters were resized, or give the new parameter to "
                    "add_param_group"
                )


def keys_shaped_like_params(preconditioner: Preconditioner, slot: int) -> list[str]:
    """Return the keys of the state tensors that must be shaped like their parameter."""
    keys = slot_keys(slot)
    if isinstance(preconditioner, SecondMoment):
        return [keys.dual, keys.moment, "pending"]
    if isinstance(preconditioner, NewtonSchulz):
        return [keys.dual, keys.momentum, "pending"]
    return [keys.dual, "pending"]


def _takes_lists() -> bool:
    """Return whether torch counts the versions of many tensors in one call."""
    try:
        torch.autograd.graph.increment_version([])
    except TypeError:  # torch 2.6
        return False
    return True


_TAKES_LISTS = _takes_lists()


def mark_changed(params: Sequence[Tensor]) -> None:
    """Tell autograd that code outside torch has written to `params`.

    A backward pass through their earlier values then raises, as after any optimizer step.
    """
    increment_version = torch.autograd.graph.increment_version
    if _TAKES_LISTS:
        increment_version(params)
    else:
        for param in params:
            increment_version(param)


def compute_dtype(param: Tensor, state: Tensor) -> torch.dtype:
    """Return the dtype to compute in: at least float32, so a step rounds only what it stores."""
    return torch.promote_types(torch.promote_types(param.dtype, state.dtype), torch.float32)
