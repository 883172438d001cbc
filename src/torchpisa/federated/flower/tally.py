"""The sum of a round: every update is checked before it can touch it."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import flwr.app
import torch
from flwr.app import MetricRecord

from torchpisa.federated.algorithms.base import Algorithm, Message, ServerState, add
from torchpisa.federated.flower.exchange import GONE, TOO_LARGE
from torchpisa.federated.flower.ledger import Ledger
from torchpisa.federated.flower.screen import Screen, Sizes, scale, sizes, template
from torchpisa.federated.flower.wire import (
    OversizeError,
    PayloadError,
    check_extent,
    entry,
    fields,
    numbers,
    weight,
)

__all__ = ["Round", "Tally", "weighted_mean"]

_log = logging.getLogger("flwr.torchpisa")


@dataclass(frozen=True)
class Round:
    """Who did what in a round.

    Attributes:
        number: from 1.
        present: clients whose update was taken.
        absent: clients that were to take part and did not, those rejected included.
        rejected: why an update was not taken, by client.
    """

    number: int
    present: list[str]
    absent: list[str]
    rejected: dict[str, str] = field(default_factory=dict)


class Tally:
    """Collects the updates of one round.

    The sum is kept in float64, so that the order of arrival does not show in float32. Updates are
    added as they arrive and forgotten, unless the screen has nothing to compare them with yet.

    Args:
        algorithm: the algorithm.
        server: as the round was opened with.
        screen: what is too large.
        samples: of every client.
        seed: of the training.
        ledger: where updates that were taken are entered, if anywhere.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        server: ServerState,
        screen: Screen,
        samples: Mapping[str, int],
        seed: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        self.present: list[str] = []
        self.rejected: dict[str, str] = {}
        self.oversized: set[str] = set()
        self._like = template(algorithm, server)
        self._scale = scale(server)
        self._algorithm = algorithm
        self._server = server
        self._screen = screen
        self._samples = samples
        self._shares = {name: n / sum(samples.values()) for name, n in samples.items()}
        self._seed = seed
        self._ledger = ledger
        self._total: Message | None = None
        self._seen: dict[str, Sizes] = {}
        self._held: dict[str, Message] = {}
        self._planned: dict[str, torch.Tensor] = {}
        self.metrics: dict[str, int | float] = {"bytes-up": 0, "gradients": 0, "samples": 0}

    def take(self, name: str, reply: flwr.app.Message) -> None:
        """Count an answer, unless there is something wrong with it."""
        if name in self._seen or name in self.rejected:
            _log.warning("a second answer of client %r in one round is ignored", name)
            return
        if reply.has_error() and reply.error.code in GONE:
            _log.warning("client %r has not answered: %s", name, reply.error.reason)
            return
        if reply.has_error():
            reason = str(reply.error.reason or f"error {reply.error.code}")
            if TOO_LARGE in reason:
                self.oversized.add(name)
            self._reject(name, reason)
            return
        try:
            check_extent(reply.content, self._like)
            update = self._read(name, reply.content)
        except Exception as error:  # whatever a client has made up must not end the run
            if isinstance(error, OversizeError):
                self.oversized.add(name)
            self.metrics["bytes-up"] += weight(reply.content)
            self._reject(name, str(error) or type(error).__name__)
            return
        self.metrics["bytes-up"] += update.bytes
        known = {} if self._ledger is None else self._ledger.sums.get(name, {})
        standing = self._algorithm.standing(self._server, update, known, self._steps(name))
        self._seen[name] = sizes(standing)
        if self._screen.knows:
            self._judge(name, update)
        else:
            self._held[name] = update

    def _read(self, name: str, content: flwr.app.RecordDict) -> Message:
        answered, claimed = entry(content, "iteration", int), entry(content, "name", str)
        iteration = self._server.iteration
        if (answered, claimed) != (iteration, name):
            raise PayloadError(
                f"this is update {answered} of client {claimed!r}, not update {iteration}"
            )
        found = numbers(content)
        if found.keys() != self._like.numbers.keys():
            raise PayloadError(f"numbers must be {list(self._like.numbers)}, got {list(found)}")
        expected = {
            key: float(value)
            for key, value in self._algorithm.numbers_after(self._steps(name)).items()
        }
        for key, value in expected.items():
            if not math.isclose(found[key], value, rel_tol=1e-6):
                raise PayloadError(
                    f"{key!r} must be {value:g} for {self._samples[name]} samples, got {found[key]}"
                )
        update = Message(fields(content, self._like.tensors), expected)
        for kind, tensors in update.tensors.items():
            for key, tensor in tensors.items():
                if not tensor.isfinite().all():
                    raise PayloadError(f"{kind} of {key!r} is not finite")
        self._count(content)
        return update

    def _steps(self, name: str) -> torch.Tensor:
        """How many local steps a client makes, which follows from how many samples it has."""
        if name not in self._planned:
            plan = self._algorithm.local.plan(
                self._samples[name], (self._seed, name), self._server.iteration
            )
            self._planned[name] = torch.tensor(float(len(plan)), dtype=torch.float64)
        return self._planned[name]

    def _count(self, content: flwr.app.RecordDict) -> None:
        for key in ("gradients", "samples"):
            self.metrics[key] += max(0, int(entry(content, key, int)))

    def _judge(self, name: str, update: Message) -> None:
        seen = list(self._seen.values())
        complaint = self._screen.complaint(self._seen[name], seen, self._scale)
        if complaint is not None:
            self._reject(name, complaint)
            return
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

    def close(self) -> tuple[Message | None, float]:
        """The sum of the updates taken, each times its share, and the sum of the shares."""
        for name, update in self._held.items():
            self._judge(name, update)
        self._held.clear()
        self._screen.close(list(self._seen.values()))
        share = sum(self._shares[name] for name in self.present)
        if self._total is None:
            return None, 0.0
        tensors = {
            kind: {key: t.to(self._like.tensors[kind][key].dtype) for key, t in tensors.items()}
            for kind, tensors in self._total.tensors.items()
        }
        return Message(tensors, self._total.numbers), share


def weighted_mean(found: Sequence[tuple[int, MetricRecord]]) -> MetricRecord | None:
    """The mean of every metric, over those who have it, by their numbers of samples."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for samples, metrics in found:
        for key, value in metrics.items():
            if isinstance(value, (int, float)):
                sums[key] = sums.get(key, 0.0) + samples * value
                counts[key] = counts.get(key, 0) + samples
    if not sums:
        return None
    return MetricRecord({key: value / counts[key] for key, value in sums.items()})
