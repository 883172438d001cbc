"""From the nodes of a checkpoint to those of an optimizer: the same ones, or others.

Where they are others, an open round is closed first, as `flush` does. Then old and new nodes are
laid side by side on [0, 1), each as long as its share alpha, and a new node takes the mean of the
old ones beside it, weighted by how much of it lies beside each. So weighted sums over all nodes
stay what they are, that of the duals above all.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from torchpisa.distributed.contents import PER_NODE, Contents, state_key, unpack
from torchpisa.distributed.stored import Stored
from torchpisa.kernels.job import Member
from torchpisa.kernels.sharded import local
from torchpisa.optim import rounds
from torchpisa.optim.base import ConsensusOptimizer
from torchpisa.optim.rounds import Group

__all__ = ["Named", "add_pending", "overlaps", "rank_of", "resume", "share_out"]

Named = Sequence[tuple[str, Tensor]]
State = MutableMapping[str, Any]

# For other nodes these settings stay the optimizer's own: they say which ranks hold the nodes, or
# are not possible on several.
_OF_LAYOUT = ("batches", "ranks", "weights", "capturable", "stochastic_rounding")
# Elements of parameters whose state is read together, that of one node at a time.
_CHUNK = 2**26
# Shares may have been rounded differently, and end at the same point nevertheless.
_SAME_POINT = 1e-12


def rank_of(optimizer: ConsensusOptimizer) -> int:
    """Which of the ranks, or replicas, that hold the nodes this process belongs to."""
    return 0 if optimizer._exchange is None else optimizer._exchange.ranks.rank


def overlaps(old: Sequence[float], new: Sequence[float]) -> list[dict[int, float]]:
    """For each new node, the old ones that it takes its mean of, with their coefficients.

    Args:
        old: alpha_i of the old nodes.
        new: alpha_i of the new ones.
    """
    ends = _ends(old)
    bounds = [0.0, *(_snapped(end, ends) for end in _ends(new))]
    rows = []
    for low, high in pairwise(bounds):
        beside = {}
        for node, (start, end) in enumerate(pairwise([0.0, *ends])):
            if min(high, end) > max(low, start):
                beside[node] = min(high, end) - max(low, start)
        if not beside:  # a share as good as zero
            beside = {min(bisect_right(ends, low), len(ends) - 1): 1.0}
        total = sum(beside.values())
        rows.append({node: length / total for node, length in beside.items()})
    return rows


def _ends(shares: Sequence[float]) -> list[float]:
    *ends, total = accumulate(shares)
    return [*(end / total for end in ends), 1.0]


def _snapped(point: float, to: Sequence[float]) -> float:
    nearest = min(to, key=lambda other: abs(other - point))
    return nearest if abs(nearest - point) < _SAME_POINT else point


# The same nodes


@torch.no_grad()
def resume(source: Stored, named: Sequence[Named], optimizer: ConsensusOptimizer) -> None:
    """Put this rank's nodes back as they were, in the middle of a round too."""
    contents = source.contents
    rank, batches = rank_of(optimizer), contents.batches
    if optimizer._exchange is not None:
        optimizer._exchange.ranks.all_shares = contents.shares
    into: dict[str, Tensor] = {}
    for number, (group, own) in enumerate(zip(optimizer.param_groups, named, strict=True)):
        group.update(unpack(contents.groups[rank][number], _device(group)))
        for name, state in _states(source, own, optimizer, group).items():
            for slot in range(batches):
                node = rank * batches + slot
                for kind in contents.state[name]:
                    key = state_key(name, kind, node)
                    into[key] = _fitted(state, f"{kind}.{slot}", source.kinds[key].dtype)
                state[f"step.{slot}"].fill_(contents.steps[name][node])
            state["arrived"] = contents.arrived[name][rank]
            if state["arrived"]:
                key = state_key(name, "pending", rank)
                into[key] = _fitted(state, "pending", source.kinds[key].dtype)
    source.read(into)


def _states(
    source: Stored, own: Named, optimizer: ConsensusOptimizer, group: Group
) -> dict[str, State]:
    """The state of each parameter that was saved with one; that of the others starts afresh."""
    states: dict[str, State] = {}
    for name, param in own:
        saved = name in source.contents.state
        if saved != (optimizer._state_of(param) is not None):
            optimizer._init_state(param, group)
        if saved:
            member = optimizer._member(param, None, group)  # which moves to the parameter's device
            assert member is not None
            states[name] = member.state
    return states


def _fitted(state: State, key: str, dtype: torch.dtype) -> Tensor:
    """An entry of `state`, in the dtype that it was saved with."""
    if state[key].dtype != dtype:
        state[key] = torch.empty_like(state[key], dtype=dtype)
    tensor: Tensor = state[key]
    return tensor


def _device(group: Group) -> torch.device:
    return group["params"][0].device if group["params"] else torch.device("cpu")


# Other nodes


@torch.no_grad()
def share_out(source: Stored, named: Sequence[Named], optimizer: ConsensusOptimizer) -> None:
    """Give this rank's nodes their means of the old ones; the model is as it was saved."""
    contents, exchange = source.contents, optimizer._exchange
    shares = optimizer.param_groups[0]["weights"] if exchange is None else exchange.ranks.all_shares
    first = rank_of(optimizer) * optimizer.batches
    rows = overlaps(contents.shares, shares)[first : first + optimizer.batches]
    for number, (group, own) in enumerate(zip(optimizer.param_groups, named, strict=True)):
        closing = _Closing(source, number, optimizer) if contents.open else None
        states = _states(source, own, optimizer, group)
        saved = [(name, param) for name, param in own if name in states]
        for chunk in _chunks(saved, whole=closing is not None and closing.joint):
            some = {name: states[name] for name, _ in chunk}
            if closing is not None:
                closing.begin(chunk, some)
            _average(source, some, rows, closing)
            if closing is not None:
                closing.end(some)
        group.update(_settings(contents, number, rows, group))
    if contents.open and exchange is not None:
        # All have computed the same, but perhaps not on the same hardware.
        exchange.ranks.broadcast([param for own in named for _, param in own])


def _chunks(own: Named, whole: bool) -> Iterator[Named]:
    chunk: list[tuple[str, Tensor]] = []
    elements = 0
    for name, param in own:
        if chunk and not whole and elements + param.numel() > _CHUNK:
            yield chunk
            chunk, elements = [], 0
        chunk.append((name, param))
        elements += param.numel()
    if chunk:
        yield chunk


def _average(
    source: Stored,
    states: Mapping[str, State],
    rows: Sequence[Mapping[int, float]],
    closing: "_Closing | None",
) -> None:
    """Write into `states`, slot by slot, the means that `rows` say.

    One old node after the other is read, so that there is never more than one of them in memory.
    """
    nodes: Sequence[int] = sorted({node for row in rows for node in row})
    if closing is not None:
        nodes = range(len(source.contents.shares))
    sums: dict[tuple[str, str, int], Tensor] = {}
    for node in nodes:
        olds = _read(source, states, node)
        if closing is not None:
            closing.settle(node, olds)
        for slot, row in enumerate(rows):
            if node not in row:
                continue
            for name, old in olds.items():
                for kind in (*source.contents.state[name], "step"):
                    value = local(old[f"{kind}.{node % source.contents.batches}"])
                    part = row[node] * value.to(torch.promote_types(value.dtype, torch.float32))
                    key = name, kind, slot
                    sums[key] = sums[key] + part if key in sums else part
    for (name, kind, slot), total in sums.items():
        own = states[name]
        if kind == "step":
            own[f"step.{slot}"].copy_(total.round())
            continue
        target = _fitted(own, f"{kind}.{slot}", source.kinds[state_key(name, kind, 0)].dtype)
        counts = not (target.is_floating_point() or target.is_complex())
        local(target).copy_(total.round() if counts else total)
    for own in states.values():
        own["arrived"] = 0


def _read(source: Stored, states: Mapping[str, State], node: int) -> dict[str, State]:
    """The state of an old node, with the slot that it had on its rank, laid out like the new."""
    slot = node % source.contents.batches
    olds: dict[str, State] = {}
    into = {}
    for name, own in states.items():
        olds[name] = {f"step.{slot}": _counter(source.contents.steps[name][node])}
        for kind in source.contents.state[name]:
            key = state_key(name, kind, node)
            into[key] = torch.empty_like(own[f"{kind}.0"], dtype=source.kinds[key].dtype)
            olds[name][f"{kind}.{slot}"] = into[key]
    source.read(into)
    return olds


def _counter(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _settings(
    contents: Contents, number: int, rows: Sequence[Mapping[int, float]], own: Group
) -> Group:
    """What a group takes over from the one that was saved; sums of sigma and rho are kept."""
    saved = {**contents.groups[0][number], **{name: own[name] for name in _OF_LAYOUT}}
    saved.update({**rounds.PROGRESS, "iteration": saved["iteration"] + contents.open})
    for name in PER_NODE:
        values = contents.per_node(number, name)
        if values is None:
            saved.pop(name, None)
        elif any(value != values[0] for value in values):
            saved[name] = [sum(part * values[node] for node, part in row.items()) for row in rows]
        else:
            each = name in ("sigma", "rho") and values[0] is not None
            saved[name] = [values[0]] * len(rows) if each else values[0]
    return unpack(saved, _device(own))


def add_pending(source: Stored, totals: Mapping[str, Tensor]) -> None:
    """Add to `totals`, by parameter, what all ranks have contributed in the open round."""
    for rank in range(source.contents.ranks):
        parts = {
            name: torch.empty_like(total)
            for name, total in totals.items()
            if source.contents.arrived[name][rank]
        }
        if not parts:
            continue
        source.read({state_key(name, "pending", rank): part for name, part in parts.items()})
        for name, part in parts.items():
            local(totals[name]).add_(local(part))


class _Closing:
    """The round that a group was saved in the middle of, and its end.

    Everything is done by the functions that close a round on one rank, node after node.
    """

    def __init__(self, source: Stored, number: int, optimizer: ConsensusOptimizer) -> None:
        self._source = source
        self._number = number
        own = optimizer.param_groups[number]
        self._groups = [
            {**own, **unpack(groups[number], _device(own))} for groups in source.contents.groups
        ]
        self._preconditioners = [optimizer.preconditioner(group) for group in self._groups]
        self.joint = any(preconditioner.joint for preconditioner in self._preconditioners)
        self._params: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}
        self._sigmas: dict[int, float] = {}  # S by parameter, where sigma follows gradients

    def begin(self, chunk: Named, states: Mapping[str, State]) -> None:
        """Add up what the batches of this round have contributed to some parameters."""
        # What no batch has reached is left alone.
        arrived = self._source.contents.arrived
        self._params = {name: param for name, param in chunk if any(arrived[name])}
        self._pending = {}
        for name in self._params:
            dtype = self._source.kinds[state_key(name, "dual", 0)].dtype
            self._pending[name] = torch.zeros_like(states[name]["dual.0"], dtype=dtype)
        add_pending(self._source, self._pending)

    def settle(self, node: int, states: Mapping[str, State]) -> None:
        """Let a node contribute what it has not yet, as is right for it."""
        contents = self._source.contents
        rank, slot = divmod(node, contents.batches)
        group, preconditioner = self._groups[rank], self._preconditioners[rank]
        everyone = (2 << contents.batches) - 1  # one bit more: so have other ranks
        members = []
        for name, param in self._params.items():
            state = states[name]
            missed = ~contents.arrived[name][rank] & 1 << slot
            state.update(pending=self._pending[name], arrived=everyone ^ missed)
            members.append(Member(param, None, state))
        members = rounds.here(group, members, preconditioner)
        rounds.settle(group, members, preconditioner)
        if rounds.follows(group):
            for member in members:
                key, share = id(member.origin), group["weights"][slot]
                sigma = float(member.state[f"sigma.{slot}"])
                self._sigmas[key] = self._sigmas.get(key, 0.0) + share * sigma

    def end(self, states: Mapping[str, State]) -> None:
        """Move the weights of what `begin` was told."""
        if not any(self._source.contents.took_part(self._number)):
            return
        group = self._groups[0]
        members = [
            Member(param, None, {**states[name], "pending": self._pending[name]})
            for name, param in self._params.items()
        ]
        members = rounds.here(group, members, self._preconditioners[0])
        if rounds.follows(group):
            totals = rounds.Totals({id(m.origin): self._sigmas[id(m.origin)] for m in members})
        else:
            names = ("sigma", "rho")
            sums = [sum(rounds.total(own, name) for own in self._groups) for name in names]
            totals = rounds.Totals(*sums)
        rounds.consensus(group, self._number, members, self._preconditioners[0], totals, None, {})
