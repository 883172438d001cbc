"""Check the updates of a round, and sum up those that pass."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import flwr.app
import torch
from flwr.app import MetricRecord

from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, ServerState, add
from torchpisa.federated.flower.exchange import NOT_ANSWERED, TOO_LARGE
from torchpisa.federated.flower.records import (
    OversizeError,
    PayloadError,
    array_bytes,
    check_size,
    read_entry,
    read_fields,
    read_numbers,
)
from torchpisa.federated.flower.screen import Screen, Sizes, norms, update_template, weight_scale
from torchpisa.federated.trust.ledger import Ledger
from torchpisa.federated.trust.robust import Judge

__all__ = ["Round", "RoundAggregation", "weighted_mean"]

_log = logging.getLogger("flwr.torchpisa")


@dataclass(frozen=True)
class Round:
    """The clients of a round, grouped by the fate of their updates.

    Attributes:
        number: the number of the round, from 1.
        present: clients with an accepted update.
        absent: clients of the round without one, rejected clients included.
        rejected: reasons for rejected updates, by client.
        late: the number of rounds by which an update was late, by client; these are present too.
    """

    number: int
    present: list[str]
    absent: list[str]
    rejected: dict[str, str] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)


class RoundAggregation:
    """The updates of one round, checked and summed up.

    The sum is in float64, so that the order of arrival does not change the result in float32.
    Updates are added as they arrive and then dropped. Only those that the screen finds too large,
    or cannot compare yet, are kept and judged again when all have arrived.

    Args:
        algorithm: the algorithm.
        server: the server as the round began.
        screen: limits on the size of updates.
        samples: the samples of every client.
        seed: the seed of the training.
        ledger: a ledger of accepted updates, or None.
        judge: rejects updates that no honest client would send, once all have arrived.
        shares: the share of every client; by default that of its samples.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        server: ServerState,
        screen: Screen,
        samples: Mapping[str, int],
        seed: int = 0,
        ledger: Ledger | None = None,
        judge: Judge | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.present: list[str] = []
        self.iterations: dict[str, int] = {}  # of the updates that arrived, by client
        self.rejected: dict[str, str] = {}
        self.oversized: set[str] = set()
        self.outliers: dict[str, str] = {}
        self._template = update_template(algorithm, server)
        self._scale = weight_scale(server)
        self._algorithm = algorithm
        self._server = server
        self._screen = screen
        self._samples = samples
        if shares is None:
            shares = {name: n / sum(samples.values()) for name, n in samples.items()}
        self._shares = shares
        self._seed = seed
        self._ledger = ledger
        self._judge = judge
        self._standings: dict[str, Fields] = {}
        self._total: Message | None = None
        self._sizes: dict[str, Sizes] = {}
        self._held_back: dict[str, Message] = {}
        self._too_large: dict[str, Message] = {}  # unless most are
        self._planned: dict[str, torch.Tensor] = {}
        self.metrics: dict[str, int | float] = {"bytes-up": 0, "gradients": 0, "samples": 0}

    @property
    def usable(self) -> int:
        """Return the number of updates that seem usable so far."""
        return len(self.present) + len(self._held_back)

    @property
    def late(self) -> dict[str, int]:
        """Return the number of rounds by which accepted updates were late."""
        return {name: age for name in self.present if (age := self._age(name))}

    def _age(self, name: str) -> int:
        return self._server.iteration - self.iterations[name]

    def receive(self, name: str, reply: flwr.app.Message, counting: range | None = None) -> None:
        """Add an answer to the sum, or record why it cannot be used.

        Args:
            name: the client.
            reply: its answer.
            counting: iterations of which an update counts; by default that of this round.
        """
        current = self._server.iteration
        counting = range(current, current + 1) if counting is None else counting
        if name in self._sizes or name in self.rejected:
            _log.warning("a second answer of client %r in one round is ignored", name)
            return
        if reply.has_error() and reply.error.code in NOT_ANSWERED:
            _log.warning("client %r has not answered: %s", name, reply.error.reason)
            return
        if reply.has_error():
            reason = str(reply.error.reason or f"error {reply.error.code}")
            if TOO_LARGE in reason:
                self.oversized.add(name)
            self._reject(name, reason)
            return
        try:
            check_size(reply.content, self._template)
            update = self._read_update(name, reply.content, counting)
        except Exception as error:  # nothing that a client sends may end the run
            if isinstance(error, OversizeError):
                self.oversized.add(name)
            self.metrics["bytes-up"] += array_bytes(reply.content)
            self._reject(name, str(error) or type(error).__name__)
            return
        self.metrics["bytes-up"] += update.bytes
        known = {} if self._ledger is None else self._ledger.sums.get(name, {})
        standing = self._algorithm.standing(self._server, update, known, self._local_steps(name))
        self._sizes[name] = norms(standing)
        if self._judge is not None:
            self._standings[name] = standing
        if self._judge is not None or not self._screen.has_history:
            self._held_back[name] = update
        elif self._complaint(name) is None:
            self._add(name, update)
        else:
            self._too_large[name] = update

    def _read_update(self, name: str, content: flwr.app.RecordDict, counting: range) -> Message:
        iteration = int(read_entry(content, "iteration", int))
        sender = read_entry(content, "name", str)
        if iteration not in counting or sender != name:
            wanted = f"{counting[0]}" if len(counting) == 1 else f"{counting[0]} to {counting[-1]}"
            raise PayloadError(
                f"this is update {iteration} of client {sender!r}, not update {wanted}"
            )
        self.iterations[name] = iteration
        received = read_numbers(content)
        if received.keys() != self._template.numbers.keys():
            raise PayloadError(
                f"numbers must be {list(self._template.numbers)}, got {list(received)}"
            )
        fields = read_fields(content, self._template.tensors)
        for kind, tensors in fields.items():
            for key, tensor in tensors.items():
                if not tensor.isfinite().all():
                    raise PayloadError(f"{kind} of {key!r} is not finite")
        numbers = self._algorithm.numbers_of(fields, self._local_steps(name))
        expected = {key: float(value) for key, value in numbers.items()}
        for key, value in expected.items():
            if not math.isclose(received[key], value, rel_tol=1e-6):
                raise PayloadError(
                    f"{key!r} must be {value:g} for {self._samples[name]} samples, "
                    f"got {received[key]}"
                )
        self._count_work(content)
        return Message(fields, expected)

    def _local_steps(self, name: str) -> torch.Tensor:
        """Return a client's number of local steps, which follows from that of its samples."""
        if name not in self._planned:
            plan = self._algorithm.local.plan(
                self._samples[name], (self._seed, name), self.iterations[name]
            )
            self._planned[name] = torch.tensor(float(len(plan)), dtype=torch.float64)
        return self._planned[name]

    def _count_work(self, content: flwr.app.RecordDict) -> None:
        for key in ("gradients", "samples"):
            self.metrics[key] += max(0, int(read_entry(content, key, int)))

    def _complaint(self, name: str) -> str | None:
        return self._screen.complaint(self._sizes[name], list(self._sizes.values()), self._scale)

    def _passes_screen(self, name: str) -> bool:
        complaint = self._complaint(name)
        if complaint is not None:
            self._reject(name, complaint)
        return complaint is None

    def _add(self, name: str, update: Message) -> None:
        double = Message(
            {
                kind: {key: tensor.double() for key, tensor in tensors.items()}
                for kind, tensors in update.tensors.items()
            },
            update.numbers,
        )
        self._total = add(self._total, double, self._shares[name])
        if self._ledger is not None:
            self._ledger.add(name, self._algorithm.contribution(update))
        self.present.append(name)

    def _reject(self, name: str, reason: str) -> None:
        _log.warning("the update of client %r is rejected: %s", name, reason)
        self.rejected[name] = reason

    def close(self, asked: int) -> tuple[Message | None, float]:
        """Return the sum of the accepted updates times their shares, and the sum of the shares.

        Args:
            asked: the number of clients that were asked, those without an answer included.
        """
        if self._screen.outgrown(list(self._sizes.values()), asked, self._scale):
            _log.warning(
                "most updates of round %d are more than %g times as large as those of recent "
                "rounds: they are compared with each other only",
                *(self._server.iteration + 1, self._screen.largest),
            )
            self._screen.forget()
        self._held_back |= self._too_large
        self._too_large.clear()
        passed = [name for name in self._held_back if self._passes_screen(name)]
        if self._judge is not None:
            standings = {name: self._standings[name] for name in passed}
            updates = {name: self._held_back[name] for name in passed}
            late = {name for name in passed if self._age(name)}
            self.outliers = self._judge.rejected(self._server, updates, standings, late)
        for name in passed:
            if name in self.outliers:
                self._reject(name, self.outliers[name])
            else:
                self._add(name, self._held_back[name])
        self._held_back.clear()
        self._standings.clear()
        self._screen.close(list(self._sizes.values()))
        share = sum(self._shares[name] for name in self.present)
        if self._total is None:
            return None, 0.0
        tensors = {
            kind: {key: t.to(self._template.tensors[kind][key].dtype) for key, t in tensors.items()}
            for kind, tensors in self._total.tensors.items()
        }
        return Message(tensors, self._total.numbers), share


def weighted_mean(measured: Sequence[tuple[int, MetricRecord]]) -> MetricRecord | None:
    """Return the mean of every metric over the clients that have it, weighted by their samples."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for samples, metrics in measured:
        for key, value in metrics.items():
            if isinstance(value, (int, float)):
                sums[key] = sums.get(key, 0.0) + samples * value
                counts[key] = counts.get(key, 0) + samples
    if not sums:
        return None
    return MetricRecord({key: value / counts[key] for key, value in sums.items()})
