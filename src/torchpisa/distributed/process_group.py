"""Rounds over the ranks of a process group: contributions, sums over ranks, and the consensus.

Every rank is a node of the paper, or holds several. In a round it adds up the contributions of its
own batches in `pending`, and the consensus needs the sum of those over all ranks. Nothing else
crosses the network but a few numbers per round.

Every rank joins every collective of every round, in the same order, even if its batches are absent:
they contribute their duals. A parameter without a gradient on all ranks must not change. But when a
rank contributes, it does not know about the others. So it assumes that another rank has a gradient,
and undoes its contribution if none has.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.distributed import dtensor
from torchpisa.distributed.dtensor import is_sharded, local
from torchpisa.kernels.dispatch import Plans
from torchpisa.kernels.job import Member, real
from torchpisa.optim import arguments
from torchpisa.optim.round import Part, Round, Totals, clear_arrived, consensus, contribute_missing
from torchpisa.torch_private import ddp_hooks, is_flattened

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["ATTACHED", "Attached", "Lockstep", "Ranks", "group_of", "join", "on_device"]

T = TypeVar("T")

# Models with an attached optimizer, which leaves their gradients alone.
ATTACHED: WeakSet[torch.nn.Module] = WeakSet()

# Size of the buckets that cross the network, DistributedDataParallel's default.
BUCKET_BYTES = 25 * 2**20
# Alignment, in bytes, with which kernels are fastest.
_ALIGNMENT = 16


def join(process_group: Any, reduce_dtype: torch.dtype | None) -> "Ranks | None":
    """Return the ranks of `process_group`, or None without a group or with a single rank.

    Args:
        process_group: a process group, a one-dimensional device mesh, or None.
        reduce_dtype: the dtype in which contributions cross the network.
    """
    group = None if process_group is None else group_of("process_group", process_group)
    return None if group is None else Ranks(group, reduce_dtype)


def group_of(name: str, given: Any) -> "ProcessGroup | None":
    """Return a process group, or None if it has a single rank.

    Args:
        name: name of the argument, for error messages.
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
    """A bucket whose sum over all ranks is under way.

    Attributes:
        work: waits for the sum.
        wire: the memory that is summed, in the dtype that crosses the network.
        flat: the memory to copy the sum to.
    """

    work: "Work"
    wire: Tensor
    flat: Tensor


class Attached(Protocol):
    """A model whose backward pass steps parameters bucket by bucket."""

    def before_step(self, slot: int) -> None:
        """Finish what the backward pass began; raise RuntimeError if it did not run."""


class _Tentative(NamedTuple):
    """A parameter without a gradient on this rank, and its state before the contribution."""

    member: Member
    before: dict[str, Tensor]


class Ranks:
    """The ranks of a process group, as seen from one of them; an optimizer's `Peers`.

    Attributes:
        group: the process group.
        size: the number of ranks.
        rank: the number of this rank.
        all_shares: alpha_i of all nodes, by rank and slot.
        attached: the model whose backward pass steps parameters, if any.
        step_begun: True if that pass has stepped some parameters, and `step()` has to follow.
    """

    def __init__(self, group: "ProcessGroup", reduce_dtype: torch.dtype | None) -> None:
        from torch import distributed

        self.group = group
        self.size: int = distributed.get_world_size(group)
        self.rank: int = distributed.get_rank(group)
        self.all_shares: list[float] = []
        self.attached: Attached | None = None
        self.step_begun = False
        self._reduce_dtype = reduce_dtype
        self._lockstep = Lockstep(self.size)
        self._under_way: list[_Sent] = []
        self._contributed: set[int] = set()
        self._tentative: dict[int, _Tentative] = {}
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
        """Return alpha_i of this rank's batches, normalised over the batches of all ranks."""
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

    def add_params(self, params: Sequence[Tensor]) -> None:
        """Check that all ranks add the same parameters, and copy the values of the first rank."""
        self._saw_no_averages = False
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
        """Overwrite `tensors` with those of the first rank, as DistributedDataParallel does."""
        from torch import distributed

        first = distributed.get_global_rank(self.group, 0)
        for tensor in map(local, tensors):
            sent = tensor.contiguous()
            distributed.broadcast(sent, first, group=self.group)
            if sent is not tensor:
                tensor.copy_(sent)

    # The round

    def before_step(self, slot: int, params: Sequence[Tensor]) -> None:
        """Prepare the step of a batch; raise if its gradients were averaged over ranks."""
        if self.attached is not None:
            self.attached.before_step(slot)
        self._refuse_averages(params)

    def on_step(self) -> None:
        """Handle `step()` or `skip()`."""
        self._lockstep.on_step()

    def on_zero_grad(self, params: Sequence[Tensor]) -> None:
        """Handle `zero_grad()`, before gradients are cleared."""
        self._lockstep.on_zero_grad(params)

    @torch.no_grad()
    def contribute(
        self,
        parts: Sequence[Part],
        members: Sequence[list[Member]],
        round: Round,
        limit: float = BUCKET_BYTES,
    ) -> None:
        """Complete the contributions of this rank's batches to `members`, and send them.

        All ranks call this with the same members in the same order.

        Args:
            parts: all parameters, by group and rule.
            members: the parameters to contribute to, by part.
            round: the open round.
            limit: the most bytes to send together.
        """
        for part, part_members in zip(parts, members, strict=True):
            for member in part_members:
                if member.state["arrived"]:
                    continue
                self._unreached.add(id(member.origin))
                if round.present:  # otherwise only duals are contributed, and nothing changes
                    self._tentative[id(member.origin)] = _Tentative(member, _copies(member))
            contribute_missing(part, part_members, round)
        complete = [member for part_members in members for member in part_members]
        self._contributed |= {id(member.origin) for member in complete}
        self._send(complete, limit)

    def close(
        self,
        parts: Sequence[Part],
        members: Sequence[list[Member]],
        round: Round,
        problem: bool,
        plans: Plans,
    ) -> int:
        """Send what is left, wait for the other ranks, and take the consensus; see `Peers`."""
        rest = [
            [m for m in part_members if id(m.origin) not in self._contributed]
            for part_members in members
        ]
        self.contribute(parts, rest, round)
        everyone = [member for part_members in members for member in part_members]
        device = everyone[0].param.device if everyone else torch.device("cpu")
        present: Scalar = len(round.present) if round.kept is None else round.kept.sum()
        reached = [float(id(member.origin) not in self._unreached) for member in everyone]
        # Totals of each part: S, or one S per parameter where sigma follows gradients; and the sum
        # of rho, which only a proximal term needs.
        part_totals: list[list[Scalar]] = []
        for part, part_members in zip(parts, members, strict=True):
            totals = part.totals(part_members)
            if part.sigma_follows:
                part_totals.append(list(totals.sigma.values()))
            elif part.preconditioner.proximal is not None:
                part_totals.append([totals.sigma, totals.rho])
            else:
                part_totals.append([totals.sigma])
        numbers = [number for totals_of_part in part_totals for number in totals_of_part]
        first = len(numbers)  # index of the first number that is not a total
        numbers += [present, float(problem), *reached, *self._lockstep.numbers]
        total = self.sum(numbers, device)
        self._receive()

        # The host reads the sums only if it must, because it may have to wait for the GPU. A rank
        # whose own batches had gradients for all parameters knows that all weights move.
        host_reads = device.type == "cpu" or bool(self._unreached) or not round.present
        sums: Sequence[Scalar] = total.tolist() if host_reads else list(total.unbind())
        keep = total[first] > 0 if round.kept is not None and not host_reads else None
        untouched: set[int] = set()  # without a gradient on any rank
        if host_reads:
            counts = sums[first + 2 : first + 2 + len(everyone)]
            pairs = zip(everyone, counts, strict=True)
            untouched = {id(member.origin) for member, count in pairs if not count}
            for key in untouched & self._tentative.keys():
                _restore(self._tentative[key])
        summed = iter(sums)
        for part, part_members, values in zip(parts, members, part_totals, strict=True):
            over_ranks = list(islice(summed, len(values)))
            if part.sigma_follows:
                keys = (id(member.origin) for member in part_members)
                totals = Totals(dict(zip(keys, over_ranks, strict=True)))
            else:
                totals = Totals(*over_ranks)
            if not host_reads or sums[first]:
                moving = [member for member in part_members if id(member.origin) not in untouched]
                consensus(part, moving, totals, keep, plans)
        clear_arrived(everyone)
        self.reset_round()
        self._lockstep.received(total[-2:], host_reads)
        return int(sums[first + 1]) if host_reads else int(problem)

    def raise_if_out_of_step(self) -> None:
        """Raise RuntimeError, on every rank, if ranks have stepped for different batches."""
        self._lockstep.compare()

    def reset_round(self) -> None:
        """Forget everything about the open round."""
        self.step_begun = False
        self._contributed.clear()
        self._tentative.clear()
        self._unreached.clear()

    def sum(self, values: Sequence[Scalar], device: torch.device) -> Tensor:
        """Return the sums of a few numbers over all ranks, on `device`, without waiting for it."""
        from torch import distributed

        total = on_device(values, device)
        distributed.all_reduce(total, group=self.group)
        return total

    @torch.no_grad()
    def _send(self, members: Sequence[Member], limit: float) -> None:
        """Start the sums of the members' `pending` over all ranks; `_receive` waits for them."""
        from torch import distributed

        for bucket in _buckets([dtensor.local_member(member) for member in members], limit):
            flat = real(_gathered(bucket))
            wire = flat.to(self._reduce_dtype or flat.dtype)
            work = distributed.all_reduce(wire, group=self.group, async_op=True)
            assert work is not None
            self._under_way.append(_Sent(work, wire, flat))

    @torch.no_grad()
    def _receive(self) -> None:
        """Wait until every `pending` is the sum over all ranks."""
        try:
            for sent in self._under_way:
                sent.work.wait()
                if sent.wire is not sent.flat:
                    sent.flat.copy_(sent.wire)
        finally:
            self._under_way.clear()

    # Refuse gradients that have been averaged over ranks. All duals would be equal then, and the
    # method would lose its advantage on heterogeneous data.

    def _refuse_shards(self, params: Sequence[Tensor]) -> None:
        """Raise ValueError if ranks of this group hold shards of the same replica."""
        for param in params:
            if is_flattened(param):
                raise ValueError(
                    "process_group must be None for parameters in FullyShardedDataParallel, which "
                    "cannot be told from copies of one replica: use torch's fully_shard, by "
                    "torchpisa.distributed.shard(model, mesh), and the mesh of replicas that it "
                    "returns as process_group"
                )
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

        if self._saw_no_averages:  # the search for models is slow, so it runs once
            return
        wanted = {id(param) for param in params}
        for model in _data_parallel_models():
            if model in ATTACHED or _leaves_gradients(model):
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
    """Detect a rank that has left out a step() while others have not.

    Collectives pair up in the order in which ranks call them, so such a rank would lag behind by
    one batch from then on. The sign of it is a gradient that was cleared without a step() or
    skip(). Every rank counts those, and the counts cross the network with each round.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._missed = 0
        self._has_stepped = True
        self._sums: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def on_step(self) -> None:
        """Handle a step() or skip()."""
        self._has_stepped = True

    def on_zero_grad(self, params: Sequence[Tensor]) -> None:
        """Count a missed step if gradients are cleared without one."""
        if not self._has_stepped and any(param.grad is not None for param in params):
            self._missed += 1
        self._has_stepped = False

    @property
    def numbers(self) -> tuple[float, float]:
        """The count and its square: the variance of the counts is zero if all are equal."""
        return float(self._missed), float(self._missed**2)

    def received(self, sums: Tensor, may_wait: bool) -> None:
        """Keep the sums of a round for `compare`.

        Args:
            sums: the sums of `numbers` over all ranks.
            may_wait: whether the host may wait for them. Otherwise they are copied in the
                background, and the sums of later rounds are ignored until they have arrived.
        """
        if may_wait:
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
    """Return numbers as one tensor on `device`, without waiting for it."""
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
    """Yield members whose pending sums are sent together."""
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

    They stay views, so nothing is copied again while the bucket stays the same.
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
    # Zeros, because the gaps between the views are summed too.
    flat = pending[0].new_zeros(total)
    for member, tensor, offset in zip(bucket, pending, offsets, strict=True):
        view = flat.as_strided(tensor.size(), tensor.stride(), offset)
        view.copy_(tensor)
        member.state["pending"] = view
    return flat


def _data_parallel_models() -> list["DistributedDataParallel"]:
    """Return all DistributedDataParallel models: a parameter does not know its model."""
    from torch.nn.parallel import DistributedDataParallel

    return [
        model
        for model in gc.get_objects()
        if issubclass(type(model), DistributedDataParallel)
        if hasattr(model, "process_group")  # not yet if its constructor has failed
    ]


def _leaves_gradients(model: "DistributedDataParallel") -> bool:
    """Return whether the model's communication hook is torch's `noop_hook`."""
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    return any(hook is noop_hook for hook in ddp_hooks(model))


def _copies(member: Member) -> dict[str, Tensor]:
    return {
        key: value.clone()
        for key, value in member.state.items()
        if isinstance(value, Tensor) and key != "pending"
    }


def _restore(tentative: _Tentative) -> None:
    for key, value in tentative.before.items():
        tentative.member.state[key].copy_(value)
