"""The server: a Flower strategy for every algorithm of `torchpisa.federated`."""

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    Metadata,
    MetricRecord,
    MetricRecordValues,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from torchpisa.checks import check_count, check_range
from torchpisa.data import permutation
from torchpisa.federated.algorithms import base
from torchpisa.federated.algorithms.base import Algorithm, ServerState, Tensors
from torchpisa.federated.flower import checkpoint as checkpoints
from torchpisa.federated.flower.exchange import exchange
from torchpisa.federated.flower.roster import Client, Roster
from torchpisa.federated.flower.screen import Screen
from torchpisa.federated.flower.tally import Round, Tally, weighted_mean
from torchpisa.federated.flower.wire import HEAD, arrays_of, records, tensors_of

__all__ = ["FederatedStrategy"]

_log = logging.getLogger("flwr.torchpisa")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

_CLOCKS = 60.0
"""Seconds that the clocks of two machines may differ by: messages live so much longer."""


class FederatedStrategy(Strategy):
    r"""Federated training with any algorithm of `torchpisa.federated`.

    Before the first round, nodes are asked for the name and the number of samples of their client,
    since \(\alpha_i = n_i / n\) must be known. From then on a client that is not there, too late,
    or has sent something unusable is absent: it stays in the sums with what it last contributed,
    and the round goes on. Clients that join later are admitted.

    Args:
        algorithm: the algorithm; clients must have the same.
        clients: training starts when so many clients have introduced themselves.
        deadline: seconds that a round may take. Clients that have not answered then are absent.
        patience: seconds that `clients` clients may take to introduce themselves at the start.
        checkpoint: a file that is written after every round, before anybody is told about it. If
            it exists, the training goes on from there: a server that is started again, with the
            same arguments and as a new run, loses nothing.
        participation: the share of the clients that is drawn for every round, at least one.
        seed: decides how clients shuffle their data and who takes part.
        screen: what is too large to be an update.
        evaluate: ask clients to evaluate the global model after every round.
        poll: seconds between two looks for answers.

    Attributes:
        server: weights, memory and numbers of the server.
        rounds: who did what in each round of this run.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        clients: int,
        deadline: float = 600.0,
        patience: float = 600.0,
        checkpoint: str | os.PathLike[str] | None = None,
        participation: float = 1.0,
        seed: int = 0,
        screen: Screen | None = None,
        evaluate: bool = False,
        poll: float = 0.5,
    ) -> None:
        check_count("clients", clients)
        check_range("deadline", deadline, 0, low_open=True, high_open=True)
        check_range("patience", patience, 0, high_open=True)
        check_range("participation", participation, 0, 1, low_open=True)
        check_count("seed", seed, 0)
        check_range("poll", poll, 0, low_open=True, high_open=True)
        self.algorithm = algorithm
        self.rounds: list[Round] = []
        self._least = clients
        self._deadline = deadline
        self._patience = patience
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._participation = participation
        self._seed = seed
        self._screen = Screen() if screen is None else screen
        self._evaluate = evaluate
        self._poll = poll
        self._training = uuid.uuid4().hex
        self._server: ServerState | None = None
        self._opened: ServerState | None = None
        self._roster = Roster(min(deadline, 60.0), self._admit)
        self._chosen: list[str] = []
        self._sent: list[tuple[Metadata, str]] = []
        self._bytes_down = 0

    @property
    def server(self) -> ServerState:
        """Weights, memory and numbers of the server."""
        if self._server is None:
            raise RuntimeError("there is no server state before start(), which makes or loads it")
        return self._server

    @property
    def clients(self) -> dict[str, Client]:
        """The clients by name."""
        return self._roster.clients

    # The run

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Train until `num_rounds` rounds are done, those before an interruption included.

        Args:
            grid: Flower's.
            initial_arrays: `torchpisa.federated.flower.arrays(model)`.
            num_rounds: rounds in all.
            timeout: seconds that a round may take, if less than `deadline`.
            train_config: goes to clients with every train message, as record `"config"`.
            evaluate_config: likewise, with every evaluate message.
            evaluate_fn: measures the global model before the first and after every round.

        Returns:
            The arrays, and the metrics of the rounds of this run.
        """
        check_count("num_rounds", num_rounds, 0)
        if self._server is not None:
            raise RuntimeError("a strategy can be started once: make a new one for a new training")
        self._begin(initial_arrays)
        self.summary()
        result = Result()
        result.arrays = arrays_of(self.server.weights)
        seconds = min(self._deadline, timeout)
        if self.server.iteration < num_rounds:
            self._gather(grid)
        self._measure(evaluate_fn, result)
        while self.server.iteration < num_rounds:
            number = self.server.iteration + 1
            config = ConfigRecord() if train_config is None else train_config
            messages = self.configure_train(number, result.arrays, config, grid)
            replies = exchange(grid, messages, seconds, self._poll)
            arrays, metrics = self.aggregate_train(number, replies)
            result.arrays = result.arrays if arrays is None else arrays
            result.train_metrics_clientapp[number] = metrics
            _log.info("round %d of %d: %s", number, num_rounds, dict(metrics))
            config = ConfigRecord() if evaluate_config is None else evaluate_config
            messages = self.configure_evaluate(number, result.arrays, config, grid)
            found = self.aggregate_evaluate(number, exchange(grid, messages, seconds, self._poll))
            if found is not None:
                result.evaluate_metrics_clientapp[number] = found
            self._measure(evaluate_fn, result)
        return result

    def _begin(self, initial: ArrayRecord) -> None:
        weights: Tensors = tensors_of(initial)
        saved = None
        if self._checkpoint is not None:
            saved = checkpoints.load(self._checkpoint, self.algorithm, self._seed, weights)
        if saved is None:
            self._server = self.algorithm.start(weights)
            return
        self._training, self._server = saved.training, saved.server
        for name, (samples, accepted) in saved.clients.items():
            self._roster.clients[name] = Client(name, samples, accepted)
        _log.info("going on after round %d", self.server.iteration)

    def _gather(self, grid: Grid) -> None:
        """Wait until enough clients are there, but not forever."""
        resumed = bool(self.clients)
        end = time.monotonic() + self._patience
        while True:
            self._roster.update(grid)
            found = [client.name for client in self._roster.reachable]
            if len(found) >= self._least:
                return
            if time.monotonic() >= end:
                break
            time.sleep(self._poll)
        if not resumed:
            raise TimeoutError(
                f"clients={self._least} clients must introduce themselves within "
                f"patience={self._patience:g} s, got {len(found)}: {found}"
            )
        _log.warning("going on with %d clients of %d: %s", len(found), len(self.clients), found)

    def _measure(self, evaluate_fn: EvaluateFn | None, result: Result) -> None:
        if evaluate_fn is None:
            return
        found = evaluate_fn(self.server.iteration, result.arrays)
        _log.info("after round %d: %s", self.server.iteration, found)
        if found is not None:
            result.evaluate_metrics_serverapp[self.server.iteration] = found

    def _admit(self, client: Client) -> None:
        before = self._roster.samples
        if before:
            after = before + client.samples
            self._server = self.algorithm.admit(self.server, before, after)
        _log.info("client %r has joined with %d samples", client.name, client.samples)

    # A round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """What the clients of this round are told; those that are offline are left out."""
        present = self._reach(grid)
        self._opened = self.algorithm.open(self.server)
        down = self.algorithm.broadcast(self._opened)
        about: dict[str, str | int] = {
            "training": self._training,
            "algorithm": self.algorithm.fingerprint,
            "seed": self._seed,
            "iteration": self.server.iteration,
        }
        content = records(down, about)
        messages = []
        for client, node in present:
            # The arrays are shared by all messages, and Flower sends them to the SuperLink once.
            own = RecordDict(dict(content.items()))
            own[HEAD] = ConfigRecord({**content.config_records[HEAD], "accepted": client.accepted})
            messages.append(self._message(own, MessageType.TRAIN, node, server_round, config))
        # Only what Flower says about them: their ids are not known before they are sent.
        metadata = [message.metadata for message in messages]
        names = [client.name for client, _ in present]
        self._sent = list(zip(metadata, names, strict=True))
        self._bytes_down = len(messages) * down.bytes
        return messages

    def _reach(self, grid: Grid) -> list[tuple[Client, int]]:
        """Who of those drawn is online. If no client is, wait for one until the deadline."""
        end = time.monotonic() + self._deadline
        self._roster.update(grid)
        # Otherwise all rounds of a training would be over before the network is back.
        while not self._roster.reachable and time.monotonic() < end:
            time.sleep(self._poll)
            self._roster.update(grid)
        self._chosen = self._draw(self.server.iteration)
        return [
            (client, client.node)
            for client in self._roster.reachable
            if client.name in self._chosen and client.node is not None
        ]

    def _draw(self, iteration: int) -> list[str]:
        names = self._roster.names
        if not names:
            return []
        count = max(1, round(self._participation * len(names)))
        if count == len(names):
            return names
        order = permutation(len(names), "participation", self._seed, iteration)
        return [names[i] for i in sorted(order[:count].tolist())]

    def _message(
        self, content: RecordDict, kind: str, node: int, server_round: int, config: ConfigRecord
    ) -> Message:
        if config:
            content["config"] = config
        life = self._deadline + _CLOCKS
        return Message(content, node, kind, ttl=life, group_id=str(server_round))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Sum up what is usable, close the round and make it durable."""
        if self._opened is None:
            raise RuntimeError("aggregate_train() comes after configure_train()")
        shares = {
            name: client.samples / self._roster.samples for name, client in self.clients.items()
        }
        tally = Tally(self.algorithm, self._opened, self._screen, shares)
        for reply in replies:
            name = self._sender(reply)
            if name is None:
                _log.warning("an answer to a message of another round is ignored")
                continue
            tally.take(name, reply)
        total, share = tally.close()
        if total is None:
            self._server = self.algorithm.skip(self._opened)
        else:
            self._server = self.algorithm.close(self._opened, total, share)
        self._finite()
        for name in tally.present:
            self.clients[name].accepted = self._opened.iteration
        self._opened = None
        self._save()
        absent = self._roster.lost(self._chosen, tally.present)
        self.rounds.append(Round(server_round, sorted(tally.present), absent, tally.rejected))
        metrics: dict[str, MetricRecordValues] = {
            "present": len(tally.present),
            "absent": len(absent),
            "rejected": len(tally.rejected),
            "share": share,
            "bytes-down": self._bytes_down,
            **tally.metrics,
        }
        return arrays_of(self.server.weights), MetricRecord(metrics)

    def _sender(self, reply: Message) -> str | None:
        """The client that an answer must be of, going by the message that it answers."""
        answered = reply.metadata.reply_to_message_id
        return next((name for sent, name in self._sent if sent.message_id == answered), None)

    def _finite(self) -> None:
        for name, weight in self.server.weights.items():
            if not weight.isfinite().all():
                raise FloatingPointError(
                    f"{name!r} is not finite after round {self.server.iteration}, which is not "
                    "saved: a larger sigma or a smaller lr keeps it from growing"
                )

    def _save(self) -> None:
        if self._checkpoint is None:
            return
        clients = {name: (c.samples, c.accepted) for name, c in self.clients.items()}
        checkpoints.save(
            self._checkpoint,
            self.algorithm,
            self._seed,
            checkpoints.Checkpoint(self._training, self.server, clients),
        )

    # Evaluation by clients

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask everybody who is online, if evaluation is asked for."""
        self._sent = []
        if not self._evaluate:
            return []
        content = records(base.Message({"weights": tensors_of(arrays)}, {}), {})
        messages = []
        for client in self._roster.reachable:
            if client.node is None:
                continue
            own, kind = RecordDict(dict(content.items())), MessageType.EVALUATE
            message = self._message(own, kind, client.node, server_round, config)
            messages.append(message)
            self._sent.append((message.metadata, client.name))
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean of what clients have measured, by their numbers of samples."""
        found = []
        for reply in replies:
            name = self._sender(reply)
            if name is None or reply.has_error():
                reason = reply.error.reason if reply.has_error() else "it was not asked"
                _log.warning("client %r did not evaluate: %s", name, reason)
            elif "metrics" in reply.content.metric_records:
                measured = reply.content.metric_records["metrics"]
                found.append((self.clients[name].samples, measured))
        return weighted_mean(found)

    def summary(self) -> None:
        """Log what this is."""
        _log.info("%s, training %s", self.algorithm.fingerprint, self._training)
        _log.info(
            "at least %d clients at the start, %g s per round, share %g of the clients, seed %d",
            self._least,
            self._deadline,
            self._participation,
            self._seed,
        )
