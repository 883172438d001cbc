"""Time and memory of simulated rounds beside other engines: Flower's simulation and Apple's pfl.

    python -m benchmarks engines --data DIR --pfl-python PYTHON \\
        --out docs/results/federated_engines.json

All engines run FedAvg with LeNet on MNIST: the same weights at the beginning, the same clients in
every round, and an epoch of the same mini-batches at each client. So the weights have to be the
same up to rounding; their distance to ours after the first three rounds is part of the result.
Later on rounding tells more and more: after 25 rounds it is a percent.
Ten clients of 300 images take part in every round, or 50 out of 1,000 clients of 60 images.

Each engine has processes of its own, with one thread, and Flower one worker. The engines take turns
round by round, in random order, so that whatever else the machine does affects all alike. Memory is
the proportional set size of all processes of an engine, its largest value during a few rounds after
those that are timed. pfl's dependencies are older than what is pinned here, so it has a Python of
its own; without `--pfl-python` it is left out.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import environment
from recipes import datasets
from recipes.heterogeneity.models import lenet
from torchpisa.data import permutation
from torchpisa.federated import Epochs, FedAvg, Simulation, accuracy

LR, LOCAL = 0.05, Epochs(1, batch_size=20)
WARM_UP, WATCHED = 3, 2
MARK = "TORCHPISA_BENCHMARK"


@dataclass(frozen=True)
class Case:
    """The clients of a simulation.

    Attributes:
        clients: the number of clients.
        cohort: the number of clients in a round.
        samples: the number of images of a client.
    """

    clients: int
    cohort: int
    samples: int


CASES = {
    "10 clients": Case(clients=10, cohort=10, samples=300),
    "50 of 1,000 clients": Case(clients=1000, cohort=50, samples=60),
}


# The task


def network() -> nn.Module:
    torch.manual_seed(0)
    return lenet(1, 28)


@cache
def client_data(data: str | None, case: Case) -> list[tuple[Tensor, Tensor]]:
    """Return the images of each client."""
    count = case.clients * case.samples
    x, y = (part[:count] for part in datasets.load("mnist", data, hold_out=False).train)
    return list(zip(x.split(case.samples), y.split(case.samples), strict=True))


def cohort(case: Case, iteration: int) -> list[int]:
    """Return the clients of a round, drawn as by `Simulation` and `FederatedStrategy`."""
    order = permutation(case.clients, "participation", 0, iteration)
    return sorted(order[: case.cohort].tolist())


def mini_batches(case: Case, client: int, iteration: int) -> list[Tensor]:
    """Return the indices of a client's mini-batches, the same in all engines."""
    return LOCAL.plan(case.samples, (0, str(client)), iteration)


def descend(model: nn.Module, x: Tensor, y: Tensor, plan: list[Tensor]) -> None:
    """Take the local steps in the way of an ordinary PyTorch program."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in plan:
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


# The engines, each in a process of its own

Weights = dict[str, Tensor]


@dataclass
class Job:
    """The work of an engine.

    Attributes:
        data: the folder of the data.
        case: the clients.
        rounds: the total number of rounds.
        requests: requests of the parent process, a byte for each round.
        replies: answers to the parent process, the seconds of each round.
        early: weights after the rounds that are not timed.
    """

    data: str | None
    case: Case
    rounds: int
    requests: int
    replies: int
    early: Weights = field(default_factory=dict)
    _start: float | None = None
    _done: int = -1

    def turn(self, weights: Callable[[], Weights]) -> None:
        """Report the round that is over, if one is, and wait until the next may begin."""
        if self._start is not None:
            os.write(self.replies, f"{time.perf_counter() - self._start}\n".encode())
        self._done += 1
        if self._done == WARM_UP:
            self.early = {name: w.detach().clone() for name, w in weights().items()}
        os.read(self.requests, 1)
        self._start = time.perf_counter()

    @property
    def clients(self) -> list[tuple[Tensor, Tensor]]:
        return client_data(self.data, self.case)


def run_torchpisa(job: Job, batched: bool | None = None) -> Weights:
    """Run our simulation."""
    simulation = Simulation(
        network(),
        job.clients,
        FedAvg(lr=LR, local=LOCAL),
        participation=job.case.cohort / job.case.clients,
        batched=batched,
    )

    for iteration in range(job.rounds):
        if simulation.present(iteration) != cohort(job.case, iteration):
            raise RuntimeError(f"other clients than elsewhere take part in round {iteration}")
        job.turn(lambda: simulation.server.weights)
        simulation.round()
    job.turn(lambda: simulation.server.weights)
    return simulation.server.weights


def run_torchpisa_in_turn(job: Job) -> Weights:
    """Run our simulation without `torch.vmap`."""
    return run_torchpisa(job, batched=False)


def run_flower(job: Job) -> Weights:
    """Run Flower's simulation with its own FedAvg and an ordinary client."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

    client, server, final = ClientApp(), ServerApp(), {}
    data, case = job.data, job.case  # a job cannot be sent to Ray's processes

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        config = message.content["config"]
        number, iteration = int(config["client"]), int(config["server-round"]) - 1
        x, y = client_data(data, case)[number]
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        descend(model, x, y, mini_batches(case, number, iteration))
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
        return Message(RecordDict(content), reply_to=message)

    class ToldApart(FlowerFedAvg):
        """FedAvg that tells each node of a round whose data to take, the same as elsewhere."""

        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterator[Message]:
            messages = super().configure_train(server_round, arrays, config, grid)
            chosen = cohort(case, server_round - 1)
            for message, number in zip(messages, chosen, strict=True):
                # The records are shared by all messages, so each gets one of its own.
                told = ConfigRecord({**message.content["config"], "client": number})
                message.content = RecordDict({**message.content, "config": told})
                yield message

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        job.turn(arrays.to_torch_state_dict)
        final.update(arrays.to_torch_state_dict())
        return MetricRecord()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        grid.pull_interval = POLL
        strategy = ToldApart(
            fraction_train=case.cohort / case.clients,
            min_train_nodes=case.cohort,
            min_available_nodes=case.clients,
            fraction_evaluate=0.0,
        )
        initial = ArrayRecord(network().state_dict())
        strategy.start(grid, initial, num_rounds=job.rounds, evaluate_fn=evaluate)

    _simulate(server, client, case)
    return final


def run_flower_strategy(job: Job) -> Weights:
    """Run Flower's simulation with our strategy and client app."""
    from flwr.app import ArrayRecord, Context, MetricRecord
    from flwr.serverapp import Grid, ServerApp

    from torchpisa.federated.flower import FederatedStrategy, Screen, arrays, client_app

    algorithm, server, final = FedAvg(lr=LR, local=LOCAL), ServerApp(), {}
    data, case = job.data, job.case

    def own(context: Context) -> tuple[Tensor, Tensor]:
        torch.set_num_threads(1)
        return client_data(data, case)[int(context.node_config["partition-id"])]

    def evaluate(number: int, record: ArrayRecord) -> MetricRecord:
        job.turn(record.to_torch_state_dict)
        final.update(record.to_torch_state_dict())
        return MetricRecord()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FederatedStrategy(
            algorithm,
            clients=case.clients,
            participation=case.cohort / case.clients,
            # FedAvg's movements grow fourfold within a few rounds here, which the default rejects.
            screen=Screen(largest=100),
            poll=POLL,
            patience=3600,
        )
        strategy.start(grid, arrays(network()), num_rounds=job.rounds, evaluate_fn=evaluate)

    _simulate(server, client_app(network, own, algorithm), case)
    return final


POLL = 0.05
"""Seconds between two looks for answers; Flower's own default of 3 would be most of a round."""


def _simulate(server: Any, client: Any, case: Case) -> None:
    from flwr.simulation import run_simulation

    ray = {"num_cpus": 1, "include_dashboard": False, "log_to_driver": False}
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server,
        client,
        num_supernodes=case.clients,
        backend_config={"init_args": ray, "client_resources": resources},
    )


def run_pfl(job: Job) -> Weights:
    """Run pfl's simulation."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Net(nn.Module):
        """The network, with the methods that pfl calls."""

        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {}

    class Turns(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Metrics:
            job.turn(weights)
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            job.turn(weights)
            return False, Metrics()

    def shuffled(user: tuple[int, int]) -> Dataset:
        iteration, number = user
        order = torch.cat(mini_batches(job.case, number, iteration))
        return Dataset([column[order] for column in job.clients[number]])

    drawn = ((k, i) for k in range(job.rounds + 1) for i in cohort(job.case, k))
    clients = FederatedDataset(shuffled, lambda: next(drawn))
    net = Net()

    def weights() -> Weights:
        return {name: w.detach() for name, w in net.net.named_parameters()}

    model = PyTorchModel(
        net, local_optimizer_create=torch.optim.SGD, central_optimizer=central_sgd(net)
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=job.case.cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=clients, val_data=clients),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=LOCAL.batch_size
        ),
        callbacks=[Turns()],
    )
    return weights()


def central_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the server's optimizer that makes an average of what pfl gives it."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


ENGINES: dict[str, Callable[[Job], Weights]] = {
    "torchpisa, clients at once": run_torchpisa,
    "torchpisa, clients in turn": run_torchpisa_in_turn,
    "pfl": run_pfl,
    "Flower with FederatedStrategy": run_flower_strategy,
    "Flower": run_flower,
}


# The parent process

# Imported, not run as __main__: Ray looks functions up by the name of their module.
START = "import json, sys; from benchmarks.engines import work; work(json.loads(sys.argv[1]))"


class Engine:
    """An engine at work.

    Args:
        name: a name in `ENGINES`.
        python: the interpreter.
        data: the folder of the data.
        case: a name in `CASES`.
        rounds: rounds in all.
        folder: for its log and its weights.
    """

    def __init__(
        self, name: str, python: str, data: str | None, case: str, rounds: int, folder: Path
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._weights, self._log = folder / "weights.pt", folder / "log"
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        order = {"name": name, "case": case, "data": data, "rounds": rounds}
        order |= {"requests": requests, "replies": replies, "weights": str(self._weights)}
        # By default Ray's workers are nice to other processes, the other engines among them.
        fair = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-c", START, json.dumps(order)],
                env={**os.environ, **fair, **quiet, MARK: self._mark},
                pass_fds=(requests, replies),
                stdout=log,
                stderr=log,
            )
        os.close(requests)
        os.close(replies)
        self._stream = os.fdopen(self._replies)
        self.name = name
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.bytes = 0

    def round(self, watched: bool = False) -> None:
        """Let it do a round; note the time, or the memory if it is watched."""
        before = self._cpu_seconds()
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,))
        if watched:
            watcher.start()
        os.write(self._requests, b"g")
        line = self._stream.readline()
        done.set()
        if not line:
            raise RuntimeError(f"{self.name} has ended:\n{self._log.read_text()[-5000:]}")
        if watched:
            watcher.join()
        self.seconds.append(float(line))
        self.cpu_seconds.append(self._cpu_seconds() - before)

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(0.02):
            self.bytes = max(self.bytes, sum(map(_pss, self._pids())))

    def finish(self) -> tuple[Weights, Weights]:
        """Let it end, and return its weights, the early ones and those at the end."""
        os.write(self._requests, b"g")
        if self._process.wait() != 0:
            raise RuntimeError(f"{self.name} has failed:\n{self._log.read_text()[-5000:]}")
        early, final = torch.load(self._weights, weights_only=True)
        return early, final

    def _pids(self) -> Iterator[int]:
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is not ours
                if self._mark.encode() in (folder / "environ").read_bytes():
                    yield int(folder.name)

    def _cpu_seconds(self) -> float:
        return sum(map(_cpu_seconds, self._pids()))


def _pss(pid: int) -> int:
    """Return the memory of a process, what it shares with others divided by their number."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return 1024 * int(
        next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1]
    )


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    data: str | None, case: str, rounds: int, pythons: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Return the numbers of each engine."""
    with tempfile.TemporaryDirectory() as folder:
        engines = []
        for number, (name, python) in enumerate(pythons.items()):
            place = Path(folder, str(number))
            place.mkdir()
            total = WARM_UP + rounds + WATCHED
            engines.append(Engine(name, python, data, case, total, place))
        for turn in range(WARM_UP + rounds + WATCHED):
            for engine in random.Random(turn).sample(engines, len(engines)):
                engine.round(watched=turn >= WARM_UP + rounds)
        weights = {engine.name: engine.finish() for engine in engines}
    test = accuracy(*datasets.load("mnist", data, hold_out=False).test)
    ours, _ = next(iter(weights.values()))
    result = {}
    for engine in engines:
        counted = slice(WARM_UP, WARM_UP + rounds)
        model = network()
        early, final = weights[engine.name]
        model.load_state_dict(final)
        with torch.no_grad():
            score = test(model)["accuracy"]
        result[engine.name] = {
            "seconds": median(engine.seconds[counted]),
            "seconds_undisturbed": quantiles(engine.seconds[counted], n=10)[0],
            "cpu_seconds": median(engine.cpu_seconds[counted]),
            "bytes": engine.bytes,
            "accuracy": score,
            "distance": _distance(early, ours),
        }
    return result


def _distance(weights: Weights, ours: Weights) -> float:
    gaps = sum(float((weights[name] - w).square().sum()) for name, w in ours.items())
    return (gaps / sum(float(w.square().sum()) for w in ours.values())) ** 0.5


def table(result: dict[str, Any]) -> str:
    """Return the results as a table for the documentation."""
    lines = [
        "| | engine | time of a round | CPU time | memory | accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for case, engines in result["cases"].items():
        for name, row in engines.items():
            lines.append(
                f"| {case} | {name} | {row['seconds']:.2f} s | {row['cpu_seconds']:.2f} s | "
                f"{row['bytes'] / 1e9:.2f} GB | {row['accuracy']:.2f} % |"
            )
    return "\n".join(lines)


def work(order: dict[str, Any]) -> None:
    """Be an engine."""
    torch.set_num_threads(1)
    case = CASES[order["case"]]
    job = Job(order["data"], case, order["rounds"], order["requests"], order["replies"])
    final = ENGINES[order["name"]](job)
    torch.save((job.early, {name: w.detach() for name, w in final.items()}), order["weights"])


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks engines", description=__doc__)
    parser.add_argument("--data", help="folder of the data; default TORCHPISA_DATA")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds (default: 20)")
    parser.add_argument("--pfl-python", help="a Python that has pfl, torch and this repository")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(argv)
    pythons = {name: sys.executable for name in args.engines}
    if args.pfl_python is None:
        pythons.pop("pfl", None)
    else:
        pythons["pfl"] = args.pfl_python
    result: dict[str, Any] = {
        "versions": environment.versions("flwr", "ray") | _pfl_version(args.pfl_python),
        "hardware": environment.hardware("cpu"),
        "load_average": os.getloadavg()[0],
        "rounds": args.rounds,
        "local": repr(LOCAL),
        "lr": LR,
        "tasks": {name: asdict(case) for name, case in CASES.items()},
        "cases": {},
    }
    for name in CASES:
        result["cases"][name] = measure(args.data, name, args.rounds, pythons)
        args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    print(table(result))


def _pfl_version(python: str | None) -> dict[str, str]:
    if python is None:
        return {}
    ask = "from importlib.metadata import version; print(version('pfl'))"
    answer = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    return {"pfl": answer.stdout.strip()}
