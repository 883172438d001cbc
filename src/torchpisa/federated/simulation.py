"""Simulate federated learning: all clients in one process, without a network."""

import copy
import dataclasses
import json
import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from torchpisa.checks import check_count, check_range
from torchpisa.data import hashed, permutation
from torchpisa.federated import durable_files
from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, ServerState, add
from torchpisa.federated.clients.batched import BatchedClients, batching_obstacle
from torchpisa.federated.clients.data import Data, sample_count
from torchpisa.federated.clients.memory import FileMemoryStore, MemoryStore, TensorMemoryStore
from torchpisa.federated.clients.objective import Loss, Objective, cross_entropy, trainable
from torchpisa.federated.clients.sequential import SequentialClients
from torchpisa.federated.progress_bar import progress_bar
from torchpisa.federated.timing import Timing
from torchpisa.federated.trust.ledger import Ledger, without_contribution
from torchpisa.federated.trust.privacy import GaussianNoise, PrivacyAccount
from torchpisa.federated.trust.robust import Judge, RobustSelection

__all__ = ["Counts", "Row", "Simulation"]

MAX_STACKED = 2**26  # parameters of clients that run at once by default; each takes some 50 bytes

Row = dict[str, float]
"""The numbers of one line of the log, by name."""


@dataclasses.dataclass
class Counts:
    """The cost of a run so far, of all clients together.

    Attributes:
        gradients: local gradients evaluated, of a mini-batch or of all data of a client.
        samples: gradients of single samples evaluated.
        bytes_up: tensors sent by clients.
        bytes_down: tensors sent to clients.
    """

    gradients: int = 0
    samples: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class SentUpdate(NamedTuple):
    """An update on its way to the server.

    Attributes:
        arrival: the virtual time of its arrival.
        update: the update.
        before: the client's memory before the round, if the server may reject the update.
    """

    arrival: float
    update: Message
    before: Fields | None = None


class Simulation:
    r"""Federated learning in one process.

    Args:
        model: the network. A copy is trained; `simulation.model` holds the global weights.
        clients: the data of each client: `(inputs, targets)`, or a map-style dataset of such pairs.
        algorithm: one of `torchpisa.federated`.
        loss: a function of outputs and targets that returns one loss per sample.
        participation: the fraction of the clients that is drawn for every round, at least one
            client; or a function of the round, from 0, that returns the numbers of the clients.
        seed: seed of the clients' shuffles and of the draw of clients.
        device: the device of the model and, if clients are batched, of all data; by default that
            of the model.
        batched: the number of clients that run together under `torch.vmap`: True for all, False
            for one after the other. By default, if the model and the data allow it, as many as
            have 67 million parameters together. Clients of very different sizes run in several
            groups, because each group is padded to its largest client. The result is the same up
            to rounding.
        memory: a folder for the clients' memory between rounds. Only the memory of a round's
            clients is then in RAM, and a checkpoint adds what has changed; see `run`. Without a
            folder, memory stays on the device and every checkpoint holds all of it. Either way a
            client needs no space before its first round.
        timing: the delays of clients in virtual time, and how long the server waits. By default a
            round ends when all updates have arrived.
        robust: a rule for rejecting updates. The server then handles them one by one, and keeps
            the contributions of each client: some three copies of the model per client.
        privacy: clipping and noise for every update. The noise comes from `seed`, so that runs can
            be repeated, and therefore protects nobody. Not together with `robust`, whose
            rejections depend on what the noise is to hide.

    Attributes:
        model: the network with the global weights.
        server: the state of the server.
        counts: the cost of the run so far.
        rejected: reasons for which updates of the last round were rejected, by client.
        time: virtual seconds since the beginning, with a `timing`.
        batched: the number of clients that run together.
        why_in_turn: the reason for which clients cannot be batched; None if they can, or if
            `batched=False`.

    Examples:
        >>> from torchpisa.federated import SISA, Simulation
        >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
        >>> clients = [(x[y == label], y[y == label]) for label in (0, 1)]
        >>> simulation = Simulation(nn.Linear(3, 2), clients, SISA(sigma=5.0, rho=1.0))
        >>> rows = simulation.run(3, progress=False)
        >>> rows[-1]["round"], rows[-1]["gradients"], rows[-1]["samples"]
        (3, 6, 120)
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[Data],
        algorithm: Algorithm,
        *,
        loss: Loss = cross_entropy,
        participation: float | Callable[[int], Sequence[int]] = 1.0,
        seed: int = 0,
        device: torch.device | str | None = None,
        batched: bool | int | None = None,
        memory: str | os.PathLike[str] | None = None,
        timing: Timing | None = None,
        robust: RobustSelection | None = None,
        privacy: GaussianNoise | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {_shown(model)}")
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                "algorithm must be one of torchpisa.federated, such as torchpisa.federated.MISA(), "
                f"got {_shown(algorithm)}"
            )
        indexed = hasattr(clients, "__getitem__") and not hasattr(clients, "__array__")
        if isinstance(clients, Mapping) or not indexed:
            raise TypeError(
                f"clients must be a list with the data of each client, got {_shown(clients)}"
            )
        if not clients:
            raise ValueError("clients must hold the data of at least one client, got none")
        if not callable(participation):
            check_range("participation", participation, 0, 1, low_open=True)
        check_count("seed", seed, 0)
        if batched is not None and not isinstance(batched, bool):
            check_count("batched", batched)
        if memory is not None and not isinstance(memory, str | os.PathLike):
            raise TypeError(f"memory must be a folder or None, got {memory!r}")
        if timing is not None and not isinstance(timing, Timing):
            raise TypeError(f"timing must be a Timing, got {timing!r}")
        if robust is not None and not isinstance(robust, RobustSelection):
            raise TypeError(f"robust must be a RobustSelection, got {robust!r}")
        if privacy is not None and not isinstance(privacy, GaussianNoise):
            raise TypeError(f"privacy must be a GaussianNoise, got {privacy!r}")
        if privacy is not None:
            privacy.check(algorithm)
            if robust is not None:
                raise ValueError(
                    "privacy must be None with robust: which updates are rejected depends on what "
                    "the noise is to hide"
                )
        self.algorithm = algorithm
        self.model = copy.deepcopy(model).to(device)
        self.counts = Counts()
        self.time = 0.0
        self._timing = timing
        self._under_way: dict[int, SentUpdate] = {}
        self._seed = seed
        self._participation = participation
        self._sizes = [sample_count(data) for data in clients]
        largest = math.inf if robust is None else robust.largest_count(self._sizes)
        counted = [min(n, largest) for n in self._sizes]
        self._alphas = torch.tensor([n / sum(counted) for n in counted], dtype=torch.float64)
        self.rejected: dict[int, str] = {}
        self._robust = robust
        self._judge = None if robust is None else Judge(robust, algorithm)
        self._ledger = Ledger()
        self._rejections = 0
        self._privacy = privacy
        self._account = None if privacy is None else PrivacyAccount(privacy)
        weights = trainable(self.model)
        self.server: ServerState = algorithm.start(weights)
        objective = Objective(self.model, loss)
        self.why_in_turn = self._obstacle(batched, objective, clients)
        self._initial = initial = algorithm.remember(weights)
        self._memory: MemoryStore = (
            TensorMemoryStore(initial, len(clients))
            if memory is None
            else FileMemoryStore(initial, memory)
        )
        self._changes = 0  # of the clients' memory by the end of the last round
        shared = (self._memory, seed, self._alphas)
        self._clients: BatchedClients | SequentialClients
        if batched is False or self.why_in_turn is not None:
            self.batched = 1
            self._clients = SequentialClients(algorithm, objective, clients, *shared)
        else:
            fitting = max(1, MAX_STACKED // sum(w.numel() for w in weights.values()))
            wanted = fitting if batched is None else len(clients) if batched is True else batched
            self.batched = min(wanted, len(clients))
            tensors = cast(Sequence[tuple[Tensor, Tensor]], clients)
            self._clients = BatchedClients(algorithm, objective, tensors, *shared, self.batched)

    def _obstacle(
        self, batched: bool | int | None, objective: Objective, clients: Sequence[Data]
    ) -> str | None:
        if batched is False:
            return None
        reason = batching_obstacle(self.algorithm, objective, clients)
        if reason is not None and batched is not None:
            raise ValueError(f"batched={batched!r} is not possible: {reason}")
        return reason

    @property
    def iteration(self) -> int:
        """Return the number of rounds done."""
        return self.server.iteration

    def present(self, iteration: int) -> list[int]:
        """Return the clients of a round; rounds count from 0.

        A client whose update has not arrived yet takes part in no other round.
        """
        m = len(self._sizes)
        if callable(self._participation):
            drawn = self._participation(iteration)
            try:  # plain integers: torch's are never equal, and a checkpoint cannot hold NumPy's
                numbers = drawn.tolist() if hasattr(drawn, "tolist") else drawn
                chosen = sorted({_client_number(client) for client in numbers})
            except TypeError:
                raise TypeError(
                    f"participation must return the numbers of clients, got {drawn!r}"
                ) from None
            if any(not 0 <= client < m for client in chosen):
                raise ValueError(
                    f"participation must return clients from 0 to {m - 1}, got {chosen}"
                )
            return [client for client in chosen if client not in self._under_way]
        count = max(1, round(self._participation * m))
        order: Iterable[int] = range(m)
        if count < m:
            order = permutation(m, "participation", self._seed, iteration).tolist()
        free = (client for client in order if client not in self._under_way)
        return sorted(islice(free, count))

    def memory_of(self, client: int) -> Fields:
        """Return a copy of a client's memory, such as its dual; clients count from 0."""
        check_count("client", client, 0, len(self._sizes) - 1)
        return cast(Fields, tree_map(lambda t: t[0], self._memory.load([client])))

    @torch.no_grad()
    def round(self) -> None:
        """Run one round."""
        self._refuse_if_interrupted()
        server = self.algorithm.open(self.server)
        present = self.present(server.iteration)
        arrivals, end = self._round_times(present, server.iteration)
        running = [client for client in present if arrivals[client] < math.inf]
        one_by_one = self._judge is not None or self._privacy is not None
        # Late updates, and those to be judged or protected by noise, are not summed up at once.
        separate = {c for c in running if one_by_one or arrivals[c] > end}
        total: Message | None = None
        if present:
            down = self.algorithm.broadcast(server)
            if running:
                before = self._memory.load(running) if one_by_one else None
                with torch.enable_grad():
                    done = self._clients.round(down, running, server.iteration, separate)
                total = done.total
                self.counts.gradients += done.work.gradients
                self.counts.samples += done.work.samples
                self.counts.bytes_up += done.sent
                sent = self._sent(done.separate, running, before, server.iteration)
                self._under_way |= {c: SentUpdate(arrivals[c], *sent[c]) for c in sorted(separate)}
            self.counts.bytes_down += down.bytes * len(present)
        self.time = end
        arrived = {c: update for c, update in self._under_way.items() if update.arrival <= end}
        for client in arrived:
            del self._under_way[client]
        self._reject(server, arrived, running)
        accepted = [client for client in running if client not in separate]
        for client, (_, update, _) in arrived.items():
            if client not in self.rejected:
                total = add(total, update, float(self._alphas[client]))
                accepted.append(client)
        if total is None:
            self.server = self.algorithm.skip(server)
        else:
            share = float(self._alphas[accepted].sum())
            self.server = self.algorithm.close(server, total, share)
        if self._account is not None:
            self._account.add({str(client): float(self._alphas[client]) for client in accepted})
        self._withdraw()
        self._copy_weights_into_model()
        self._changes = self._memory.changes

    def _refuse_if_interrupted(self) -> None:
        """Raise RuntimeError if some clients have moved on in a round that was not closed."""
        if self._memory.changes != self._changes:
            raise RuntimeError(
                f"round {self.iteration + 1} was interrupted: some clients' memory has moved on "
                "without the server. Load a state from before the round, as run() does by itself "
                "if it had a checkpoint, or make a new Simulation"
            )

    def _sent(
        self,
        updates: dict[int, Message],
        running: Sequence[int],
        before: Fields | None,
        iteration: int,
    ) -> dict[int, tuple[Message, Fields | None]]:
        """Return the updates that clients send, each with its client's memory before if needed."""
        if before is None:
            return {client: (update, None) for client, update in updates.items()}
        rows: dict[int, Fields] = {
            client: tree_map(lambda t, row=row: t[row], before)
            for row, client in enumerate(running)
        }
        if self._privacy is None:
            return {client: (update, rows[client]) for client, update in updates.items()}
        sent: dict[int, tuple[Message, Fields | None]] = {}
        for client, update in updates.items():
            secret = hashed("noise", self._seed, client, iteration)
            generator = torch.Generator("cpu").manual_seed(secret)
            new = self.memory_of(client)
            blurred, new = self._privacy.protect(
                self.algorithm, update, rows[client], new, generator
            )
            self._memory.save([client], tree_map(lambda t: t[None], new))
            sent[client] = blurred, None
        return sent

    def _reject(
        self, server: ServerState, arrived: dict[int, SentUpdate], running: Sequence[int]
    ) -> None:
        """Reject updates that the judge suspects, and reset the memory of their clients."""
        self.rejected = {}
        if self._judge is None:
            return
        standings = {}
        for client, (_, update, _) in arrived.items():
            known = self._ledger.sums.get(str(client), {})
            plan = self.algorithm.local.plan(
                self._sizes[client], (self._seed, str(client)), server.iteration
            )
            steps = torch.tensor(float(len(plan)), dtype=torch.float64)
            standings[str(client)] = self.algorithm.standing(server, update, known, steps)
        updates = {str(client): update for client, (_, update, _) in arrived.items()}
        late = {str(client) for client in arrived if client not in running}
        rejected = self._judge.rejected(server, updates, standings, late)
        self.rejected = {int(name): reason for name, reason in rejected.items()}
        self._rejections += len(rejected)
        for client, (_, update, before) in arrived.items():
            if client in self.rejected:
                self._memory.save([client], tree_map(lambda t: t[None], before))
            else:
                self._ledger.add(str(client), self.algorithm.contribution(update))

    def _withdraw(self) -> None:
        """Remove the contributions of clients that were rejected too often."""
        for name in [] if self._judge is None else self._judge.withdrawn():
            if name in self._ledger.sums:
                contribution = self._ledger.remove(name)
                share = float(self._alphas[int(name)])
                self.server = without_contribution(self.server, contribution, share, 1.0, 1.0)
                self._memory.save([int(name)], tree_map(lambda t: t[None], self._initial))

    def _round_times(
        self, present: Sequence[int], iteration: int
    ) -> tuple[dict[int, float], float]:
        """Return the virtual times at which a round's updates arrive, and at which it ends."""
        timing = self._timing
        earlier = [update.arrival for update in self._under_way.values()]
        if timing is None:  # updates may be under way after loading the state of a run with one
            end = max([self.time, *earlier])
            return dict.fromkeys(present, end), end
        arrivals = {client: timing.arrival(self.time, client, iteration) for client in present}
        return arrivals, timing.end(self.time, [*earlier, *arrivals.values()])

    @torch.no_grad()
    def _copy_weights_into_model(self) -> None:
        """Copy the global weights into the model."""
        for name, w in self.server.weights.items():
            self.model.get_parameter(name).copy_(w)

    def run(
        self,
        rounds: int,
        *,
        evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
        every: int = 1,
        log: str | os.PathLike[str] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> list[Row]:
        """Run until `rounds` rounds are done, counted from the very first.

        Args:
            rounds: the total number of rounds.
            evaluate: a function of the model that returns metrics for the rows, such as
                `accuracy(inputs, targets)`.
            every: rounds between two rows; there is one before the first and one after the last
                round too.
            log: a file that gets every row as a line of JSON. A new run overwrites it.
            checkpoint: a file to save the run to with every row. If it exists, the run resumes
                from it. It survives a crash of the machine. With `memory`, it refers to that
                folder, which only fits the last checkpoint.
            progress: show a progress bar on the terminal.

        Returns:
            The rows, those before an interruption included: `round`, the metrics of `evaluate`, the
            cost so far (see `Counts`), `seconds`, and, where they apply, the virtual `time`, the
            number of updates `rejected`, and the `epsilon` of the model at `delta` of `privacy`.

        Raises:
            FloatingPointError: the weights are no longer finite.
            RuntimeError: an earlier round was interrupted, by Ctrl-C or an error in the loss, and
                there is no checkpoint to go back to.
        """
        check_count("rounds", rounds, 0)
        check_count("every", every)
        if evaluate is not None and not callable(evaluate):
            raise TypeError(
                "evaluate must be a function of the model, such as accuracy(inputs, targets), got "
                f"{_shown(evaluate)}"
            )
        for name, file in (("log", log), ("checkpoint", checkpoint)):
            if file is not None and not isinstance(file, str | os.PathLike):
                raise TypeError(f"{name} must be a file or None, got {file!r}")
        history = RunHistory(log, checkpoint)
        saved = history.resume()
        if saved is not None:
            self.load_state_dict(saved)
        start = time.perf_counter() - (history.rows[-1]["seconds"] if history.rows else 0.0)

        def record() -> Row:
            row: Row = {"round": self.iteration, **self._measure(evaluate)}
            row |= {**dataclasses.asdict(self.counts), "seconds": time.perf_counter() - start}
            if self._timing is not None:
                row["time"] = self.time
            if self._judge is not None:
                row["rejected"] = self._rejections
            if self._account is not None:
                row["epsilon"] = self._account.epsilon
            if history.add(row, self.state_dict):
                self._memory.release()
            return row

        with progress_bar(rounds, self.iteration, progress) as show:
            if not history.rows:
                show(record())
            while self.iteration < rounds:
                self.round()
                if self.iteration % every == 0 or self.iteration == rounds:
                    show(record())
        return history.rows

    def _measure(
        self, evaluate: Callable[[nn.Module], dict[str, float]] | None
    ) -> dict[str, float]:
        finite = torch.stack([w.isfinite().all() for w in self.server.weights.values()]).all()
        if not finite:
            raise FloatingPointError(
                f"the weights are not finite after round {self.iteration}: if the clients' data "
                "are finite, a larger sigma or a smaller lr keeps them from growing"
            )
        if evaluate is None:
            return {}
        self.model.eval()
        metrics = evaluate(self.model)
        try:  # as a log and a checkpoint can hold them: NumPy's numbers could not be read back
            plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in metrics.items()}
            json.dumps(plain)
        except (AttributeError, TypeError, ValueError):
            raise TypeError(
                f"evaluate must return numbers by name in a dictionary, got {metrics!r}"
            ) from None
        return plain

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run needs to continue: server, clients' memory and counts.

        With a folder for the clients' `memory` it refers to that folder, and is valid until `run`
        writes its next checkpoint.
        """
        self._refuse_if_interrupted()
        state = {
            "setting": self._setting(),
            "server": vars(self.server),
            "clients": self._memory.state_dict(),
            "counts": dataclasses.asdict(self.counts),
            "time": self.time,
            "under_way": [
                {"client": client, "arrival": sent.arrival, **sent.update._asdict()}
                | ({} if sent.before is None else {"before": sent.before})
                for client, sent in self._under_way.items()
            ],
        }
        if self._judge is not None:
            state["judge"] = self._judge.state_dict()
            state["ledger"] = dict(self._ledger.sums)
            state["rejections"] = self._rejections
        if self._account is not None:
            state["spent"] = dict(self._account.spent)
        return cast(dict[str, Any], _copied(state, None))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of a simulation with the same arguments."""
        for name, current in self._setting().items():
            saved = state["setting"].get(name)
            if saved != current:
                raise ValueError(f"{name} must be that of the saved run, {saved}, got {current}")
        copied = _copied(state, next(iter(self.server.weights.values())).device)
        self._memory.load_state_dict(copied["clients"])
        self.server = ServerState(**copied["server"])
        self.counts = Counts(**copied["counts"])
        self.time = copied["time"]
        self._under_way = {
            sent["client"]: SentUpdate(
                sent["arrival"], Message(sent["tensors"], sent["numbers"]), sent.get("before")
            )
            for sent in copied["under_way"]
        }
        if self._judge is not None:
            self._judge.load_state_dict(copied["judge"])
            self._ledger = Ledger(copied["ledger"])
            self._rejections = copied["rejections"]
        if self._account is not None:
            self._account.spent = copied["spent"]
        self._changes = self._memory.changes
        self._copy_weights_into_model()

    def _setting(self) -> dict[str, Any]:
        shapes = {name: tuple(w.shape) for name, w in self.server.weights.items()}
        return {
            "algorithm": self.algorithm.fingerprint,
            "model": shapes,
            "sizes": self._sizes,
            "seed": self._seed,
            "robust": None if self._robust is None else repr(self._robust),
            "privacy": None if self._privacy is None else repr(self._privacy),
        }


class RunHistory:
    """The rows of a run in memory, its log and its checkpoint."""

    def __init__(
        self,
        log: str | os.PathLike[str] | None,
        checkpoint: str | os.PathLike[str] | None,
    ) -> None:
        self.rows: list[Row] = []
        self._log = None if log is None else Path(log)
        self._checkpoint = None if checkpoint is None else Path(checkpoint)

    def resume(self) -> dict[str, Any] | None:
        """Return the saved state, or None; truncate the log to the rows saved with it."""
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        if self._checkpoint is None or not self._checkpoint.exists():
            if self._log is not None:
                self._log.write_text("", encoding="utf-8")
            return None
        refused = f"checkpoint must be a file that run() wrote, got {self._checkpoint}, which "
        try:
            saved = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds, and its advice does not apply here
            raise ValueError(refused + "cannot be read; it is left as it is") from error
        if not isinstance(saved, dict) or saved.keys() != {"state", "rows"}:
            raise ValueError(refused + "holds something else; it is left as it is")
        self.rows = saved["rows"]
        if self._log is not None:
            lines = (json.dumps(row) + "\n" for row in self.rows)
            self._log.write_text("".join(lines), encoding="utf-8")
        return cast(dict[str, Any], saved["state"])

    def add(self, row: Row, state: Callable[[], dict[str, Any]]) -> bool:
        """Append a row, and save the state if there is a checkpoint; return True if saved."""
        self.rows.append(row)
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if self._checkpoint is None:
            return False
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        new = self._checkpoint.with_name(self._checkpoint.name + ".new")
        torch.save({"state": state(), "rows": self.rows}, new)
        durable_files.replace(new, self._checkpoint)  # an interruption leaves the old one
        return True


def _copied(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(entry, device) for key, entry in value.items()}
    return [_copied(entry, device) for entry in value] if isinstance(value, list) else value


def _client_number(value: Any) -> int:
    if isinstance(value, bool):  # of a mask
        raise TypeError
    return operator.index(value)


def _shown(value: object) -> str:
    """Return a value as messages have it, without tensors."""
    return repr(value) if isinstance(value, str | type) else f"a {type(value).__name__}"
