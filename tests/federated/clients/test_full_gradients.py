"""Gradients of whole clients: which groups of clients are recorded, and that it changes nothing."""

import pytest
import torch
from torch import Tensor, nn

from torchpisa.federated.clients import full_gradients
from torchpisa.federated.clients.full_gradients import FullGradients, faster_one_by_one
from torchpisa.federated.clients.objective import Objective, trainable

SIZES = (7, 5, 9)


@pytest.fixture
def gradients() -> FullGradients:
    torch.manual_seed(0)
    data = [(torch.randn(n, 4).double(), torch.randint(3, (n,))) for n in SIZES]
    return FullGradients(Objective(nn.Linear(4, 3).double()), data, chunk=3)


def expected(gradients: FullGradients, clients: list[int]) -> dict[str, Tensor]:
    model = gradients._objective.model
    rows = []
    for client in clients:
        x, y = gradients._data[client]
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        rows.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def test_means_over_chunks_stacked(gradients: FullGradients) -> None:
    weights = trainable(gradients._objective.model)
    for clients in ([0, 1, 2], [2, 0], [0, 1, 2], [0, 1, 2]):
        actual = gradients(weights, clients)
        for name, value in expected(gradients, clients).items():
            torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-14)


def test_groups_that_come_again_are_recorded(
    gradients: FullGradients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_gradients, "MAX_RECORDED", 2)
    weights = trainable(gradients._objective.model)
    for clients in ([0], [1], [0], [2], [1], [2], [2]):
        gradients(weights, clients)
    assert set(gradients._recorded) == {(0,), (1,)}  # no room for a third


def test_counts_of_groups_do_not_grow_without_end(
    gradients: FullGradients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_gradients, "MAX_COUNTED", 2)
    weights = trainable(gradients._objective.model)
    for clients in ([0], [1], [2], [0, 1], [1, 2], [0, 2]):
        gradients(weights, clients)
        assert len(gradients._seen) <= 2
    assert not gradients._recorded


@pytest.mark.parametrize(
    ("device", "sizes", "answer"),
    [
        ("cuda", (1000, 24), True),
        ("cuda", (1000, 23), False),
        ("cpu", (1000, 1000), False),
    ],
)
def test_large_clients_on_a_gpu(device: str, sizes: tuple[int, ...], answer: bool) -> None:
    assert faster_one_by_one(torch.device(device), sizes) is answer
