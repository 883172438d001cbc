"""Collecting answers: never without a limit, and one that is broken harms nobody else."""

import time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from tests.federated.flower.fake import SETTING, FakeGrid, app, federation, model, strategy
from torchpisa.federated.flower import arrays
from torchpisa.federated.flower.aggregation import RoundAggregation
from torchpisa.federated.flower.exchange import NOT_ANSWERED, Inbox, exchange
from torchpisa.federated.flower.screen import Screen


class Mailbox:
    """Messages are their own ids; the answer to one comes after so many looks."""

    def __init__(self, answers):
        self.answers = answers
        self.looks = dict.fromkeys(answers, 0)
        self.requests = []

    def push_messages(self, messages):
        return [message if message in self.answers else None for message in messages]

    def pull_messages(self, ids):
        self.requests.append(list(ids))
        replies = []
        for message_id in ids:
            self.looks[message_id] += 1
            answer = self.answers[message_id]
            if isinstance(answer, Exception):
                raise answer
            if answer is not None and self.looks[message_id] > answer:
                metadata = SimpleNamespace(reply_to_message_id=message_id)
                replies.append(SimpleNamespace(metadata=metadata))
        return replies


def answered(grid, messages=None, seconds=0.2):
    replies = exchange(grid, messages or list(grid.answers), seconds, 0.01, Inbox(10**6))
    return [reply.metadata.reply_to_message_id for reply in replies]


def test_answers_come_as_they_are_ready():
    assert answered(Mailbox({"a": 2, "b": 0, "c": 1})) == ["b", "c", "a"]


def test_time_is_limited():
    start = time.monotonic()
    assert answered(Mailbox({"a": 0, "b": None}), seconds=0.1) == ["a"]
    assert 0.1 <= time.monotonic() - start < 2


def test_one_that_cannot_be_decoded():
    grid = Mailbox({"a": 0, "b": ValueError("junk"), "c": 1})
    replies = list(exchange(grid, list("abc"), 0.2, 0.01, Inbox(10**6)))
    assert [reply.metadata.reply_to_message_id for reply in replies] == ["a", "b", "c"]
    assert replies[1].error.code in NOT_ANSWERED


def test_superlink_that_cannot_be_reached_is_an_error():
    with pytest.raises(httpx.ConnectError):
        answered(Mailbox({"a": httpx.ConnectError("gone")}))


def test_message_that_is_not_taken():
    message = SimpleNamespace(metadata=SimpleNamespace(dst_node_id=7))
    grid = Mailbox({"a": 0})
    grid.push_messages = lambda messages: [m if m == "a" else None for m in messages]
    assert answered(grid, ["a", message]) == ["a"]


def test_few_requests_for_many_clients():
    grid = Mailbox({f"{i}": 0 for i in range(95)})
    assert len(answered(grid)) == 95
    assert len(grid.requests) <= 20


def test_updates_are_not_held_once_there_is_a_comparison():
    server = strategy()
    grid = federation(None)
    server.start(grid, arrays(model()), 1)
    messages = server.configure_train(2, arrays(model()), ConfigRecord(), grid)
    ids = grid.push_messages(messages)
    samples = {name: client.samples for name, client in server.clients.items()}
    for screen, held in ((Screen(), 4), (server._screen, 0)):
        aggregation = RoundAggregation(SETTING, server._opened, screen, samples)
        for name, message_id in zip("0123", ids, strict=True):
            aggregation.receive(name, *_again(grid, message_id))
        assert len(aggregation._held_back) == held
        assert aggregation.close(len(samples))[1] == pytest.approx(1.0)
        assert sorted(aggregation.present) == ["0", "1", "2", "3"]


def _again(grid, message_id):
    replies = grid.pull_messages([message_id])
    grid._replies[message_id] = replies[0]
    return replies


def test_config_and_lifetime_of_messages():
    grid, server = federation(None), strategy(deadline=7.0)
    server.start(grid, arrays(model()), 1, train_config=ConfigRecord({"depth": 3}))
    message = grid.sent[-1]
    assert message.content["config"]["depth"] == 3
    assert message.metadata.ttl == 67.0
    assert message.metadata.group_id == "1"


def test_name_of_a_client(caplog):
    grid = FakeGrid()
    grid.add(0, app(SETTING), "0", name="clinic")
    grid.add(1, app(SETTING), "1")
    del grid.nodes[1][1].node_config["partition-id"]
    server = strategy(clients=1)
    server.start(grid, arrays(model()), 1)
    assert list(server.clients) == ["clinic"]
    assert "must be started with name=... or partition-id=..." in caplog.text


class Wire:
    """A grid that is a connection: replies come in parts, as many of them as `there` says."""

    def __init__(self, replies):
        self._runtime_client = self
        self.run, self.node = SimpleNamespace(run_id=1), Node(node_id=1)
        self.replies, self.parts, self.there, self.confirmed = {}, {}, {}, []
        self.read = 0
        for asked, content in replies.items():
            question = Message(RecordDict(), 5, "train")
            question.metadata.__dict__["_message_id"] = asked
            reply = Message(content, reply_to=question)
            name = reply.object_id
            reply.metadata.__dict__["_message_id"] = name
            self.replies[asked] = reply
            self.parts |= {k: v.deflate() for k, v in get_all_nested_objects(reply).items()}
            self.there[asked] = True

    def push_messages(self, messages):
        return messages

    def PullMessages(self, request):  # noqa: N802
        replies = [self.replies.pop(i) for i in list(request.message_ids) if i in self.replies]
        for reply in replies:
            self.there[reply.object_id] = self.there[reply.metadata.reply_to_message_id]
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(m)) for m in replies],
            message_object_trees=[get_object_tree(m) for m in replies],
        )

    def PullObject(self, request):  # noqa: N802
        available = self.there.get(request.object_id, True)
        content = self.parts[request.object_id] if available else b""
        self.read += len(content)
        return PullObjectResponse(
            object_found=True, object_available=available, object_content=content
        )

    def ConfirmMessageReceived(self, request):  # noqa: N802
        self.confirmed.append(request.message_object_id)


def noise(count):
    array = Array(np.random.default_rng(count).standard_normal(count))
    return RecordDict({"delta": ArrayRecord({"float64": array})})


def test_answer_that_is_announced_and_never_sent_stops_nobody():
    FakeGrid()  # sets what Flower's messages need
    grid = Wire({"a": noise(10), "b": noise(11), "c": noise(12)})
    grid.there["b"] = False
    assert answered(grid, ["a", "b", "c"]) == ["a", "c"]
    assert len(grid.confirmed) == 2


def test_an_answer_may_arrive_in_parts_over_several_rounds():
    """The SuperLink announces it once; what was not expected any more is forgotten."""
    FakeGrid()
    grid, inbox = Wire({"a": noise(10), "b": noise(11), "c": noise(12)}), Inbox(10**6)
    grid.there |= {"b": False, "c": False}
    late = {name: grid.replies[name].object_id for name in "bc"}
    replies = exchange(grid, list("abc"), 0.1, 0.01, inbox)
    assert [reply.metadata.reply_to_message_id for reply in replies] == ["a"]
    grid.there |= dict.fromkeys(late.values(), True)
    replies = exchange(grid, [], 5, 0.01, inbox, sent_before=["b"])
    assert [reply.metadata.reply_to_message_id for reply in replies] == ["b"]
    assert not inbox._arriving


def test_enough_answers():
    grid, seen = Mailbox({"a": 0, "b": 1, "c": 1, "d": 3}), []
    inbox = Inbox(10**6)
    for reply in exchange(grid, list("abcd"), 60, 0.01, inbox, enough=lambda: len(seen) >= 2):
        seen.append(reply.metadata.reply_to_message_id)
    assert seen == ["a", "b", "c"]  # those that were read with the second are not lost


def test_answer_is_not_read_beyond_the_limit():
    FakeGrid()
    grid = Wire({"a": noise(10), "b": noise(5_000_000)})  # 40 MB, in parts of 5
    replies = {
        reply.metadata.reply_to_message_id: reply
        for reply in exchange(grid, ["a", "b"], 5, 0.01, Inbox(10**6))
    }
    assert not replies["a"].has_error()
    assert "is larger than 1000000 bytes" in replies["b"].error.reason
    assert grid.read < 7_000_000
    assert len(grid.confirmed) == 2  # so that the SuperLink forgets it
