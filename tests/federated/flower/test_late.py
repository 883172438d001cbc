"""Answers that are late count once, whoever is killed meanwhile."""

import math
import time

import pytest
import torch

from tests.federated.flower.fake import (
    SETTING,
    Killed,
    app,
    client_data,
    dying_save,
    federation,
    imbalance,
    model,
    strategy,
)
from torchpisa.federated import (
    MISA,
    SISA,
    FedAvg,
    FedNova,
    Minibatches,
    RobustSelection,
    Scaffold,
    Simulation,
    Timing,
)
from torchpisa.federated.flower import GaussianNoise, arrays, checkpoint

ROUNDS = 10
STALE = 5  # rounds; more than any answer takes here

ALGORITHMS = [
    SISA(sigma=4.0, rho=2.0, gamma=0.99, local=Minibatches(2, 3)),
    SISA(sigma=None, rho=None),
    MISA(sigma=5.0, rho=5.0),
    Scaffold(lr=0.1),
    FedAvg(lr=0.1),
    FedNova(lr=0.1, momentum=0.5),
]


def run(grid, server, rounds=ROUNDS, then=lambda number: None):
    """Train, with `grid.iteration` up to date and `then` after every round."""

    def evaluate(number, _):
        grid.iteration = number
        then(number)

    server.start(grid, arrays(model()), rounds, evaluate_fn=evaluate)
    return server


def uneven(client, iteration):
    return (0, 2, 0, 1)[client] if iteration % 3 else client % 2


def simulated(algorithm, delay, **options):
    """Return the same training in virtual time, in which a round takes one second or less."""
    timing = Timing(lambda client, k: 0.5 + delay(client, k), deadline=1.0)
    clients = [client_data(i) for i in range(4)]
    return Simulation(model(), clients, algorithm, batched=False, timing=timing, **options)


def assert_close(server, simulation):
    for name, weight in server.server.weights.items():
        expected = simulation.server.weights[name]
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6, msg=name)


def same(one, other):
    """Return True if two servers are equal to the last bit."""
    pairs = [(one.server.weights, other.server.weights)]
    pairs += [(one.server.memory[kind], other.server.memory[kind]) for kind in one.server.memory]
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_equals_simulation(algorithm, participation, tmp_path):
    grid = federation(tmp_path, algorithm=algorithm)
    grid.delay = uneven
    server = strategy(algorithm=algorithm, staleness=STALE, participation=participation)
    run(grid, server)
    simulation = simulated(algorithm, uneven, participation=participation)
    simulation.run(ROUNDS, progress=False)
    assert sum(len(entry.late) for entry in server.rounds) >= 2
    assert_close(server, simulation)
    assert all(imbalance(server, tmp_path, kind) < 1e-5 for kind in server.server.memory)


def test_late_answers_are_judged_as_in_a_simulation(tmp_path):
    """The movement of a model that a client has not seen yet says nothing about its answer."""
    robust = RobustSelection(factor=1e9, response=-math.inf, count_limit=math.inf)
    grid = federation(tmp_path)
    grid.delay = uneven
    server = run(grid, strategy(staleness=STALE, robust=robust))
    simulation = simulated(SETTING, uneven, robust=robust)
    simulation.run(ROUNDS, progress=False)
    assert_close(server, simulation)
    responses, expected = server._judge._responses, simulation._judge._responses
    assert responses.keys() == expected.keys() == {"0", "2"}  # the others are late too often
    for name, response in responses.items():
        assert vars(response) == pytest.approx(vars(expected[name]), rel=1e-3)


def test_who_is_late_is_asked_for_nothing_else(tmp_path):
    grid = federation(tmp_path)
    grid.delay = lambda client, iteration: 2 if (client, iteration) == (1, 3) else 0
    server = run(grid, strategy(staleness=STALE))
    present = ["0", "1", "2", "3"]
    others = ["0", "2", "3"]
    assert [entry.present for entry in server.rounds] == [
        *([present] * 3 + [others] * 2 + [present] * 5)
    ]
    assert [entry.absent for entry in server.rounds] == [[]] * 3 + [["1"]] + [[]] * 6
    assert [entry.late for entry in server.rounds] == [{}] * 5 + [{"1": 2}] + [{}] * 4
    asked = [
        message.content["torchpisa"]["iteration"]
        for message in grid.sent
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1
    ]
    assert asked == [0, 1, 2, 3, 6, 7, 8, 9]
    assert imbalance(server, tmp_path) < 1e-6


@pytest.mark.parametrize("staleness", [0, 1])
def test_later_than_that_does_not_count(staleness, tmp_path):
    """It is as if the client had been offline until it is asked again."""
    grid = federation(tmp_path / "a")
    grid.delay = lambda client, iteration: 4 if (client, iteration) == (1, 3) else 0
    server = run(grid, strategy(staleness=staleness))
    other = federation(tmp_path / "b")
    absent = range(3, 4 + staleness)

    def offline(number):
        other.offline = {1} if number in absent else set()

    assert same(server, run(other, strategy(staleness=staleness), then=offline))
    assert all(not entry.late for entry in server.rounds)
    assert imbalance(server, tmp_path / "a") < 1e-6


def test_a_round_ends_with_enough_updates(tmp_path):
    grid = federation(tmp_path)
    grid.delay = lambda client, iteration: 3 if client == 1 and iteration % 4 == 0 else 0
    start = time.monotonic()
    server = run(grid, strategy(staleness=STALE, enough=3, deadline=60.0), 12)
    assert time.monotonic() - start < 30
    assert [len(entry.present) for entry in server.rounds] == [3, 3, 3, 4] * 3
    assert imbalance(server, tmp_path) < 1e-6


@pytest.mark.parametrize("algorithm", [SETTING, Scaffold(lr=0.1)], ids=["SISA", "Scaffold"])
@pytest.mark.parametrize("when", ["before it saves", "after it saves"])
def test_server_killed_while_an_answer_is_under_way(when, algorithm, tmp_path, monkeypatch):
    """The answer to the dead run is lost; the client sends it again to the next one."""
    file, clients = tmp_path / "server.pt", tmp_path / "clients"
    grid = federation(clients, algorithm=algorithm)
    grid.delay = lambda client, iteration: 9 if (client, iteration) == (1, 2) else 0
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", dying_save(4, when))
        with pytest.raises(Killed):
            run(grid, strategy(file, algorithm, staleness=STALE))
    grid.forget()
    server = run(grid, strategy(file, algorithm, staleness=STALE))
    reference = federation(tmp_path / "reference", algorithm=algorithm)
    late = 1 if when == "before it saves" else 2
    reference.delay = lambda client, iteration: late if (client, iteration) == (1, 2) else 0
    undisturbed = run(reference, strategy(algorithm=algorithm, staleness=STALE))
    assert server.rounds[0].late == {"1": late}
    assert same(server, undisturbed)
    kind = "dual" if algorithm is SETTING else "control"
    assert imbalance(server, clients, kind) < 1e-5


@pytest.mark.parametrize("computed", [False, True])
def test_client_killed_while_its_answer_is_under_way(computed, tmp_path):
    """It is started again two rounds later; what it had computed, it sends then."""
    grid = federation(tmp_path / "a")

    def lose(message, answer):
        if message.metadata.message_type == "train" and grid.iteration == 3:
            if computed:
                answer()
            return None
        return answer()

    grid.tricks[1] = lose

    def restart(number):
        grid.offline = {1} if number == 4 else set()
        if number == 5:
            grid.add(1, app(SETTING, tmp_path / "a"), "1")

    server = run(grid, strategy(staleness=STALE), then=restart)
    assert [entry.late for entry in server.rounds if entry.late] == [{"1": 2}] * computed
    other = federation(tmp_path / "b")
    if computed:
        other.delay = lambda client, iteration: 2 if (client, iteration) == (1, 3) else 0

    def offline(number):
        other.offline = {1} if not computed and number in (3, 4) else set()

    assert same(server, run(other, strategy(staleness=STALE), then=offline))
    assert imbalance(server, tmp_path / "a") < 1e-6


def test_an_answer_and_its_repetition_count_once(tmp_path):
    """The node seems to be gone for a round, is asked again, and both answers arrive."""
    grid = federation(tmp_path)
    grid.delay = lambda client, iteration: 2 if (client, iteration) == (1, 3) else 0

    def flicker(number):
        grid.offline = {1} if number == 4 else set()

    server = run(grid, strategy(staleness=STALE), then=flicker)
    assert [entry.late for entry in server.rounds if entry.late] == [{"1": 2}]
    asked = [
        message.content["torchpisa"]["iteration"]
        for message in grid.sent
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1
    ]
    assert asked == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert imbalance(server, tmp_path) < 1e-6


def test_an_update_that_was_rejected_is_not_sent_again(tmp_path):
    grid = federation(tmp_path / "a")

    def spoil(message, answer):
        reply = answer()
        if message.metadata.message_type == "train" and grid.iteration == 3:
            reply.content["torchpisa"]["iteration"] = 77
        return reply

    grid.tricks[1] = spoil
    server = run(grid, strategy(staleness=STALE))
    assert list(server.rounds[3].rejected) == ["1"]
    assert "this is update 77 of client '1', not update" in server.rounds[3].rejected["1"]
    other = federation(tmp_path / "b")

    def offline(number):
        other.offline = {1} if number == 3 else set()

    assert same(server, run(other, strategy(staleness=STALE), then=offline))
    assert all(not entry.late for entry in server.rounds)


def test_an_update_that_was_taken_cannot_be_repeated(tmp_path):
    """A client sends its update of round 3 again in round 4, which may be three rounds late."""
    grid = federation(tmp_path)
    kept = []

    def replay(message, answer):
        reply = answer()
        if message.metadata.message_type == "train" and grid.iteration in (2, 3):
            kept.append(reply.content)
            reply.content = kept[0]
        return reply

    grid.tricks[1] = replay
    server = run(grid, strategy(staleness=3))
    assert server.rounds[3].rejected == {"1": "this is update 2 of client '1', not update 3"}
    assert imbalance(server, tmp_path) < 1e-6


@pytest.mark.parametrize("change", ["evict", "restart"])
def test_what_is_under_way_is_void_when_its_client_is_taken_out(change, tmp_path):
    grid = federation(tmp_path)
    grid.delay = lambda client, iteration: 3 if (client, iteration) == (1, 3) else 0
    server = strategy(staleness=STALE)

    def take_out(number):
        if number == 5:
            getattr(server, change)("1")

    run(grid, server, then=take_out)
    assert all(not entry.late for entry in server.rounds)
    assert ("1" in server.rounds[-1].present) == (change == "restart")
    assert imbalance(server, tmp_path) < 1e-6


def test_a_repeated_answer_has_the_same_noise(tmp_path, monkeypatch):
    """Otherwise a server that asks twice would see the update less blurred."""
    grid = federation(tmp_path / "clients", privacy=GaussianNoise(clip=1.0, noise=0.5))
    file, answers = tmp_path / "server.pt", []

    def listen(message, answer):
        reply = answer()
        if message.metadata.message_type == "train" and grid.iteration == 1:
            answers.append(reply.content["delta"]["float32"].data)
        return reply

    grid.tricks[1] = listen
    run(grid, strategy(file, staleness=1), 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", dying_save(2))
        with pytest.raises(Killed):
            run(grid, strategy(file, staleness=1), 2)
    run(grid, strategy(file, staleness=1), 2)
    assert len(answers) == 2
    assert answers[0] == answers[1]


def test_nobody_waits_for_ever():
    """The only client is lost with its answer: it is asked again when the round is repeated."""
    grid = federation(None, clients=1)
    lost = []

    def lose(message, answer):
        if message.metadata.message_type == "train" and not lost:
            lost.append(message)
            return None
        return answer()

    grid.tricks[0] = lose
    server = run(grid, strategy(clients=1, staleness=1, patience=60.0), 3)
    assert [entry.present for entry in server.rounds] == [[], [], ["0"], ["0"], ["0"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enough": 0}, "enough must be an integer >= 1, got 0"),
        ({"staleness": -1}, "staleness must be an integer >= 0, got -1"),
        ({"staleness": math.inf}, "staleness must be an integer >= 0, got inf"),
    ],
)
def test_arguments(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        strategy(**options)
