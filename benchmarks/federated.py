"""Time of federated rounds in one process: MNIST and LeNet.

    python -m benchmarks federated --data DIR --device cuda --out docs/results/federated_cuda.json
    python -m benchmarks federated --devices --data DIR --out docs/results/federated_devices.json

The first has ten clients of one label each: SISA with one gradient of all local data per round,
against an ordinary loop over the clients with `torchpisa.SISA`; FedAvg with a fifth of an epoch per
round, clients at once against in turn.

`--devices` has 10,000 clients of six images, 50 in a round, against 50 clients of six images, on
one thread: SISA with one gradient of all local data, whose clients keep 8 bytes per parameter. Each
case is a process of its own; they take turns round by round, in any order, so that whatever else
the machine does affects all alike, and "undisturbed" is the first decile of the rounds. What is
counted comes after 200 rounds, in which every client has been once. Then 199 clients of ten images
and one of 5,000 with softmax regression: grouped by size, padded to the largest, and in turn.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import torchpisa
from benchmarks import environment
from recipes import datasets
from recipes.heterogeneity.models import lenet
from torchpisa.federated import SISA, Epochs, FedAvg, FullGradient, Simulation, accuracy
from torchpisa.federated.clients import batched as batching
from torchpisa.federated.partition import by_label, iid

SIGMA, RHO = 5.0, 1.0
Clients = list[tuple[Tensor, Tensor]]


def seconds(device: str, work: Callable[[], None], rounds: int) -> float:
    """Return the seconds of some rounds, after three that are not counted."""
    for _ in range(3):
        work()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def loop(clients: Clients, device: str) -> Callable[[], None]:
    """Run a round of an ordinary loop: the optimizer, with a gradient of each client in turn."""
    model = network(device)
    sizes = [len(y) for _, y in clients]
    weights = [n / sum(sizes) for n in sizes]
    opt = torchpisa.SISA(
        model.parameters(), sigma=SIGMA, rho=RHO, beta=0.999, batches=len(clients), weights=weights
    )

    def one_round() -> None:
        for x, y in clients:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()

    return one_round


def network(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return lenet(1, 28).to(device)


def measure(data: str | None, device: str, rounds: int) -> dict[str, Any]:
    dataset = datasets.load("mnist", data, hold_out=False).to(device)
    x, y = dataset.train
    parts = by_label(y, clients=10, labels_per_client=1)
    clients = [(x[part], y[part]) for part in (indices.to(device) for indices in parts.indices)]

    def simulation(algorithm: Any, batched: bool | None = None) -> Simulation:
        return Simulation(network(device), clients, algorithm, device=device, batched=batched)

    local = Epochs(0.2, 64)
    sisa = simulation(SISA(sigma=SIGMA, rho=RHO, local=FullGradient()))
    few = max(1, rounds // 10)
    return {
        "versions": environment.versions(),
        "hardware": environment.hardware(device),
        "rounds": rounds,
        "sisa_seconds": seconds(device, sisa.round, rounds),
        "sisa_accuracy": accuracy(*dataset.test)(sisa.model)["accuracy"],
        "loop_seconds_per_round": seconds(device, loop(clients, device), few) / few,
        "fedavg_seconds_per_round": seconds(
            device, simulation(FedAvg(lr=0.01, local=local)).round, few
        )
        / few,
        "fedavg_in_turn_seconds_per_round": seconds(
            device, simulation(FedAvg(lr=0.01, local=local), batched=False).round, max(1, few // 10)
        )
        / max(1, few // 10),
    }


COHORT, SAMPLES, WARM_UP = 50, 6, 200
CASES: dict[str, dict[str, Any]] = {
    "50 clients in RAM": {"clients": COHORT, "folder": False, "checkpoint": False},
    "10,000 clients in a folder": {"clients": 10_000, "folder": True, "checkpoint": False},
    "the same, checkpoint after every round": {
        "clients": 10_000,
        "folder": True,
        "checkpoint": True,
    },
}


def cohort(clients: int) -> Callable[[int], Sequence[int]]:
    """Return who takes part: everybody once, in order, and then whoever is drawn."""

    def present(iteration: int) -> Sequence[int]:
        if iteration < clients // COHORT:
            return range(COHORT * iteration, COHORT * (iteration + 1))
        return random.Random(iteration).sample(range(clients), COHORT)

    return present


def run_case(data: str | None, case: dict[str, Any], pipe: Connection) -> None:
    """Run a round whenever asked, and answer with its seconds; in the end with the memory used."""
    torch.set_num_threads(1)
    x, y = datasets.load("mnist", data, hold_out=False).train
    parts = iid(SAMPLES * case["clients"], case["clients"])
    clients = [(x[part], y[part]) for part in parts.indices]
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(
            network("cpu"),
            clients,
            SISA(sigma=SIGMA, rho=RHO),
            participation=cohort(case["clients"]),
            memory=Path(folder, "memory") if case["folder"] else None,
        )
        before = peak_bytes()
        start: list[float] = []

        def answer(model: torch.nn.Module) -> dict[str, float]:
            if start:
                pipe.send((time.perf_counter() - start[0], time.process_time() - start[1]))
            if not pipe.recv():
                raise KeyboardInterrupt
            start[:] = time.perf_counter(), time.process_time()
            return {}

        checkpoint = Path(folder, "run.pt") if case["checkpoint"] else None
        with contextlib.suppress(KeyboardInterrupt):
            simulation.run(10**9, evaluate=answer, checkpoint=checkpoint, progress=False)
        on_disk = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        pipe.send({"bytes": peak_bytes(), "bytes_before": before, "bytes_on_disk": on_disk})


def peak_bytes() -> int:
    """Return the largest amount of memory that this process has had, on Linux."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_devices(data: str | None, rounds: int) -> dict[str, Any]:
    context = get_context("spawn")
    pipes, samples = {}, {name: list[tuple[float, float]]() for name in CASES}
    for name, case in CASES.items():
        pipes[name], end = context.Pipe()
        context.Process(target=run_case, args=(data, case, end), daemon=True).start()
    for turn in range(WARM_UP + rounds):
        # Shuffled, since the disk is still busy with what the case before has written.
        for name in random.Random(turn).sample(list(CASES), len(CASES)):
            pipes[name].send(True)
            samples[name].append(pipes[name].recv())
    result: dict[str, Any] = {}
    for name, pipe in pipes.items():
        pipe.send(False)
        walls, cpus = zip(*samples[name][WARM_UP:], strict=True)
        result[name] = {
            "seconds": median(walls),
            "seconds_undisturbed": quantiles(walls, n=10)[0],
            "cpu_seconds": median(cpus),
            **pipe.recv(),
        }
    return {
        "versions": environment.versions(),
        "hardware": environment.hardware("cpu"),
        "load_average": os.getloadavg()[0],
        "cohort": COHORT,
        "samples_per_client": SAMPLES,
        "rounds": rounds,
        "cases": result,
        "uneven": measure_uneven(data),
    }


def measure_uneven(data: str | None, rounds: int = 3) -> dict[str, float]:
    """Return CPU seconds per round of 199 small clients and a large one, by how they are run."""
    torch.set_num_threads(1)
    x, y = datasets.load("mnist", data, hold_out=False).train
    sizes = [10] * 199 + [5000]
    columns = (torch.split(column[: sum(sizes)], sizes) for column in (x, y))
    clients = list(zip(*columns, strict=True))
    result = {}
    for name, batched, small in (("grouped", None, 32), ("padded", None, 5000), ("turn", False, 0)):
        with mock.patch.object(batching, "SMALL", small):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
            simulation = Simulation(model, clients, SISA(), batched=batched)
            simulation.round()
            start = time.process_time()
            for _ in range(rounds):
                simulation.round()
            result[name] = (time.process_time() - start) / rounds
    return result


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks federated", description=__doc__)
    parser.add_argument("--data", help="folder of the data; default TORCHPISA_DATA")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, help="default 500, with --devices 100")
    parser.add_argument("--devices", action="store_true", help="10,000 clients, on the CPU")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(argv)
    if args.devices:
        result = measure_devices(args.data, args.rounds or 100)
    else:
        result = measure(args.data, args.device, args.rounds or 500)
    args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
