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

from torchpisa.distributed import dtensor
from torchpisa.distributed.checkpoint.contents import PER_NODE, Contents, unpack
from torchpisa.distributed.checkpoint.stored import Stored
from torchpisa.distributed.dtensor import local
from torchpisa.distributed.process_group import Ranks
from torchpisa.kernels.dispatch import steps_parts
from torchpisa.kernels.job import Member
from torchpisa.optim.arguments import PENALTIES
from torchpisa.optim.pisa import PISA
from torchpisa.optim.round import Group, Part, Round, Totals, consensus, contribute_missing
from torchpisa.state_keys import node_key, state_key

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


def rank_of(optimizer: PISA) -> int:
    """Return which of the ranks, or replicas, that hold the nodes this process belongs to."""
    return optimizer.peers.rank if isinstance(optimizer.peers, Ranks) else 0


def overlaps(old: Sequence[float], new: Sequence[float]) -> list[dict[int, float]]:
    """Return for each new node the old ones that it takes its mean of, with their coefficients.

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
def resume(source: Stored, named: Sequence[Named], optimizer: PISA) -> None:
    """Put this rank's nodes back as they were, in the middle of a round too."""
    contents = source.contents
    rank, batches = rank_of(optimizer), contents.batches
    if isinstance(optimizer.peers, Ranks):
        optimizer.peers.all_shares = contents.shares
    into: dict[str, Tensor] = {}
    for number, (group, entries) in enumerate(zip(optimizer.param_groups, named, strict=True)):
        settings, optimizer.round = unpack(contents.groups[rank][number], _device(group))
        group.update(settings)
        for name, state in _states(source, entries, optimizer, group).items():
            for slot in range(batches):
                node = rank * batches + slot
                for kind in contents.state[name]:
                    key = node_key(name, kind, node)
                    into[key] = _fitted(state, state_key(kind, slot), source.kinds[key].dtype)
                state[state_key("step", slot)].fill_(contents.steps[name][node])
            state["arrived"] = contents.arrived[name][rank]
            if state["arrived"]:
                key = node_key(name, "pending", rank)
                into[key] = _fitted(state, "pending", source.kinds[key].dtype)
    source.read(into)


def _states(source: Stored, entries: Named, optimizer: PISA, group: Group) -> dict[str, State]:
    """Return the state of each parameter that was saved with one; others start afresh."""
    states: dict[str, State] = {}
    for name, param in entries:
        saved = name in source.contents.state
        if saved != optimizer.has_state(param):
            optimizer.init_state([param], group)
        if saved:
            optimizer.member(param, None, group)  # moves it to the parameter's device
            states[name] = optimizer.state[param]
    return states


def _fitted(state: State, key: str, dtype: torch.dtype) -> Tensor:
    """Return an entry of `state`, in the dtype that it was saved with."""
    if state[key].dtype != dtype:
        state[key] = torch.empty_like(state[key], dtype=dtype)
    tensor: Tensor = state[key]
    return tensor


def _device(group: Group) -> torch.device:
    return group["params"][0].device if group["params"] else torch.device("cpu")


# Other nodes


@torch.no_grad()
def share_out(source: Stored, named: Sequence[Named], optimizer: PISA) -> None:
    """Give this rank's nodes their means of the old ones; the model is as it was saved."""
    contents, ranks = source.contents, optimizer.peers
    shares = optimizer.param_groups[0]["weights"]
    if isinstance(ranks, Ranks):
        shares = ranks.all_shares
    first = rank_of(optimizer) * optimizer.batches
    rows = overlaps(contents.shares, shares)[first : first + optimizer.batches]
    for number, (group, entries) in enumerate(zip(optimizer.param_groups, named, strict=True)):
        states = _states(source, entries, optimizer, group)
        for part in (part for part in optimizer.parts() if part.number == number):
            members = {id(param) for param in part.params}
            saved = [(name, p) for name, p in entries if name in states and id(p) in members]
            closing = _Closing(source, part) if contents.open else None
            for chunk in _chunks(saved, whole=closing is not None and closing.joint):
                some = {name: states[name] for name, _ in chunk}
                if closing is not None:
                    closing.begin(chunk, some)
                _average(source, some, rows, closing)
                if closing is not None:
                    closing.end(some)
        group.update(_settings(contents, number, rows, group))
    optimizer.round = Round(contents.groups[0][0]["iteration"] + contents.open)
    if contents.open and isinstance(ranks, Ranks):
        # All have computed the same, but perhaps not on the same hardware.
        ranks.broadcast([param for entries in named for _, param in entries])


def _chunks(entries: Named, whole: bool) -> Iterator[Named]:
    chunk: list[tuple[str, Tensor]] = []
    elements = 0
    for name, param in entries:
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
            closing.contribute(node, olds)
        for slot, row in enumerate(rows):
            if node not in row:
                continue
            for name, old in olds.items():
                for kind in (*source.contents.state[name], "step"):
                    value = local(old[state_key(kind, node % source.contents.batches)])
                    part = row[node] * value.to(torch.promote_types(value.dtype, torch.float32))
                    key = name, kind, slot
                    sums[key] = sums[key] + part if key in sums else part
    for (name, kind, slot), total in sums.items():
        state = states[name]
        if kind == "step":
            state[state_key("step", slot)].copy_(total.round())
            continue
        dtype = source.kinds[node_key(name, kind, 0)].dtype
        target = _fitted(state, state_key(kind, slot), dtype)
        counts = not (target.is_floating_point() or target.is_complex())
        local(target).copy_(total.round() if counts else total)
    for state in states.values():
        state["arrived"] = 0


def _read(source: Stored, states: Mapping[str, State], node: int) -> dict[str, State]:
    """Return the state of an old node, in the slot that it had on its rank, laid out like new."""
    slot = node % source.contents.batches
    olds: dict[str, State] = {}
    into = {}
    for name, state in states.items():
        steps = source.contents.steps[name][node]
        olds[name] = {state_key("step", slot): torch.tensor(steps, dtype=torch.float32)}
        for kind in source.contents.state[name]:
            key, first = node_key(name, kind, node), state[state_key(kind, 0)]
            into[key] = torch.empty_like(first, dtype=source.kinds[key].dtype)
            olds[name][state_key(kind, slot)] = into[key]
    source.read(into)
    return olds


def _settings(
    contents: Contents, number: int, rows: Sequence[Mapping[int, float]], group: Group
) -> Group:
    """Return what a group takes over from a saved one; sums of sigma and rho are kept."""
    saved = {**contents.groups[0][number], **{name: group[name] for name in _OF_LAYOUT}}
    for name in PER_NODE:
        values = contents.per_node(number, name)
        if values is None:
            saved.pop(name, None)
        elif any(value != values[0] for value in values):
            saved[name] = [sum(part * values[node] for node, part in row.items()) for row in rows]
        else:
            each = name in PENALTIES and values[0] is not None
            saved[name] = [values[0]] * len(rows) if each else values[0]
    return unpack(saved, _device(group))[0]


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
        source.read({node_key(name, "pending", rank): part for name, part in parts.items()})
        for name, part in parts.items():
            local(totals[name]).add_(local(part))


class _Closing:
    """The round that some parameters were saved in the middle of, and its end.

    Everything is done by the functions that close a round on one rank, node after node.
    """

    def __init__(self, source: Stored, part: Part) -> None:
        self._source = source
        self._number = part.number
        self._parts: list[Part] = []
        self._rounds: list[Round] = []
        for groups in source.contents.groups:
            settings, round = unpack(groups[part.number], _device(part.group))
            group = {**part.group, **settings}
            self._parts.append(Part(part.number, group, part.params, part.rule))
            self._rounds.append(round)
        self.joint = any(each.preconditioner.joint for each in self._parts)
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
            dual = states[name][state_key("dual", 0)]
            dtype = self._source.kinds[node_key(name, "dual", 0)].dtype
            self._pending[name] = torch.zeros_like(dual, dtype=dtype)
        add_pending(self._source, self._pending)

    def contribute(self, node: int, states: Mapping[str, State]) -> None:
        """Let a node contribute what it has not yet, as is right for it."""
        contents = self._source.contents
        rank, slot = divmod(node, contents.batches)
        part = self._parts[rank]
        everyone = (2 << contents.batches) - 1  # one bit more: so have other ranks
        members = []
        for name, param in self._params.items():
            state = states[name]
            missed = ~contents.arrived[name][rank] & 1 << slot
            state.update(pending=self._pending[name], arrived=everyone ^ missed)
            members.append(Member(param, None, state))
        members = _held(part, members)
        contribute_missing(part, members, self._rounds[rank])
        if part.follows:
            for member in members:
                key, share = id(member.origin), part.group["weights"][slot]
                sigma = float(member.state[state_key("sigma", slot)])
                self._sigmas[key] = self._sigmas.get(key, 0.0) + share * sigma

    def end(self, states: Mapping[str, State]) -> None:
        """Move the weights of what `begin` was told."""
        if not any(self._source.contents.took_part(self._number)):
            return
        part = self._parts[0]
        members = [
            Member(param, None, {**states[name], "pending": self._pending[name]})
            for name, param in self._params.items()
        ]
        members = _held(part, members)
        if part.follows:
            totals = Totals({id(m.origin): self._sigmas[id(m.origin)] for m in members})
        else:
            sigma = sum(each.total(each.sigmas) for each in self._parts)
            totals = Totals(sigma, sum(each.total(each.rhos) for each in self._parts))
        consensus(part, members, totals, None, {})


def _held(part: Part, members: list[Member]) -> list[Member]:
    """Return what this process holds of members, if that is how they are stepped."""
    if not steps_parts(part.group, part.preconditioner):
        return members
    return [dtensor.part(member) for member in members]
