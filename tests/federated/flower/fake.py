"""A grid without a network: nodes run in this process, and lose or forge messages on demand."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from torchpisa.federated import SISA, Algorithm
from torchpisa.federated.durable_files import load
from torchpisa.federated.flower import FederatedStrategy, arrays, checkpoint, client_app
from torchpisa.federated.flower.client_memory import FolderMemoryStore

Answer = Callable[[], Message]
Trick = Callable[[Message, Answer], Message | None]
"""Gets a message and a function that has it answered; returns what the server sees, if anything."""


class FakeGrid(Grid):
    """Nodes by id; messages are serialised as Flower does it, and answered at once.

    Attributes:
        delay: by how many rounds the answer of a node to the message of an iteration is late.
        iteration: rounds done, which whoever uses `delay` has to set.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[ClientApp, Context]] = {}
        self.offline: set[int] = set()
        self.keys: dict[int, bytes] = {}
        self.tricks: dict[int, Trick] = {}
        self.sent: list[Message] = []
        self.delay: Callable[[int, int], int] = lambda node, iteration: 0
        self.iteration = 0
        self._replies: dict[str, Message] = {}
        self._due: dict[str, int] = {}
        # Flower sets these in the processes of its apps.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def add(self, node: int, app: ClientApp, partition: str, **config: Any) -> None:
        """Start a node; one with the same id was started again and has lost its state."""
        node_config = {"partition-id": partition, **config}
        self.nodes[node] = app, Context(1, node, node_config, RecordDict(), {})

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message_id = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = message_id
            self.sent.append(message)
            ids.append(message_id)
            reply = self._deliver(_copy(message))
            if reply is not None:
                self._replies[message_id] = reply
            if message.metadata.message_type == "train":
                asked = message.content["torchpisa"]["iteration"]
                late = self.delay(message.metadata.dst_node_id, asked)
                if late:
                    self._due[message_id] = asked + late
        return ids

    def _deliver(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if node in self.offline or node not in self.nodes:
            return None
        app, context = self.nodes[node]

        def answer() -> Message:
            try:
                return app(message, context)
            except Exception as error:  # as Flower's ClientApp process does
                return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)

        trick = self.tricks.get(node)
        reply = answer() if trick is None else trick(message, answer)
        return None if reply is None else _copy(reply)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        due = [i for i in message_ids if self._due.get(i, 0) <= self.iteration]
        replies = (self._replies.pop(message_id, None) for message_id in due)
        return [reply for reply in replies if reply is not None]

    def forget(self) -> None:
        """Lose all answers that are on their way, as the SuperLink does when a run ends."""
        self._replies.clear()

    def get_node_ids(self) -> list[int]:
        return [node for node in self.nodes if node not in self.offline]

    def get_nodes(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(node_id=node, public_key=self.keys.get(node, b""))
            for node in self.get_node_ids()
        ]

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=TaskIdentity.run_id)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **kwargs: Any) -> list[Message]:
        raise NotImplementedError


class Killed(BaseException):
    """The server process is gone."""


def dying_save(iteration: int, when: str = "before it saves") -> Callable[..., None]:
    """Return a `checkpoint.save` of a server that is killed in a round.

    Args:
        iteration: rounds closed by then.
        when: "before it saves" or "after it saves" that round.
    """
    save = checkpoint.save

    def killed(file: Path, algorithm: Algorithm, seed: int, value: checkpoint.Checkpoint) -> None:
        dies = value.server.iteration == iteration
        if dies and when == "before it saves":
            raise Killed
        save(file, algorithm, seed, value)
        if dies:
            raise Killed

    return killed


def _copy(message: Message) -> Message:
    return message_from_proto(message_to_proto(message))


def model() -> nn.Module:
    """Return a small network, always with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def client_data(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return clients with one label each and different numbers of samples."""
    generator = torch.Generator().manual_seed(client)
    count = 5 + 2 * client
    inputs = torch.randn(count, 3, generator=generator) + client
    return inputs, torch.full((count,), client % 3)


def app(algorithm: Algorithm, folder: Path | None = None, **options: Any) -> ClientApp:
    """Return the app of every client, which reads its name from the node config."""
    return client_app(
        model,
        lambda context: client_data(int(context.node_config["partition-id"])),
        algorithm,
        folder=folder,
        **options,
    )


SETTING = SISA(sigma=5.0, rho=1.0)


def federation(
    folder: Path | None, clients: int = 4, algorithm: Algorithm = SETTING, **options: Any
) -> FakeGrid:
    """Return a grid whose node i is client i."""
    grid = FakeGrid()
    for client in range(clients):
        grid.add(client, app(algorithm, folder, **options), str(client))
    return grid


def strategy(
    checkpoint: Path | None = None, algorithm: Algorithm = SETTING, **options: Any
) -> FederatedStrategy:
    """Return a strategy with short deadlines."""
    settings = {"clients": 4, "deadline": 0.05, "patience": 0.05, "poll": 0.01, **options}
    return FederatedStrategy(algorithm, checkpoint=checkpoint, **settings)


def imbalance(strategy: FederatedStrategy, folder: Path, kind: str = "dual") -> float:
    """Return `imbalance_of` a strategy."""
    clients = {name: vars(client) for name, client in strategy.clients.items()}
    saved = {"training": strategy._training, "server": vars(strategy.server), "clients": clients}
    return imbalance_of(saved, folder, kind)


def imbalance_of(saved: dict[str, Any], folder: Path, kind: str = "dual") -> float:
    """Return how far the server's sum is from that of its clients' memories; 0 but for rounding.

    Args:
        saved: the server's checkpoint.
        folder: of the clients.
        kind: of memory.
    """
    server, clients = saved["server"], saved["clients"]
    total = {name: torch.zeros_like(w).double() for name, w in server["weights"].items()}
    samples = sum(client["samples"] for client in clients.values())
    for name, client in clients.items():
        count, accepted = client["samples"], client["accepted"]
        kept = load(FolderMemoryStore(folder, saved["training"], name).file)
        if accepted == -1:
            continue
        assert accepted in (kept["asked"], kept["taken"])
        memory = kept["pending"] if accepted == kept["asked"] else kept["committed"]
        for key, value in memory[kind].items():
            total[key] += count / samples * value.double()
    sums = server["memory"][kind]
    scale = max(float(value.abs().max()) for value in sums.values())
    gap = max(float((total[key] - value).abs().max()) for key, value in sums.items())
    return gap / scale


def start(
    grid: Grid, server: FederatedStrategy, rounds: int = 6, **options: Any
) -> FederatedStrategy:
    """Train to the end and return the server."""
    server.start(grid, arrays(model()), rounds, **options)
    return server
