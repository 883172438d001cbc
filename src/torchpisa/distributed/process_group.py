"""A round over the ranks of a process group: who contributes what, and what crosses the network.

Every rank is a node of the paper, or holds several. In a round it adds up the contributions of its
own batches in `pending`; the sum of those over all ranks is what the consensus needs. This is all
that crosses the network, besides a short line of numbers per round.

Every rank joins every collective of every round, in the same order, whatever happened to its
batches: one that was left out contributes its dual. A parameter that no batch of any rank reached
is left alone, but a rank knows only its own batches when it has to contribute. So it contributes
what is right if another rank reached the parameter, and takes that back if none did.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.distributed import dtensor
from torchpisa.distributed.dtensor import is_sharded, local
from torchpisa.kernels.dispatch import Plans
from torchpisa.kernels.job import Member, real
from torchpisa.optim import arguments
from torchpisa.optim.round import Part, Round, Totals, consensus, contribute_missing, finish
from torchpisa.torch_private import ddp_hooks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["Attached", "Lockstep", "Ranks", "group_of", "join", "on_device"]

T = TypeVar("T")

# What DistributedDataParallel cuts gradients into.
BUCKET_BYTES = 25 * 2**20
# Where kernels read and write widest.
_ALIGNMENT = 16


def join(process_group: Any, reduce_dtype: torch.dtype | None) -> "Ranks | None":
    """Return the ranks of `process_group`, or None if there is nobody to talk to.

    Args:
        process_group: a process group, a one-dimensional device mesh, or None.
        reduce_dtype: what contributions cross the network in.
    """
    group = None if process_group is None else group_of("process_group", process_group)
    return None if group is None else Ranks(group, reduce_dtype)


def group_of(name: str, given: Any) -> "ProcessGroup | None":
    """Return a process group, or None if it has no other ranks than this one.

    Args:
        name: the argument by which it was given.
        given: a process group or a one-dimensional device mesh.
    """
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                f"{name} must be a process group or a mesh of one dimension, got one of "
                f"{given.ndim}: name the one that replicas lie along, as in mesh['replicate']"
            )
        given = given.get_group()
    if not isinstance(given, distributed.ProcessGroup):
        raise ValueError(
            f"{name} must be a torch.distributed process group (such as "
            f"torch.distributed.group.WORLD) of which this process is a member, got {given!r}"
        )
    return None if distributed.get_world_size(given) == 1 else given


@dataclass(frozen=True)
class _Sent:
    """A sum under way, and where it goes when it has arrived."""

    work: "Work"
    wire: Tensor
    flat: Tensor


class Attached(Protocol):
    """A model whose backward pass takes parts of the steps."""

    @property
    def model(self) -> torch.nn.Module:
        """The model."""

    def expect(self, slot: int) -> None:
        """Raise RuntimeError if the backward pass has not taken its part of this batch's step."""


class _Doubt(NamedTuple):
    """A parameter that no batch of this rank reached, and its state before the contribution."""

    member: Member
    before: dict[str, Tensor]


class Ranks:
    """The ranks of a process group, as seen from one of them; an optimizer's `Peers`.

    Attributes:
        group: the process group.
        size: number of ranks.
        rank: this one.
        all_shares: alpha_i of all nodes, by rank and slot.
        attached: the model whose backward pass takes parts of the steps, if there is one.
        begun: whether it has, of the step that is due.
    """

    def __init__(self, group: "ProcessGroup", reduce_dtype: torch.dtype | None) -> None:
        from torch import distributed

        self.group = group
        self.size: int = distributed.get_world_size(group)
        self.rank: int = distributed.get_rank(group)
        self.all_shares: list[float] = []
        self.attached: Attached | None = None
        self.begun = False
        self._reduce_dtype = reduce_dtype
        self._lockstep = Lockstep(self.size)
        self._under_way: list[_Sent] = []
        self._contributed: set[int] = set()
        self._doubts: dict[int, _Doubt] = {}
        self._unreached: set[int] = set()
        self._saw_no_averages = False

    # Agreements

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        from torch import distributed

        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, what: str, value: object) -> None:
        """Raise ValueError, on all ranks, if `value` is not the same on all of them."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"{what} must be the same on all ranks of process_group, got {values[0]!r} on "
                    f"rank 0 and {other!r} on rank {rank}"
                )

    def shares(self, weights: Sequence[float] | None, batches: int) -> list[float]:
        """Return alpha_i of this rank's batches, from the weights of all ranks' batches."""
        given = self.gather((batches, weights if weights is None else [float(w) for w in weights]))
        kinds = [(count, weights is None) for count, weights in given]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(
                "batches must be the same, and weights given or not given, on all ranks of "
                f"process_group, got (batches, weights) by rank: {given}"
            )
        everyone = (
            None
            if weights is None
            else [w for _, their_weights in given for w in their_weights or ()]
        )
        self.all_shares = arguments.shares(everyone, batches * self.size)
        return self.all_shares[self.rank * batches : (self.rank + 1) * batches]

    def add(self, params: Sequence[Tensor]) -> None:
        """Agree on parameters that all ranks add; they take the values of the first rank."""
        self._refuse_shards(params)
        self.agree("the number of parameters", len(params))
        kinds = self.gather([_kind(param) for param in params])
        for others in zip(*kinds, strict=True):
            if any(kind != others[0] for kind in others):
                raise ValueError(
                    "parameters must have the same shapes and dtypes, in the same order, on all "
                    f"ranks of process_group, got, by rank: {', '.join(others)}"
                )
        self.broadcast(params)

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` by those of the first rank, as DistributedDataParallel does."""
        from torch import distributed

        first = distributed.get_global_rank(self.group, 0)
        for tensor in map(local, tensors):
            sent = tensor.contiguous()
            distributed.broadcast(sent, first, group=self.group)
            if sent is not tensor:
                tensor.copy_(sent)

    # The round

    def stepped(self) -> None:
        """Note that a batch was stepped, or is absent."""
        self._lockstep.stepped()

    def cleared(self, params: Sequence[Tensor]) -> None:
        """Note that gradients are about to be cleared."""
        self._lockstep.cleared(params)

    def expect(self, slot: int, params: Sequence[Tensor]) -> None:
        """Raise if gradients are not what a rank's step for a batch needs."""
        if self.attached is not None:
            self.attached.expect(slot)
        self._refuse_averages(params)

    @torch.no_grad()
    def contribute(
        self,
        parts: Sequence[Part],
        members: Sequence[list[Member]],
        round: Round,
        limit: float = BUCKET_BYTES,
    ) -> None:
        """Complete what this rank's batches contribute to `members`, and send it.

        All ranks contribute to the same members in the same order.

        Args:
            parts: all parameters, by rule.
            members: some of them.
            round: where it stands.
            limit: bytes that cross the network in one go.
        """
        for part, of_part in zip(parts, members, strict=True):
            for member in of_part:
                if member.state["arrived"]:
                    continue
                self._unreached.add(id(member.origin))
                if round.present:  # otherwise only duals are contributed, and nothing changes
                    self._doubts[id(member.origin)] = _Doubt(member, _copies(member))
            contribute_missing(part, of_part, round)
        together = [member for of_part in members for member in of_part]
        self._contributed |= {id(member.origin) for member in together}
        self._send(together, limit)

    def close(
        self,
        parts: Sequence[Part],
        members: Sequence[list[Member]],
        round: Round,
        problem: bool,
        plans: Plans,
    ) -> int:
        """Send the rest, wait for the others, and take the consensus; see `Peers`."""
        rest = [
            [m for m in of_part if id(m.origin) not in self._contributed] for of_part in members
        ]
        self.contribute(parts, rest, round)
        everyone = [member for of_part in members for member in of_part]
        device = everyone[0].param.device if everyone else torch.device("cpu")
        present: Scalar = len(round.present) if round.kept is None else round.kept.sum()
        reached = [float(id(member.origin) not in self._unreached) for member in everyone]
        # Where sigma follows gradients, one for each parameter. Of rho, only where the consensus
        # has a proximal term.
        of_parts: list[list[Scalar]] = []
        for part, of_part in zip(parts, members, strict=True):
            totals = part.totals(of_part)
            if part.follows:
                of_parts.append(list(totals.sigma.values()))
            elif part.preconditioner.proximal is not None:
                of_parts.append([totals.sigma, totals.rho])
            else:
                of_parts.append([totals.sigma])
        numbers = [number for values in of_parts for number in values]
        first = len(numbers)  # of the other numbers
        numbers += [present, float(problem), *reached, *self._lockstep.numbers]
        total = self.sum(numbers, device)
        self._receive()

        # The host reads the sums only if it has to, because that may mean to wait for a GPU: what
        # this rank's own batches have reached and moved needs no confirmation by others.
        told = device.type == "cpu" or bool(self._unreached) or not round.present
        sums: Sequence[Scalar] = total.tolist() if told else list(total.unbind())
        keep = total[first] > 0 if round.kept is not None and not told else None
        left: set[int] = set()
        if told:
            counts = sums[first + 2 : first + 2 + len(everyone)]
            left = {id(m.origin) for m, count in zip(everyone, counts, strict=True) if not count}
            for key in left & self._doubts.keys():
                _restore(self._doubts[key])
        summed = iter(sums)
        for part, of_part, values in zip(parts, members, of_parts, strict=True):
            here = list(islice(summed, len(values)))
            if part.follows:
                keys = (id(member.origin) for member in of_part)
                totals = Totals(dict(zip(keys, here, strict=True)))
            else:
                totals = Totals(*here)
            if not told or sums[first]:
                moving = [member for member in of_part if id(member.origin) not in left]
                consensus(part, moving, totals, keep, plans)
        finish(everyone)
        self.forget()
        self._lockstep.received(total[-2:], told)
        return int(sums[first + 1]) if told else int(problem)

    def raise_if_out_of_step(self) -> None:
        """Raise RuntimeError, on every rank, if ranks have stepped for different batches."""
        self._lockstep.compare()

    def forget(self) -> None:
        """Drop what is left of a round."""
        self.begun = False
        self._contributed.clear()
        self._doubts.clear()
        self._unreached.clear()

    def sum(self, values: Sequence[Scalar], device: torch.device) -> Tensor:
        """Return a few numbers, added up over all ranks, on `device`, without waiting for it."""
        from torch import distributed

        total = on_device(values, device)
        distributed.all_reduce(total, group=self.group)
        return total

    @torch.no_grad()
    def _send(self, members: Sequence[Member], limit: float) -> None:
        """Start adding up the members' `pending` over all ranks; `_receive` finishes it."""
        from torch import distributed

        for bucket in _buckets([dtensor.part(member) for member in members], limit):
            flat = real(_gathered(bucket))
            wire = flat.to(self._reduce_dtype or flat.dtype)
            work = distributed.all_reduce(wire, group=self.group, async_op=True)
            assert work is not None
            self._under_way.append(_Sent(work, wire, flat))

    @torch.no_grad()
    def _receive(self) -> None:
        """Wait for everything that was sent: then every `pending` is the sum over all ranks."""
        try:
            for sent in self._under_way:
                sent.work.wait()
                if sent.wire is not sent.flat:
                    sent.flat.copy_(sent.wire)
        finally:
            self._under_way.clear()

    # Gradients that have been averaged already

    # All duals would be equal then, and heterogeneous data no better off than with any other
    # optimizer.

    def _refuse_shards(self, params: Sequence[Tensor]) -> None:
        """Raise ValueError if ranks of this group hold shards of one replica."""
        for param in params:
            if is_sharded(param):
                ranks = param.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
                if self._shares_ranks(ranks):
                    raise ValueError(
                        "process_group must not have two ranks that hold shards of one replica, "
                        f"or over which fully_shard averages gradients: a parameter of shape "
                        f"{tuple(param.shape)} is spread over ranks {ranks}. Use "
                        "torchpisa.distributed.shard(model, mesh) instead of fully_shard, and the "
                        "mesh of replicas that it returns as process_group"
                    )

    def _refuse_averages(self, params: Sequence[Tensor]) -> None:
        """Raise ValueError if a DistributedDataParallel model averages gradients of `params`."""
        from torch import distributed

        if self._saw_no_averages:  # looking for models takes time, so once must do
            return
        attached = None if self.attached is None else self.attached.model
        wanted = {id(param) for param in params}
        for model in _data_parallel_models():
            if model is attached or _leaves_gradients(model):
                continue
            if not self._shares_ranks(distributed.get_process_group_ranks(model.process_group)):
                continue
            if any(id(param) in wanted for param in model.parameters()):
                raise ValueError(
                    "gradients must be those of each rank's own data, but DistributedDataParallel "
                    "averages them: call torchpisa.distributed.attach(optimizer, model) before "
                    "the first backward pass, use what torchpisa.integrations has for Accelerate, "
                    "Transformers or Lightning, or leave process_group out to train on averages"
                )
        self._saw_no_averages = True

    def _shares_ranks(self, ranks: Sequence[int]) -> bool:
        from torch import distributed

        ours = distributed.get_process_group_ranks(self.group)
        return len(set(ours) & set(ranks)) > 1


class Lockstep:
    """Notices a rank that has left a step() out while others have not.

    Collectives are paired in the order in which ranks come to them, so such a rank would be one
    batch behind the others from then on. It is known by gradients that were cleared before any
    step() or skip() came for them. Every rank counts those, and the counts cross with each round.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._missed = 0
        self._came = True
        self._sums: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def stepped(self) -> None:
        """Note a step() or skip()."""
        self._came = True

    def cleared(self, params: Sequence[Tensor]) -> None:
        """Note that the gradients of `params` are about to be cleared."""
        if not self._came and any(param.grad is not None for param in params):
            self._missed += 1
        self._came = False

    @property
    def numbers(self) -> tuple[float, float]:
        """The numbers to send: the counts are equal if their variance is zero."""
        return float(self._missed), float(self._missed**2)

    def received(self, sums: Tensor, told: bool) -> None:
        """Take what has crossed with a round.

        Args:
            sums: of `numbers`, over all ranks.
            told: whether the host may wait for them. Otherwise they are looked at in a later
                round, and those of rounds until then are not.
        """
        if told:
            self._sums, self._arrival = sums, None
        elif self._sums is None:
            self._sums = torch.empty(2, dtype=sums.dtype, pin_memory=True)
            self._sums.copy_(sums, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    def compare(self) -> None:
        """Raise RuntimeError, on every rank, if the counts that have arrived differ."""
        if self._sums is None:
            return
        if self._arrival is not None and not self._arrival.query():  # type: ignore[no-untyped-call]
            return
        total, squares = self._sums.tolist()
        self._sums = self._arrival = None
        if self._size * squares != total**2:
            raise RuntimeError(
                "every rank of process_group must call step() or skip() once per batch, but some "
                f"have left it out: {self._missed} times on this rank, {total / self._size:g} "
                "times on average, gradients were cleared that no step() had used. Batches of "
                "different rounds have been combined since. A rank without a usable batch calls "
                "skip()"
            )


def on_device(
    values: Sequence[Scalar], device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return a few numbers as one tensor on `device`, without waiting for it."""
    known = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
    numbers = torch.tensor(known, dtype=dtype, pin_memory=device.type == "cuda")
    numbers = numbers.to(device, non_blocking=True)
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            numbers[index].copy_(value)
    return numbers


def _kind(param: Tensor) -> str:
    return f"{param.dtype} of shape {tuple(local(param).shape)}"


def _buckets(members: Sequence[Member], limit: float) -> Iterator[list[Member]]:
    """Yield members whose pending sums cross the network together."""
    kinds: dict[object, list[Member]] = {}
    for member in members:
        pending = member.state["pending"]
        kinds.setdefault((pending.device, pending.dtype), []).append(member)
    for alike in kinds.values():
        bucket: list[Member] = []
        size = 0
        for member in alike:
            pending = member.state["pending"]
            needed = pending.numel() * pending.element_size()
            if bucket and size + needed > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(member)
            size += needed
        yield bucket


def _gathered(bucket: Sequence[Member]) -> Tensor:
    """Return one flat tensor of which the members' `pending` are views.

    They stay that until they are sent in other company, so nothing is copied from round to round.
    """
    pending: list[Tensor] = [member.state["pending"] for member in bucket]
    step = max(1, _ALIGNMENT // pending[0].element_size())
    offsets = [0]
    for tensor in pending:
        offsets.append(offsets[-1] + -(-tensor.numel() // step) * step)
    total = offsets.pop()
    storage = pending[0].untyped_storage()
    if storage.nbytes() == total * pending[0].element_size() and all(
        tensor.storage_offset() == offset
        and tensor.untyped_storage().data_ptr() == storage.data_ptr()
        for tensor, offset in zip(pending, offsets, strict=True)
    ):
        return pending[0].as_strided((total,), (1,), 0)
    # Zeros, because what lies between the views is added up, too.
    flat = pending[0].new_zeros(total)
    for member, tensor, offset in zip(bucket, pending, offsets, strict=True):
        view = flat.as_strided(tensor.size(), tensor.stride(), offset)
        view.copy_(tensor)
        member.state["pending"] = view
    return flat


def _data_parallel_models() -> list["DistributedDataParallel"]:
    """Return all that there are in this process: parameters do not know to which they belong."""
    from torch.nn.parallel import DistributedDataParallel

    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), DistributedDataParallel)
        if hasattr(thing, "process_group")  # whose construction has come that far
    ]


def _leaves_gradients(model: "DistributedDataParallel") -> bool:
    """Return whether the model's communication hook is the one that does nothing."""
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    return any(hook is noop_hook for hook in ddp_hooks(model))


def _copies(member: Member) -> dict[str, Tensor]:
    return {
        key: value.clone()
        for key, value in member.state.items()
        if isinstance(value, Tensor) and key != "pending"
    }


def _restore(doubt: _Doubt) -> None:
    for key, value in doubt.before.items():
        doubt.member.state[key].copy_(value)
