"""Whatever is killed, and whenever: no update that counts is lost, and none counts twice."""

import shutil

import pytest
import torch
from flwr.app import ConfigRecord
from flwr.common.serde import message_from_proto, message_to_proto

from tests.federated.flower.fake import (
    SETTING,
    FakeGrid,
    Killed,
    app,
    dying_save,
    federation,
    imbalance,
    model,
    strategy,
)
from torchpisa.federated import SISA, Scaffold, durable_files
from torchpisa.federated.flower import NobodyTrainsError, arrays, checkpoint

ROUNDS = 8


def at(iteration, what):
    """Return a trick that is played in one round only."""

    def trick(message, answer):
        if message.metadata.message_type != "train":
            return answer()
        if message.content["torchpisa"]["iteration"] != iteration:
            return answer()
        return what(message, answer)

    return trick


def same(one, other):
    """Return True if two servers are equal to the last bit."""
    pairs = [(one.weights, other.weights)]
    pairs += [(one.memory[kind], other.memory[kind]) for kind in one.memory]
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


def run(folder, grid=None, server=None, rounds=ROUNDS):
    """Train and return the server."""
    grid = federation(folder / "clients") if grid is None else grid
    server = strategy(folder / "server.pt") if server is None else server
    server.start(grid, arrays(model()), rounds)
    return server


@pytest.fixture(scope="module")
def absent_in_round_3(tmp_path_factory):
    """Return the reference: client 1 is offline in iteration 3, nothing else happens."""
    folder = tmp_path_factory.mktemp("reference")
    grid = federation(folder / "clients")
    server = strategy(folder / "server.pt")

    def evaluate(number, _):
        grid.offline = {1} if number == 3 else set()

    server.start(grid, arrays(model()), ROUNDS, evaluate_fn=evaluate)
    return server


@pytest.mark.parametrize("when", ["before it computes", "before its answer", "too late"])
def test_client_killed(when, tmp_path, absent_in_round_3):
    grid = federation(tmp_path / "a/clients")
    clients = tmp_path / "a/clients"

    def lose(message, answer):
        if when == "before its answer":
            answer()
        if when == "too late":
            kept = answer()
            grid.late = kept  # nobody looks for it any more when it arrives
        grid.add(1, app(SETTING, clients), "1")  # started again: only its folder is left
        return None

    grid.tricks[1] = at(3, lose)
    server = run(tmp_path / "a", grid)
    assert server.rounds[3].absent == ["1"]
    assert all(not entry.absent for entry in server.rounds if entry.number != 4)
    assert same(server.server, absent_in_round_3.server)
    assert imbalance(server, clients) < 1e-6


def test_client_killed_after_its_answer(tmp_path):
    grid = federation(tmp_path / "a/clients")

    def restart(message, answer):
        reply = answer()
        grid.add(1, app(SETTING, tmp_path / "a/clients"), "1")
        return reply

    grid.tricks[1] = at(3, restart)
    assert same(run(tmp_path / "a", grid).server, run(tmp_path / "b").server)


def test_clients_without_a_folder_do_not_survive_but_do_no_harm(tmp_path):
    grid = federation(None)

    def restart(message, answer):
        reply = answer()
        grid.add(1, app(SETTING), "1")
        return reply

    grid.tricks[1] = at(3, restart)
    server = run(tmp_path, grid)
    assert [entry.absent for entry in server.rounds] == [[]] * 4 + [["1"]] * 4
    reason = server.rounds[-1].rejected["1"]
    assert "took update 3 of this client last" in reason
    assert "goes with update -1" in reason


@pytest.mark.parametrize("when", ["before it saves", "after it saves"])
@pytest.mark.parametrize(
    "algorithm",
    [SETTING, SISA(sigma=None, rho=None), Scaffold(lr=0.1)],
    ids=["SISA", "CalibratedSISA", "Scaffold"],
)
def test_server_killed(when, algorithm, tmp_path, monkeypatch):
    reference = run(
        tmp_path / "b",
        federation(tmp_path / "b/clients", algorithm=algorithm),
        strategy(tmp_path / "b/server.pt", algorithm),
    )
    grid = federation(tmp_path / "a/clients", algorithm=algorithm)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", dying_save(4, when))
        with pytest.raises(Killed):
            run(tmp_path / "a", grid, strategy(tmp_path / "a/server.pt", algorithm))
    again = strategy(tmp_path / "a/server.pt", algorithm)
    result = again.start(grid, arrays(model()), ROUNDS)
    numbers = sorted(result.train_metrics_clientapp)
    assert numbers == list(range(4 if when == "before it saves" else 5, ROUNDS + 1))
    assert all(not entry.absent for entry in again.rounds)
    assert same(again.server, reference.server)
    kind = "control" if isinstance(algorithm, Scaffold) else "dual"
    assert imbalance(again, tmp_path / "a/clients", kind) < 1e-5


def test_server_and_client_killed_in_one_round(tmp_path, monkeypatch):
    grid = federation(tmp_path / "a/clients")
    save = checkpoint.save

    def killed(file, algorithm, seed, value):
        if value.server.iteration == 4:
            grid.add(2, app(SETTING, tmp_path / "a/clients"), "2")
            raise Killed
        save(file, algorithm, seed, value)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", killed)
        with pytest.raises(Killed):
            run(tmp_path / "a", grid)
    server = run(tmp_path / "a", grid)
    assert same(server.server, run(tmp_path / "b").server)
    assert imbalance(server, tmp_path / "a/clients") < 1e-6


def test_message_of_a_dead_server_comes_late(tmp_path, monkeypatch):
    """A message that the first run had sent reaches a client after the second run's."""
    grid = federation(tmp_path / "a/clients")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", dying_save(4))
        with pytest.raises(Killed):
            run(tmp_path / "a", grid)
    old = [
        message
        for message in grid.sent
        if message.metadata.message_type == "train"
        and message.metadata.dst_node_id == 1
        and message.content["torchpisa"]["iteration"] == 3
    ]
    server = strategy(tmp_path / "a/server.pt")

    def evaluate(number, _):
        if number >= 4:
            grid._deliver(old[0])

    server.start(grid, arrays(model()), ROUNDS, evaluate_fn=evaluate)
    assert same(server.server, run(tmp_path / "b").server)
    assert imbalance(server, tmp_path / "a/clients") < 1e-6


def test_client_lost_its_folder(tmp_path):
    grid = federation(tmp_path / "a/clients")
    (tmp_path / "a").mkdir()
    client_folder = tmp_path / "a/own"
    grid.add(1, app(SETTING, client_folder), "1")

    def lose(message, answer):
        reply = answer()
        shutil.rmtree(client_folder)
        return reply

    grid.tricks[1] = at(3, lose)
    server = run(tmp_path / "a", grid)
    other = federation(tmp_path / "b/clients")
    reference = strategy(tmp_path / "b/server.pt")

    def evaluate(number, _):
        other.offline = {1} if number >= 4 else set()

    reference.start(other, arrays(model()), ROUNDS, evaluate_fn=evaluate)
    assert same(server.server, reference.server)
    assert [entry.absent for entry in server.rounds] == [[]] * 4 + [["1"]] * 4
    assert "took update 3" in server.rounds[4].rejected["1"]


def test_server_was_set_back(tmp_path):
    grid = federation(tmp_path / "clients")
    run(tmp_path, grid, rounds=3)
    backup = shutil.copy(tmp_path / "server.pt", tmp_path / "backup.pt")
    run(tmp_path, grid, rounds=6)
    shutil.copy(backup, tmp_path / "server.pt")
    with pytest.raises(NobodyTrainsError) as error:
        run(tmp_path, grid, rounds=5)
    assert "took update 2 of this client last" in str(error.value)
    assert "goes with update 4 (pending: 5" in str(error.value)


def test_answers_that_do_not_count(tmp_path):
    grid, server = federation(tmp_path / "clients"), strategy()
    server.start(grid, arrays(model()), 2)
    start = server.server
    messages = list(server.configure_train(3, arrays(model()), ConfigRecord(), grid))
    ids = grid.push_messages(messages)
    replies = [reply for i in ids for reply in grid.pull_messages([i])]
    stale = _relabelled(replies[0], "message-1")
    server.aggregate_train(3, [stale, *replies, replies[2], replies[2]])
    once = server.server
    server._server, server._screen = start, strategy()._screen
    list(server.configure_train(3, arrays(model()), ConfigRecord(), grid))
    server._asked = [
        asked._replace(metadata=message.metadata)
        for asked, message in zip(server._asked, messages, strict=True)
    ]
    server.aggregate_train(3, replies)
    assert same(once, server.server)


def _relabelled(reply, message_id):
    copy = message_from_proto(message_to_proto(reply))
    copy.metadata.__dict__["_reply_to_message_id"] = message_id
    return copy


@pytest.mark.parametrize("change", ["algorithm", "seed", "model"])
def test_checkpoint_of_another_training(change, tmp_path):
    run(tmp_path, rounds=1)
    algorithm = Scaffold(lr=0.1) if change == "algorithm" else SETTING
    server = strategy(tmp_path / "server.pt", algorithm, seed=int(change == "seed"))
    network = torch.nn.Linear(2, 2) if change == "model" else model()
    expected = "initial_arrays" if change == "model" else change
    with pytest.raises(ValueError, match=f"{expected} must be"):
        server.start(FakeGrid(), arrays(network), 2)


def test_a_new_training_starts_afresh_in_the_same_folder(tmp_path):
    grid = federation(tmp_path / "clients")
    one, two = strategy(), strategy()
    one.start(grid, arrays(model()), 3)
    two.start(grid, arrays(model()), 3)
    assert same(one.server, two.server)
    assert len(list((tmp_path / "clients").iterdir())) == 2


def test_training_that_is_done_needs_no_clients(tmp_path):
    done = run(tmp_path, rounds=3)
    again = strategy(tmp_path / "server.pt")
    result = again.start(FakeGrid(), arrays(model()), 3)
    assert same(done.server, again.server)
    assert result.train_metrics_clientapp == {}


def test_resumed_run_goes_on_with_those_who_are_there(tmp_path):
    grid = federation(tmp_path / "clients")
    run(tmp_path, grid, rounds=3)
    grid.offline = {0, 1}
    server = run(tmp_path, grid, rounds=5)
    assert [entry.present for entry in server.rounds] == [["2", "3"]] * 2
    assert imbalance(server, tmp_path / "clients") < 1e-6


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "some.pt"
    durable_files.save(file, {"value": 1})

    def crash(value, stream):
        stream.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(OSError, match="no space"):
        durable_files.save(file, {"value": 2})
    assert durable_files.load(file) == {"value": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_messages_in_the_wrong_order(tmp_path):
    """The message of round 3 reaches a client after that of round 4."""
    grid = federation(tmp_path / "clients")
    held = []

    def hold(message, answer):
        held.append(answer)

    def late(message, answer):
        reply = answer()
        assert "is asked for after" in held[0]().error.reason
        return reply

    def trick(message, answer):
        kind = message.metadata.message_type
        iteration = message.content["torchpisa"]["iteration"] if kind == "train" else -1
        return {3: hold, 4: late}.get(iteration, lambda _, answer: answer())(message, answer)

    grid.tricks[1] = trick
    server = run(tmp_path, grid)
    assert [entry.absent for entry in server.rounds] == [[], [], [], ["1"], [], [], [], []]
    assert imbalance(server, tmp_path / "clients") < 1e-6
