"""Choose the kernel for every job; no other module decides.

| kernel | device | preconditioners | chosen |
|---|---|---|---|
| `loop` | any | any | with `foreach=False`, or if no other kernel fits |
| `foreach` | any | torchpisa's own | by default |
| `cpu/native` | CPU, float32 | SISA's and Identity, sigma given | with `fused=True` |
| `triton` | CUDA | SISA's, NSISA's, Identity and MISA | by default, or with `fused=True` |

Every process steps its own part of a sharded parameter. Only a user's preconditioner gets the whole
DTensor, because it may need all of it: right, but slow.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch import Tensor

from torchpisa.kernels import misa
from torchpisa.kernels.cpu import native
from torchpisa.kernels.foreach import FOREACH, knows
from torchpisa.kernels.job import (
    PLAIN_TYPES,
    Consensus,
    Kernel,
    LocalJob,
    Member,
    check_shapes,
)
from torchpisa.kernels.loop import LOOP
from torchpisa.kernels.triton import plan as triton_plan
from torchpisa.kernels.triton.plan import Plans
from torchpisa.preconditioners import Preconditioner

__all__ = [
    "Plans",
    "by_layout",
    "check_fused",
    "check_fused_misa",
    "for_consensus",
    "for_local_step",
    "for_misa",
    "for_missed_batch",
    "steps_local_parts",
    "supporting",
]

_IS_CPU = attrgetter("is_cpu")
_NO_CPU_KERNEL = "MISA has fused kernels for CUDA devices only"


def for_local_step(
    settings: Mapping[str, Any],
    members: list[Member],
    preconditioner: Preconditioner,
    slot: int,
    sigma_follows: bool,
    key: Hashable,
    plans: Plans,
) -> Kernel:
    """Return the kernel for the local step of a batch.

    Args:
        settings: the parameter group.
        members: the parameters, all with gradients.
        preconditioner: their preconditioner.
        slot: the batch.
        sigma_follows: True if sigma follows the gradients.
        key: identifies the set of members in `plans`.
        plans: cache of what the Triton kernels have prepared.

    Raises:
        ValueError: `fused=True`, and it is not possible.
    """
    fused, foreach = settings["fused"], settings["foreach"]
    params = [member.param for member in members]
    if members and (fused or (fused is None and foreach is None)):
        kernel_or_reason: Kernel | str
        if not _on_cpu(params):
            capturable = settings["capturable"]
            kernel_or_reason = triton_plan.find(
                plans, (key, slot), members, preconditioner, slot, sigma_follows, capturable
            )
        elif fused:
            kernel_or_reason = native.obstacle(params, preconditioner) or native.NATIVE
        else:
            kernel_or_reason = "a C compiler runs only with fused=True"
        if not isinstance(kernel_or_reason, str):
            return kernel_or_reason
        if fused:
            raise ValueError(f"fused=True is not possible: {kernel_or_reason}")
    return FOREACH if knows(preconditioner) and _uses_foreach(settings, params) else LOOP


def supporting(kernel: Kernel, job: LocalJob) -> Kernel:
    """Return `kernel`, or the first of its fallbacks that supports a job."""
    while not kernel.supports(job):
        assert kernel.slower is not None
        kernel = kernel.slower
    return kernel


def by_layout(kernel: Kernel, job: LocalJob) -> list[tuple[Kernel, LocalJob]]:
    """Return a job and its kernel, divided where members differ in how they are sharded.

    A norm over sharded parameters is summed over the processes that share them, which are others
    for other layouts.
    """
    wholes = [member.whole for member in job.members]
    if wholes.count(None) == len(wholes):
        return [(kernel, job)]
    jobs: dict[Hashable, LocalJob] = {}
    for member in job.members:
        whole: Any = member.whole
        layout = None if whole is None else (whole.placements, whole.device_mesh)
        if job.search and member.grad is not None:  # the fused kernel would leave these entries out
            member = member._replace(grad=member.grad.nan_to_num(0.0, 0.0, 0.0))
        jobs.setdefault(layout, replace(job, members=[], flags=None)).members.append(member)
    if len(jobs) == 1:
        return [(kernel, job)]
    # The plan of a fused kernel is for all members together.
    return [(FOREACH, each) for each in jobs.values()]


def for_missed_batch(settings: Mapping[str, Any], members: Sequence[Member]) -> Kernel:
    """Return the kernel for the local step of a batch without gradients for the members."""
    params = [member.param for member in members]
    return FOREACH if _uses_foreach(settings, params) else LOOP


def for_consensus(
    settings: Mapping[str, Any],
    members: list[Member],
    consensus: Consensus,
    keep: Tensor | None,
    sigma_follows: bool,
    key: Hashable,
    plans: Plans,
) -> Kernel:
    """Return the kernel for a consensus of pending sums; arguments as in `for_local_step`."""
    fused, foreach = settings["fused"], settings["foreach"]
    wanted = not sigma_follows and (fused or (fused is None and foreach is None))
    params = [member.param for member in members]
    if wanted and not _on_cpu(params) and consensus.proximal is None:
        plan = triton_plan.find_consensus(plans, key, members)
        if not isinstance(plan, str):
            return plan
    return FOREACH if keep is None and _uses_foreach(settings, params) else LOOP


def for_misa(job: misa.ConsensusJob, key: Hashable, plans: Plans | None) -> misa.ConsensusKernel:
    """Return the kernel for a consensus of MISA.

    Args:
        job: the consensus.
        key: identifies the set of members in `plans`.
        plans: cache of what the Triton kernels have prepared; None to only add up gradients.

    Raises:
        ValueError: `fused=True`, and it is not possible; or a tensor does not fit its parameter.
    """
    fused, foreach = job.settings["fused"], job.settings["foreach"]
    params = [member.param for member in job.members]
    if plans is not None and (fused or (fused is None and foreach is None)):
        kernel_or_reason: misa.ConsensusKernel | str = _NO_CPU_KERNEL
        if not _on_cpu(params):
            kernel_or_reason = triton_plan.find_misa(plans, key, job)
        if not isinstance(kernel_or_reason, str):
            return kernel_or_reason
        if fused:
            raise ValueError(f"fused=True is not possible: {kernel_or_reason}")
    check_shapes(job.members, ("moment", "pending"))
    return misa.FOREACH if _uses_foreach(job.settings, params) else misa.LOOP


def check_fused(
    params: Sequence[Tensor],
    preconditioner: Preconditioner,
    settings: Mapping[str, Any],
    sigma_follows: bool,
) -> None:
    """Raise ValueError if `fused=True` is not possible for the parameters of a group.

    Args:
        params: the parameters; of sharded ones the local parts.
        preconditioner: their preconditioner.
        settings: their group.
        sigma_follows: True if sigma follows the gradients.
    """
    reason: str | None
    if not settings["fused"]:
        return
    if not _on_cpu(params):
        reason = triton_plan.obstacle(params, preconditioner)
    elif sigma_follows:
        reason = "on a CPU sigma must not follow the gradients; give sigma and rho"
    elif settings["state_dtype"] not in (None, *(param.dtype for param in params)):
        dtype = settings["state_dtype"]
        reason = f"on a CPU state must be of its parameter's dtype, got {dtype}"
    else:
        reason = native.obstacle(params, preconditioner)
    if reason is not None:
        raise ValueError(f"fused=True is not possible: {reason}")


def check_fused_misa(group: Mapping[str, Any]) -> None:
    """Raise ValueError if `fused=True` is not possible for a group of MISA."""
    if not group["fused"]:
        return
    params = group["params"]
    reason = triton_plan.misa_obstacle(group)
    if reason is None:
        reason = _NO_CPU_KERNEL if _on_cpu(params) else triton_plan.obstacle(params, None)
    if reason is not None:
        raise ValueError(f"fused=True is not possible: {reason}")


def steps_local_parts(settings: Mapping[str, Any], preconditioner: Preconditioner) -> bool:
    """Return whether each process steps its own part of a sharded parameter."""
    return settings["foreach"] is not False and knows(preconditioner)


def _uses_foreach(settings: Mapping[str, Any], params: Sequence[Tensor]) -> bool:
    """Return whether to use `foreach`: by default for plain tensors."""
    if settings["foreach"] is not None:
        return bool(settings["foreach"])
    return {*map(type, params)} <= PLAIN_TYPES


def _on_cpu(params: Sequence[Tensor]) -> bool:
    """Return whether no parameter is for Triton, whose interpreter in tests takes CPU tensors."""
    return "cpu" not in triton_plan.DEVICES and all(map(_IS_CPU, params))
