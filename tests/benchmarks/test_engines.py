"""The comparison of engines: all of them are given the same work."""

import os

import pytest
import torch

from benchmarks import engines
from benchmarks.engines import Case, Job

CASE, ROUNDS = Case(clients=4, cohort=2, samples=50), 3


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CASE.clients, CASE.samples, 1, 28, 28, generator=generator)
    y = torch.randint(0, 10, (CASE.clients, CASE.samples), generator=generator)
    made = list(zip(x, y, strict=True))
    monkeypatch.setattr(engines, "client_data", lambda data, case: made)
    return made


@pytest.mark.parametrize("batched", [None, False])
def test_ours_is_the_ordinary_program(
    batched: bool | None, clients: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    requests, go = os.pipe()
    results, replies = os.pipe()
    os.write(go, b"g" * (ROUNDS + 1))
    ours = engines.run_torchpisa(Job(None, CASE, ROUNDS, requests, replies), batched)
    assert len(os.read(results, 10_000).splitlines()) == ROUNDS
    for end in (requests, go, results, replies):
        os.close(end)
    model = engines.network()
    for iteration in range(ROUNDS):
        start = {name: w.detach().clone() for name, w in model.named_parameters()}
        ends = []
        for number in engines.cohort(CASE, iteration):
            model.load_state_dict(start)
            plan = engines.mini_batches(CASE, number, iteration)
            engines.descend(model, *clients[number], plan)
            ends.append({name: w.detach().clone() for name, w in model.named_parameters()})
        model.load_state_dict({name: sum(end[name] for end in ends) / 2 for name in start})
    for name, weight in model.named_parameters():
        torch.testing.assert_close(ours[name], weight.detach(), rtol=1e-4, atol=1e-6)


def test_table() -> None:
    row = {"seconds": 0.123, "cpu_seconds": 0.1, "bytes": 5e8, "accuracy": 90.0, "distance": 0.0}
    made = engines.table({"cases": {"10 clients": {"pfl": row}}})
    assert made.splitlines()[-1] == "| 10 clients | pfl | 0.12 s | 0.10 s | 0.50 GB | 90.00 % |"
