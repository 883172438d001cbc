"""The task: replace `model`, `data` and `evaluate` with yours; other files stay as they are."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torchpisa.federated import SISA, Algorithm, FullGradient, accuracy
from torchpisa.federated.flower import load_arrays

LABELS = 10


def model() -> nn.Module:
    """Return the network; layers with running statistics, such as BatchNorm, are refused."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(64, LABELS)


def data(context: Context) -> tuple[Tensor, Tensor]:
    """Return the data of this client: all digits with one label, the extreme of uneven data."""
    label = int(context.node_config["partition-id"]) % LABELS
    inputs, targets = digits(test=False)
    return inputs[targets == label], targets[targets == label]


def algorithm(context: Context) -> Algorithm:
    """Return the algorithm, the same on the server and on all clients."""
    config = context.run_config
    return SISA(
        sigma=float(config["sigma"]),
        rho=float(config["rho"]),
        local=FullGradient(steps=int(config["steps"])),
    )


def folder(context: Context) -> str | None:
    """Return the folder for a client's memory, from `--node-config 'folder="/absolute/path"'`."""
    path = context.node_config.get("folder")
    return None if path is None else str(path)


def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the model on the server, before the first and after every round."""
    measure = accuracy(*digits(test=True))
    return MetricRecord(dict(measure(load_arrays(model(), arrays))))


def digits(test: bool) -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits; every fifth of them is for the test."""
    bunch = load_digits()
    inputs = torch.tensor(bunch.data, dtype=torch.float32) / 16
    targets = torch.tensor(bunch.target)
    held_out = torch.arange(len(targets)) % 5 == 0
    chosen = held_out if test else ~held_out
    return inputs[chosen], targets[chosen]
