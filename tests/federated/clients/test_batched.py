"""Clients at once in groups of similar size."""

import pytest
import torch
from torch import Tensor, nn

from tests.federated.problems import MAKERS, classes, distance, logistic, memories, simulate
from torchpisa.federated import SISA, Epochs, FullGradient, Minibatches, Simulation
from torchpisa.federated.clients.batched import group_by_cost

UNEVEN = (3, 300, 2, 40, 5, 290, 1, 45, 160, 30)


@pytest.mark.parametrize("small", [0, 1, 32])
def test_padding_at_most_doubles_the_work(small: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (1000 * torch.rand(200, generator=generator) ** 4).int().add(1).tolist()
    costs = dict(enumerate(sizes))
    groups = group_by_cost(costs, small)
    assert sorted(client for group in groups for client in group) == list(range(200))
    assert len(groups) <= 11
    for group in groups:
        largest = max(costs[client] for client in group)
        assert largest <= max(small, 2 * min(costs[client] for client in group))
        assert group == sorted(group)


def test_equal_clients_are_one_group() -> None:
    assert group_by_cost({4: 7, 1: 7, 3: 7}, 0) == [[1, 3, 4]]
    assert group_by_cost(dict(enumerate([10] * 199 + [5000])), 32) == [[199], list(range(199))]
    assert group_by_cost(dict(enumerate((7, 12, 3, 20, 9))), 32) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("SISA", FullGradient(steps=2)),
        ("FedNova", Epochs(1, 16)),
        ("Scaffold", Minibatches(2, 16, chunk=60)),
    ],
    ids=["SISA", "FedNova", "Scaffold"],
)
def test_uneven_clients_at_once_and_in_turn(name: str, local: object) -> None:
    clients = classes(UNEVEN)
    at_once, in_turn = (
        simulate(MAKERS[name](local=local), 2, clients=clients, batched=batched, participation=0.8)
        for batched in (True, False)
    )
    assert distance(at_once.server.weights, in_turn.server.weights) <= 1e-10
    assert at_once.counts == in_turn.counts
    for a, b in zip(memories(at_once), memories(in_turn), strict=True):
        assert all(distance(a[kind], b[kind]) <= 1e-9 for kind in a if kind != "step")


def test_small_clients_are_not_padded_to_a_large_one() -> None:
    """Counted are the samples that go through the model, padding included."""
    seen: list[int] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super().forward(x)

    clients = classes([10] * 19 + [500])
    simulation = Simulation(Watched(4, 3).double(), clients, SISA(), batched=True)
    seen.clear()
    simulation.round()
    assert sorted(seen) == [10, 500]


def test_padding_is_of_the_clients_own_data() -> None:
    """One client has a value that is missing; the others are padded, and learn nothing of it."""
    clients = classes((3, 20, 7))
    clients[0][0][0] = torch.nan
    at_once, in_turn = (
        Simulation(
            logistic(),
            clients,
            SISA(local=Epochs(1, 8)),
            batched=batched,
            participation=lambda iteration: [1, 2],
        )
        for batched in (True, False)
    )
    for simulation in (at_once, in_turn):
        simulation.round()
    assert distance(at_once.server.weights, in_turn.server.weights) <= 1e-12
