"""The task: replace model, data and evaluate by yours; the other files stay as they are."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torchpisa.federated import SISA, Algorithm, FullGradient, accuracy
from torchpisa.federated.flower import load_arrays

LABELS = 10


def model() -> nn.Module:
    """The network. Layers that keep running statistics, such as BatchNorm, are refused."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(64, LABELS)


def data(context: Context) -> tuple[Tensor, Tensor]:
    """What this client has: the digits with one label, as far from an even spread as it gets."""
    label = int(context.node_config["partition-id"]) % LABELS
    inputs, targets = digits(test=False)
    return inputs[targets == label], targets[targets == label]


def algorithm(context: Context) -> Algorithm:
    """The algorithm, on the server and on all clients."""
    config = context.run_config
    return SISA(
        sigma=float(config["sigma"]),
        rho=float(config["rho"]),
        local=FullGradient(steps=int(config["steps"])),
    )


def folder(context: Context) -> str | None:
    """Where a client keeps its memory: `--node-config 'folder="/absolute/path"'`."""
    found = context.node_config.get("folder")
    return None if found is None else str(found)


def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
    """What the server measures before the first and after every round."""
    measure = accuracy(*digits(test=True))
    return MetricRecord(dict(measure(load_arrays(model(), arrays))))


def digits(test: bool) -> tuple[Tensor, Tensor]:
    """Every fifth of scikit-learn's digits is for the test."""
    bunch = load_digits()
    inputs = torch.tensor(bunch.data, dtype=torch.float32) / 16
    targets = torch.tensor(bunch.target)
    held_out = torch.arange(len(targets)) % 5 == 0
    chosen = held_out if test else ~held_out
    return inputs[chosen], targets[chosen]
