"""Small models, clients that differ in size and in kind, and rounds without a simulation."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchpisa.federated import (
    MISA,
    PISA,
    SISA,
    AdaptiveFedADMM,
    Algorithm,
    Epochs,
    FedAvg,
    FedDyn,
    FedMuon,
    FedNova,
    FedPD,
    FedProx,
    FullGradient,
    LocalMISA,
    Minibatches,
    Scaffold,
    ServerMuon,
)
from torchpisa.federated.algorithms.base import Fields, ServerState, Tensors, add
from torchpisa.federated.clients.local_round import local_round
from torchpisa.federated.clients.local_work import LocalWork
from torchpisa.federated.clients.objective import Loss, Objective
from torchpisa.federated.simulation import Simulation
from torchpisa.preconditioners import SecondMoment

Pair = tuple[Tensor, Tensor]

SIZES = (7, 12, 3, 20, 9)

# Every kind of algorithm, by what a test may want to change about it.
MAKERS: dict[str, Callable[..., Algorithm]] = {
    "PISA": lambda **changes: PISA(
        preconditioner=SecondMoment("rmsprop", beta=0.9),
        **{"sigma": 4.0, "rho": 1.0, "gamma": 0.98, "consensus_decay": 0.01, **changes},
    ),
    "SISA": lambda **changes: SISA(
        **{"sigma": 4.0, "rho": 1.0, "gamma": 0.98, "weight_decay": 0.02, **changes}
    ),
    "CalibratedSISA": lambda **changes: SISA(
        **{"sigma": None, "rho": None, "gamma": 0.98, "consensus_decay": 0.01, **changes}
    ),
    "MISA": lambda **changes: MISA(
        **{"sigma": 1.0, "rho": 2.0, "gamma": 0.98, "consensus_decay": 0.01, **changes}
    ),
    "LocalMISA": lambda **changes: LocalMISA(**{"rho": 5.0, "lr": 0.8, **changes}),
    "FedAvg": lambda **changes: FedAvg(**{"lr": 0.1, "momentum": 0.5, "lr_decay": 0.97, **changes}),
    "FedProx": lambda **changes: FedProx(**{"lr": 0.1, "mu": 0.3, "weight_decay": 0.02, **changes}),
    "FedNova": lambda **changes: FedNova(
        **{"lr": 0.1, "momentum": 0.5, "server_lr": 0.8, **changes}
    ),
    "Scaffold": lambda **changes: Scaffold(**{"lr": 0.1, "lr_decay": 0.97, **changes}),
    "ScaffoldWarm": lambda **changes: Scaffold(**{"lr": 0.1, "warm_start": True, **changes}),
    "ServerMuon": lambda **changes: ServerMuon(**{"server_lr": 0.05, **changes}),
    "FedDyn": lambda **changes: FedDyn(**{"lr": 0.1, "alpha": 0.5, "lr_decay": 0.97, **changes}),
    "FedPD": lambda **changes: FedPD(**{"lr": 0.1, "eta": 2.0, **changes}),
    "AdaptiveFedADMM": lambda **changes: AdaptiveFedADMM(
        **{"lr": 0.1, "rho": 0.5, "mu": 1.5, "start_from": "client", **changes}
    ),
    "FedMuon": lambda **changes: FedMuon(**{"lr": 0.03, "lr_decay": 0.97, **changes}),
}


def seeded(model: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return model().double()


def logistic() -> nn.Module:
    return seeded(lambda: nn.Linear(4, 3))


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def matrices() -> nn.Module:
    """Return a network without biases, for Newton-Schulz."""
    return seeded(
        lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
    )


def conv() -> nn.Module:
    """Return a small network for images of 6 x 6."""
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))
    )


def classes(
    sizes: Sequence[int] = SIZES, shape: tuple[int, ...] = (4,), seed: int = 0
) -> list[Pair]:
    """Return clients that prefer one of three classes, with inputs around different centres."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for i, n in enumerate(sizes):
        shift = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = torch.randn(n, *shape, generator=generator, dtype=torch.float64) + 0.5 * shift
        y = torch.randint(0, 3, (n,), generator=generator)
        y[: n // 2] = i % 3
        clients.append((x, y))
    return clients


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1)


def straight(n: int = 3) -> nn.Module:
    return seeded(lambda: nn.Linear(n, 1, bias=False))


def least_squares(sizes: Sequence[int] = (6, 30, 10, 18, 14), n: int = 3) -> list[Pair]:
    """Return clients with different curvatures and with solutions far from each other."""
    generator = torch.Generator().manual_seed(1)
    clients = []
    for i, size in enumerate(sizes):
        scale = torch.linspace(0.6, 1.4, n, dtype=torch.float64).roll(i)
        x = scale * torch.randn(size, n, generator=generator, dtype=torch.float64)
        optimum = 3 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
        noise = 0.1 * torch.randn(size, 1, generator=generator, dtype=torch.float64)
        clients.append((x, x @ optimum + noise))
    return clients


def optimum(clients: Sequence[Pair]) -> Tensor:
    """Return the minimiser of the mean over all samples."""
    x, y = (torch.cat(column) for column in zip(*clients, strict=True))
    return torch.linalg.lstsq(x, y).solution.T


def shares(clients: Sequence[Pair]) -> list[float]:
    sizes = [len(y) for _, y in clients]
    return [size / sum(sizes) for size in sizes]


def parameters(model: nn.Module) -> Tensors:
    return {name: w.detach().clone() for name, w in model.named_parameters()}


def flat(weights: Tensors) -> Tensor:
    return torch.cat([w.detach().flatten().cpu() for w in weights.values()])


def distance(a: Tensors, b: Tensors) -> float:
    """Return the distance relative to the size of b."""
    assert list(a) == list(b)
    return float((flat(a) - flat(b)).norm() / flat(b).norm())


def cross(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def simulate(
    algorithm: Algorithm,
    rounds: int,
    model: Callable[[], nn.Module] = mlp,
    clients: Sequence[Pair] | None = None,
    **settings: object,
) -> Simulation:
    data = classes() if clients is None else clients
    simulation = Simulation(model(), data, algorithm, **settings)  # type: ignore[arg-type]
    for _ in range(rounds):
        simulation.round()
    return simulation


def memories(simulation: Simulation) -> list[Fields]:
    """Return the memory of each client."""
    return [simulation.memory_of(client) for client in range(len(simulation._sizes))]


def weighted_sum(memory: Sequence[Fields], kind: str, alphas: Sequence[float]) -> Tensors:
    names = memory[0][kind]
    return {
        name: sum(
            (a * fields[kind][name] for a, fields in zip(alphas, memory, strict=True)),
            start=0 * t,
        )
        for name, t in names.items()
    }


class ByHand:
    """The round that `Algorithm` describes, written out, with clients that may join."""

    def __init__(
        self, algorithm: Algorithm, model: nn.Module, clients: Sequence[Pair], loss: Loss
    ) -> None:
        self.algorithm = algorithm
        self.objective = Objective(model, loss)
        self.clients = list(clients)
        self.initial = parameters(model)
        self.server: ServerState = algorithm.start(self.initial)
        self.memory = [algorithm.remember(self.initial) for _ in clients]

    def join(self, data: Pair) -> None:
        before = sum(len(y) for _, y in self.clients)
        self.clients.append(data)
        self.server = self.algorithm.admit(self.server, before, before + len(data[1]))
        self.memory.append(self.algorithm.remember(self.initial))

    def round(self, present: Sequence[int]) -> None:
        server = self.algorithm.open(self.server)
        down = self.algorithm.broadcast(server)
        alphas = shares(self.clients)
        total = None
        for i in present:
            update, self.memory[i], _ = local_round(
                self.algorithm,
                self.objective,
                self.clients[i],
                down,
                self.memory[i],
                key=(0, str(i)),
                iteration=server.iteration,
            )
            total = add(total, update, alphas[i])
        assert total is not None
        self.server = self.algorithm.close(server, total, sum(alphas[i] for i in present))


def works() -> list[LocalWork]:
    """Return kinds of local work, with batches that do not divide the clients' sizes."""
    return [
        FullGradient(),
        FullGradient(steps=3, chunk=8),
        Epochs(1, batch_size=4),
        Epochs(0.7, batch_size=5, chunk=6),
        Minibatches(steps=3, batch_size=4),
        Minibatches(steps=2, batch_size=10, chunk=7),
    ]
