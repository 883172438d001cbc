"""The Flower strategy, which is the server of every algorithm of `torchpisa.federated`."""

import logging
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import NamedTuple

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

from torchpisa.checks import check_choice, check_count, check_range
from torchpisa.data import permutation
from torchpisa.federated.algorithms import base
from torchpisa.federated.algorithms.base import Algorithm, ServerState, Tensors
from torchpisa.federated.flower import checkpoint as checkpoints
from torchpisa.federated.flower.aggregation import Round, RoundAggregation, weighted_mean
from torchpisa.federated.flower.checkpoint import Checkpoint
from torchpisa.federated.flower.exchange import Inbox, exchange
from torchpisa.federated.flower.records import (
    DTYPES,
    HEAD,
    arrays_of,
    size_limit,
    tensors_of,
    to_records,
)
from torchpisa.federated.flower.roster import Admission, Client, Roster
from torchpisa.federated.flower.screen import Screen, update_template
from torchpisa.federated.trust.ledger import Ledger, without_contribution
from torchpisa.federated.trust.privacy import GaussianNoise, PrivacyAccount
from torchpisa.federated.trust.robust import Judge, RobustSelection

__all__ = ["FederatedStrategy", "NobodyTrainsError"]

_log = logging.getLogger("flwr.torchpisa")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

_CLOCK_SKEW = 60.0
"""Seconds by which the clocks of two machines may differ; messages stay valid so much longer."""

_MAX_STRIKES = 2
"""Oversized answers in a row after which a client is put aside."""

_LOW_SHARE = 0.5
"""Share of the samples below which a round triggers a warning."""


class NobodyTrainsError(RuntimeError):
    """Raised if all reachable clients refuse to train."""


class TrainRequest(NamedTuple):
    """A train message that was sent.

    Attributes:
        metadata: metadata of the message; its id is not known before it is sent.
        client: the client's name.
        node: the client's node.
        iteration: the iteration of the requested update.
        exchange: the number of exchanges of messages before this one.
    """

    metadata: Metadata
    client: str
    node: int
    iteration: int
    exchange: int


class FederatedStrategy(Strategy):
    r"""A Flower strategy for any algorithm of `torchpisa.federated`.

    Before the first round the server asks all nodes for the name and the number of samples of their
    client, because it must know \(\alpha_i = n_i / n\). From then on a client is absent if it is
    offline, too late, or sends an unusable update: its last contribution stays in the sums, and the
    round goes on. Clients may join later. A round without a usable update is repeated and does not
    count. If all clients refuse, the run ends with their reasons.

    With `staleness`, a late answer still counts once, when it arrives; until then its client gets
    no other request. With `enough` as well, training is asynchronous.

    Args:
        algorithm: the algorithm; clients must have the same.
        clients: the number of clients that must have registered before training starts.
        deadline: seconds after which a round ends. Clients that have not answered are absent.
        patience: seconds to wait for `clients` clients at the start, and to repeat a round beyond
            its deadline while there is no usable answer.
        enough: the number of updates that end a round before its deadline.
        staleness: the number of rounds by which an answer may be late and still count. With 0, a
            late answer is dropped, and its client goes on from its memory before the round.
        checkpoint: a file that is written after every round, before any client is told about it.
            If it exists, training resumes from it: a server that is started again with the same
            arguments, as a new run, loses nothing. Two runs cannot use it at the same time.
        participation: the fraction of the clients that is drawn for every round, at least one
            client.
        seed: seed of the clients' shuffles and of the draw of clients.
        screen: limits on the size of updates.
        robust: a rule for rejecting updates that no honest client would send, whatever their size;
            see `torchpisa.federated.RobustSelection`. The server then holds all updates of a round.
        privacy: the `privacy` of the clients' `client_app`. Clients with another one refuse to
            train. The metrics of a round then have the `epsilon` of the model so far, at
            `privacy.delta`, which holds if the screen rejects no update. Not together with
            `robust`.
        samples: the number of samples of each client, by name. Other clients are refused, and the
            numbers that clients report are ignored. By default they are believed, within
            `max_share`.
        max_share: the largest share of all samples that one client may report, if there are three
            or more clients. One that reports more is left out, with a warning.
        bind_names: tie every name to the key that first registered it. Use False for SuperNodes
            without a key of their own, which have a new one after every start.
        ledger: keep the contributions of each client to the server's memory, so that lies stand out
            and `evict` can remove them. It costs a copy of the model per client, in memory and in
            the checkpoint; FedAvg, FedProx and FedNova need none. With False, the default of
            `screen` is `Screen(largest=1000)`, and there can be no `robust`.
        evaluate: ask clients to evaluate the global model after every round.
        poll: seconds between two checks for answers.

    Attributes:
        server: weights, memory and numbers of the server.
        rounds: the clients and results of each round of this run.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        clients: int,
        deadline: float = 600.0,
        patience: float = 600.0,
        enough: int | None = None,
        staleness: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        participation: float = 1.0,
        seed: int = 0,
        screen: Screen | None = None,
        robust: RobustSelection | None = None,
        privacy: GaussianNoise | None = None,
        samples: Mapping[str, int] | None = None,
        max_share: float = 0.5,
        bind_names: bool = True,
        ledger: bool = True,
        evaluate: bool = False,
        poll: float = 0.5,
    ) -> None:
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                "algorithm must be one of torchpisa.federated, such as torchpisa.federated.MISA(), "
                f"got {algorithm!r}"
            )
        for name, value, kind in (
            ("screen", screen, Screen),
            ("robust", robust, RobustSelection),
            ("privacy", privacy, GaussianNoise),
        ):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__} or None, got {value!r}")
        check_count("clients", clients)
        check_range("deadline", deadline, 0, low_open=True, high_open=True)
        check_range("patience", patience, 0, high_open=True)
        if enough is not None:
            check_count("enough", enough)
        check_count("staleness", staleness, 0)
        check_range("participation", participation, 0, 1, low_open=True)
        check_count("seed", seed, 0)
        check_range("poll", poll, 0, low_open=True, high_open=True)
        check_range("max_share", max_share, 0, 1, low_open=True)
        check_choice("bind_names", bind_names, (True, False))
        check_choice("ledger", ledger, (True, False))
        check_choice("evaluate", evaluate, (True, False))
        if samples is not None:
            if not isinstance(samples, Mapping) or any(not isinstance(n, str) for n in samples):
                raise TypeError(
                    "samples must be a dictionary from names of clients, which are texts, to "
                    f"numbers of samples, got {samples!r}"
                )
            for name, count in samples.items():
                check_count(f"samples[{name!r}]", count)
        if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
            raise TypeError(f"checkpoint must be a file or None, got {checkpoint!r}")
        if checkpoint is not None and Path(checkpoint).is_dir():
            raise ValueError(f"checkpoint must be a file, got {str(checkpoint)!r}, a folder")
        if privacy is not None:
            privacy.check(algorithm)
        if privacy is not None and robust is not None:
            raise ValueError(
                "privacy must be None with robust: which updates are rejected depends on what the "
                "noise is to hide"
            )
        if robust is not None and not ledger:
            raise ValueError(
                f"ledger must be True with robust, got {ledger!r}: clients are compared by what "
                "they have contributed so far"
            )
        self.algorithm = algorithm
        self.rounds: list[Round] = []
        self._min_clients = clients
        self._deadline = deadline
        self._patience = patience
        self._enough = enough
        self._staleness = staleness
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._participation = participation
        self._seed = seed
        # Without a ledger only the change of a dual can be measured, which is large for a newcomer.
        default = Screen() if ledger else Screen(largest=1e3)
        self._screen = default if screen is None else screen
        self._robust = robust
        self._judge = None if robust is None else Judge(robust, algorithm)
        self._privacy = privacy
        self._account = None if privacy is None else PrivacyAccount(privacy)
        self._evaluate = evaluate
        self._poll = poll
        self._training = uuid.uuid4().hex
        self._server: ServerState | None = None
        self._opened: ServerState | None = None
        admission = Admission(samples, max_share, bind_names)
        self._roster = Roster(min(deadline, 60.0), self._admit, admission)
        self._ledger = Ledger() if ledger else None
        self._generation = 0
        self._run = "unknown"
        self._chosen: list[str] = []
        self._asked: list[TrainRequest] = []  # those without an answer
        self._asked_to_evaluate: list[tuple[Metadata, str]] = []
        self._last_rejected: dict[str, int] = {}  # iterations, by client
        self._exchanges = 0  # rounds, and rounds tried again
        self._usable = 0  # updates of the open round
        self._inbox = Inbox(0)
        self._bytes_down = 0
        self._attempt = 0  # how often the open round was tried before
        self._strikes: dict[str, int] = {}
        self._low_rounds = 0  # rounds in a row with a low share of the samples

    @property
    def server(self) -> ServerState:
        """Return weights, memory and numbers of the server."""
        if self._server is None:
            raise RuntimeError("there is no server state before start(), which makes or loads it")
        return self._server

    @property
    def clients(self) -> dict[str, Client]:
        """Return the clients by name."""
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
            grid: Flower's grid.
            initial_arrays: `torchpisa.federated.flower.arrays(model)`.
            num_rounds: the total number of rounds.
            timeout: seconds after which a round ends, if less than `deadline`.
            train_config: settings for clients, the record `"config"` of every train message.
            evaluate_config: settings for clients, in every evaluate message.
            evaluate_fn: evaluates the global model before the first and after every round.

        Returns:
            The arrays, and the metrics of the rounds of this run.
        """
        check_count("num_rounds", num_rounds, 0)
        check_range("timeout", timeout, 0)
        if self._server is not None:
            raise RuntimeError("a strategy can be started once: make a new one for a new training")
        if not isinstance(initial_arrays, ArrayRecord):
            raise TypeError(
                "initial_arrays must be torchpisa.federated.flower.arrays(model), got a "
                f"{type(initial_arrays).__name__}"
            )
        for name, array in initial_arrays.items():
            if array.dtype not in DTYPES:
                raise TypeError(
                    "initial_arrays must be torchpisa.federated.flower.arrays(model), which has no "
                    f"buffers, got {name!r} of {array.dtype}"
                )
        self._run = _run_id(grid)
        file = self._checkpoint
        with nullcontext() if file is None else checkpoints.locked(file, self._run):
            self._start_or_resume(initial_arrays)
            self._inbox = Inbox(size_limit(update_template(self.algorithm, self.server)))
            self.summary()
            result = Result()
            result.arrays = arrays_of(self.server.weights)
            if self.server.iteration < num_rounds:
                self._wait_for_clients(grid)
            self._evaluate_on_server(evaluate_fn, result)
            train_config = ConfigRecord() if train_config is None else train_config
            evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
            seconds = min(self._deadline, timeout)
            while self.server.iteration < num_rounds:
                self._train_round(grid, result, num_rounds, seconds, train_config)
                self._evaluate_on_clients(grid, result, seconds, evaluate_config)
                self._evaluate_on_server(evaluate_fn, result)
        return result

    def _train_round(
        self, grid: Grid, result: Result, num_rounds: int, seconds: float, config: ConfigRecord
    ) -> None:
        """Repeat a round until there is a usable update; raise if none can be expected."""
        number = self.server.iteration + 1
        end = time.monotonic() + self._deadline + self._patience
        refused: dict[str, str] = {}
        self._attempt = 0
        while self.server.iteration < number:
            messages = self.configure_train(number, result.arrays, config, grid)
            sent_before = [a.metadata.message_id for a in self._asked if a.metadata.message_id]
            replies = exchange(
                grid,
                messages,
                seconds,
                self._poll,
                self._inbox,
                sent_before=sent_before,
                enough=self._has_enough,
            )
            arrays, metrics = self.aggregate_train(number, replies)
            result.arrays = result.arrays if arrays is None else arrays
            result.train_metrics_clientapp[number] = metrics
            _log.info("round %d of %d: %s", number, num_rounds, dict(metrics))
            refused |= self.rounds[-1].rejected
            if self.server.iteration < number:
                self._check_hopeless(number, refused, time.monotonic() >= end)
                self._attempt += 1
        self._attempt = 0

    def _has_enough(self) -> bool:
        return self._enough is not None and self._usable >= self._enough

    def _check_hopeless(self, number: int, refused: Mapping[str, str], late: bool) -> None:
        """Raise if there is no point in repeating a round."""
        reachable = [client.name for client in self._roster.reachable]
        everybody = reachable or list(self._roster.put_aside)
        if everybody and all(name in refused for name in everybody):
            raise NobodyTrainsError(
                f"nobody trains in round {number}: all {len(everybody)} clients that are online "
                f"were refused or refuse.\n{_grouped(refused)}"
            )
        if late:
            raise TimeoutError(
                f"nothing usable came in round {number} for deadline={self._deadline:g} and "
                f"patience={self._patience:g} s. Online: {reachable}.\n{_grouped(refused)}"
            )

    def _evaluate_on_clients(
        self, grid: Grid, result: Result, seconds: float, config: ConfigRecord
    ) -> None:
        number = self.server.iteration
        messages = self.configure_evaluate(number, result.arrays, config, grid)
        replies = exchange(grid, messages, seconds, self._poll, Inbox(1024 * 1024))
        metrics = self.aggregate_evaluate(number, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[number] = metrics

    def _start_or_resume(self, initial: ArrayRecord) -> None:
        weights: Tensors = tensors_of(initial)
        saved = None
        if self._checkpoint is not None:
            saved = checkpoints.load(self._checkpoint, self.algorithm, self._seed, weights)
        if saved is None:
            self._server = self.algorithm.start(weights)
            return
        self._training, self._server = saved.training, saved.server
        self._generation = saved.generation
        self._roster.evicted, self._roster.lives = set(saved.evicted), saved.lives
        self._roster.started = True
        self._roster.largest_count = saved.largest_count
        if self._judge is not None and saved.judge is not None:
            self._judge.load_state_dict(saved.judge)
        if self._account is not None:
            self._account.spent = saved.spent
        for name, record in saved.clients.items():
            self._roster.clients[name] = Client(**vars(record), name=name)
        if self._ledger is not None:
            self._ledger = self._resumed_ledger(saved)
        self._screen.resume(saved.sizes)
        _log.info("going on after round %d", self.server.iteration)

    def _resumed_ledger(self, saved: Checkpoint) -> Ledger | None:
        missing = [n for n, c in saved.clients.items() if c.accepted >= 0 and n not in saved.ledger]
        if missing and saved.server.memory:
            if self._robust is not None:
                raise ValueError(
                    f"robust must be None for the training in {self._checkpoint}, which has no "
                    f"ledger of what clients have contributed so far, got {self._robust}"
                )
            _log.warning("no ledger: the run before had none, so nobody can be evicted")
            return None
        return Ledger(saved.ledger)

    def _wait_for_clients(self, grid: Grid) -> None:
        """Wait until enough clients have introduced themselves, at most for `patience`."""
        resumed = bool(self.clients)
        end = time.monotonic() + self._patience
        while True:
            self._roster.update(grid)
            present = [client.name for client in self._roster.reachable]
            if len(present) >= self._min_clients:
                if self._robust is not None and not self._roster.started:
                    claims = [client.samples for client in self.clients.values()]
                    self._roster.limit_counts(self._robust.largest_count(claims))
                self._roster.started = True
                return
            if time.monotonic() >= end:
                break
            time.sleep(self._poll)
        if not resumed:
            raise TimeoutError(
                f"clients={self._min_clients} clients must introduce themselves within "
                f"patience={self._patience:g} s, got {len(present)}: {present}. "
                f"{_grouped(self._roster.problems)}".rstrip()
            )
        _log.warning("going on with %d clients of %d: %s", len(present), len(self.clients), present)

    def _evaluate_on_server(self, evaluate_fn: EvaluateFn | None, result: Result) -> None:
        if evaluate_fn is None:
            return
        metrics = evaluate_fn(self.server.iteration, result.arrays)
        _log.info("after round %d: %s", self.server.iteration, metrics)
        if metrics is not None:
            result.evaluate_metrics_serverapp[self.server.iteration] = metrics

    def _admit(self, client: Client) -> None:
        before = self._roster.weight
        if before:
            after = before + client.weight
            self._server = self.algorithm.admit(self.server, before, after)
        _log.info("client %r has joined with %d samples", client.name, client.samples)

    # A round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages for the clients of this round, as far as they are online."""
        if self._server is None:
            raise RuntimeError(
                "FederatedStrategy must be run by its own start(), got configure_train() before "
                "it. Flower's wrappers DifferentialPrivacyServerSideFixedClipping, "
                "DifferentialPrivacyServerSideAdaptiveClipping, "
                "DifferentialPrivacyClientSideFixedClipping and "
                "DifferentialPrivacyClientSideAdaptiveClipping cannot hold it: they clip and blur "
                "weights, and clients send updates whose sum the server keeps. Give "
                "client_app(privacy=GaussianNoise(...)) instead."
            )
        present = self._choose_clients(grid)
        self._opened = self.algorithm.open(self.server)
        down = self.algorithm.broadcast(self._opened)
        about: dict[str, str | int] = {
            "training": self._training,
            "algorithm": self.algorithm.fingerprint,
            "seed": self._seed,
            "iteration": self.server.iteration,
            "staleness": self._staleness,
        }
        if self._privacy is not None:
            about["privacy"] = repr(self._privacy)
        content = to_records(down, about)
        messages = []
        for client, node in present:
            # The arrays are shared by all messages, and Flower sends them to the SuperLink once.
            addressed = RecordDict(dict(content.items()))
            state = {"accepted": client.accepted, "life": client.life}
            state["oldest"] = self._oldest_that_counts(client.name)
            addressed[HEAD] = ConfigRecord({**content.config_records[HEAD], **state})
            message = self._message(
                addressed, MessageType.TRAIN, node, server_round, config, 1 + self._staleness
            )
            messages.append(message)
            iteration = self.server.iteration
            self._asked.append(
                TrainRequest(message.metadata, client.name, node, iteration, self._exchanges)
            )
        self._exchanges += 1
        self._usable = 0
        self._bytes_down = len(messages) * down.bytes
        return messages

    def _choose_clients(self, grid: Grid) -> list[tuple[Client, int]]:
        """Draw clients and return those online; if no client is, wait until the deadline."""
        end = time.monotonic() + self._deadline
        self._roster.update(grid)
        # Without waiting, all rounds of a training would be over before the network is back.
        while not self._roster.reachable and time.monotonic() < end:
            time.sleep(self._poll)
            self._roster.update(grid)
        self._asked = [asked for asked in self._asked if self._is_awaited(asked)]
        busy = {asked.client for asked in self._asked}
        free = {client.name for client in self._roster.reachable} - busy
        attempt = self._attempt
        self._chosen = self._draw(self.server.iteration, attempt, busy)
        while free and not free & set(self._chosen):  # draw again: nobody drawn is online
            attempt += 1
            self._chosen = self._draw(self.server.iteration, attempt, busy)
        return [
            (client, client.node)
            for client in self._roster.reachable
            if client.name in self._chosen and client.node is not None
        ]

    def _is_awaited(self, asked: TrainRequest) -> bool:
        """Return True if the answer to a message of an earlier round may still come and count."""
        client = self.clients.get(asked.client)
        # Rounds that are tried again count: otherwise nobody would be asked in one where all are
        # awaited and lost.
        return (
            self._exchanges - asked.exchange <= self._staleness
            and client is not None
            and client.node == asked.node
            and asked.node in self._roster.online
        )

    def _draw(self, iteration: int, attempt: int, busy: Collection[str]) -> list[str]:
        """Draw clients of whom no answer is awaited."""
        names = self._roster.names
        if not names:
            return []
        count = max(1, round(self._participation * len(names)))
        order: Iterable[int] = range(len(names))
        if count < len(names):
            again = (attempt,) if attempt else ()
            key = ("participation", self._seed, iteration, *again)
            order = permutation(len(names), *key).tolist()
        free = (i for i in order if names[i] not in busy)
        return [names[i] for i in sorted(islice(free, count))]

    def _oldest_that_counts(self, name: str) -> int:
        """Return the iteration of the oldest update that a client may send, again if need be."""
        known = max(self.clients[name].accepted, self._last_rejected.get(name, -1))
        return max(self.server.iteration - self._staleness, known + 1)

    def _message(
        self,
        content: RecordDict,
        kind: str,
        node: int,
        server_round: int,
        config: ConfigRecord,
        deadlines: int = 1,
    ) -> Message:
        if config:
            content["config"] = config
        ttl = deadlines * self._deadline + _CLOCK_SKEW
        return Message(content, node, kind, ttl=ttl, group_id=str(server_round))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Sum up the usable updates, close the round and save it."""
        if self._opened is None:
            raise RuntimeError("aggregate_train() comes after configure_train()")
        samples = {name: client.samples for name, client in self.clients.items()}
        aggregation = RoundAggregation(
            self.algorithm,
            self._opened,
            self._screen,
            samples,
            self._seed,
            self._ledger,
            self._judge,
            self._roster.shares,
        )
        answered = set()
        for reply in replies:
            question = reply.metadata.reply_to_message_id
            asked = next((a for a in self._asked if a.metadata.message_id == question), None)
            if asked is None:
                _log.warning("an answer to a message of another round is ignored")
                continue
            answered.add(question)
            oldest = min(self._oldest_that_counts(asked.client), asked.iteration)
            aggregation.receive(asked.client, reply, range(oldest, asked.iteration + 1))
            self._usable = aggregation.usable
        total, share = aggregation.close(len(self._asked))
        if total is not None:
            self._server = self.algorithm.close(self._opened, total, share)
            self._require_finite()
            for name in aggregation.present:
                self.clients[name].accepted = aggregation.iterations[name]
            if self._account is not None:
                shares = self._roster.shares
                self._account.add({name: shares[name] for name in aggregation.present})
            self._save()
        for name in aggregation.rejected:  # it shall not send the same again
            self._last_rejected[name] = self._opened.iteration
        self._opened = None
        self._put_oversized_aside(aggregation)
        self._asked = [
            asked
            for asked in self._asked
            if self._staleness and asked.metadata.message_id not in {"", *answered}
        ]
        self._withdraw_outliers(aggregation)
        absent = self._roster.absent(self._chosen, aggregation.present)
        awaited = {asked.client for asked in self._asked}
        self._warn_of_low_share(server_round, share, [n for n in absent if n not in awaited])
        late = aggregation.late
        for name, age in late.items():
            _log.info(
                "the update of client %r for round %d counts in round %d",
                *(name, server_round - age, server_round),
            )
        self.rounds.append(
            Round(server_round, sorted(aggregation.present), absent, aggregation.rejected, late)
        )
        metrics: dict[str, MetricRecordValues] = {
            "present": len(aggregation.present),
            "absent": len(absent),
            "rejected": len(aggregation.rejected),
            "late": len(late),
            "share": share,
            "bytes-down": self._bytes_down,
            **aggregation.metrics,
        }
        if self._account is not None:
            metrics["epsilon"] = self._account.epsilon
        return arrays_of(self.server.weights), MetricRecord(metrics)

    def _withdraw_outliers(self, aggregation: RoundAggregation) -> None:
        """Restart clients that were outliers several times in a row."""
        withdrawn = [] if self._judge is None else self._judge.withdrawn()
        for name in aggregation.outliers:
            contributed = self.clients[name].accepted >= 0 and self.server.memory
            if contributed and name in withdrawn and self._ledger is not None:
                self.restart(name)

    def _put_oversized_aside(self, aggregation: RoundAggregation) -> None:
        """Stop asking clients whose answers were oversized several times in a row."""
        for name in [asked.client for asked in self._asked]:
            self._strikes[name] = (
                self._strikes.get(name, 0) + 1 if name in aggregation.oversized else 0
            )
            if self._strikes[name] >= _MAX_STRIKES:
                self._roster.put_aside[name] = aggregation.rejected[name]
                _log.warning(
                    "client %r is put aside for the rest of this run: %d answers in a row were "
                    "larger than they can be",
                    *(name, _MAX_STRIKES),
                )

    def _warn_of_low_share(self, number: int, share: float, absent: list[str]) -> None:
        """Warn if most of the data has no part in the training."""
        if not absent or share >= _LOW_SHARE * self._participation:
            self._low_rounds = 0
            return
        if self._low_rounds % 10 == 0:
            heavy = sorted(absent, key=lambda name: -self.clients[name].samples)[:5]
            shares = self._roster.shares
            parts = {name: shares[name] for name in heavy}
            shown = ", ".join(f"{name!r} ({part:.1%})" for name, part in parts.items())
            _log.warning(
                "only %.2g%% of the samples had a part in round %d: the model hardly moves. "
                "Absent: %s. One that is gone for good is taken out by evict.",
                *(100 * share, number, shown),
            )
        self._low_rounds += 1

    def _require_finite(self) -> None:
        for name, weight in self.server.weights.items():
            if not weight.isfinite().all():
                raise FloatingPointError(
                    f"{name!r} is not finite after round {self.server.iteration}, which is not "
                    "saved: a larger sigma or a smaller lr keeps it from growing"
                )

    def _save(self) -> None:
        if self._checkpoint is None:
            return
        checkpoint = Checkpoint(
            self._training,
            self.server,
            {name: client.record for name, client in self.clients.items()},
            {} if self._ledger is None else self._ledger.sums,
            self._screen.history,
            sorted(self._roster.evicted),
            self._roster.lives,
            None if self._judge is None else self._judge.state_dict(),
            self._roster.largest_count,
            {} if self._account is None else self._account.spent,
            self._generation,
            self._run,
        )
        checkpoints.save(self._checkpoint, self.algorithm, self._seed, checkpoint)
        self._generation = checkpoint.generation

    # Taking a client's contribution back

    def evict(self, name: str) -> None:
        """Remove a client from the training, with its contribution to the server's memory.

        The weights of the other clients grow as if it had never been there, and it is not let in
        again. What it did to the global weights stays; the training mends it. Call it between two
        rounds, as from `evaluate_fn`, or use the command `evict` when no run is under way.

        Raises:
            KeyError: there is no such client.
            RuntimeError: there is no ledger.
        """
        contribution = self._take_contribution(name)
        before = self._roster.weight
        client = self._roster.evict(name)
        after = before - client.weight
        self._server = without_contribution(self.server, contribution, client.weight, before, after)
        _log.warning("client %r is evicted", name)
        self._save()

    def restart(self, name: str) -> None:
        """Restart a client that has lost its memory, as if it joined now.

        What it has contributed to the server's memory is taken out, and the client is told to
        begin with the memory of a newcomer. Its name and its weight stay.

        Raises:
            KeyError: there is no such client.
            RuntimeError: there is no ledger.
        """
        contribution = self._take_contribution(name)
        client, total = self.clients[name], self._roster.weight
        self._server = without_contribution(self.server, contribution, client.weight, total, total)
        client.accepted, client.life = -1, client.life + 1
        _log.warning("client %r starts anew", name)
        self._save()

    def _take_contribution(self, name: str) -> base.Fields:
        if name not in self.clients:
            raise KeyError(f"name must be one of the clients {self._roster.names}, got {name!r}")
        if self._opened is not None:
            raise RuntimeError("evict() and restart() are for between two rounds")
        if self._ledger is None and self.server.memory:
            raise RuntimeError(
                "what a client has contributed is not known: FederatedStrategy needs ledger=True "
                "from the start of a training for evict() and restart()"
            )
        self._asked = [asked for asked in self._asked if asked.client != name]
        return {} if self._ledger is None else self._ledger.remove(name)

    # Evaluation by clients

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages for all clients that are online, if evaluation is asked for."""
        self._asked_to_evaluate = []
        if not self._evaluate:
            return []
        busy = {asked.client for asked in self._asked}
        content = to_records(base.Message({"weights": tensors_of(arrays)}, {}), {})
        messages = []
        for client in self._roster.reachable:
            if client.node is None or client.name in busy:
                continue
            addressed, kind = RecordDict(dict(content.items())), MessageType.EVALUATE
            message = self._message(addressed, kind, client.node, server_round, config)
            messages.append(message)
            self._asked_to_evaluate.append((message.metadata, client.name))
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean of the clients' metrics, weighted by their numbers of samples."""
        measured = []
        for reply in replies:
            question = reply.metadata.reply_to_message_id
            asked = ((sent.message_id, name) for sent, name in self._asked_to_evaluate)
            name = next((name for message_id, name in asked if message_id == question), None)
            if name is None or reply.has_error():
                reason = reply.error.reason if reply.has_error() else "it was not asked"
                _log.warning("client %r did not evaluate: %s", name, reason)
            elif "metrics" in reply.content.metric_records:
                metrics = reply.content.metric_records["metrics"]
                measured.append((self.clients[name].samples, metrics))
        return weighted_mean(measured)

    def summary(self) -> None:
        """Log the settings of the training."""
        _log.info("%s, training %s", self.algorithm.fingerprint, self._training)
        _log.info(
            "at least %d clients at the start, %g s per round, share %g of the clients, seed %d",
            self._min_clients,
            self._deadline,
            self._participation,
            self._seed,
        )


def _run_id(grid: Grid) -> str:
    try:
        return str(grid.run.run_id)
    except Exception:  # a grid that has none
        return "unknown"


def _grouped(reasons: Mapping[str, str]) -> str:
    """Return clients grouped by reason, since many have the same."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return "\n".join(f"{', '.join(names)}: {reason}" for reason, names in groups.items())
