"""Time of federated rounds in one process: MNIST, LeNet, ten clients of one label each.

    python -m benchmarks federated --data DIR --device cuda --out docs/results/federated_cuda.json

SISA with one gradient of all local data per round, against an ordinary loop over the clients with
`torchpisa.SISA`; FedAvg with a fifth of an epoch per round, clients at once against in turn.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchpisa
from benchmarks import environment
from recipes import datasets
from recipes.heterogeneity.models import lenet
from torchpisa.federated import SISA, Epochs, FedAvg, FullGradient, Simulation, accuracy
from torchpisa.federated.partition import by_label

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


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks federated", description=__doc__)
    parser.add_argument("--data", help="folder of the data; default TORCHPISA_DATA")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(argv)
    result = measure(args.data, args.device, args.rounds)
    args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
