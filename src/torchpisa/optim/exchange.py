"""A round over several ranks: who contributes what, in which order, and what follows from it.

Every rank joins every collective of every round, in the same order, whatever happened to its
batches: one that was left out contributes its dual. A parameter that no batch of any rank reached
is left alone, but a rank knows only its own batches when it has to contribute. So it contributes
what is right if another rank reached the parameter, and takes that back if none did.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.kernels.fused import Plans
from torchpisa.kernels.job import Member
from torchpisa.optim import rounds
from torchpisa.optim.ranks import BUCKET_BYTES, Lockstep, Ranks
from torchpisa.optim.rounds import Group, Totals
from torchpisa.preconditioners import Preconditioner

__all__ = ["Exchange"]


class _Doubt(NamedTuple):
    """A parameter that no batch of this rank reached, and its state before the contribution."""

    member: Member
    before: dict[str, Tensor]


class Exchange:
    """What is under way between the ranks in one round.

    Attributes:
        ranks: the ranks.
        begun: whether a step of this round has been taken in part.
        lockstep: whether all ranks step for the same batches.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.begun = False
        self.lockstep = Lockstep(ranks.size)
        self._sent: set[int] = set()
        self._doubts: dict[int, _Doubt] = {}
        self._unreached: set[int] = set()

    def send(
        self,
        groups: Sequence[Group],
        members: Sequence[list[Member]],
        preconditioners: Sequence[Preconditioner],
        limit: float = BUCKET_BYTES,
    ) -> None:
        """Complete what this rank's batches contribute to `members`, and send it.

        Args:
            groups: the parameter groups.
            members: some of their parameters, by group.
            preconditioners: of each group.
            limit: see `Ranks.send`.
        """
        for group, own, preconditioner in zip(groups, members, preconditioners, strict=True):
            for member in own:
                if member.state["arrived"]:
                    continue
                self._unreached.add(id(member.origin))
                if group["present"]:  # otherwise only duals are contributed, and nothing changes
                    self._doubts[id(member.origin)] = _Doubt(member, _copies(member))
            rounds.settle(group, own, preconditioner)
        together = [member for own in members for member in own]
        self._sent |= {id(member.origin) for member in together}
        self.ranks.send(together, limit)

    def close(
        self,
        groups: Sequence[Group],
        members: Sequence[list[Member]],
        preconditioners: Sequence[Preconditioner],
        problem: bool,
        plans: Plans,
    ) -> int:
        """Send the rest, wait for the others, and take the consensus.

        Args:
            groups: the parameter groups.
            members: all parameters with state, by group.
            preconditioners: of each group.
            problem: whether a batch of this rank was left out for a reason that is to be raised.
            plans: of the fused kernels.

        Returns:
            How many ranks had a problem, as far as this one was told.
        """
        rest = [[m for m in own if id(m.origin) not in self._sent] for own in members]
        self.send(groups, rest, preconditioners)
        everyone = [member for own in members for member in own]
        device = everyone[0].param.device if everyone else torch.device("cpu")
        kept = groups[0]["kept"]
        present: Scalar = groups[0]["present"].bit_count() if kept is None else kept.sum()
        reached = [float(id(member.origin) not in self._unreached) for member in everyone]
        # Where sigma follows gradients, one for each parameter. Of rho, only where the consensus
        # has a proximal term.
        own_totals: list[Scalar] = []
        counts = []
        for group, own, preconditioner in zip(groups, members, preconditioners, strict=True):
            if rounds.follows(group):
                values = list(rounds.sigmas_of(group, own).values())
            else:
                values = [rounds.total(group, "sigma")]
                if preconditioner.proximal is not None:
                    values.append(rounds.total(group, "rho"))
            own_totals += values
            counts.append(len(values))
        numbers = [*own_totals, present, float(problem), *reached, *self.lockstep.numbers]
        total = self.ranks.tally(numbers, device)
        self.ranks.receive()

        # The host reads the sums only if it has to, because that may mean to wait for a GPU: what
        # this rank's own batches have reached and moved needs no confirmation by others.
        told = device.type == "cpu" or bool(self._unreached) or not groups[0]["present"]
        sums: Sequence[Scalar] = total.tolist() if told else list(total.unbind())
        first = len(own_totals)  # of the other numbers
        moves = sums[first]
        keep = None
        if kept is not None and not told:
            keep = total[first] > 0
        all_members = members
        if told:
            counts_of = sums[first + 2 : first + 2 + len(everyone)]
            left = {id(m.origin) for m, n in zip(everyone, counts_of, strict=True) if not n}
            for key in left & self._doubts.keys():
                _restore(self._doubts[key])
            members = [[m for m in own if id(m.origin) not in left] for own in members]
        totals = iter(sums)
        for number, (group, own) in enumerate(zip(groups, members, strict=True)):
            values = list(islice(totals, counts[number]))
            if rounds.follows(group):
                keys = (id(member.origin) for member in all_members[number])
                summed = Totals(dict(zip(keys, values, strict=True)))
            else:
                summed = Totals(*values)
            if not told or moves:
                rounds.consensus(group, number, own, preconditioners[number], summed, keep, plans)
        for group in groups:
            rounds.finish(group, everyone)
        self.forget()
        self.lockstep.check(total[-2:], told)
        return int(sums[first + 1]) if told else int(problem)

    def forget(self) -> None:
        """Be ready for the next round."""
        self.begun = False
        self._sent.clear()
        self._doubts.clear()
        self._unreached.clear()


def _copies(member: Member) -> dict[str, Tensor]:
    return {
        key: value.clone()
        for key, value in member.state.items()
        if isinstance(value, Tensor) and key != "pending"
    }


def _restore(doubt: _Doubt) -> None:
    for key, value in doubt.before.items():
        doubt.member.state[key].copy_(value)
