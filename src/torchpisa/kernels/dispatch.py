"""Which kernel computes what, and why: the only place that decides.

| kernel | where | takes | chosen |
|---|---|---|---|
| `loop` | anywhere | any preconditioner | `foreach=False`, or nothing else can |
| `foreach` | anywhere | the package's own preconditioners | by default |
| `cpu/native` | CPU, float32 | SISA's rule and Identity, sigma given | `fused=True` |
| `triton` | CUDA | SISA, NSISA, Identity and MISA | by default, `fused=True` |

Sharded parameters are stepped where their parts lie, except by preconditioners of a user's own,
which may need all of a parameter; what those compute with sharded tensors is right, if slow.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchpisa.kernels import misa
from torchpisa.kernels.cpu import native
from torchpisa.kernels.foreach import FOREACH, knows
from torchpisa.kernels.job import Kernel, LocalJob, Member, Move, check_shapes, real
from torchpisa.kernels.loop import LOOP
from torchpisa.kernels.triton import plan as triton_plan
from torchpisa.kernels.triton.plan import Plans
from torchpisa.preconditioners import Preconditioner

__all__ = [
    "Plans",
    "able",
    "check_fused",
    "check_fused_misa",
    "for_consensus",
    "for_local_step",
    "for_misa",
    "for_missed_batch",
    "many_at_once",
    "steps_parts",
]

_PLAIN = (Tensor, torch.nn.Parameter)
_NO_CPU_KERNEL = "MISA has fused kernels for CUDA devices only"


def check_fused(
    params: Sequence[Tensor],
    preconditioner: Preconditioner,
    settings: Mapping[str, Any],
    follows: bool,
) -> None:
    """Raise ValueError if fused kernels are asked for that cannot step the parameters.

    Args:
        params: what this process holds of them.
        preconditioner: theirs.
        settings: their group.
        follows: whether sigma follows their gradients.
    """
    reason: str | None
    if not settings["fused"]:
        return
    if not _on_cpu(params):
        reason = triton_plan.obstacle(params, preconditioner)
    elif follows:
        reason = "on a CPU sigma must not follow the gradients; give sigma and rho"
    elif settings["state_dtype"] not in (None, *(param.dtype for param in params)):
        dtype = settings["state_dtype"]
        reason = f"on a CPU state must be of its parameter's dtype, got {dtype}"
    else:
        reason = native.obstacle(params, preconditioner)
    if reason is not None:
        raise ValueError(f"fused=True is not possible: {reason}")


def for_local_step(
    settings: Mapping[str, Any],
    members: list[Member],
    preconditioner: Preconditioner,
    slot: int,
    follows: bool,
    key: Hashable,
    plans: Plans,
) -> Kernel:
    """Return what computes the local step of a batch.

    Args:
        settings: the parameter group.
        members: the parameters, all with gradients.
        preconditioner: theirs.
        slot: the batch.
        follows: whether sigma follows their gradients.
        key: names the members, to find again what was prepared for them.
        plans: what was prepared.

    Raises:
        ValueError: `fused=True`, and it is not possible.
    """
    fused, foreach = settings["fused"], settings["foreach"]
    if members and (fused or (fused is None and foreach is None)):
        kernel_or_reason: Kernel | str
        if not _on_cpu([member.param for member in members]):
            kernel_or_reason = triton_plan.find(
                plans, (key, slot), members, preconditioner, slot, follows
            )
        elif fused:
            params = [member.param for member in members]
            kernel_or_reason = native.obstacle(params, preconditioner) or native.NATIVE
        else:
            kernel_or_reason = "a C compiler is called only for those who ask for it"
        if not isinstance(kernel_or_reason, str):
            return kernel_or_reason
        if fused:
            raise ValueError(f"fused=True is not possible: {kernel_or_reason}")
    return FOREACH if knows(preconditioner) and many_at_once(settings, members) else LOOP


def for_missed_batch(settings: Mapping[str, Any], members: Sequence[Member]) -> Kernel:
    """Return what computes the local step of a batch that did not reach the members."""
    return FOREACH if many_at_once(settings, members) else LOOP


def for_consensus(
    settings: Mapping[str, Any],
    members: list[Member],
    move: Move,
    keep: Tensor | None,
    follows: bool,
    key: Hashable,
    plans: Plans,
) -> Kernel:
    """Return what computes the consensus from pending sums; see `for_local_step`."""
    fused, foreach = settings["fused"], settings["foreach"]
    wanted = not follows and (fused or (fused is None and foreach is None))
    on_cpu = _on_cpu([member.param for member in members])
    if wanted and not on_cpu and move.proximal is None:
        plan = triton_plan.find_consensus(plans, key, members)
        if not isinstance(plan, str):
            return plan
    return FOREACH if keep is None and many_at_once(settings, members) else LOOP


def for_misa(job: misa.ConsensusJob, key: Hashable, plans: Plans | None) -> misa.ConsensusKernel:
    """Return what computes a consensus of MISA.

    Args:
        job: the consensus.
        key: names its members, to find again what was prepared for them.
        plans: what was prepared; None if gradients are only to be added up.

    Raises:
        ValueError: `fused=True`, and it is not possible; or a tensor does not fit its parameter.
    """
    fused, foreach = job.settings["fused"], job.settings["foreach"]
    if plans is not None and (fused or (fused is None and foreach is None)):
        kernel_or_reason: misa.ConsensusKernel | str = _NO_CPU_KERNEL
        if not _on_cpu([member.param for member in job.members]):
            kernel_or_reason = triton_plan.find_misa(plans, key, job)
        if not isinstance(kernel_or_reason, str):
            return kernel_or_reason
        if fused:
            raise ValueError(f"fused=True is not possible: {kernel_or_reason}")
    check_shapes(job.members, ("moment", "pending"))
    return misa.FOREACH if many_at_once(job.settings, job.members) else misa.LOOP


def check_fused_misa(group: Mapping[str, Any]) -> None:
    """Raise ValueError if fused kernels are asked for that cannot step a group of MISA."""
    if not group["fused"]:
        return
    params = group["params"]
    reason = triton_plan.misa_obstacle(group)
    if reason is None:
        reason = _NO_CPU_KERNEL if _on_cpu(params) else triton_plan.obstacle(params, None)
    if reason is not None:
        raise ValueError(f"fused=True is not possible: {reason}")


def able(kernel: Kernel, job: LocalJob) -> Kernel:
    """Return `kernel`, or the next slower one that supports a job."""
    while not kernel.supports(job):
        assert kernel.slower is not None
        kernel = kernel.slower
    return kernel


def steps_parts(settings: Mapping[str, Any], preconditioner: Preconditioner) -> bool:
    """Return whether sharded parameters are stepped where their parts lie."""
    return settings["foreach"] is not False and knows(preconditioner)


def _on_cpu(params: Sequence[Tensor]) -> bool:
    """Return whether Triton has nothing to do; its interpreter, in tests, takes CPUs too."""
    return "cpu" not in triton_plan.DEVICES and all(param.is_cpu for param in params)


def many_at_once(settings: Mapping[str, Any], members: Sequence[Member]) -> bool:
    """Return whether parameters are taken many per call, as plain tensors are by default."""
    if settings["foreach"] is not None:
        return bool(settings["foreach"])
    return all(type(real(member.param)) in _PLAIN for member in members)
