"""Load the nodes of a checkpoint into an optimizer with the same nodes, or with others.

For others, an open round is closed first, as by `flush`. Then old and new nodes are laid side by
side on [0, 1), each with the length of its share alpha, and a new node takes the mean of the old
nodes that it overlaps, weighted by the overlap. This keeps weighted sums over all nodes, above all
that of the duals.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from torchpisa.distributed import dtensor
from torchpisa.distributed.checkpoint.contents import PER_NODE, Contents, unpack
from torchpisa.distributed.checkpoint.storage import Checkpoint
from torchpisa.distributed.dtensor import local
from torchpisa.distributed.process_group import Ranks
from torchpisa.kernels.dispatch import steps_local_parts
from torchpisa.kernels.job import Member
from torchpisa.optim.arguments import PENALTIES
from torchpisa.optim.pisa import PISA
from torchpisa.optim.round import Group, Part, Round, Totals, consensus, contribute_missing
from torchpisa.state_keys import node_key, state_key

__all__ = ["Named", "add_pending", "node_rank", "overlaps", "redistribute", "resume"]

Named = Sequence[tuple[str, Tensor]]
State = MutableMapping[str, Any]

# Settings that are not taken from the checkpoint, because they depend on the number of ranks.
_OF_LAYOUT = ("batches", "ranks", "weights", "capturable", "stochastic_rounding")
# The most elements of parameters whose state is read together, one node at a time.
_CHUNK = 2**26
# Ends of shares that are this close are the same but for rounding.
_SAME_POINT = 1e-12


def node_rank(optimizer: PISA) -> int:
    """Return the rank of this process among the ranks, or replicas, that hold the nodes."""
    return optimizer.peers.rank if isinstance(optimizer.peers, Ranks) else 0


def overlaps(old: Sequence[float], new: Sequence[float]) -> list[dict[int, float]]:
    """Return for each new node the coefficients of the old nodes in its mean.

    Args:
        old: alpha_i of the old nodes.
        new: alpha_i of the new ones.
    """
    ends = _ends(old)
    bounds = [0.0, *(_snapped(end, ends) for end in _ends(new))]
    rows = []
    for low, high in pairwise(bounds):
        lengths = {}
        for node, (start, end) in enumerate(pairwise([0.0, *ends])):
            if min(high, end) > max(low, start):
                lengths[node] = min(high, end) - max(low, start)
        if not lengths:  # the share is zero but for rounding
            lengths = {min(bisect_right(ends, low), len(ends) - 1): 1.0}
        total = sum(lengths.values())
        rows.append({node: length / total for node, length in lengths.items()})
    return rows


def _ends(shares: Sequence[float]) -> list[float]:
    *ends, total = accumulate(shares)
    return [*(end / total for end in ends), 1.0]


def _snapped(point: float, to: Sequence[float]) -> float:
    nearest = min(to, key=lambda other: abs(other - point))
    return nearest if abs(nearest - point) < _SAME_POINT else point


# The same nodes


@torch.no_grad()
def resume(source: Checkpoint, named: Sequence[Named], optimizer: PISA) -> None:
    """Restore the nodes of this rank, also in the middle of a round."""
    contents = source.contents
    rank, batches = node_rank(optimizer), contents.batches
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


def _states(source: Checkpoint, entries: Named, optimizer: PISA, group: Group) -> dict[str, State]:
    """Return the state of each parameter that has saved state; reset the state of others."""
    states: dict[str, State] = {}
    for name, param in entries:
        saved = name in source.contents.state
        if saved != optimizer.has_state(param):
            optimizer.init_state([param], group)
        if saved:
            optimizer.member(param, None, group)  # moves the state to the parameter's device
            states[name] = optimizer.state[param]
    return states


def _fitted(state: State, key: str, dtype: torch.dtype) -> Tensor:
    """Return an entry of `state`, replaced if it was saved with another dtype."""
    if state[key].dtype != dtype:
        state[key] = torch.empty_like(state[key], dtype=dtype)
    tensor: Tensor = state[key]
    return tensor


def _device(group: Group) -> torch.device:
    return group["params"][0].device if group["params"] else torch.device("cpu")


# Other nodes


@torch.no_grad()
def redistribute(source: Checkpoint, named: Sequence[Named], optimizer: PISA) -> None:
    """Give each node of this rank its mean of the old ones; the model is loaded already."""
    contents, ranks = source.contents, optimizer.peers
    shares = optimizer.param_groups[0]["weights"]
    if isinstance(ranks, Ranks):
        shares = ranks.all_shares
    first = node_rank(optimizer) * optimizer.batches
    rows = overlaps(contents.shares, shares)[first : first + optimizer.batches]
    for number, (group, entries) in enumerate(zip(optimizer.param_groups, named, strict=True)):
        states = _states(source, entries, optimizer, group)
        for part in (part for part in optimizer.parts() if part.group_index == number):
            members = {id(param) for param in part.params}
            saved = [(name, p) for name, p in entries if name in states and id(p) in members]
            closing = _Closing(source, part) if contents.open else None
            for chunk in _chunks(saved, joint=closing is not None and closing.joint):
                chunk_states = {name: states[name] for name, _ in chunk}
                if closing is not None:
                    closing.begin(chunk, chunk_states)
                _average(source, chunk_states, rows, closing)
                if closing is not None:
                    closing.end(chunk_states)
        group.update(_settings(contents, number, rows, group))
    optimizer.round = Round(contents.groups[0][0]["iteration"] + contents.open)
    if contents.open and isinstance(ranks, Ranks):
        # All have computed the same, but perhaps not on the same hardware.
        ranks.broadcast([param for entries in named for _, param in entries])


def _chunks(entries: Named, joint: bool) -> Iterator[Named]:
    chunk: list[tuple[str, Tensor]] = []
    elements = 0
    for name, param in entries:
        if chunk and not joint and elements + param.numel() > _CHUNK:
            yield chunk
            chunk, elements = [], 0
        chunk.append((name, param))
        elements += param.numel()
    if chunk:
        yield chunk


def _average(
    source: Checkpoint,
    states: Mapping[str, State],
    rows: Sequence[Mapping[int, float]],
    closing: "_Closing | None",
) -> None:
    """Write into `states` the means with the coefficients `rows`, by slot.

    Old nodes are read one after the other, so that only one of them is in memory.
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


def _read(source: Checkpoint, states: Mapping[str, State], node: int) -> dict[str, State]:
    """Return the state of an old node, under its old slot, in the layouts of `states`."""
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
    """Return the saved settings for a group; weighted sums of sigma and rho are kept."""
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


def add_pending(source: Checkpoint, totals: Mapping[str, Tensor]) -> None:
    """Add to `totals`, by parameter, the contributions of all ranks to the open round."""
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
    """Closes a round in the middle of which a checkpoint was saved.

    It calls the functions that close a round on one rank, node by node.
    """

    def __init__(self, source: Checkpoint, part: Part) -> None:
        self._source = source
        self._group_index = part.group_index
        self._parts: list[Part] = []
        self._rounds: list[Round] = []
        for groups in source.contents.groups:
            settings, round = unpack(groups[part.group_index], _device(part.group))
            group = {**part.group, **settings}
            self._parts.append(Part(part.group_index, group, part.params, part.rule))
            self._rounds.append(round)
        self.joint = any(each.preconditioner.joint for each in self._parts)
        self._params: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}
        self._sigmas: dict[int, float] = {}  # S by parameter, where sigma follows gradients

    def begin(self, chunk: Named, states: Mapping[str, State]) -> None:
        """Add up the contributions to the open round, for some parameters."""
        # Parameters without a gradient in any batch do not change.
        arrived = self._source.contents.arrived
        self._params = {name: param for name, param in chunk if any(arrived[name])}
        self._pending = {}
        for name in self._params:
            dual = states[name][state_key("dual", 0)]
            dtype = self._source.kinds[node_key(name, "dual", 0)].dtype
            self._pending[name] = torch.zeros_like(dual, dtype=dtype)
        add_pending(self._source, self._pending)

    def contribute(self, node: int, states: Mapping[str, State]) -> None:
        """Add the contribution of a node, unless it is part of the sum already."""
        contents = self._source.contents
        rank, slot = divmod(node, contents.batches)
        part = self._parts[rank]
        all_arrived = (2 << contents.batches) - 1  # with one more bit, for the other ranks
        members = []
        for name, param in self._params.items():
            state = states[name]
            missed = ~contents.arrived[name][rank] & 1 << slot
            state.update(pending=self._pending[name], arrived=all_arrived ^ missed)
            members.append(Member(param, None, state))
        members = _local_parts(part, members)
        contribute_missing(part, members, self._rounds[rank])
        if part.sigma_follows:
            for member in members:
                key, share = id(member.origin), part.group["weights"][slot]
                sigma = float(member.state[state_key("sigma", slot)])
                self._sigmas[key] = self._sigmas.get(key, 0.0) + share * sigma

    def end(self, states: Mapping[str, State]) -> None:
        """Take the consensus for the parameters of `begin`."""
        if not any(self._source.contents.present(self._group_index)):
            return
        part = self._parts[0]
        members = [
            Member(param, None, {**states[name], "pending": self._pending[name]})
            for name, param in self._params.items()
        ]
        members = _local_parts(part, members)
        if part.sigma_follows:
            totals = Totals({id(m.origin): self._sigmas[id(m.origin)] for m in members})
        else:
            sigma = sum(each.total(each.sigmas) for each in self._parts)
            totals = Totals(sigma, sum(each.total(each.rhos) for each in self._parts))
        consensus(part, members, totals, None, {})


def _local_parts(part: Part, members: list[Member]) -> list[Member]:
    """Return the local parts of members if those are what is stepped."""
    if not steps_local_parts(part.group, part.preconditioner):
        return members
    return [dtensor.local_member(member) for member in members]
