"""Lies, mistakes and strangers: each was tried on a deployment and did harm."""

import itertools
import math
import shutil
import stat

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from torch import nn

from tests.federated.flower.deployment import example_module
from tests.federated.flower.fake import (
    SETTING,
    app,
    client_data,
    federation,
    imbalance,
    model,
    start,
    strategy,
)
from torchpisa.federated import (
    MISA,
    SISA,
    FedADMM,
    FedAvg,
    FedNova,
    RobustSelection,
    Scaffold,
    durable_files,
)
from torchpisa.federated.flower import (
    NobodyTrainsError,
    Screen,
    aggregation,
    arrays,
    client_app,
    load_arrays,
)
from torchpisa.federated.flower.commands import main as command

HEAD, FLAT = "torchpisa", "float32"


def lying(change, iterations=range(1000)):
    """Return a trick that changes an honest answer in some rounds."""

    def trick(message, answer):
        reply = answer()
        if message.metadata.message_type != "train" or reply.has_error():
            return reply
        if message.content[HEAD]["iteration"] in iterations:
            change(reply.content)
        return reply

    return trick


def times(factor, field="delta"):
    def change(content):
        content[field][FLAT] = Array(content[field][FLAT].numpy() * np.float32(factor))

    return change


# Runs in which nobody trains


def lost_memory(folder):
    """Restart the SuperNodes, which had no folder."""
    start(federation(None), strategy(folder / "server.pt"), 3)
    return federation(None), strategy(folder / "server.pt"), "took update 2 of this client last"


def batch_norm(folder):
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    grid = federation(None)
    for node in grid.nodes:
        grid.add(node, client_app(lambda: network, own_data, SETTING), str(node))
    return grid, strategy(folder / "server.pt"), "must not keep running statistics"


def float64_inputs(folder):
    def data(context):
        inputs, targets = own_data(context)
        return inputs.double(), targets

    grid = federation(None)
    for node in grid.nodes:
        grid.add(node, client_app(model, data, SETTING), str(node))
    return grid, strategy(folder / "server.pt"), "same dtype|Double"


def other_sigma(folder):
    grid = federation(None, algorithm=SISA(sigma=6.0, rho=1.0))
    return grid, strategy(folder / "server.pt"), "must be that of the server"


def no_algorithm(folder):
    grid = federation(None)
    for node in grid.nodes:
        grid.add(node, client_app(model, own_data, lambda context: SISA), str(node))
    return grid, strategy(folder / "server.pt"), "algorithm must return one .*, got <class .*SISA'>"


def own_data(context):
    return client_data(int(context.node_config["partition-id"]))


@pytest.mark.parametrize(
    "mistake", [lost_memory, batch_norm, float64_inputs, other_sigma, no_algorithm]
)
def test_nobody_trains(mistake, tmp_path):
    grid, server, reason = mistake(tmp_path)
    file = tmp_path / "server.pt"
    before = file.read_bytes() if file.exists() else None
    network = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        if mistake is batch_norm
        else model()
    )
    with pytest.raises(NobodyTrainsError, match=reason) as error:
        server.start(grid, arrays(network), 30)
    assert "0, 1, 2, 3: " in str(error.value)
    assert len(server.rounds) == 1
    assert (file.read_bytes() if file.exists() else None) == before


def test_one_refusal_does_not_end_a_run_that_draws_few():
    grid, server = federation(None), strategy(participation=0.25, deadline=60.0)
    grid.add(2, app(SISA(sigma=6.0, rho=1.0)), "2")
    start(grid, server, 12)
    assert server.server.iteration == 12
    assert {name for entry in server.rounds for name in entry.present} == {"0", "1", "3"}


def test_nodes_that_are_gone_have_not_refused(tmp_path):
    """The SuperLink answers for them; the round is tried again."""
    grid, server = federation(tmp_path / "clients"), strategy(deadline=60.0)
    gone = dict.fromkeys(grid.nodes, 3)

    def trick(message, answer):
        node = message.metadata.dst_node_id
        if message.metadata.message_type == "train" and gone[node]:
            gone[node] -= 1
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "offline"), reply_to=message)
        return answer()

    grid.tricks = dict.fromkeys(grid.nodes, trick)
    start(grid, server, 3)
    assert [len(entry.present) for entry in server.rounds] == [0, 0, 0, 4, 4, 4]


def test_empty_rounds_end_in_time_and_do_not_count(tmp_path):
    grid, server = federation(tmp_path / "clients"), strategy(tmp_path / "server.pt")

    def evaluate(number, _):
        if number == 2:
            grid.tricks = dict.fromkeys(grid.nodes, lambda message, answer: None)

    with pytest.raises(TimeoutError, match=r"nothing usable came in round 3 .* Online: \['0', "):
        start(grid, server, 30, evaluate_fn=evaluate)
    assert server.server.iteration == 2
    assert durable_files.load(tmp_path / "server.pt")["server"]["iteration"] == 2


# Lies within an update


@pytest.mark.parametrize("algorithm", [SETTING, Scaffold(lr=0.1), FedAvg(lr=0.1)])
def test_one_liar_of_many(algorithm, tmp_path):
    """-10 times the truth in every round: the others train as if it were not there."""
    field = "delta" if algorithm is SETTING else "moved"

    def change(content):
        times(-10, field)(content)
        if "control" in content:
            times(-10, "control")(content)

    grid = federation(tmp_path / "a", 8, algorithm)
    grid.tricks[4] = lying(change)
    server = start(grid, strategy(algorithm=algorithm, clients=8), 8)
    assert all(entry.absent == ["4"] for entry in server.rounds)
    other = federation(tmp_path / "b", 8, algorithm)
    reference = strategy(algorithm=algorithm, clients=8)

    def evaluate(number, _):
        other.offline = {4}

    start(other, reference, 8, evaluate_fn=evaluate)
    for name, weight in server.server.weights.items():
        torch.testing.assert_close(weight, reference.server.weights[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("algorithm", "factor"), [(SETTING, -2), (MISA(), -4)])
def test_lies_within_the_limit_do_not_add_up(algorithm, factor):
    """A small lie in every round: the liar's dual stays within the limit, and so does the sum."""
    grid = federation(None, 5, algorithm)
    grid.tricks[3] = lying(times(factor))
    server = start(grid, strategy(clients=5, algorithm=algorithm), 25)
    norms = {
        name: math.sqrt(sum(float(t.square().sum()) for t in sums["dual"].values()))
        for name, sums in server._ledger.sums.items()
    }
    liar = norms.pop("3")
    assert liar <= 1.01 * Screen().largest * max(norms.values())
    assert any("3" in entry.rejected for entry in server.rounds)


@pytest.mark.parametrize("algorithm", [SETTING, FedAvg(lr=0.1)])
def test_a_liar_within_the_limits_of_size_is_rejected_as_an_outlier(algorithm, tmp_path):
    """The sign is wrong, the size passes the screen; the server's sum stays its clients'."""
    grid = federation(tmp_path / "clients", 8, algorithm)
    trick = times(-2.5, "delta") if algorithm is SETTING else times(-1.9, "moved")
    grid.tricks[4] = lying(trick)
    server = strategy(clients=8, algorithm=algorithm, robust=RobustSelection())
    start(grid, server, 6)
    outlier = [entry.rejected.get("4", "") for entry in server.rounds]
    assert any("from the geometric median of all" in reason for reason in outlier)
    if algorithm is SETTING:
        assert imbalance(server, tmp_path / "clients") < 1e-6


def test_an_outlier_loses_what_it_had_contributed(tmp_path):
    """Honest in two rounds, then not: after three rejections its dual leaves the sum."""
    grid = federation(tmp_path / "clients", 8)
    grid.tricks[4] = lying(times(-2.9), range(2, 8))
    server = strategy(clients=8, robust=RobustSelection(), screen=Screen(largest=1e3))
    start(grid, server, 7)
    assert [number for number, entry in enumerate(server.rounds) if "4" in entry.present] == [0, 1]
    assert server.clients["4"].life == 1
    assert "4" not in server._ledger.sums
    assert imbalance(server, tmp_path / "clients") < 1e-6


def test_what_a_judge_knows_survives_a_restart(tmp_path):
    """Four rounds before, four after: the same clients are rejected as without a restart."""
    runs = []
    for stops in ((8,), (4, 8)):
        folder = tmp_path / str(len(stops))
        grid = federation(folder / "clients", 8)
        grid.tricks[4] = lying(times(-2.9), range(2, 8))
        robust, rounds = RobustSelection(), []
        for stop in stops:
            server = strategy(
                folder / "server.pt", clients=8, robust=robust, screen=Screen(largest=1e3)
            )
            start(grid, server, stop)
            rounds += [entry.rejected for entry in server.rounds]
        runs.append(rounds)
    assert runs[0] == runs[1]
    assert "put out" in str(runs) or all("4" in rejected for rejected in runs[0][2:])


def test_robust_selection_needs_to_know_what_clients_have_contributed(tmp_path):
    file = tmp_path / "server.pt"
    start(federation(tmp_path), strategy(file, ledger=False), 2)
    with pytest.raises(ValueError, match=r"robust must be None .* no ledger .*, got RobustSel"):
        start(federation(tmp_path), strategy(file, robust=RobustSelection()), 4)


def test_claimed_samples_are_limited_and_the_sum_stays_right(tmp_path):
    """Clients have 5, 7, ... samples; the limit is that of the start, also for who comes later."""
    file, folder = tmp_path / "server.pt", tmp_path / "clients"
    grid = federation(folder, 5)
    robust = RobustSelection(factor=1e9, count_limit=1.0)
    grid.offline = {4}
    start(grid, strategy(file, clients=4, robust=robust), 2)
    grid.offline = set()
    server = start(grid, strategy(file, clients=4, robust=robust), 4)
    assert {name: c.samples for name, c in server.clients.items()}["4"] == 13
    weights = {name: client.weight for name, client in server.clients.items()}
    assert weights == {"0": 5, "1": 7, "2": 7, "3": 7, "4": 7}
    total = {}
    for name, sums in server._ledger.sums.items():
        for key, dual in sums["dual"].items():
            total[key] = total.get(key, 0) + weights[name] / 33 * dual.double()
    for key, dual in server.server.memory["dual"].items():
        torch.testing.assert_close(total[key].float(), dual, rtol=1e-4, atol=1e-6)
    assert command(["evict", str(file), "4"]) == 0


@pytest.mark.parametrize("clients", [1, 2])
def test_first_reply_has_a_bound(clients):
    """With nothing to compare with, too."""
    grid, server = federation(None, clients), strategy(clients=clients)
    grid.tricks[0] = lying(times(1e10))
    if clients == 1:
        with pytest.raises(NobodyTrainsError, match="more than the ceiling"):
            start(grid, server)
    else:
        start(grid, server, 2)
        assert all("ceiling" in entry.rejected["0"] for entry in server.rounds)


def test_screen_remembers_over_a_restart(tmp_path):
    grid = federation(tmp_path / "clients")
    start(grid, strategy(tmp_path / "server.pt"), 3)
    grid.offline = {0, 1, 2}
    grid.tricks[3] = lying(times(-500))
    with pytest.raises(NobodyTrainsError, match="times the median"):
        start(grid, strategy(tmp_path / "server.pt"), 4)


# A sigma that is found in the first round


CALIBRATED = SISA(sigma=None, rho=None)


@pytest.mark.parametrize("when", [0, 1, 4])
def test_server_restarted_after_any_round_finds_the_same_sigma(when, tmp_path):
    whole = strategy(tmp_path / "whole.pt", CALIBRATED)
    start(federation(tmp_path / "a", algorithm=CALIBRATED), whole)
    grid = federation(tmp_path / "b", algorithm=CALIBRATED)
    if when:
        start(grid, strategy(tmp_path / "parts.pt", CALIBRATED), when)
    parts = start(grid, strategy(tmp_path / "parts.pt", CALIBRATED))
    assert parts.server.numbers == whole.server.numbers
    assert parts.server.numbers["sigma"] > 0
    for name, weight in whole.server.weights.items():
        assert torch.equal(parts.server.weights[name], weight)


def square(value):
    def change(content):
        content[HEAD]["number.square"] = value

    return change


@pytest.mark.parametrize("lie", [square(1e6), square(0.0), square(math.nan), times(100)])
def test_a_liar_does_not_decide_sigma(lie):
    """It is as good as absent; how large its gradient is, the server computes itself."""

    def absent(message, answer):
        return None if message.metadata.message_type == "train" else answer()

    sigmas = []
    for trick in (lying(lie, [0]), absent):
        grid = federation(None, algorithm=CALIBRATED)
        grid.tricks[1] = trick
        server = start(grid, strategy(algorithm=CALIBRATED), 1)
        assert server.rounds[0].absent == ["1"]
        sigmas.append(server.server.numbers["sigma"])
    assert sigmas[0] > 0
    assert sigmas[0] == sigmas[1]


# Taking a client's contribution back


@pytest.mark.parametrize(
    "algorithm",
    [
        SETTING,
        SISA(sigma=None, rho=None),
        MISA(),
        Scaffold(lr=0.1),
        FedAvg(lr=0.1),
        FedADMM(lr=0.1, rho=1.0),
    ],
)
@pytest.mark.parametrize("by", ["strategy", "command"])
def test_evicted_client_leaves_nothing_behind(by, algorithm, tmp_path):
    kind = next(iter(algorithm.remember({"w": torch.zeros(1)})), None)
    file, folder = tmp_path / "server.pt", tmp_path / "clients"
    grid = federation(folder, algorithm=algorithm)
    first = strategy(file, algorithm)

    def evaluate(number, _):
        if by == "strategy" and number == 3 and "1" in first.clients:
            first.evict("1")

    start(grid, first, 3, evaluate_fn=evaluate)
    if by == "command":
        assert command(["evict", str(file), "1"]) == 0
    server = start(grid, strategy(file, algorithm), 5)
    assert sorted(server.clients) == ["0", "2", "3"]
    assert all(entry.present == ["0", "2", "3"] for entry in server.rounds)
    if kind is not None:
        assert imbalance(server, folder, kind) < 1e-5


@pytest.mark.parametrize("evicted", [True, False])
def test_training_recovers_from_a_lie_when_the_liar_is_evicted(evicted):
    """One 50-fold reply in round 4; without the eviction it would stay in the sum for good."""
    algorithm = SISA(sigma=2.0, rho=1.0)
    grid = federation(None, 5, algorithm)
    grid.tricks[4] = lying(times(50), [3])
    server = strategy(clients=5, algorithm=algorithm, screen=Screen(largest=1e6, ceiling=1e9))
    losses = {}

    def evaluate(number, record):
        losses[number] = loss(record, range(4))
        if number == 5 and evicted:
            server.evict("4")

    start(grid, server, 30, evaluate_fn=evaluate)
    assert losses[5] > 4
    assert (losses[30] < losses[2]) == evicted
    assert evicted or losses[30] > 4 * losses[5]


def loss(record, clients):
    network = load_arrays(model(), record)
    data = [client_data(client) for client in clients]
    inputs, targets = (torch.cat(parts) for parts in zip(*data, strict=True))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(network(inputs), targets))


@pytest.mark.parametrize("by", ["strategy", "command"])
def test_client_that_lost_its_folder_starts_anew(by, tmp_path):
    file, folder, client_folder = tmp_path / "server.pt", tmp_path / "clients", tmp_path / "own"
    grid = federation(folder)
    grid.add(1, app(SETTING, client_folder), "1")
    start(grid, strategy(file), 4)
    shutil.rmtree(client_folder)
    refused = start(grid, strategy(file), 5)
    assert "restart CHECKPOINT CLIENT" in refused.rounds[0].rejected["1"]
    server = strategy(file)
    if by == "command":
        assert command(["restart", str(file), "1"]) == 0
        start(grid, server, 8)
    else:
        start(grid, server, 8, evaluate_fn=lambda number, _: number == 5 and server.restart("1"))
    assert all(entry.present == ["0", "1", "2", "3"] for entry in server.rounds)
    shutil.copytree(client_folder, folder, dirs_exist_ok=True)
    assert imbalance(server, folder) < 1e-6


def test_evicted_client_may_come_back_as_a_newcomer(tmp_path):
    """With a folder full of what does not count any more."""
    file, folder = tmp_path / "server.pt", tmp_path / "clients"
    grid = federation(folder)
    start(grid, strategy(file), 3)
    assert command(["evict", str(file), "1"]) == 0
    start(grid, strategy(file), 5)
    assert command(["admit", str(file), "1"]) == 0
    server = start(grid, strategy(file), 8)
    assert server.rounds[-1].present == ["0", "1", "2", "3"]
    assert imbalance(server, folder) < 1e-6


def test_evict_needs_a_ledger_and_a_client():
    server = start(federation(None), strategy(ledger=False), 1)
    with pytest.raises(RuntimeError, match="ledger=True"):
        server.evict("1")
    with pytest.raises(KeyError, match=r"one of the clients \['0', '1', '2', '3'\], got 'x'"):
        server.evict("x")


@pytest.mark.parametrize("norm", [-900.0, 0.0, math.nan, 2.0])
def test_norm_of_fednova_is_known_to_the_server(norm):
    algorithm = FedNova(lr=0.1, momentum=0.5)
    grid, server = federation(None, algorithm=algorithm), strategy(algorithm=algorithm)
    grid.tricks[1] = lying(lambda content: content[HEAD].update({"number.norm": norm}))
    start(grid, server, 3)
    assert all(entry.absent == ["1"] for entry in server.rounds)
    assert "'norm' must be 1 for 7 samples, got" in server.rounds[0].rejected["1"]


# Replies that are larger than they can be


def big_array(content):
    content["delta"][FLAT] = Array(np.zeros(100_000, np.float32))


def big_layout(content):
    content[HEAD]["layout.delta"] = "[" * 1_000_000


def many_records(content):
    for number in range(100):
        content[f"junk-{number}"] = ConfigRecord({"a": 1})


def many_entries(content):
    content[HEAD].update({f"junk-{number}": 1 for number in range(2000)})


@pytest.mark.parametrize("junk", [big_array, big_layout, many_records, many_entries])
def test_junk_is_not_read_and_who_repeats_it_is_put_aside(junk, monkeypatch, caplog):
    grid, server = federation(None), strategy()
    grid.tricks[1] = lying(junk)
    opened = itertools.count()
    read_fields = aggregation.read_fields
    monkeypatch.setattr(
        aggregation, "read_fields", lambda *args: (next(opened), read_fields(*args))[1]
    )
    start(grid, server, 5)
    assert [list(entry.rejected) for entry in server.rounds] == [["1"]] * 2 + [[]] * 3
    assert next(opened) == 15  # those of the other three
    assert "client '1' is put aside for the rest of this run" in caplog.text
    asked = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert asked.count(1) == 2


def test_junk_as_introduction():
    grid, server = federation(None), strategy(clients=3)

    def trick(message, answer):
        head = ConfigRecord({"name": "x" * 10_000, "samples": 5})
        return Message(RecordDict({HEAD: head}), reply_to=message)

    grid.tricks[1] = trick
    start(grid, server, 1)
    assert sorted(server.clients) == ["0", "2", "3"]


# Files


def test_certificates_made_twice_explain_themselves(tmp_path, capsys, monkeypatch):
    certificates = example_module("certificates.py")
    folder = tmp_path / "federation"

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["certificates.py", str(folder), *arguments])
        certificates.main()
        return capsys.readouterr().out

    assert "for server.example, localhost, 127.0.0.1" in run("--host", "server.example")
    assert f"made: {folder}/node-0, {folder}/node-0.pub" in run("--nodes", "1")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    said = run("--host", "other.example", "--nodes", "1")
    assert "kept: " in said
    assert "server.key, for server.example, localhost, 127.0.0.1" in said
    assert "node-0; --first says where the numbers of further nodes begin" in said
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "node-0").stat().st_mode) == 0o600
