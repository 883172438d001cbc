"""The roster of clients: numbers of samples, names and keys."""

import os

import pytest

from tests.federated.flower.fake import (
    SETTING,
    app,
    federation,
    start,
    strategy,
)
from torchpisa.federated.flower.commands import main as command
from torchpisa.federated.flower.roster import _online

HEAD = "torchpisa"


def key(number):
    """Return what the roster takes for a public key."""
    return b"-----BEGIN PUBLIC KEY-----\n" + bytes([number])


def claiming(samples):
    def trick(message, answer):
        reply = answer()
        if message.metadata.message_type == "query":
            reply.content[HEAD]["samples"] = samples
            return reply
        return None  # and never trains

    return trick


def test_newcomer_that_claims_everything_is_left_out(caplog):
    grid, server = federation(None, 5), strategy(clients=4)
    grid.offline = {4}
    grid.tricks[4] = claiming(10**12)

    def evaluate(number, _):
        grid.offline = set() if number == 3 else grid.offline

    start(grid, server, 6, evaluate_fn=evaluate)
    assert sorted(server.clients) == ["0", "1", "2", "3"]
    assert all(entry.absent == [] for entry in server.rounds)
    assert "claims 1000000000000 of 1000000000032 samples, more than max_share=0.5" in caplog.text


def test_bad_count_refuses_that_client_and_not_the_start():
    grid, server = federation(None, 5), strategy(clients=4)
    grid.tricks[0] = claiming(10**12)
    start(grid, server, 2)
    assert sorted(server.clients) == ["1", "2", "3", "4"]
    grid, server = federation(None, 4), strategy(clients=4)
    grid.tricks[0] = claiming(10**12)
    with pytest.raises(TimeoutError, match=r"got 3: \['1', '2', '3'\]. node 0: client '0' claims"):
        start(grid, server, 2)


def test_table_of_samples(caplog):
    grid, server = federation(None, 5), strategy(clients=4, samples=dict.fromkeys("0123", 10))
    grid.tricks[0] = lambda message, answer: claiming(10**12)(message, answer) or answer()
    start(grid, server, 2)
    assert {name: client.samples for name, client in server.clients.items()} == dict.fromkeys(
        "0123", 10
    )
    assert "client '4' is not in samples" in caplog.text
    assert "what counts is samples['0'] = 10" in caplog.text
    with pytest.raises(ValueError, match=r"samples\['x'\] must be an integer >= 1, got 0"):
        strategy(samples={"x": 0})


def test_low_share_is_said(caplog):
    grid, server = federation(None, 4), strategy()

    def evaluate(number, _):
        grid.offline = {2, 3}

    start(grid, server, 15, evaluate_fn=evaluate)
    lines = [r.getMessage() for r in caplog.records if "of the samples had a part" in r.message]
    assert len(lines) == 2  # not in every round
    assert lines[0].startswith("only 38% of the samples had a part in round 1")
    assert "'3' (34.4%), '2' (28.1%)" in lines[0]


def test_name_belongs_to_its_key(tmp_path, caplog):
    file = tmp_path / "server.pt"
    grid = federation(tmp_path / "clients")
    grid.keys = {node: key(node) for node in grid.nodes}
    start(grid, strategy(file), 3)
    # After a restart another registered node is faster.
    grid.offline = {2}
    grid.add(9, app(SETTING, tmp_path / "thief"), "2")
    grid.keys[9] = key(9)
    thief = start(grid, strategy(file), 5)
    assert all(entry.absent == ["2"] for entry in thief.rounds)
    assert "node 9 is refused: it claims to be client '2', who has another key" in caplog.text
    grid.offline = set()
    server = start(grid, strategy(file), 7)
    assert all(entry.absent == [] for entry in server.rounds)
    assert server.clients["2"].node == 2
    # The owner has a new key, and the operator says so.
    grid.offline = {2}
    assert command(["release", str(file), "2"]) == 0
    server = start(grid, strategy(file), 8)
    assert server.clients["2"].node == 9


def test_node_with_the_same_key_and_another_id(tmp_path):
    """The SuperLink has lost its database."""
    file, folder = tmp_path / "server.pt", tmp_path / "clients"
    grid = federation(folder)
    grid.keys = {node: key(node) for node in grid.nodes}
    start(grid, strategy(file), 3)
    again = federation(folder)
    again.nodes = {node + 50: kept for node, kept in again.nodes.items()}
    again.keys = {node: key(node - 50) for node in again.nodes}
    server = start(again, strategy(file), 5)
    assert all(entry.absent == [] for entry in server.rounds)


def test_keys_of_simulated_nodes_are_none():
    grid = federation(None, 2)
    grid.keys = {0: os.urandom(32), 1: key(1)}
    assert _online(grid)[0] is None
    assert len(_online(grid)[1]) == 64
