"""What to do about gradients that are not finite, and how the host hears of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchpisa.distributed import dtensor
from torchpisa.kernels.job import FindsNonfinite, Member, real
from torchpisa.kernels.triton.plan import Plan
from torchpisa.kernels.triton.table import Launch
from torchpisa.optim.round import Group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Verdict", "Watch", "verdict"]

# torch's own kinds of parameters; anything else may be sharded.
_PLAIN = (Tensor, torch.nn.Parameter)

# Elements up to which gradients on a CPU are looked at together.
_SMALL = 2**14

# Where the host would have to wait for what it asks; tests add the CPU.
DEFERRED_ON = ["cuda"]


class Verdict(NamedTuple):
    """The decision whether a batch takes part.

    Attributes:
        present: False if it is left out.
        keep: a tensor that says so, where only the device knows.
        search: the kernels are to look while they work, and to leave out single entries.
        problem: what is wrong with it, if that is to be raised.
        deferred: by list, whether the kernel is to look while it works; see `Watch.flags`.
    """

    present: bool = True
    keep: Tensor | None = None
    search: bool = False
    problem: str | None = None
    deferred: Sequence[bool] = ()


def verdict(
    groups: Sequence[Group],
    members: Sequence[list[Member]],
    kernels: Sequence[FindsNonfinite],
    found_inf: Tensor | None,
    where: str,
) -> Verdict:
    """Look at gradients before a step, and return whether their batch takes part.

    Args:
        groups: the parameter groups.
        members: parameters, all with gradients, in lists.
        kernels: what steps each list.
        found_inf: the finding of a GradScaler, if there is one; then nothing is looked at.
        where: batch and iteration, for the message.
    """
    mode = groups[0]["nonfinite"]
    if not any(members) or (found_inf is None and mode == "ignore"):
        return Verdict()
    home = next(some[0].param.device for some in members if some)
    # A gradient of which every process holds a part is left out by all of them or by none.
    over: list[ProcessGroup] = []
    for some in members:
        if some and not over and type(some[0].origin) not in _PLAIN:
            over = dtensor.groups([member.origin for member in some])
    searching = False
    deferred, unchecked = [], []
    for some, kernel in zip(members, kernels, strict=True):
        later = found_inf is None and mode == "raise" and not over and _can_wait(some, kernel)
        deferred.append(later)
        searching = searching or (kernel.finds_nonfinite and bool(some))
        if not later and not kernel.finds_nonfinite:
            for member in some:
                grad = member.grad
                if grad is not None and grad.numel():
                    plain = type(grad) is Tensor and not grad.is_complex()
                    unchecked.append(grad if plain else real(dtensor.local(grad)))
    if found_inf is None and mode == "raise":
        bad = []
        if unchecked and _any_nonfinite(unchecked):
            everyone = [member for some in members for member in some]
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


def _can_wait(members: Sequence[Member], kernel: FindsNonfinite) -> bool:
    """Return whether the host need not know until a later step whether gradients are finite.

    That is where asking means to wait for a device, and the kernel need not be told.
    """
    if not members or not kernel.takes_flags or members[0].param.device.type not in DEFERRED_ON:
        return False
    return all(
        member.param.device.type in DEFERRED_ON and member.param.device == members[0].param.device
        for member in members
    )


def _anywhere(flag: Tensor, over: Sequence["ProcessGroup"]) -> Tensor:
    """Return whether a flag is set here or in a process with parts of the same parameters."""
    return dtensor.summed(dtensor.local(flag).float(), over) > 0


def named(params: Sequence[Tensor], groups: Sequence[Group]) -> str:
    """Return names of parameters, for messages."""
    wanted = {id(param) for param in params}
    names = []
    for number, group in enumerate(groups):
        given = group.get("param_names")
        for i, param in enumerate(group["params"]):
            if id(param) in wanted:
                names.append(given[i] if given else f"parameter {i} of group {number}")
    return ", ".join(names)


@dataclass(frozen=True)
class _FlagsUnderWay:
    """Flags on their way to the host, and the step that they come from."""

    launches: list[tuple[Launch, list[Member]]]
    flags: list["_Flags"]
    on_gpu: bool
    where: str


@dataclass(frozen=True)
class _Flags:
    """Flags of all parameters of a group, for kernels that have none of their own.

    Attributes:
        params: the parameters.
        nonfinite: a number each, on the device; above zero where a gradient was not finite.
        seen: host memory for a copy of them.
        of: the same numbers by parameter.
    """

    params: list[Tensor]
    nonfinite: Tensor
    seen: Tensor
    of: dict[int, Tensor]

    @classmethod
    def make(cls, params: Sequence[Tensor], device: torch.device) -> "_Flags":
        nonfinite = torch.zeros(len(params), dtype=torch.float32, device=device)
        seen = torch.zeros(len(params), dtype=torch.float32)
        of = dict(zip(map(id, params), nonfinite.unbind(), strict=True))
        pinned = seen.pin_memory() if device.type == "cuda" else seen
        return cls(list(params), nonfinite, pinned, of)

    def fit(self, members: Sequence[Member]) -> bool:
        """Return whether there are flags for `members`, and on their device."""
        return self.nonfinite.device == members[0].param.device and all(
            id(member.origin) in self.of for member in members
        )


class Watch:
    """Flags that kernels set where a gradient is not finite, on their way to the host.

    The host never waits for them in a step. They stay set on the device until they have been
    reported, so none is lost while an earlier copy is under way.

    Attributes:
        waits: whether flags are under way.
    """

    def __init__(self) -> None:
        self.waits = False
        self._sent: _FlagsUnderWay | None = None
        self._event: torch.cuda.Event | None = None
        self._flags: dict[int, _Flags] = {}

    def flags(
        self,
        params: Sequence[Sequence[Tensor]],
        members: Sequence[list[Member]],
        deferred: Sequence[bool],
    ) -> list[list[Tensor] | None]:
        """Return, for the lists that are `deferred`, a number on the device for each member.

        Kernels raise them where a gradient is not finite; they stay until they were reported.

        Args:
            params: all parameters, in lists.
            members: those of them that a step is taken for.
            deferred: by list.
        """
        by_list: list[list[Tensor] | None] = [None] * len(members)
        if not any(deferred):
            return by_list
        for number, (all_of_it, some) in enumerate(zip(params, members, strict=True)):
            if not (deferred[number] and some):
                continue
            device = some[0].param.device
            flags = self._flags.get(number)
            if flags is None or not flags.fit(some):
                flags = self._flags[number] = _Flags.make(all_of_it, device)
            by_list[number] = [flags.of[id(member.origin)] for member in some]
        return by_list

    def note(
        self, kernels: Sequence[FindsNonfinite], members: Sequence[list[Member]], where: str
    ) -> None:
        """Send for the flags of a step over `members` that has just been launched."""
        if self._sent is not None:
            return
        launches = [
            (launch, some)
            for kernel, some in zip(kernels, members, strict=True)
            if isinstance(kernel, Plan)
            for launch in kernel.launches
        ]
        flags = list(self._flags.values())
        devices = [launch.kind.device for launch, _ in launches]
        devices += [each.nonfinite.device for each in flags]
        on_gpu = any(device.type == "cuda" for device in devices)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return
        for launch, _ in launches:
            launch.seen.copy_(launch.nonfinite, non_blocking=True)
        for own_flags in flags:
            own_flags.seen.copy_(own_flags.nonfinite, non_blocking=True)
        if on_gpu:
            if self._event is None:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        self._sent = _FlagsUnderWay(launches, flags, on_gpu, where)
        self.waits = True

    def report(self, name: Callable[[Sequence[Tensor]], str], wait: bool = False) -> None:
        """Raise FloatingPointError if flags have come back set.

        Args:
            name: names parameters.
            wait: for flags that are still under way.
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
        self._sent, self.waits = None, False
        entries = any(launch.seen.any() for launch, _ in sent.launches)
        whole = any(each.seen.any() for each in sent.flags)
        if not entries and not whole:
            return
        bad = []
        for launch, members in sent.launches:
            flags = zip(launch.members, launch.seen.tolist(), strict=True)
            bad += [members[number].origin for number, flag in flags if flag]
            launch.nonfinite.zero_()
        for each in sent.flags:
            bad += [
                param for param, flag in zip(each.params, each.seen.tolist(), strict=True) if flag
            ]
            each.nonfinite.zero_()
        left_out = "Those entries were left out, the others were stepped"
        if whole:
            left_out = "Those entries, or all of the gradient that they are in, were left out"
        raise FloatingPointError(
            f"non-finite gradient in {sent.where}: {name(bad)}. {left_out}; nonfinite='skip' "
            "leaves such batches out"
        )


def _is_finite(grad: Tensor | None) -> bool:
    return grad is None or bool(dtensor.local(grad).isfinite().all())


def _any_nonfinite(grads: Sequence[Tensor]) -> Tensor | bool:
    """Return whether any entry is not finite: as a 0-d tensor unless all gradients are on the CPU.

    Off the CPU it looks at Euclidean norms, for all gradients at once, so that a gradient so large
    that its square overflows counts as infinite.
    """
    small: dict[torch.dtype, list[Tensor]] = {}
    elsewhere: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    any_bad: Tensor | bool = False
    for grad in grads:
        if not grad.is_cpu:
            elsewhere.setdefault((grad.device, grad.dtype), []).append(grad)
        elif grad.numel() > _SMALL:
            any_bad = any_bad or _has_nonfinite(grad)
        else:
            flat = grad if grad.dim() == 1 else grad.reshape(-1)
            small.setdefault(grad.dtype, []).append(flat)
    for alike in small.values():  # to copy a small one costs less than a call
        any_bad = any_bad or _has_nonfinite(torch.cat(alike))
    for (_, dtype), alike in elsewhere.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(alike, 2, wide))
        bad = norms.isfinite().all().logical_not()
        any_bad = bad | (any_bad.to(bad.device) if isinstance(any_bad, Tensor) else any_bad)
    return any_bad


def _has_nonfinite(grad: Tensor) -> bool:
    """Look at the sum, which is not finite if an entry is not; all of them only if it is not."""
    return not math.isfinite(grad.sum().item()) and not bool(grad.isfinite().all())
