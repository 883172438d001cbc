"""Lies, mistakes and strangers: each was tried on a deployment and did harm."""

import itertools
import math
import os
import shutil
import stat

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Error, Message, RecordDict
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from tests.federated.flower.deployment import example_module
from tests.federated.flower.fake import (
    SETTING,
    app,
    client_data,
    federation,
    imbalance,
    model,
    strategy,
)
from torchpisa.federated import MISA, SISA, FedAvg, FedNova, Scaffold
from torchpisa.federated.flower import (
    DamagedFileError,
    GaussianNoise,
    InUseError,
    NobodyTrainsError,
    Screen,
    aggregation,
    arrays,
    checkpoint,
    client_app,
    durable_files,
    load_arrays,
)
from torchpisa.federated.flower.client_memory import FolderMemoryStore
from torchpisa.federated.flower.commands import main as command
from torchpisa.federated.flower.roster import _online

HEAD, FLAT = "torchpisa", "float32"


def start(grid, server, rounds=6, **options):
    server.start(grid, arrays(model()), rounds, **options)
    return server


def key(number):
    """Return what the roster takes for a public key."""
    return b"-----BEGIN PUBLIC KEY-----\n" + bytes([number])


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


def own_data(context):
    return client_data(int(context.node_config["partition-id"]))


@pytest.mark.parametrize("mistake", [lost_memory, batch_norm, float64_inputs, other_sigma])
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


# Two runs on one checkpoint


def test_second_run_is_refused_with_the_id_of_the_first(tmp_path):
    grid, server = federation(tmp_path / "clients"), strategy(tmp_path / "server.pt")
    TaskIdentity.run_id = 4711

    def evaluate(number, _):
        if number == 2:
            second = federation(tmp_path / "clients")
            TaskIdentity.run_id = 4712
            with pytest.raises(InUseError, match="run 4712 is refused: run 4711 "):
                start(second, strategy(tmp_path / "server.pt"))

    start(grid, server, 4, evaluate_fn=evaluate)
    assert server.server.iteration == 4
    assert imbalance(server, tmp_path / "clients") < 1e-6
    start(grid, strategy(tmp_path / "server.pt"), 5)  # afterwards it is free


def test_a_writer_that_the_lock_has_not_kept_out(tmp_path):
    """On a file system without locks, the run that has fallen behind must not write."""
    algorithm = FedAvg(lr=0.1)  # its clients have no memory that would notice
    grid = federation(None, algorithm=algorithm)
    server, other = strategy(tmp_path / "server.pt", algorithm), tmp_path / "other.pt"

    def evaluate(number, _):
        if number == 2:
            shutil.copy(tmp_path / "server.pt", other)
            start(federation(None, algorithm=algorithm), strategy(other, algorithm), 4)
            shutil.copy(other, tmp_path / "server.pt")

    with pytest.raises(InUseError, match=r"was generation 2 .* is generation 4 now"):
        start(grid, server, 4, evaluate_fn=evaluate)
    assert durable_files.load(tmp_path / "server.pt") is not None
    assert durable_files.generation(tmp_path / "server.pt") == 4


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


# Taking a client's contribution back


@pytest.mark.parametrize("algorithm", [SETTING, MISA(), Scaffold(lr=0.1), FedAvg(lr=0.1)])
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


def test_commands_explain_themselves(tmp_path, capsys):
    file = tmp_path / "server.pt"
    assert command(["evict", str(file), "1"]) == 1
    assert "does not exist" in capsys.readouterr().err
    start(federation(tmp_path / "clients"), strategy(file), 2)
    assert command(["evict", str(file), "nobody"]) == 1
    assert "must be one of ['0', '1', '2', '3'], got 'nobody'" in capsys.readouterr().err
    with checkpoint.locked(file, "12"):
        assert command(["evict", str(file), "1"]) == 1
    assert "run 12 " in capsys.readouterr().err
    assert command(["show", str(file)]) == 0
    said = capsys.readouterr().out
    assert "2 rounds" in said
    assert "34.4%" in said
    start(federation(None), strategy(tmp_path / "no.pt", ledger=False), 2)
    assert command(["evict", str(tmp_path / "no.pt"), "1"]) == 1
    assert "ledger=True" in capsys.readouterr().err


def test_evict_needs_a_ledger_and_a_client():
    server = start(federation(None), strategy(ledger=False), 1)
    with pytest.raises(RuntimeError, match="ledger=True"):
        server.evict("1")
    with pytest.raises(KeyError, match=r"one of the clients \['0', '1', '2', '3'\], got 'x'"):
        server.evict("x")


# Numbers of samples


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
    with pytest.raises(TimeoutError, match=r"got 3: \['1', '2', '3'\]. client '0' claims"):
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


@pytest.mark.parametrize("norm", [-900.0, 0.0, math.nan, 2.0])
def test_norm_of_fednova_is_known_to_the_server(norm):
    algorithm = FedNova(lr=0.1, momentum=0.5)
    grid, server = federation(None, algorithm=algorithm), strategy(algorithm=algorithm)
    grid.tricks[1] = lying(lambda content: content[HEAD].update({"number.norm": norm}))
    start(grid, server, 3)
    assert all(entry.absent == ["1"] for entry in server.rounds)
    assert "'norm' must be 1 for 7 samples, got" in server.rounds[0].rejected["1"]


# Names and keys


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


# Privacy


@pytest.mark.parametrize(
    "mod", [LocalDpMod(1.0, 1.0, 1.0, 0.1), fixedclipping_mod, adaptiveclipping_mod]
)
def test_mods_that_would_destroy_updates_are_refused(mod):
    name = getattr(mod, "__name__", "LocalDpMod")
    with pytest.raises(ValueError, match=rf"got {name}: .* Use privacy=GaussianNoise"):
        app(SETTING, mods=[mod])


def test_harmless_mods_are_taken():
    seen = []

    def client_folder(message, context, call_next):
        seen.append(message.metadata.message_type)
        return call_next(message, context)

    start(federation(None, mods=[message_size_mod, client_folder]), strategy(), 1)
    assert sorted(seen) == ["query"] * 4 + ["train"] * 4


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: DifferentialPrivacyServerSideFixedClipping(inner, 1.0, 1.0, 4),
        lambda inner: DifferentialPrivacyServerSideAdaptiveClipping(inner, 0.1, 4),
        lambda inner: DifferentialPrivacyClientSideFixedClipping(inner, 1.0, 1.0, 4),
        lambda inner: DifferentialPrivacyClientSideAdaptiveClipping(inner, 0.1, 4),
    ],
)
def test_wrappers_are_refused_by_name(wrap):
    wrapped = wrap(strategy())
    with pytest.raises(RuntimeError, match=type(wrapped).__name__) as error:
        wrapped.start(federation(None), arrays(model()), 1)
    assert "privacy=GaussianNoise" in str(error.value)


@pytest.mark.parametrize("algorithm", [SETTING, Scaffold(lr=0.1), FedAvg(lr=0.1)])
def test_blurred_updates_keep_the_sum(algorithm, tmp_path):
    kind = next(iter(algorithm.remember({"w": torch.zeros(1)})), None)
    grid = federation(tmp_path, algorithm=algorithm, privacy=GaussianNoise(0.05, 0.1))
    server = start(grid, strategy(algorithm=algorithm), 5)
    assert all(entry.absent == [] for entry in server.rounds)
    plain = start(federation(None, algorithm=algorithm), strategy(algorithm=algorithm), 5)
    name = "0.weight"
    assert not torch.equal(server.server.weights[name], plain.server.weights[name])
    if kind is not None:
        assert imbalance(server, tmp_path, kind) < 1e-5


def test_clip_and_noise():
    update = SETTING.start({"w": torch.zeros(10_000)}), torch.randn(10_000)
    message = type(SETTING.broadcast(update[0]))({"delta": {"w": update[1]}}, {})
    clipped = GaussianNoise(2.0, 0.0).apply(message).tensors["delta"]["w"]
    torch.testing.assert_close(clipped, update[1] * (2 / update[1].norm()))
    noise = GaussianNoise(2.0, 0.5).apply(message).tensors["delta"]["w"] - clipped
    assert float(noise.std()) == pytest.approx(1.0, rel=0.05)
    again = GaussianNoise(2.0, 0.5).apply(message).tensors["delta"]["w"] - clipped
    assert not torch.equal(noise, again)
    for options in ({"clip": 0, "noise": 1}, {"clip": 1, "noise": -1}):
        with pytest.raises(ValueError, match="must be a finite number"):
            GaussianNoise(**options)


# Files


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_nobody_else_may_read_the_files(tmp_path):
    folder = tmp_path / "deep" / "er"
    start(federation(folder / "clients"), strategy(folder / "server.pt"), 2)
    for path in (tmp_path / "deep").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("name", ["..", ".", "", "../../x", "a/b", "%2E%2E", "\\..\\x"])
def test_names_stay_inside_the_folder(name, tmp_path):
    folder = tmp_path / "in" / "side"
    file = FolderMemoryStore(folder, name, name).file
    assert file.resolve().is_relative_to(folder.resolve())
    assert file.parent.parent == folder
    others = {FolderMemoryStore(folder, other, "x").file for other in ("..", "%2E%2E", ".", "a")}
    assert len(others) == 4


def test_every_flipped_byte_is_noticed(tmp_path):
    file = tmp_path / "server.pt"
    durable_files.save(file, {"server": {"w": torch.randn(20)}, "clients": {"a": 1}}, 3)
    content = file.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(DamagedFileError, match=str(file)):
            durable_files.load(file)
    for size in (0, 10, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(DamagedFileError, match=str(file)):
            durable_files.load(file)
    file.write_bytes(content)
    assert durable_files.load(file)["clients"] == {"a": 1}


def test_last_two_generations_are_kept(tmp_path):
    file = tmp_path / "server.pt"
    grid = federation(tmp_path / "clients")
    start(grid, strategy(file), 3)
    assert durable_files.load(durable_files.previous(file))["server"]["iteration"] == 2
    file.write_bytes(b"junk")
    with pytest.raises(DamagedFileError, match=r"server\.pt is damaged.*server\.pt\.previous"):
        start(grid, strategy(file), 4)
    durable_files.previous(file).replace(file)
    # The clients have not heard of round 3 being counted, and go back with the server.
    server = start(grid, strategy(file), 6)
    assert all(entry.absent == [] for entry in server.rounds)
    assert imbalance(server, tmp_path / "clients") < 1e-6


def test_old_trainings_are_listed_and_removed(tmp_path, capsys):
    folder = tmp_path / "clients"
    grid = federation(folder)
    names = []
    for _ in range(2):
        server = start(grid, strategy(), 1)
        names.append(server._training)
    assert command(["trainings", str(folder)]) == 0
    said = capsys.readouterr().out
    assert all(f"{name}" in said for name in names)
    assert "0, 1, 2, 3" in said
    assert command(["remove", str(folder), names[0]]) == 0
    assert [path.name for path in folder.iterdir()] == [names[1]]
    assert command(["remove", str(folder), ".."]) == 1
    assert "must be one of those in" in capsys.readouterr().err
    (folder / names[1] / "mine.txt").write_text("keep")
    assert command(["remove", str(folder), names[1]]) == 1
    assert (folder / names[1] / "mine.txt").exists()


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
