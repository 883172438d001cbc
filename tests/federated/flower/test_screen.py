"""Payloads that must not reach the global model."""

import json
import math
import re
from pathlib import Path

import flwr.app
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from tests.federated.flower.fake import SETTING, federation, model, strategy
from torchpisa.federated import FedAvg, FedNova, FullGradient, RobustSelection, Scaffold
from torchpisa.federated.algorithms import Message
from torchpisa.federated.flower import NobodyTrainsError, Screen, arrays
from torchpisa.federated.flower.records import (
    PayloadError,
    read_entry,
    read_fields,
    read_numbers,
    to_records,
)
from torchpisa.federated.flower.screen import norms, update_template

HEAD, LAYOUT, FLAT = "torchpisa", "layout.delta", "float32"


def array(new):
    """Return a forgery that replaces the array of all entries."""

    def forge(content):
        content["delta"][FLAT] = new(content["delta"][FLAT])

    return forge


def entries(change):
    """Return a forgery that changes the entries of the array."""
    return array(lambda old: Array(change(old.numpy())))


def value(number):
    """Return a forgery that puts a number into one entry."""

    def change(flat):
        flat[7] = number
        return flat

    return entries(change)


def scaled(factor):
    """Return a forgery that multiplies all entries."""
    return entries(lambda flat: flat * np.float32(factor))


def layout(change, entries=lambda flat: flat):
    """Return a forgery that changes the layout, and the array."""

    def forge(content):
        layout = json.loads(content[HEAD][LAYOUT])
        changed = change(layout)
        content[HEAD][LAYOUT] = json.dumps(layout if changed is None else changed)
        content["delta"][FLAT] = Array(entries(content["delta"][FLAT].numpy()))

    return forge


def raw(data):
    """Return a forgery that replaces the bytes of the array."""
    return array(lambda old: Array(old.dtype, old.shape, old.stype, data(old.data)))


def header(kind, shape):
    """Return a forgery with a header and no data."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return raw(lambda _: b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)


def record(name, new=None):
    """Return a forgery that removes or replaces a record."""

    def forge(content):
        if name in content:
            del content[name]
        if new is not None:
            content[name] = new

    return forge


def head(**entries):
    """Return a forgery that changes entries of the head; None removes one."""

    def forge(content):
        for name, new in entries.items():
            content[HEAD].pop(name) if new is None else content[HEAD].update({name: new})

    return forge


ZEROS = Array(np.zeros(3, np.float32))
FORGERIES = {
    "nan": (value(math.nan), "is not finite"),
    "inf": (value(-math.inf), "is not finite"),
    "1e30": (value(1e30), "more than the ceiling"),
    "overflow of the norm": (scaled(1e25), "more than the ceiling"),
    "1e5 times too large": (scaled(1e5), "times the median"),
    "wrong shape": (layout(lambda all: all[0][2].reverse()), "must have shape"),
    "shape that is none": (layout(lambda all: all[0].__setitem__(2, [-4, -3])), "have shape"),
    "missing parameter": (layout(lambda all: all[1:], lambda x: x[12:]), "'0.weight'.* missing"),
    "missing entries": (entries(lambda x: x[12:]), "must have 31 entries"),
    "extra parameter": (
        layout(lambda all: [*all, ["mine", FLAT, [2]]], lambda x: np.append(x, x[:2])),
        r"\['mine'\] are not trained parameters of the model",
    ),
    "extra entries": (entries(lambda x: np.append(x, x[:2])), "must have 31 entries"),
    "a parameter twice": (layout(lambda all: [*all, all[0]]), "is there twice"),
    "other dtype": (layout(lambda all: all[0].__setitem__(1, "float64")), "must be torch.float32"),
    "unknown dtype": (layout(lambda all: all[0].__setitem__(1, "junk")), "must be torch.float32"),
    "float64": (entries(lambda x: x.astype(np.float64)), "must be float32, got float64"),
    "integers": (entries(lambda x: x.astype(np.int32)), "must be float32"),
    "big endian": (entries(lambda x: x.astype(">f4")), "must be float32"),
    "complex": (entries(lambda x: x.astype(np.complex64)), "must be float32"),
    "two dimensions": (entries(lambda x: x.reshape(1, -1)), "must have 31 entries"),
    "scalar": (entries(lambda x: x[:1].reshape(())), "must have 31 entries"),
    "garbage": (raw(lambda _: b"junk"), "cannot be read"),
    "nothing": (raw(lambda _: b""), "cannot be read"),
    "cut off": (raw(lambda data: data[:-4]), "in 120 bytes"),
    "too long": (raw(lambda data: data + b"1234"), "in 128 bytes"),
    "huge header": (header("<f4", "(99999999999,)"), "must have 31 entries"),
    "objects": (header("|O", "(31,)"), "must be float32, got object"),
    "layout that is none": (layout(lambda _: {"a": 1}), "layout cannot be read"),
    "layout that is garbage": (head(**{LAYOUT: "[[["}), "layout cannot be read"),
    "layout that is missing": (head(**{LAYOUT: None}), "'layout.delta' must be of type str"),
    "no record": (record("delta"), r"records \['delta'\] are missing"),
    "extra record": (record("weights", ArrayRecord({})), r"\['weights'\] are unknown"),
    "other record": (record("delta", MetricRecord({"a": 1})), r"\['delta'\] are missing"),
    "other arrays": (record("delta", ArrayRecord({"float16": ZEROS})), "arrays must be"),
    "no head": (record(HEAD), "'torchpisa' is missing"),
    "strange head": (head(iteration="x"), "'iteration' must be of type int, got 'x'"),
    "extra number": (head(**{"number.sigma": 1.0}), r"numbers must be \[\], got \['sigma'\]"),
    "strange number": (head(**{"number.sigma": "x"}), "must be a number, got 'x'"),
    "another client": (head(name="0"), "update 3 of client '0', not update 3"),
    "another round": (head(iteration=0), "update 0 of client '1', not update 3"),
}


def forged(forge, iterations):
    """Return the trick of a client that lies in some rounds."""

    def trick(message, answer):
        reply = answer()
        if message.metadata.message_type != "train":
            return reply
        if message.content["torchpisa"]["iteration"] in iterations:
            forge(reply.content)
        return reply

    return trick


def train(folder, rounds=6, absent=(), forge=None, iterations=(3,)):
    grid, server = federation(folder / "clients"), strategy()
    if forge is not None:
        grid.tricks[1] = forged(forge, iterations)

    def evaluate(number, _):
        grid.offline = {1} if number in absent else set()

    server.start(grid, arrays(model()), rounds, evaluate_fn=evaluate)
    return server


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return a training in which client 1 is absent in iteration 3."""
    return train(tmp_path_factory.mktemp("reference"), absent=[3])


@pytest.mark.parametrize("kind", FORGERIES)
def test_forged_update_is_as_good_as_none(kind, reference, tmp_path, caplog):
    forge, reason = FORGERIES[kind]
    server = train(tmp_path, forge=forge)
    for name, weight in server.server.weights.items():
        assert torch.equal(weight, reference.server.weights[name])
        assert torch.equal(
            server.server.memory["dual"][name], reference.server.memory["dual"][name]
        )
    assert [list(entry.rejected) for entry in server.rounds] == [
        [],
        [],
        [],
        ["1"],
        [],
        [],
    ]
    (line,) = [r.getMessage() for r in caplog.records if "is rejected" in r.getMessage()]
    assert "client '1'" in line
    assert re.search(reason, line), line


@pytest.mark.parametrize("factor", [1e5, 1e25])
def test_first_round(factor, tmp_path):
    """With nothing to compare with but the others of the same round."""
    server = train(tmp_path / "b", forge=scaled(factor), iterations=(0, 1))
    assert [list(entry.rejected) for entry in server.rounds[:3]] == [["1"], ["1"], []]
    assert len(server.rounds[2].present) == 4


def test_garbage_instead_of_content(tmp_path):
    grid, server = federation(tmp_path), strategy()

    def trick(message, answer):
        if message.metadata.message_type == "query":
            return answer()
        return flwr.app.Message(RecordDict(), reply_to=message)

    grid.tricks[1] = trick
    server.start(grid, arrays(model()), 2)
    assert [entry.absent for entry in server.rounds] == [["1"], ["1"]]


@pytest.mark.parametrize("norm", [math.nan, 1e30, 1e7])
def test_numbers_are_screened_too(norm):
    algorithm = FedNova(lr=0.1)
    grid, server = federation(None, algorithm=algorithm), strategy(algorithm=algorithm)

    def forge(content):
        content[HEAD]["number.norm"] = norm

    grid.tricks[1] = forged(forge, range(10))
    server.start(grid, arrays(model()), 3)
    assert [list(entry.rejected) for entry in server.rounds] == [["1"]] * 3


@pytest.mark.parametrize("answer", [{"name": 3}, {"name": "x", "samples": 0}, {"samples": 5}, {}])
def test_bad_introduction(answer):
    grid, server = federation(None), strategy(clients=3)

    def trick(message, honest):
        return flwr.app.Message(RecordDict({"torchpisa": ConfigRecord(answer)}), reply_to=message)

    grid.tricks[1] = trick
    server.start(grid, arrays(model()), 1)
    assert sorted(server.clients) == ["0", "2", "3"]


def test_screen_remembers_what_it_rejected():
    screen = Screen(largest=20, rounds=3)
    screen.close([{"delta": 1.0}] * 4)
    assert "more than 20 times the median of 1" in screen.complaint({"delta": 100.0}, [])
    for _ in range(3):
        screen.close([{"delta": 100.0}] * 4)
    assert screen.complaint({"delta": 100.0}, []) is None


@pytest.mark.parametrize(
    ("large", "small", "asked", "outgrown"),
    [
        (10, 0, 10, True),
        (6, 4, 10, True),
        (5, 5, 10, False),
        (1, 9, 10, False),
        (1, 0, 1, False),  # a round of one client
        (1, 0, 10, False),  # the others do not answer
        (5, 0, 10, False),
        (2, 0, 2, True),
        (0, 0, 0, False),
    ],
)
def test_a_majority_of_those_asked_outgrows_the_screen(large, small, asked, outgrown):
    screen = Screen()
    screen.close([{"moved": 1.0, "control": 5.0}] * 10)
    seen = [{"moved": 10.0, "control": 5.0}] * large + [{"moved": 1.0, "control": 5.0}] * small
    assert screen.outgrown(seen, asked) is outgrown


def test_nothing_outgrows_the_ceiling_or_an_empty_history():
    screen = Screen(ceiling=1e3)
    assert not screen.outgrown([{"delta": 10.0}] * 4, 4)
    screen.close([{"delta": 1.0}] * 4)
    assert screen.outgrown([{"delta": 999.0}] * 4, 4)
    assert not screen.outgrown([{"delta": 1001.0}] * 4, 4)
    assert not screen.outgrown([{"delta": math.nan}] * 4, 4)


def warm_up(iteration):
    """Raise the learning rate twentyfold after three rounds."""
    return 0.05 if iteration < 3 else 1.0


WARMED_UP = FedAvg(lr=0.2, lr_decay=warm_up, local=FullGradient(2))


def moved_further(factor):
    """Return a forgery of FedAvg's movement."""

    def forge(content):
        content["moved"][FLAT] = Array(content["moved"][FLAT].numpy() * np.float32(factor))

    return forge


@pytest.mark.parametrize("judged", [False, True])
def test_a_jump_that_all_clients_share_is_no_attack(judged, tmp_path, caplog):
    """The round after it, and a restart, go on from there; one that jumps further is rejected."""
    options = {"algorithm": WARMED_UP, "robust": RobustSelection() if judged else None}
    grid, server = federation(None, algorithm=WARMED_UP), strategy(tmp_path / "a", **options)
    grid.tricks[1] = forged(moved_further(100), (3, 4))
    server.start(grid, arrays(model()), 4)
    assert [sorted(entry.rejected) for entry in server.rounds] == [[], [], [], ["1"]]
    assert [len(entry.present) for entry in server.rounds] == [4, 4, 4, 3]
    assert "most updates of round 4 are more than 3 times as large" in caplog.text
    restarted = strategy(tmp_path / "a", **options)
    restarted.start(grid, arrays(model()), 6)
    assert [sorted(entry.rejected) for entry in restarted.rounds] == [["1"], []]
    assert caplog.text.count("most updates") == 1


@pytest.mark.parametrize("others", ["there", "away", "lost"])
def test_one_client_cannot_make_the_screen_forget(others, tmp_path):
    """Not while the others train, nor when it is alone online, nor when theirs get lost."""
    grid, server = federation(None), strategy(tmp_path / "a", clients=4)
    grid.tricks[1] = forged(scaled(100), range(3, 10))

    def evaluate(number, _):
        if number == 3 and others == "away":
            grid.offline = {0, 2, 3}
        if number == 3 and others == "lost":
            grid.tricks |= {node: lambda message, answer: None for node in (0, 2, 3)}

    def go():
        server.start(grid, arrays(model()), 5, evaluate_fn=evaluate)

    if others == "there":
        go()
    else:
        with pytest.raises((NobodyTrainsError, TimeoutError), match="times the median"):
            go()
    assert all("1" in entry.rejected for entry in server.rounds[3:])
    assert all("1" not in entry.present for entry in server.rounds[3:])


def test_screen_with_few_clients():
    screen = Screen()
    assert not screen.has_history
    pair = [{"delta": 1.0}, {"delta": 1e9}]
    assert screen.complaint(pair[0], pair) is None
    assert screen.complaint(pair[1], pair) is not None
    assert screen.complaint({"delta": 0.0}, [{"delta": 0.0}]) is None
    assert screen.complaint({"delta": 5.0}, [{"delta": 0.0}, {"delta": 5.0}]) is None
    assert screen.complaint({"delta": 1e13}, [{"delta": 1e13}]) is not None
    assert screen.complaint({"delta": math.nan}, []) is not None


def test_sizes_do_not_overflow():
    update = update_template(SETTING, SETTING.start({"w": torch.zeros(4)}))
    assert list(update.tensors) == ["delta"]
    big = {"delta": {"w": torch.full((4,), 1e30)}}
    assert norms(big)["delta"] == pytest.approx(2e30)


@pytest.mark.parametrize("algorithm", [SETTING, FedAvg(lr=1.0), FedNova(lr=1.0), Scaffold(lr=1.0)])
def test_template(algorithm):
    server = algorithm.start({"w": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.float64)})
    update = update_template(algorithm, server)
    expected = {"Scaffold": ["moved", "control"], "SISA": ["delta"]}
    assert list(update.tensors) == expected.get(type(algorithm).__name__, ["moved"])
    for tensors in update.tensors.values():
        assert tensors["w"].shape == (2, 3)
        assert tensors["b"].dtype == torch.float64
    assert list(update.numbers) == (["norm"] if isinstance(algorithm, FedNova) else [])


def test_wire_round_trip():
    tensors = {
        "a": torch.randn(3, 4).T,
        "scalar": torch.tensor(2.0, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "half": torch.ones(2, dtype=torch.float16),
    }
    sent = Message({"a": tensors, "b": tensors}, {"x": 0.5})
    content = to_records(sent, {"name": "me"})
    back = read_fields(content, sent.tensors)
    assert all(torch.equal(back["b"][name], tensor) for name, tensor in tensors.items())
    assert read_numbers(content) == {"x": 0.5}
    assert read_entry(content, "name", str) == "me"
    shuffled = dict(reversed(tensors.items()))
    back = read_fields(content, {"a": shuffled, "b": tensors})
    assert all(torch.equal(back["a"][name], tensor) for name, tensor in tensors.items())
    with pytest.raises(TypeError, match=r"'w' must be one of float16, .* got bfloat16"):
        to_records(Message({"a": {"w": torch.ones(1, dtype=torch.bfloat16)}}, {}), {})
    with pytest.raises(PayloadError, match="are missing"):
        read_fields(content, {"a": tensors, "b": {"w": torch.ones(1)}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"largest": 0.5}, "largest must be a number >= 1, got 0.5"),
        ({"ceiling": 0}, "ceiling must be a number > 0, got 0"),
        ({"rounds": 0}, "rounds must be an integer >= 1, got 0"),
    ],
)
def test_screen_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Screen(**options)


def test_default_of_the_screen_is_what_the_experiment_found():
    """The table on the page, and the tightest limit that no honest update has met."""
    from benchmarks import screen

    root = Path(__file__).parents[3]
    result = json.loads((root / "docs/results/screen.json").read_text())
    assert screen.show(result) in (root / "docs/flower.md").read_text()
    rejected = {
        limit: sum(
            run["honest_rejected"]
            for run in result["runs"]
            if (run["measure"], run["largest"]) == ("standing", limit)
            and run["story"] in screen.HONEST
        )
        for limit in screen.LIMITS
    }
    assert min(limit for limit, count in rejected.items() if not count) == Screen().largest
