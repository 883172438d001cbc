"""Find gradients that are not finite, and report them without making the host wait for a GPU."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchpisa.distributed import dtensor
from torchpisa.kernels.job import PLAIN_TYPES, FindsNonfinite, Member, real
from torchpisa.kernels.triton.plan import Plan
from torchpisa.kernels.triton.table import Launch
from torchpisa.optim.round import Group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Verdict", "Watch", "examine", "named"]

# Gradients of up to so many elements are concatenated before they are checked, on a CPU.
_SMALL = 2**14

# Devices on which a check would make the host wait; tests add the CPU.
DEFERRED_ON = ["cuda"]

_GRADIENT = attrgetter("grad")


class Verdict(NamedTuple):
    """The decision whether a batch is used, and what its kernels still have to check.

    Attributes:
        present: False if the batch counts as absent.
        keep: the same as a tensor, where only the device knows.
        search: True if kernels are to find and leave out single entries while they work.
        problem: the error to raise, if any.
        deferred: by part, whether the kernel is to leave out whole gradients; see `Watch.flags`.
    """

    present: bool = True
    keep: Tensor | None = None
    search: bool = False
    problem: str | None = None
    deferred: Sequence[bool] = ()


def examine(
    groups: Sequence[Group],
    members: Sequence[list[Member]],
    kernels: Sequence[FindsNonfinite],
    found_inf: Tensor | None,
    where: str,
) -> Verdict:
    """Check the gradients of a batch before its step.

    Args:
        groups: the parameter groups.
        members: parameters with gradients, by part.
        kernels: the kernel of each part.
        found_inf: positive if a GradScaler found infinities; None to check the gradients.
        where: batch and iteration, for the message.
    """
    mode = groups[0]["nonfinite"]
    if not any(members) or (found_inf is None and mode == "ignore"):
        return Verdict()
    home = next(part_members[0].param.device for part_members in members if part_members)
    # The processes that hold parts of one gradient must decide alike.
    perhaps_sharded = [
        member.origin
        for part_members in members
        for member in part_members
        if member.whole is not None or type(member.param) not in PLAIN_TYPES
    ]
    over = dtensor.mesh_groups(perhaps_sharded) if perhaps_sharded else []
    searching = False
    deferred, unchecked = [], []
    for part_members, kernel in zip(members, kernels, strict=True):
        later = (
            found_inf is None and mode == "raise" and not over and _can_defer(part_members, kernel)
        )
        deferred.append(later)
        searching = searching or (kernel.finds_nonfinite and bool(part_members))
        if not later and not kernel.finds_nonfinite:
            grads = list(map(_GRADIENT, part_members))
            if {*map(type, grads)} != {Tensor} or any(map(Tensor.is_complex, grads)):
                grads = [real(dtensor.local(grad)) for grad in grads]
            unchecked += grads
    if found_inf is None and mode == "raise":
        bad = []
        if unchecked and _any_nonfinite(unchecked):
            everyone = [member for part_members in members for member in part_members]
            bad = [member.origin for member in everyone if not _is_finite(member.grad)]
        is_bad = bool(bad)
        if over and not searching:
            is_bad = bool(_anywhere(torch.tensor(is_bad, device=home), over))
        if not is_bad:
            return Verdict(search=searching, deferred=deferred)
        names = named(bad, groups) if bad else "in a shard of another process"
        return Verdict(present=False, problem=f"non-finite gradient in {where}: {names}")
    if found_inf is not None:
        bad_batch = found_inf.reshape(()) > 0
    else:
        flags: list[Tensor | bool] = [
            flag
            for kernel in kernels
            if isinstance(kernel, Plan)
            for flag in kernel.any_nonfinite()
        ]
        if unchecked:
            flags.append(_any_nonfinite(unchecked))
        if not flags and not over:
            return Verdict()
        bad_batch = torch.zeros((), dtype=torch.bool, device=home)
        for flag in flags:
            bad_batch = bad_batch | (flag.to(home) if isinstance(flag, Tensor) else flag)
    if over:
        return Verdict(present=not _anywhere(bad_batch, over))
    if bad_batch.device.type != "cpu" or groups[0]["capturable"]:
        return Verdict(keep=bad_batch.logical_not())
    return Verdict(present=not bad_batch)


def _can_defer(members: Sequence[Member], kernel: FindsNonfinite) -> bool:
    """Return whether the kernel can leave out bad gradients and report them in a later step.

    Only worth it on devices for which the host would have to wait.
    """
    if not members or not kernel.takes_flags or members[0].param.device.type not in DEFERRED_ON:
        return False
    return all(
        member.param.device.type in DEFERRED_ON and member.param.device == members[0].param.device
        for member in members
    )


def _anywhere(flag: Tensor, over: Sequence["ProcessGroup"]) -> Tensor:
    """Return whether a flag is set in this or another process of these groups."""
    return dtensor.summed(dtensor.local(flag).float(), over) > 0


def named(params: Sequence[Tensor], groups: Sequence[Group]) -> str:
    """Return the names of parameters for an error message."""
    wanted = {id(param) for param in params}
    names = []
    for number, group in enumerate(groups):
        given = group.get("param_names")
        for i, param in enumerate(group["params"]):
            if id(param) in wanted:
                names.append(given[i] if given else f"parameter {i} of group {number}")
    return ", ".join(names)


@dataclass(frozen=True)
class _Transfer:
    """Flags that are being copied to the host, and the step that they come from."""

    launches: list[tuple[Launch, list[Member]]]
    flags: list["_Flags"]
    on_gpu: bool
    where: str


@dataclass(frozen=True)
class _Flags:
    """One flag for each parameter of a part, for kernels without flags of their own.

    Attributes:
        params: the parameters.
        nonfinite: a number each, on the device; above zero where a gradient was not finite.
        seen: host memory for a copy of them.
        by_param: the same numbers as 0-d tensors, by `id` of the parameter.
    """

    params: list[Tensor]
    nonfinite: Tensor
    seen: Tensor
    by_param: dict[int, Tensor]

    @classmethod
    def make(cls, params: Sequence[Tensor], device: torch.device) -> "_Flags":
        nonfinite = torch.zeros(len(params), dtype=torch.float32, device=device)
        seen = torch.zeros(len(params), dtype=torch.float32, device="cpu")
        by_param = dict(zip(map(id, params), nonfinite.unbind(), strict=True))
        pinned = seen.pin_memory() if device.type == "cuda" else seen
        return cls(list(params), nonfinite, pinned, by_param)

    def cover(self, members: Sequence[Member]) -> bool:
        """Return whether there is a flag for each of `members`, on their device."""
        return self.nonfinite.device == members[0].param.device and all(
            id(member.origin) in self.by_param for member in members
        )


class Watch:
    """Collects the flags that kernels set where a gradient is not finite.

    Flags are copied to the host in the background, so a step never waits for them. They stay set on
    the device until they have been reported, so none is lost while an earlier copy is under way.

    Attributes:
        under_way: True while flags are being copied.
    """

    def __init__(self) -> None:
        self.under_way = False
        self._sent: _Transfer | None = None
        self._event: torch.cuda.Event | None = None
        self._flags: dict[int, _Flags] = {}

    def flags(
        self,
        params: Sequence[Sequence[Tensor]],
        members: Sequence[list[Member]],
        deferred: Sequence[bool],
    ) -> list[list[Tensor] | None]:
        """Return the flags that kernels are to set, one for each member of a deferred part.

        Args:
            params: all parameters, by part.
            members: the parameters that are stepped.
            deferred: by part, whether its kernel is to check gradients.
        """
        by_part: list[list[Tensor] | None] = [None] * len(members)
        if not any(deferred):
            return by_part
        for number, (part_params, part_members) in enumerate(zip(params, members, strict=True)):
            if not (deferred[number] and part_members):
                continue
            device = part_members[0].param.device
            flags = self._flags.get(number)
            if flags is None or not flags.cover(part_members):
                flags = self._flags[number] = _Flags.make(part_params, device)
            by_part[number] = [flags.by_param[id(member.origin)] for member in part_members]
        return by_part

    def fetch(
        self, kernels: Sequence[FindsNonfinite], members: Sequence[list[Member]], where: str
    ) -> None:
        """Start copying the flags of a step over `members` that has just been launched."""
        if self._sent is not None:
            return
        launches = [
            (launch, part_members)
            for kernel, part_members in zip(kernels, members, strict=True)
            if isinstance(kernel, Plan)
            for launch in kernel.launches
        ]
        flags = list(self._flags.values())
        devices = [launch.kind.device for launch, _ in launches]
        devices += [part_flags.nonfinite.device for part_flags in flags]
        on_gpu = any(device.type == "cuda" for device in devices)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return
        for launch, _ in launches:
            launch.seen.copy_(launch.nonfinite, non_blocking=True)
        for part_flags in flags:
            part_flags.seen.copy_(part_flags.nonfinite, non_blocking=True)
        if on_gpu:
            if self._event is None:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        self._sent = _Transfer(launches, flags, on_gpu, where)
        self.under_way = True

    def report(self, name: Callable[[Sequence[Tensor]], str], wait: bool = False) -> None:
        """Raise FloatingPointError if flags that have arrived are set.

        Args:
            name: returns the names of parameters, for the message.
            wait: wait for flags that are still being copied.
        """
        sent = self._sent
        if sent is None:
            return
        if sent.on_gpu:
            assert self._event is not None
            if torch.cuda.is_current_stream_capturing():
                return
            if wait:
                self._event.synchronize()
            elif not self._event.query():  # type: ignore[no-untyped-call]
                return
        self._sent, self.under_way = None, False
        lost_entries = any(launch.seen.any() for launch, _ in sent.launches)
        lost_gradients = any(part_flags.seen.any() for part_flags in sent.flags)
        if not lost_entries and not lost_gradients:
            return
        bad = []
        for launch, members in sent.launches:
            indexes = zip(launch.members, launch.seen.tolist(), strict=True)
            bad += [members[index].origin for index, flag in indexes if flag]
            launch.nonfinite.zero_()
        for part_flags in sent.flags:
            flagged = zip(part_flags.params, part_flags.seen.tolist(), strict=True)
            bad += [param for param, flag in flagged if flag]
            part_flags.nonfinite.zero_()
        left_out = "Those entries were left out, the others were stepped"
        if lost_gradients:
            left_out = "Those entries, or all of the gradient that they are in, were left out"
        raise FloatingPointError(
            f"non-finite gradient in {sent.where}: {name(bad)}. {left_out}; nonfinite='skip' "
            "leaves such batches out"
        )


def _is_finite(grad: Tensor | None) -> bool:
    return grad is None or bool(dtensor.local(grad).isfinite().all())


def _any_nonfinite(grads: Sequence[Tensor]) -> Tensor | bool:
    """Return whether any entry is not finite: a bool if all are on the CPU, else a tensor.

    On other devices it checks the norms of all gradients in one call, so a gradient whose square
    overflows counts as infinite.
    """
    small: list[Tensor] = []
    elsewhere: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    any_bad: Tensor | bool = False
    for grad in grads:
        if not grad.is_cpu:
            elsewhere.setdefault((grad.device, grad.dtype), []).append(grad)
        elif grad.numel() > _SMALL:
            any_bad = any_bad or _has_nonfinite(grad)
        else:
            small.append(grad if grad.dim() == 1 else grad.reshape(-1))
    if small:  # one copy and one call cost less than many calls
        any_bad = any_bad or _has_nonfinite(torch.cat(small))
    for (_, dtype), alike in elsewhere.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(alike, 2, wide))
        bad = norms.isfinite().all().logical_not()
        any_bad = bad | (any_bad.to(bad.device) if isinstance(any_bad, Tensor) else any_bad)
    return any_bad


def _has_nonfinite(grad: Tensor) -> bool:
    # The sum is not finite if any entry is not; it may also overflow, so look twice.
    return not math.isfinite(grad.sum().item()) and not bool(grad.isfinite().all())
