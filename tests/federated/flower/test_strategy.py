"""The strategy and the client app against each other, without a network."""

import itertools
import time
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from torch import nn

from tests.federated.flower.fake import (
    SETTING,
    app,
    client_data,
    federation,
    imbalance,
    model,
    strategy,
)
from torchpisa.federated import (
    PISA,
    SISA,
    AdaptiveFedADMM,
    FedAvg,
    FedNova,
    FedPD,
    FedProx,
    Minibatches,
    RobustSelection,
    Scaffold,
    ServerMuon,
    Simulation,
)
from torchpisa.federated.flower import Screen, arrays, client_app, load_arrays
from torchpisa.preconditioners import Identity

ALGORITHMS = [
    SETTING,
    SISA(sigma=4.0, rho=2.0, gamma=0.99, local=Minibatches(2, 3)),
    PISA(preconditioner=Identity(), sigma=5.0, rho=1.0, consensus_decay=0.01),
    FedAvg(lr=0.1, momentum=0.5),
    FedProx(lr=0.1, mu=0.1),
    FedNova(lr=0.1, momentum=0.5),
    Scaffold(lr=0.1),
    SISA(sigma=None, rho=None),
]
# What is new about each: memory and messages with scalars, buffers of the server, local starts.
RIVALS = [
    Scaffold(lr=0.1, warm_start=True),
    ServerMuon(),
    FedPD(lr=0.1, eta=1.0),
    AdaptiveFedADMM(lr=0.1, start_from="client"),
]
CASES = [
    *((algorithm, True, 0.5) for algorithm in ALGORITHMS),
    *((algorithm, False, 1.0) for algorithm in ALGORITHMS),
    *((rival, True, 0.5) for rival in RIVALS),
]


def same(one, other):
    """Return True if two sets of tensors are equal to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize(
    ("algorithm", "on_disk", "participation"),
    CASES,
    ids=[f"{type(algorithm).__name__}-{rest}" for algorithm, *rest in CASES],
)
def test_equals_simulation(algorithm, on_disk, participation, tmp_path):
    clients = [client_data(i) for i in range(4)]
    alone = Simulation(
        model(), clients, algorithm, participation=participation, seed=3, batched=False
    )
    alone.run(8, progress=False)
    grid = federation(tmp_path if on_disk else None, algorithm=algorithm)
    # The duals of FedPD grow by large factors in the first rounds.
    screen = Screen(largest=100) if isinstance(algorithm, FedPD) else None
    server = strategy(algorithm=algorithm, participation=participation, seed=3, screen=screen)
    result = server.start(grid, arrays(model()), 8)
    trained = load_arrays(model(), result.arrays)
    for (name, here), there in zip(
        trained.named_parameters(), alone.model.parameters(), strict=True
    ):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6, msg=name)
    metrics = result.train_metrics_clientapp.values()
    assert sum(m["bytes-up"] for m in metrics) == alone.counts.bytes_up
    assert sum(m["bytes-down"] for m in metrics) == alone.counts.bytes_down
    assert sum(m["gradients"] for m in metrics) == alone.counts.gradients
    assert sum(m["samples"] for m in metrics) == alone.counts.samples


def test_registers_before_the_first_round_and_reports(tmp_path):
    grid, server = federation(tmp_path), strategy()
    result = server.start(grid, arrays(model()), 2)
    assert {n: c.samples for n, c in server.clients.items()} == {"0": 5, "1": 7, "2": 9, "3": 11}
    kinds = [message.metadata.message_type for message in grid.sent]
    assert kinds == ["query"] * 4 + ["train"] * 8
    first = result.train_metrics_clientapp[1]
    assert (first["present"], first["absent"], first["rejected"]) == (4, 0, 0)
    assert first["share"] == pytest.approx(1)
    assert [entry.present for entry in server.rounds] == [["0", "1", "2", "3"]] * 2
    assert imbalance(server, tmp_path) < 1e-6


def test_absent_client_keeps_its_dual(tmp_path):
    grid, server = federation(tmp_path), strategy()
    absent = {2: {1}, 3: {1, 2}, 5: {0}}

    def evaluate(number, _):
        grid.offline = absent.get(number, set())

    server.start(grid, arrays(model()), 8, evaluate_fn=evaluate)
    alone = Simulation(
        model(),
        [client_data(i) for i in range(4)],
        SETTING,
        batched=False,
        participation=lambda i: sorted(set(range(4)) - absent.get(i, set())),
    )
    alone.run(8, progress=False)
    for name, weight in server.server.weights.items():
        torch.testing.assert_close(weight, alone.server.weights[name], rtol=1e-5, atol=1e-6)
    assert imbalance(server, tmp_path) < 1e-6
    assert server.rounds[3].absent == ["1", "2"]


def test_nobody_there_moves_nothing(tmp_path):
    grid, server = federation(tmp_path), strategy()
    server.start(grid, arrays(model()), 2)
    before = server.server
    grid.offline = set(range(4))
    assert server.configure_train(3, arrays(model()), ConfigRecord(), grid) == []
    _, metrics = server.aggregate_train(3, [])
    assert same(before.weights, server.server.weights)
    assert same(before.memory["dual"], server.server.memory["dual"])
    assert server.server.iteration == 2
    assert metrics["present"] == 0


def test_rounds_are_not_wasted_while_the_network_is_down():
    grid, server = federation(None), strategy(deadline=20.0)
    looks = itertools.count()
    nodes = grid.get_node_ids

    def get_node_ids():
        return [] if 3 <= next(looks) < 10 else nodes()

    grid.get_node_ids = get_node_ids
    server.start(grid, arrays(model()), 6)
    assert [len(entry.present) for entry in server.rounds] == [4] * 6


def test_drawn_clients_that_are_offline_are_not_waited_for():
    grid, server = federation(None), strategy(deadline=20.0, participation=0.25)

    def evaluate(number, _):
        grid.offline = {0, 1, 2}

    start = time.monotonic()
    server.start(grid, arrays(model()), 12, evaluate_fn=evaluate)
    assert time.monotonic() - start < 10
    assert [entry.present for entry in server.rounds] == [["3"]] * 12


def test_a_strategy_is_started_once():
    server = strategy()
    server.start(federation(None), arrays(model()), 1)
    with pytest.raises(RuntimeError, match="can be started once"):
        server.start(federation(None), arrays(model()), 1)


def test_a_timeout_is_a_number():
    with pytest.raises(ValueError, match="timeout must be a number >= 0, got None"):
        strategy().start(federation(None), arrays(model()), 1, timeout=None)


def test_too_few_clients_is_an_error():
    with pytest.raises(TimeoutError, match=r"clients=5 .* patience=0\.05 s, got 4: \['0'"):
        strategy(clients=5).start(federation(None), arrays(model()), 1)


def test_too_few_clients_is_an_error_that_says_why():
    """Clients whose data cannot be read, which otherwise only the log of the server has."""

    def nothing(context):
        return torch.zeros(0, 3), torch.zeros(0)

    grid = federation(None, clients=1)
    for node in (1, 2):
        grid.add(node, client_app(model, nothing, SISA(sigma=5.0, rho=1.0)), str(node))
    with pytest.raises(TimeoutError, match=r"got 1: .*\. node 1, node 2: .* one sample, got 0$"):
        strategy(clients=3).start(grid, arrays(model()), 1)


def test_late_client_is_admitted(tmp_path):
    grid = federation(tmp_path)
    late = grid.nodes.pop(3)
    server = strategy(clients=3)

    def evaluate(number, _):
        if number == 3:
            grid.nodes[3] = late

    server.start(grid, arrays(model()), 10, evaluate_fn=evaluate)
    assert [len(entry.present) for entry in server.rounds] == [3] * 3 + [4] * 7
    assert imbalance(server, tmp_path) < 1e-6


def test_two_nodes_with_one_name(tmp_path, caplog):
    grid, server = federation(tmp_path), strategy()
    grid.add(77, app(SETTING, tmp_path), "2")
    server.start(grid, arrays(model()), 3)
    assert {client.node for client in server.clients.values()} == {0, 1, 2, 3}
    assert not any(
        message.metadata.dst_node_id == 77
        for message in grid.sent
        if message.metadata.message_type == "train"
    )
    (line,) = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert "node 77" in line
    assert "client '2'" in line


def test_node_id_changes_when_a_client_is_restarted(tmp_path):
    grid, server = federation(tmp_path), strategy()

    def evaluate(number, _):
        if number == 3:  # without a key, a new process is a new node
            grid.offline = {2}
            grid.add(77, app(SETTING, tmp_path), "2")

    server.start(grid, arrays(model()), 6, evaluate_fn=evaluate)
    undisturbed = strategy()
    undisturbed.start(federation(tmp_path / "other"), arrays(model()), 6)
    assert same(server.server.weights, undisturbed.server.weights)
    assert server.clients["2"].node == 77


def test_node_that_cannot_introduce_itself_is_asked_again():
    grid, server = federation(None), strategy(clients=3)
    answers = itertools.count()

    def trick(message, answer):
        if message.metadata.message_type == "query" and next(answers) == 0:
            return Message(Error(2, "no disk"), reply_to=message)
        return answer()

    grid.tricks[1] = trick
    server.start(grid, arrays(model()), 12)
    assert "1" in server.clients


def test_clients_evaluate(tmp_path):
    def measure(network, data):
        inputs, targets = data
        return {"count": len(targets), "first": float(network(inputs)[0, 0])}

    grid = federation(tmp_path, evaluate=measure)
    result = strategy(evaluate=True).start(grid, arrays(model()), 1)
    metrics = result.evaluate_metrics_clientapp[1]
    assert metrics["count"] == pytest.approx(sum(n * n for n in (5, 7, 9, 11)) / 32)
    network = load_arrays(model(), result.arrays).requires_grad_(False)
    first = [float(network(client_data(i)[0])[0, 0]) for i in range(4)]
    mean = sum(n * x for n, x in zip((5, 7, 9, 11), first, strict=True)) / 32
    assert metrics["first"] == pytest.approx(mean, rel=1e-5)


def test_evaluate_fn_sees_every_round():
    seen = []

    def evaluate(number, record):
        seen.append((number, sorted(record)))
        return MetricRecord({"number": number})

    result = strategy().start(federation(None), arrays(model()), 3, evaluate_fn=evaluate)
    assert [number for number, _ in seen] == [0, 1, 2, 3]
    assert {number: m["number"] for number, m in result.evaluate_metrics_serverapp.items()} == {
        0: 0,
        1: 1,
        2: 2,
        3: 3,
    }


def test_client_with_another_algorithm_refuses():
    grid = federation(None)
    grid.add(2, app(SISA(sigma=6.0, rho=1.0)), "2")
    server = strategy()
    server.start(grid, arrays(model()), 2)
    assert server.rounds[0].absent == ["2"]
    assert "must be that of the server" in server.rounds[0].rejected["2"]
    assert "sigma=6.0" in server.rounds[0].rejected["2"]


def test_weights_that_are_not_finite_end_the_run(tmp_path):
    algorithm = FedAvg(lr=1.0, server_lr=1e60)
    server = strategy(tmp_path / "server.pt", algorithm)
    with pytest.raises(FloatingPointError, match="is not finite after round 1, which is not saved"):
        server.start(federation(None, algorithm=algorithm), arrays(model()), 5)
    assert not (tmp_path / "server.pt").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients must be an integer >= 1, got 0"),
        ({"deadline": 0}, "deadline must be a finite number > 0, got 0"),
        ({"participation": 1.5}, r"participation must be in \(0, 1\], got 1.5"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"poll": 0}, "poll must be a finite number > 0, got 0"),
        ({"evaluate": print}, "evaluate must be one of True, False, got <built-in function print>"),
        ({"robust": RobustSelection(), "ledger": False}, "ledger must be True with robust, got F"),
        ({"checkpoint": Path(__file__).parent}, "checkpoint must be a file, got '.*', a folder"),
    ],
)
def test_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        strategy(**options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: strategy(algorithm=SISA), r"algorithm must be one of .*, got <class .*SISA'>"),
        (lambda: strategy(samples=[5, 7]), r"samples must be a dictionary .*, got \[5, 7\]"),
        (lambda: strategy(samples={0: 5}), r"names of clients, which are texts, .*, got \{0: 5\}"),
        (lambda: strategy(checkpoint=True), "checkpoint must be a file or None, got True"),
        (lambda: strategy(screen=3.0), "screen must be a Screen or None, got 3.0"),
        (lambda: strategy(robust=True), "robust must be a RobustSelection or None, got True"),
        (lambda: strategy(privacy=1.0), "privacy must be a GaussianNoise or None, got 1.0"),
        (
            lambda: strategy().start(federation(None), model(), 1),
            r"initial_arrays must be .*arrays\(model\), got a Sequential",
        ),
        (
            lambda: strategy().start(
                federation(None), ArrayRecord(nn.BatchNorm1d(3).state_dict()), 1
            ),
            r"initial_arrays must be .*arrays\(model\), .*, got 'num_batches_tracked' of int64",
        ),
        (lambda: client_app(model(), print, SISA()), "model must be a function .*, got a Sequ"),
        (lambda: client_app(model, client_data(0), SISA()), "data must be a function .* a tuple"),
        (lambda: client_app(model, print, SISA), "algorithm must be one .*, got <class .*SISA'>"),
        (lambda: client_app(model, print, SISA(), privacy=1.0), "privacy must be .*, got 1.0"),
        (lambda: client_app(model, print, SISA(), loss="mse"), "loss must be .*, got 'mse'"),
        (lambda: client_app(model, print, SISA(), evaluate=0.5), "evaluate must be .*, got 0.5"),
    ],
)
def test_arguments_of_another_kind(make, message):
    with pytest.raises(TypeError, match=message):
        make()
