"""Virtual time: updates that arrive late, once, and updates that are lost."""

import math
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tests.federated.problems import (
    MAKERS,
    classes,
    cross,
    distance,
    flat,
    half_square,
    least_squares,
    memories,
    mlp,
    optimum,
    parameters,
    shares,
    simulate,
    straight,
    weighted_sum,
)
from torchpisa.federated import (
    PISA,
    SISA,
    Epochs,
    LognormalDelay,
    Simulation,
    Timing,
)
from torchpisa.federated.algorithms.base import Message, add
from torchpisa.federated.clients.local_round import local_round
from torchpisa.federated.clients.objective import Objective
from torchpisa.preconditioners import Identity

both_ways = pytest.mark.parametrize("batched", [False, True], ids=["in turn", "at once"])
# Of every kind: with and without memory, with numbers, with a memory that begins at the weights.
NAMES = ("SISA", "MISA", "FedAvg", "FedNova", "Scaffold", "FedPD")
DELAYS = (0.5, 1.0, 2.5, 0.7, 3.2)


def uneven(client: int, iteration: int) -> float:
    return DELAYS[client] + 0.3 * ((client + iteration) % 3)


@both_ways
@pytest.mark.parametrize("name", NAMES)
def test_without_a_deadline_only_time_passes(name: str, batched: bool) -> None:
    plain, timed = (
        simulate(MAKERS[name](), 4, batched=batched, participation=0.6, timing=timing)
        for timing in (None, Timing(uneven))
    )
    assert torch.equal(flat(plain.server.weights), flat(timed.server.weights))
    assert timed.counts == plain.counts
    longest = [max(uneven(i, k) for i in plain.present(k)) for k in range(4)]
    assert timed.time == pytest.approx(sum(longest))
    assert plain.time == 0


class Events:
    """The same, written out as events with one client at a time; every update is applied once."""

    def __init__(self, algorithm: Any, deadline: float) -> None:
        self.algorithm, self.deadline, self.now = algorithm, deadline, 0.0
        self.clients = classes()
        self.objective = Objective(mlp(), cross)
        weights = parameters(mlp())
        self.server = algorithm.start(weights)
        self.memory = [algorithm.remember(weights) for _ in self.clients]
        self.events: list[tuple[float, int, Message]] = []

    def round(self) -> list[int]:
        server = self.algorithm.open(self.server)
        down = self.algorithm.broadcast(server)
        away = [client for _, client, _ in self.events]
        for i, data in enumerate(self.clients):
            if i not in away:
                update, self.memory[i], _ = local_round(
                    self.algorithm,
                    self.objective,
                    data,
                    down,
                    self.memory[i],
                    key=(0, str(i)),
                    iteration=server.iteration,
                )
                self.events.append((self.now + uneven(i, server.iteration), i, update))
        self.now = min(self.now + self.deadline, max(at for at, _, _ in self.events))
        total, share, arrived = None, 0.0, []
        for _, i, update in [event for event in self.events if event[0] <= self.now]:
            total = add(total, update, shares(self.clients)[i])
            share += shares(self.clients)[i]
            arrived.append(i)
        self.events = [event for event in self.events if event[0] > self.now]
        self.server = (
            self.algorithm.skip(server)
            if total is None
            else self.algorithm.close(server, total, share)
        )
        return arrived


@both_ways
@pytest.mark.parametrize("name", NAMES)
def test_late_updates_are_applied_once_when_they_arrive(name: str, batched: bool) -> None:
    algorithm = MAKERS[name](local=Epochs(1, batch_size=5))
    events = Events(algorithm, deadline=1.1)
    simulation = simulate(algorithm, 0, batched=batched, timing=Timing(uneven, deadline=1.1))
    arrived = []
    for _ in range(9):
        arrived.append(events.round())
        simulation.round()
        assert simulation.time == pytest.approx(events.now)
    assert len({tuple(clients) for clients in arrived}) > 2
    assert distance(simulation.server.weights, events.server.weights) <= 1e-10
    for kind, tensors in events.server.memory.items():
        assert distance(simulation.server.memory[kind], tensors) <= 1e-10


@both_ways
@pytest.mark.parametrize("name", ["SISA", "MISA", "Scaffold"])
def test_the_server_lacks_what_is_under_way_and_no_more(name: str, batched: bool) -> None:
    algorithm = MAKERS[name]()
    kind = "control" if name == "Scaffold" else "dual"
    timing = Timing(uneven, deadline=1.1)
    simulation = simulate(algorithm, 6, batched=batched, timing=timing)
    alphas = shares(classes())
    clients = weighted_sum(memories(simulation), kind, alphas)
    under_way = simulation._under_way
    assert under_way
    missing = {
        key: sum(
            alphas[i] * algorithm.contribution(late.update)[kind][key]
            for i, late in under_way.items()
        )
        for key in clients
    }
    total = {key: simulation.server.memory[kind][key] + missing[key] for key in clients}
    assert distance(total, clients) <= 1e-12


@pytest.mark.parametrize(
    ("algorithm", "timing"),
    [
        (SISA(sigma=5.0, rho=0.5), Timing(uneven, deadline=1.1)),
        (PISA(preconditioner=Identity(), sigma=5.0, rho=2.0), Timing(uneven, enough=2)),
    ],
    ids=["SISA", "PISA"],
)
def test_the_solution_is_that_of_all_data(algorithm: Any, timing: Timing) -> None:
    """Slow clients count less often, and for no less."""
    clients = least_squares()
    simulation = simulate(
        algorithm, 100, straight, clients, loss=half_square, timing=timing, batched=False
    )
    assert distance(simulation.server.weights, {"weight": optimum(clients)}) <= 1e-4


def test_a_round_ends_with_enough_updates() -> None:
    delays = {0: 1.0, 1: 2.5, 2: 4.0}
    clients = classes((4, 5, 6))
    timing = Timing(lambda client, k: delays[client], enough=2)
    simulation = simulate(SISA(), 0, clients=clients, timing=timing)
    seen = []
    for _ in range(4):
        simulation.round()
        arrivals = {i: late.arrival for i, late in simulation._under_way.items()}
        seen.append((simulation.time, arrivals))
    assert seen == [
        (2.5, {2: 4.0}),  # of 0 and 1
        (4.0, {1: 5.0}),  # of 2, and of 0 again, at 3.5
        (5.0, {2: 8.0}),  # of 1, and of 0, which began at 4.0
        (7.5, {2: 8.0}),  # of 0 and 1
    ]


def test_clients_whose_update_is_under_way_are_not_drawn() -> None:
    timing = Timing(lambda client, k: 5.0 if client == 2 else 1.0, deadline=1.0)
    everybody = simulate(SISA(), 1, timing=timing)
    assert everybody.present(1) == [0, 1, 3, 4]
    chosen = simulate(SISA(), 1, timing=timing, participation=lambda k: [2, 3])
    assert chosen.present(1) == [3]
    share = simulate(SISA(), 1, timing=timing, participation=0.8)
    while 2 not in share._under_way:
        share.round()
    assert share.present(share.iteration) == [0, 1, 3, 4]
    for _ in range(5):
        everybody.round()
    assert 2 in everybody.present(everybody.iteration) or 2 in everybody._under_way


@both_ways
def test_lost_updates(batched: bool) -> None:
    """The client goes on from what it remembered; the server waits for it until the deadline."""

    def unreliable(client: int, iteration: int) -> float:
        return math.inf if client == 1 and iteration < 2 else 0.5

    timing = Timing(unreliable, deadline=2.0)
    simulation = simulate(SISA(), 2, batched=batched, timing=timing)
    without = simulate(SISA(), 2, batched=batched, participation=lambda k: [0, 2, 3, 4])
    assert torch.equal(flat(simulation.server.weights), flat(without.server.weights))
    assert not flat(simulation.memory_of(1)["dual"]).any()
    assert simulation.time == 4.0
    assert simulation.counts.bytes_down * 4 == without.counts.bytes_down * 5
    simulation.round()
    assert flat(simulation.memory_of(1)["dual"]).all()
    assert simulation.time == 4.5


def test_nobody_waits_for_ever() -> None:
    lost = simulate(SISA(), 2, timing=Timing(lambda client, k: math.inf))
    assert lost.time == 0
    assert lost.iteration == 2
    assert torch.equal(flat(lost.server.weights), flat(parameters(mlp())))
    some = simulate(SISA(), 1, timing=Timing(lambda client, k: 3.0 if client else math.inf))
    assert some.time == 3.0


@both_ways
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("name", ["SISA", "FedNova"])
def test_a_run_resumes_with_updates_under_way(
    name: str, batched: bool, on_disk: bool, tmp_path: Path
) -> None:
    def make(part: str) -> Simulation:
        memory = tmp_path / part if on_disk else None
        timing = Timing(uneven, deadline=1.1)
        return simulate(MAKERS[name](), 0, batched=batched, timing=timing, memory=memory)

    whole = make("whole")
    rows = whole.run(9, progress=False)
    first = make("parts")
    first.run(4, checkpoint=tmp_path / "run.pt", progress=False)
    assert first._under_way
    resumed = make("parts")
    again = resumed.run(9, checkpoint=tmp_path / "run.pt", progress=False)
    assert torch.equal(flat(resumed.server.weights), flat(whole.server.weights))
    assert [row["time"] for row in again] == [row["time"] for row in rows]
    assert resumed.counts == whole.counts


def test_without_timing_all_that_is_under_way_arrives_in_the_next_round() -> None:
    late = simulate(SISA(), 1, timing=Timing(uneven, deadline=1.1))
    plain = simulate(SISA(), 0)
    plain.load_state_dict(late.state_dict())
    plain.round()
    alphas = shares(classes())
    assert not plain._under_way
    total = weighted_sum(memories(plain), "dual", alphas)
    assert distance(plain.server.memory["dual"], total) <= 1e-12


def test_lognormal_delays() -> None:
    delay = LognormalDelay(median=10.0, clients=0.5, rounds=0.2)
    logs = [[math.log(delay(i, k) / 10) for k in range(30)] for i in range(400)]
    assert abs(median(x for row in logs for x in row)) < 0.1
    means = torch.tensor([sum(row) / 30 for row in logs])
    assert float(means.std()) == pytest.approx(0.5, rel=0.1)
    within = torch.tensor(logs).std(dim=1).square().mean().sqrt()
    assert float(within) == pytest.approx(0.2, rel=0.05)
    assert delay(3, 5) == LognormalDelay(median=10.0, clients=0.5, rounds=0.2)(3, 5)
    assert delay(3, 5) != LognormalDelay(median=10.0, clients=0.5, rounds=0.2, seed=1)(3, 5)


REFUSED: dict[str, tuple[Any, str]] = {
    "deadline": (lambda: Timing(uneven, deadline=0), "deadline must be a number > 0, got 0"),
    "enough": (lambda: Timing(uneven, enough=0), "enough must be an integer >= 1, got 0"),
    "delay": (
        lambda: simulate(SISA(), 1, timing=Timing(lambda client, k: -1.0)),
        "delay of client 0 in round 0 must be a number >= 0, got -1.0",
    ),
    "nan": (
        lambda: simulate(SISA(), 1, timing=Timing(lambda client, k: math.nan)),
        "delay of client 0 in round 0 must be a number >= 0, got nan",
    ),
    "median": (lambda: LognormalDelay(median=0), "median must be a finite number > 0, got 0"),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_messages(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_types() -> None:
    with pytest.raises(TypeError, match="delay must be a function of client and round, got 3"):
        Timing(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="timing must be a Timing, got 3"):
        simulate(SISA(), 0, timing=3)
