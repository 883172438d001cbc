"""The Flower `ClientApp` for a model, data and an algorithm of `torchpisa.federated`."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import nn

from torchpisa.federated.algorithms import base
from torchpisa.federated.algorithms.base import Algorithm, Fields, Tensors
from torchpisa.federated.clients.data import Data, sample_count
from torchpisa.federated.clients.local_round import RoundWork, local_round
from torchpisa.federated.clients.objective import (
    Loss,
    Objective,
    check_loss,
    cross_entropy,
    trainable,
)
from torchpisa.federated.flower.client_memory import (
    ClientMemoryStore,
    FolderMemoryStore,
    RunMemoryStore,
)
from torchpisa.federated.flower.mods import check_mods
from torchpisa.federated.flower.records import (
    HEAD,
    arrays_of,
    load_arrays,
    read_entry,
    read_fields,
    read_numbers,
    to_records,
)
from torchpisa.federated.trust.privacy import GaussianNoise

__all__ = ["Evaluate", "client_app"]

Evaluate = Callable[[nn.Module, Data], Mapping[str, float]]
"""From the model with the global weights and the client's data to numbers by name."""

Folder = str | os.PathLike[str] | None


def client_app(
    model: Callable[[], nn.Module],
    data: Callable[[Context], Data],
    algorithm: Algorithm | Callable[[Context], Algorithm],
    *,
    loss: Loss = cross_entropy,
    folder: Folder | Callable[[Context], Folder] = None,
    evaluate: Evaluate | None = None,
    privacy: GaussianNoise | None = None,
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """Return the `ClientApp` of a federated training, for any algorithm.

    A client's name is `name` of its node config or else `partition-id`, which simulations set.
    Name and number of samples must not change during a training.

    Args:
        model: builds the network, on the device to train on. Initial weights come from the
            server, except for parameters that require no gradient: those stay as built.
        data: loads the data of this client: `(inputs, targets)`, or a map-style dataset of such
            pairs. Called once per process and client.
        algorithm: the algorithm of the server, or a function that reads it from
            `context.run_config`. If the two differ, the client refuses to train.
        loss: a function of outputs and targets that returns one loss per sample.
        folder: the folder of the client's memory (duals, moments, control variates) between
            rounds; a path, or a function of the context. Without one it is kept in Flower's
            `context.state`, which is lost with the SuperNode or the run: good for simulations.
        evaluate: measures the global model on the client's data when the server asks for it.
        privacy: clipping and noise for every update before it leaves the client.
        mods: mods of Flower or your own. Those that change the arrays of an answer (differential
            privacy, secure aggregation) are refused.

    Returns:
        An app that answers `train`, `query` and `evaluate` messages of `FederatedStrategy`.
    """
    check_mods(mods)
    for name, function in (("model", model), ("data", data)):
        if not callable(function) or isinstance(function, nn.Module):
            raise TypeError(
                f"{name} must be a function that returns it, got a {type(function).__name__}"
            )
    if isinstance(algorithm, type) or not (isinstance(algorithm, Algorithm) or callable(algorithm)):
        raise TypeError(
            "algorithm must be one of torchpisa.federated, such as torchpisa.federated.MISA(), or "
            f"a function of the context that returns one, got {algorithm!r}"
        )
    check_loss(loss)
    if evaluate is not None and not callable(evaluate):
        raise TypeError(
            f"evaluate must be a function of the model and the client's data, got {evaluate!r}"
        )
    if privacy is not None and not isinstance(privacy, GaussianNoise):
        raise TypeError(f"privacy must be a GaussianNoise or None, got {privacy!r}")
    client = _Client(model, data, algorithm, loss, folder, evaluate, privacy)
    app = ClientApp(mods=list(mods))
    app.train()(client.train)
    app.query()(client.introduce)
    app.evaluate()(client.measure)
    return app


@dataclass
class _Client:
    """The arguments of `client_app`; model and data are loaded once per process."""

    model: Callable[[], nn.Module]
    data: Callable[[Context], Data]
    algorithm: Algorithm | Callable[[Context], Algorithm]
    loss: Loss
    folder: Folder | Callable[[Context], Folder]
    evaluate: Evaluate | None
    privacy: GaussianNoise | None
    _objective: Objective | None = None
    _data: dict[str, Data] = field(default_factory=dict)

    def introduce(self, message: Message, context: Context) -> Message:
        """Tell the server the client's name and number of samples."""
        name = client_name(context)
        head = ConfigRecord({"name": name, "samples": sample_count(self._get_data(name, context))})
        return Message(RecordDict({HEAD: head}), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        """Run one round and return the update."""
        content, name = message.content, client_name(context)
        algorithm = self._agreed_algorithm(content, context)
        self._check_privacy(str(content.config_records[HEAD].get("privacy", "")))
        iteration = int(read_entry(content, "iteration", int))
        accepted = int(read_entry(content, "accepted", int))
        down = self._read_broadcast(content)
        weights = down.tensors["weights"]

        def initial_memory() -> Fields:
            return algorithm.remember(weights)

        store = self._store(content, context, name, initial_memory)
        memory = None if store is None else store.load()
        life = int(read_entry(content, "life", int))
        if memory is not None:
            oldest = int(read_entry(content, "oldest", int))
            lost = memory.unsettled_answer(accepted, iteration, life, oldest)
            if lost is not None:  # on its way to a server that is gone, or by a client that was
                update = base.Message(lost["tensors"], lost["numbers"])
                return _answer(message, update, lost["work"], name, memory.asked)
        committed = None if memory is None else memory.resolve(accepted, iteration, life)
        old = initial_memory() if committed is None else _on_device_of(committed, weights)
        update, new, work = local_round(
            algorithm,
            self._get_objective(),
            self._get_data(name, context),
            down,
            old,
            key=(int(read_entry(content, "seed", int)), name),
            iteration=iteration,
        )
        if self.privacy is not None:
            update, new = self.privacy.protect(algorithm, update, old, new)
        if store is not None and memory is not None:
            # Saved before the answer is sent: an update that the server counts must not be lost.
            late_counts = int(read_entry(content, "staleness", int)) > 0
            memory.set_pending(new, iteration, _kept(update, work) if late_counts else None)
            store.save(memory)
        return _answer(message, update, work._asdict(), name, iteration)

    def measure(self, message: Message, context: Context) -> Message:
        """Evaluate the global model on the client's data."""
        if self.evaluate is None:
            raise ValueError("the server asks for an evaluation, but client_app got no evaluate")
        model = self._get_objective().model
        weights = self._read_broadcast(message.content).tensors["weights"]
        load_arrays(model, arrays_of(weights))
        model.eval()
        with torch.no_grad():
            metrics = self.evaluate(model, self._get_data(client_name(context), context))
        record = MetricRecord({name: float(value) for name, value in metrics.items()})
        return Message(RecordDict({"metrics": record}), reply_to=message)

    def _agreed_algorithm(self, content: RecordDict, context: Context) -> Algorithm:
        setting = self.algorithm
        algorithm = setting if isinstance(setting, Algorithm) else setting(context)
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                "algorithm must return one of torchpisa.federated, such as "
                f"torchpisa.federated.MISA(), got {algorithm!r}"
            )
        local, remote = algorithm.fingerprint, read_entry(content, "algorithm", str)
        if local != remote:
            raise ValueError(f"algorithm must be that of the server, {remote}, got {local}")
        return algorithm

    def _check_privacy(self, reported: str) -> None:
        """Raise if the server reports an epsilon for other noise than this client's."""
        if reported and reported != repr(self.privacy):
            raise ValueError(f"privacy must be that of the server, {reported}, got {self.privacy}")

    def _read_broadcast(self, content: RecordDict) -> base.Message:
        """Return the server's broadcast, on the device of the model."""
        parameters = trainable(self._get_objective().model)
        like = {name: parameters for name in content.array_records}
        if "weights" not in like:
            raise ValueError(f"a message must hold 'weights', got {list(like)}")
        tensors = {
            kind: {name: t.to(parameters[name].device) for name, t in values.items()}
            for kind, values in read_fields(content, like).items()
        }
        return base.Message(tensors, read_numbers(content))

    def _store(
        self, content: RecordDict, context: Context, name: str, initial_memory: Callable[[], Fields]
    ) -> ClientMemoryStore | None:
        if not initial_memory():
            return None  # the clients of this algorithm keep nothing between rounds
        folder = self.folder(context) if callable(self.folder) else self.folder
        if folder is None:
            return RunMemoryStore(context, initial_memory)
        return FolderMemoryStore(Path(folder), str(read_entry(content, "training", str)), name)

    def _get_objective(self) -> Objective:
        if self._objective is None:
            self._objective = Objective(self.model(), self.loss)
        return self._objective

    def _get_data(self, name: str, context: Context) -> Data:
        if name not in self._data:
            self._data[name] = self.data(context)
        return self._data[name]


def client_name(context: Context) -> str:
    """Return the client's name; not the node id, which changes at a restart without a key."""
    for key in ("name", "partition-id"):
        if key in context.node_config:
            return str(context.node_config[key])
    raise ValueError(
        "a SuperNode must be started with name=... or partition-id=... in --node-config, got "
        f"{dict(context.node_config)}"
    )


def _answer(
    message: Message, update: base.Message, work: Mapping[str, int], name: str, iteration: int
) -> Message:
    content = to_records(update, {"name": name, "iteration": iteration, **work})
    return Message(content, reply_to=message)


def _kept(update: base.Message, work: RoundWork) -> dict[str, Any]:
    """Return an update in a form that can be saved."""
    numbers = {name: float(value) for name, value in update.numbers.items()}
    return {"tensors": update.tensors, "numbers": numbers, "work": work._asdict()}


def _on_device_of(memory: Fields, weights: Tensors) -> Fields:
    device = next(iter(weights.values())).device
    return {
        kind: {name: tensor.to(device) for name, tensor in tensors.items()}
        for kind, tensors in memory.items()
    }
