"""Plans: the launches of a job, kept from step to step, or the reason why Triton cannot take it.

One launch steps all parameters of one `Kind`, by a table of their addresses. A plan is built in the
first step. Each further step compares it with the tensors that it is given; if only addresses have
changed, as those of gradients do, it sends a new table.
"""

import contextlib
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from torchpisa.kernels import newton_schulz
from torchpisa.kernels.foreach import as_rows, rows_of
from torchpisa.kernels.job import Consensus, Kernel, LocalJob, Member, check_shapes, mark_changed
from torchpisa.kernels.misa import ConsensusJob, block_shape
from torchpisa.kernels.optional import without_triton
from torchpisa.kernels.triton import table
from torchpisa.kernels.triton.table import Launch, Matrices, Row
from torchpisa.preconditioners import Identity, NewtonSchulz, Preconditioner, SecondMoment
from torchpisa.state_keys import state_key

__all__ = [
    "MisaPlan",
    "Plan",
    "Plans",
    "find",
    "find_consensus",
    "find_misa",
    "misa_obstacle",
    "obstacle",
]

# Where the kernels run; tests add the CPU, for Triton's interpreter.
DEVICES = ["cuda"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The state of each preconditioner. Identity has none, and its kernel does not read this column.
_MEMORY: dict[type[Preconditioner], str] = {
    SecondMoment: "moment",
    NewtonSchulz: "momentum",
    Identity: "dual",
}


@dataclass
class Plan:
    """The launches of a local step or a consensus, for all steps with the same parameters.

    Attributes:
        rows: a row per parameter, as last sent to the device.
        fingerprint: what each step compares, to know whether the rows still hold.
        launches: one per combination of device and dtypes.
        captured: host memory that CUDA graphs copy from.
        copies: copies of gradients that are not laid out like their parameters.
    """

    finds_nonfinite: ClassVar[bool] = True
    takes_flags: ClassVar[bool] = False
    slower: ClassVar[Kernel | None] = None

    rows: list[Row]
    fingerprint: list[Row]
    launches: list[Launch]
    captured: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)

    def supports(self, job: LocalJob) -> bool:
        """Return True: a plan is only given jobs that it was made for."""
        return True

    def local_step(self, job: LocalJob) -> None:
        """Take the local step, see `Kernel`."""
        from torchpisa.kernels.triton import launch

        for each in self.launches:
            with _on(each.kind.device):
                launch.local_step(job, each)
        if job.consensus is not None:
            mark_changed([member.param for member in job.members])
        else:
            for member in job.members:
                member.state["arrived"] |= 1 << job.slot
        self.copies.clear()

    def residual_norm(self, job: LocalJob) -> list[Tensor]:
        """Return the norm of r for each launch."""
        from torchpisa.kernels.triton import launch

        norms = []
        for each in self.launches:
            with _on(each.kind.device):
                norms.append(launch.residual_norm(job, each))
        return norms

    def any_nonfinite(self) -> list[Tensor]:
        """Return a 0-d bool tensor per launch: whether a gradient is not finite."""
        from torchpisa.kernels.triton import launch

        flags = []
        for each in self.launches:
            with _on(each.kind.device):
                flags.append(launch.any_nonfinite(each))
        return flags

    def take_consensus(
        self, members: list[Member], consensus: Consensus, keep: Tensor | None
    ) -> None:
        """Take the consensus, see `Kernel`."""
        from torchpisa.kernels.triton import launch

        for each in self.launches:
            with _on(each.kind.device):
                launch.take_consensus(consensus, keep, each)
        mark_changed([member.param for member in members])


@dataclass
class MisaPlan(Plan):
    """The launches of a consensus of MISA; see `kernels.misa.ConsensusKernel`."""

    def consensus_step(self, job: ConsensusJob) -> None:
        """Take the consensus."""
        from torchpisa.kernels.triton import launch

        for each in self.launches:
            with _on(each.kind.device):
                launch.misa_step(job, each)
        mark_changed([member.param for member in job.members])
        self.copies.clear()

    def residual_norms(self, job: ConsensusJob) -> list[Tensor]:
        """Return the norm of r for each launch."""
        from torchpisa.kernels.triton import launch

        norms = []
        for each in self.launches:
            with _on(each.kind.device):
                norms.append(launch.misa_norm(job, each))
        return norms


Plans = dict[Hashable, Plan]
_P = TypeVar("_P", bound=Plan)


def find(
    plans: Plans,
    key: Hashable,
    members: Sequence[Member],
    preconditioner: Preconditioner,
    slot: int,
    sigma_follows: bool,
    capturable: bool,
) -> Plan | str:
    """Return the plan for a local step over `members`, or the reason why there is none.

    Args:
        plans: the plans that earlier calls have built; a new one is added.
        key: identifies the set of members and the batch.
        members: the parameters, all with gradients.
        preconditioner: solves for d.
        slot: the batch.
        sigma_follows: True if sigma follows the gradients.
        capturable: True if CUDA graphs may hold the addresses of state.
    """
    memory = _MEMORY.get(type(preconditioner))
    if memory is None:
        return f"there is no kernel for {type(preconditioner).__name__}"
    keys = state_key("dual", slot), state_key(memory, slot), state_key("step", slot)
    sigma_keys = (state_key("sigma", slot), state_key("level", slot)) if sigma_follows else ()
    plan = plans.get(key)
    fingerprint = _fingerprint(members, *keys, *sigma_keys)
    if plan is not None and fingerprint == plan.fingerprint and not _capturing(plan.launches):
        return plan
    reason = obstacle([member.param for member in members], preconditioner)
    if reason is not None:
        return reason
    if any(member.whole is not None for member in members):
        if isinstance(preconditioner, NewtonSchulz):
            return "matrices are sharded, so they have to be brought together first"
        if sigma_follows:
            return "sigma follows gradients of which every process has a part"
    if sigma_follows and not isinstance(preconditioner, SecondMoment):
        return f"there is no kernel for a sigma that follows with {type(preconditioner).__name__}"
    check_shapes(members, (*keys[:2], "pending"))
    for param, grad, state, _ in members:
        assert grad is not None
        tensors = [state[name] for name in (*keys[:2], "pending") if name in state]
        reason = _mismatch(param, grad, tensors)
        if reason is not None:
            return reason
        for name in sigma_keys:
            if state[name].dtype != torch.float32 or state[name].device != param.device:
                return f"{name} of a parameter is on another device, or not float32"
        # The counter stays on the device, where the kernels count.
        state[keys[2]] = state[keys[2]].to(param.device, torch.float32, non_blocking=True)
    counters = _in_one(members, keys[2], may_move=plan is None and not capturable)
    rows, copies = _local_rows(members, *keys, sigma_keys)
    # A copy is made in every step, so the next step must not match.
    fingerprint = [] if copies else _fingerprint(members, *keys, *sigma_keys)
    matrices = None
    if isinstance(preconditioner, NewtonSchulz):
        params = [member.param for member in members]
        shapes = [(param.size(0), param.numel() // param.size(0)) for param in params]
        matrices = Matrices(shapes, (preconditioner.dtype or torch.float32).itemsize)
    plan = plans[key] = _updated(plan, rows, fingerprint, matrices, Plan)
    for launch in plan.launches:
        launch.steps = [members[number].state[keys[2]] for number in launch.order]
    if len(plan.launches) == 1 and counters is not None:
        plan.launches[0].steps = [counters]
    plan.copies = copies
    return plan


def find_consensus(plans: Plans, key: Hashable, members: Sequence[Member]) -> Plan | str:
    """Return the plan for a consensus over `members`, or the reason why there is none."""
    plan = plans.get(key)
    fingerprint = [
        (param.data_ptr(), state["pending"].data_ptr(), param.numel())
        for param, _, state, _ in members
    ]
    if plan is not None and fingerprint == plan.fingerprint and not _capturing(plan.launches):
        return plan
    reason = obstacle([member.param for member in members], None)
    if reason is not None:
        return reason
    check_shapes(members, ("pending",))
    rows: list[Row] = []
    for param, _, state, _ in members:
        pending = state["pending"]
        if pending.device != param.device:
            return "a pending sum is on another device than its parameter"
        if pending.dtype not in _DTYPES or pending.stride() != param.stride():
            return "a pending sum is of another dtype or layout than its parameter"
        addresses = (param.data_ptr(), 0, 0, 0, pending.data_ptr(), 0, 0, 0)
        kind = param.device, param.dtype, param.dtype, pending.dtype, False
        rows.append((*addresses, param.numel(), *kind))
    plan = plans[key] = _updated(plan, rows, fingerprint, None, Plan)
    return plan


def find_misa(plans: Plans, key: Hashable, job: ConsensusJob) -> MisaPlan | str:
    """Return the plan for a consensus of MISA, or the reason why there is none."""
    memory = "rows" if job.matrix else "moment"
    plan = plans.get(key)
    fingerprint = _misa_fingerprint(job, memory)
    if (
        isinstance(plan, MisaPlan)
        and fingerprint == plan.fingerprint
        and not _capturing(plan.launches)
    ):
        return plan
    members = job.members
    params = [member.param for member in members]
    reason = obstacle(params, None) or misa_obstacle(job.settings)
    count = job.settings["blocks"] if job.matrix else 1
    if reason is None and job.matrix:
        reason = _not_row_by_row(params)
        if count > 1 and not all(param.is_contiguous() for param in params):
            reason = reason or "blocks of a parameter are not stored one after the other"
    if reason is not None:
        return reason
    if job.matrix and not job.whole_here:
        return "matrices are sharded or shared by replicas, so each has to go to its owner first"
    check_shapes(members, ("dual", "moment"))
    for member in members:
        # The counter stays on the device, where the kernels count.
        step = member.state["step"].to(member.param.device, torch.float32, non_blocking=True)
        member.state["step"] = step
    may_move = plan is None and not job.settings["capturable"]
    counters = _in_one(members, "step", may_move)
    for member, grad in zip(members, job.grads, strict=True):
        dual = member.state["dual"]
        average = member.state.get(memory, dual)
        reason = _mismatch(member.param, grad, [dual] if job.matrix else [dual, average])
        if reason is not None:
            return reason
        if average.dtype != dual.dtype:
            return "state of one parameter is of several dtypes"
    rows, copies = _misa_rows(job, memory, count)
    matrices = None
    if job.matrix:
        shapes = [block_shape(param, count) for param in params for _ in range(count)]
        dtype = newton_schulz.dtype_for(job.settings["ns_dtype"], params) or torch.float32
        matrices = Matrices(shapes, dtype.itemsize)
    fingerprint = [] if copies else _misa_fingerprint(job, memory)
    earlier = plan if isinstance(plan, MisaPlan) else None
    updated = plans[key] = _updated(earlier, rows, fingerprint, matrices, MisaPlan)
    for launch in updated.launches:
        launch.members = [number // count for number in launch.order]
        launch.steps = [members[number].state["step"] for number in dict.fromkeys(launch.members)]
    if len(updated.launches) == 1 and counters is not None:
        updated.launches[0].steps = [counters]
    updated.copies = copies
    return updated


def misa_obstacle(settings: Mapping[str, Any]) -> str | None:
    """Return why these kernels cannot compute MISA with these settings; None if they can."""
    for name in ("before", "damping"):
        if settings[name]:
            return f"there is no kernel for {name}={settings[name]!r}"
    return None


def _misa_fingerprint(job: ConsensusJob, memory: str) -> list[Row]:
    """Return what tells whether the rows of MISA still hold, see `_fingerprint`."""
    return [
        (
            param.data_ptr(),
            grad.data_ptr(),
            state["dual"].data_ptr(),
            state[memory].data_ptr() if memory in state else 0,
            state["step"].data_ptr(),
            param.numel(),
            grad.dtype,
            grad.is_contiguous() or grad.stride(),
            (job.settings["ns_dtype"], job.settings["blocks"]) if job.matrix else None,
        )
        for (param, _, state, _), grad in zip(job.members, job.grads, strict=True)
    ]


def obstacle(params: Sequence[Tensor], preconditioner: Preconditioner | None) -> str | None:
    """Return why parameters cannot be stepped by these kernels; None if they can."""
    if preconditioner is not None and type(preconditioner) not in _MEMORY:
        return f"there is no kernel for {type(preconditioner).__name__}"
    for param in params:
        which = f"a parameter of shape {tuple(param.shape)}"
        if type(param) not in (Tensor, torch.nn.Parameter):
            return f"{which} is a {type(param).__name__}, not a plain tensor"
        if param.device.type not in DEVICES:
            return f"{which} is on {param.device}, not on a CUDA device"
        if param.dtype not in _DTYPES:
            return f"{which} is of {param.dtype}, not float32, bfloat16 or float16"
        # What torch allocates for dense tensors has their strides.
        if torch.empty_like(param, device="meta").stride() != param.stride():
            return f"{which} has gaps or overlaps in memory"
    if isinstance(preconditioner, NewtonSchulz):
        reason = _not_row_by_row(params)
        if reason is not None:
            return reason
    return without_triton() if params else None


def _not_row_by_row(params: Sequence[Tensor]) -> str | None:
    """Return why parameters cannot be read as matrices; None if they can."""
    for param in params:
        which = f"a parameter of shape {tuple(param.shape)}"
        if param.dim() < 2 or param.stride(0) != max(param.stride()):
            return f"{which} is not stored row by row"
        if param.numel() >= 2**31:
            return f"{which} has more than 2^31 elements"
    return None


def _mismatch(param: Tensor, grad: Tensor, states: Sequence[Tensor]) -> str | None:
    """Return why the kernels cannot read a gradient and state of a parameter; None if they can."""
    for tensor in (grad, *states):
        if tensor.dtype not in _DTYPES:
            role = "gradient" if tensor is grad else "state"
            return f"a {role} is of {tensor.dtype}, not float32, bfloat16 or float16"
    if any(tensor.dtype != states[0].dtype for tensor in states):
        return "state of one parameter is of several dtypes"
    if any(tensor.stride() != param.stride() for tensor in states):
        return "state is laid out in another way than its parameter"
    if any(tensor.device != param.device for tensor in (grad, *states)):
        return "a gradient or state is on another device than its parameter"
    return None


def _laid_out_like(param: Tensor, grad: Tensor, copies: list[Tensor]) -> Tensor:
    """Return the gradient, or a copy laid out like its parameter, which is added to `copies`."""
    if (grad.is_contiguous() and param.is_contiguous()) or grad.stride() == param.stride():
        return grad
    copies.append(torch.empty_like(param, dtype=grad.dtype).copy_(grad))
    return copies[-1]


def _fingerprint(
    members: Sequence[Member],
    dual: str,
    memory: str,
    step: str,
    sigma: str | None = None,
    level: str | None = None,
) -> list[Row]:
    """Return what tells whether rows still hold; as little as possible, since every step needs it.

    The address of an earlier gradient may be reused for one of another dtype or layout, but not of
    another shape, which the optimizer refuses; a parameter or state with another dtype or layout
    has another address.

    Args:
        members: the parameters.
        dual: the key of this state, and so on.
        memory: that of what the preconditioner remembers.
        step: that of the counter.
        sigma: that of sigma, where it follows the gradients.
        level: likewise.
    """
    return [
        (
            param.data_ptr(),
            grad.data_ptr(),  # type: ignore[union-attr]
            state[dual].data_ptr(),
            state[memory].data_ptr(),
            state["pending"].data_ptr() if "pending" in state else 0,
            state[step].data_ptr(),
            0 if sigma is None else state[sigma].data_ptr(),
            0 if level is None else state[level].data_ptr(),
            param.numel(),
            grad.dtype,  # type: ignore[union-attr]
            grad.is_contiguous() or grad.stride(),  # type: ignore[union-attr]
            not state["arrived"],
        )
        for param, grad, state, _ in members
    ]


def _local_rows(
    members: Sequence[Member], dual: str, memory: str, step: str, sigma_keys: Sequence[str]
) -> tuple[list[Row], list[Tensor]]:
    rows: list[Row] = []
    copies: list[Tensor] = []
    for param, grad, state, _ in members:
        assert grad is not None
        grad = _laid_out_like(param, grad, copies)
        dual_tensor = state[dual]
        rows.append(
            (
                param.data_ptr(),
                grad.data_ptr(),
                dual_tensor.data_ptr(),
                state[memory].data_ptr(),
                state.get("pending", dual_tensor).data_ptr(),
                state[step].data_ptr(),
                *(tuple(state[name].data_ptr() for name in sigma_keys) or (0, 0)),
                param.numel(),
                param.device,
                param.dtype,
                grad.dtype,
                dual_tensor.dtype,
                not state["arrived"],
            )
        )
    return rows, copies


def _misa_rows(job: ConsensusJob, memory: str, count: int) -> tuple[list[Row], list[Tensor]]:
    """Return a row for each of the `count` blocks of each parameter, and copies of gradients."""
    rows: list[Row] = []
    copies: list[Tensor] = []
    for (param, _, state, _), given_grad in zip(job.members, job.grads, strict=True):
        grad = _laid_out_like(param, given_grad, copies)
        dual = state["dual"]
        average = state.get(memory, dual)
        size = param.numel() // count
        averages = block_shape(param, count)[0] if job.matrix else size
        starts = [tensor.data_ptr() for tensor in (param, grad, dual, average)]
        block_bytes = [size * tensor.itemsize for tensor in (param, grad, dual)]
        block_bytes.append(averages * average.itemsize)
        kind = param.device, param.dtype, grad.dtype, dual.dtype, False
        for block in range(count):
            offsets = [block * one for one in block_bytes]
            # No pending sum, and neither sigma nor level.
            others = 0, state["step"].data_ptr(), 0, 0
            rows.append((*map(operator.add, starts, offsets), *others, size, *kind))
    return rows, copies


def _in_one(members: Sequence[Member], step: str, may_move: bool) -> Tensor | None:
    """Return all step counters as one tensor, to count them in one call; None if they are apart.

    Args:
        members: the parameters.
        step: the key of the counters.
        may_move: move them into one tensor, which a CUDA graph that counts where they are would
            not notice.
    """
    counters = [member.state[step] for member in members]
    if len({counter.device for counter in counters}) > 1:
        return None
    if may_move:
        rows_of(counters, owned=True)
    return as_rows(counters)


def _updated(
    plan: _P | None,
    rows: list[Row],
    fingerprint: list[Row],
    matrices: Matrices | None,
    kind: type[_P],
) -> _P:
    """Return `plan` with new addresses if nothing else has changed, else a new plan."""
    if plan is not None and not _capturing(plan.launches):
        same = [row[table.SIZE :] for row in rows] == [row[table.SIZE :] for row in plan.rows]
        if same:
            for launch in plan.launches:
                table.refresh(launch, rows)
            plan.rows, plan.fingerprint = rows, fingerprint
            return plan
    # A CUDA graph copies from its own host memory at every replay, whatever other steps there are.
    captured = [] if plan is None else plan.captured
    return kind(rows, fingerprint, table.build(rows, matrices, captured), captured)


def _capturing(launches: Sequence[Launch]) -> bool:
    return any(each.kind.device.type == "cuda" for each in launches) and (
        torch.cuda.is_current_stream_capturing()
    )


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
