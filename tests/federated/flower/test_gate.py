"""The gate, with a SuperLink that is a function."""

import asyncio
import secrets
from base64 import b64encode

import httpx
import pytest
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import Message
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    public_key_to_bytes,
    sign_message,
)

from torchpisa.federated.flower import gate
from torchpisa.federated.flower.commands import main as command
from torchpisa.federated.flower.gate import Gate

MEGABYTE = 2**20


class Node:
    """Calls the gate as a SuperNode does, or as somebody who pretends to be one."""

    def __init__(self, door, key=None):
        self.private, self.public = generate_key_pairs() if key is None else key
        self.door = door

    def call(self, name, body=b"", *, path=None, stamp="now", **headers):
        signature = sign_message(self.private, stamp.encode())
        signed = {
            "flwr-public-key": b64encode(public_key_to_bytes(self.public)).decode(),
            "flwr-timestamp": stamp,
            "flwr-signature": b64encode(signature).decode(),
            **headers,
        }

        async def send():
            transport = httpx.ASGITransport(app=self.door)
            async with httpx.AsyncClient(transport=transport, base_url="https://gate") as client:
                return await client.post(path or f"/v1/fleet/{name}", content=body, headers=signed)

        return asyncio.run(send()).status_code


class Link:
    """Knows some keys, has messages to hand out, and keeps what it was sent."""

    def __init__(self, *nodes):
        self.known = {node for node in nodes}
        self.messages = 0
        self.seen = []

    def __call__(self, request):
        self.seen.append((request.url.path, len(request.content)))
        if request.headers["flwr-public-key"] not in self.known:
            return httpx.Response(401)
        if request.url.path.endswith("pull-messages") and self.messages:
            self.messages -= 1
            answer = PullMessagesResponse(messages_list=[Message()])
            return httpx.Response(200, content=answer.SerializeToString())
        return httpx.Response(200)


@pytest.fixture
def link():
    return Link()


@pytest.fixture
def door(link):
    client = httpx.AsyncClient(transport=httpx.MockTransport(link), base_url="https://link")
    return Gate(client, max_reply=40 * MEGABYTE)


@pytest.fixture
def node(link, door):
    made = Node(door)
    link.known.add(b64encode(public_key_to_bytes(made.public)).decode())
    return made


def test_headers_of_any_bytes(door, link):
    """A stranger cannot fill the log with exceptions."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(event):
        sent.append(event)

    headers = [(b"x-strange", b"\xff"), (b"flwr-timestamp", b"\xff")]
    scope = {"type": "http", "method": "POST", "path": "/v1/fleet/get-run", "headers": headers}
    asyncio.run(door(scope, receive, send))
    assert sent[0]["status"] == 401
    assert link.seen == []
    assert Node(door).call("get-run", strange=b"\xff") == 401  # the SuperLink's answer


def test_supernodes_get_through(node, link):
    for call in gate._LIMITS:
        assert node.call(call) == (413 if call == "push-object" else 200)
    assert {path for path, _ in link.seen} >= {"/v1/fleet/activate-node", "/v1/fleet/pull-object"}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/fleet//activate-node",
        "/V1/fleet/activate-node",
        "/v1/fleet/activate-node/",
        "/v1/fleet/%2e%2e/control/start-run",
        "/docs",
        "/",
    ],
)
def test_nothing_else_does(path, node, link):
    """Not even for a node that is known."""
    assert node.call("", path=path) == 404
    assert link.seen == []


def test_requests_must_be_signed(node, link):
    assert node.call("pull-messages", **{"flwr-signature": "junk"}) == 401
    assert node.call("pull-messages", **{"flwr-timestamp": "another time"}) == 401
    assert node.call("pull-messages", **{"flwr-public-key": ""}) == 401
    assert link.seen == []


def test_strangers_send_little(door, link):
    """The SuperLink reads a request before it looks at the key."""
    stranger = Node(door)
    assert stranger.call("push-object", secrets.token_bytes(MEGABYTE)) == 413
    assert link.seen == []
    assert stranger.call("activate-node") == 401


def test_one_reply_per_message_and_not_more_than_it_may_have(node, link):
    part = secrets.token_bytes(10 * MEGABYTE)
    assert node.call("activate-node") == 200
    assert node.call("push-object", part) == 413  # it was asked nothing
    link.messages = 1
    assert node.call("pull-messages") == 200
    assert [node.call("push-object", part) for _ in range(6)] == [200] * 4 + [413] * 2
    assert node.call("pull-messages") == 200  # nothing new
    assert node.call("push-object", part) == 413
    link.messages = 1
    assert node.call("pull-messages") == 200
    assert node.call("push-object", part) == 200
    assert sum(size for path, size in link.seen if "push-object" in path) == 50 * MEGABYTE


def test_one_request_is_limited_too(node, link):
    link.messages = 1
    assert node.call("pull-messages") == 200
    assert node.call("push-object", bytes(17 * MEGABYTE)) == 413
    assert node.call("push-messages", bytes(5 * MEGABYTE)) == 413
    assert node.call("send-node-heartbeat", bytes(MEGABYTE)) == 413


def test_link_that_is_down(node, link, door):
    def broken(request):
        raise httpx.ConnectError("gone")

    door._client = httpx.AsyncClient(transport=httpx.MockTransport(broken), base_url="https://x")
    assert node.call("pull-messages") == 503


def test_memory_of_keys_is_limited(door, link, monkeypatch):
    monkeypatch.setattr(gate, "_MAX_NODES", 3)
    for _ in range(6):
        Node(door).call("pull-messages")
    assert len(door._nodes) == 3


@pytest.mark.parametrize(("text", "bytes_"), [("64M", 64 * MEGABYTE), ("1g", 2**30), ("500", 500)])
def test_sizes(text, bytes_, monkeypatch, tmp_path):
    passed_on = {}
    monkeypatch.setattr(gate, "run_gate", lambda superlink, **options: passed_on.update(options))
    files = {"--root-certificates": "a", "--ssl-certfile": "b", "--ssl-keyfile": "c"}
    arguments = [part for pair in files.items() for part in pair]
    base = ["gate", "--port", "1", "--superlink", "127.0.0.1:2", *arguments]
    assert command([*base, "--max-reply", text]) == 0
    assert passed_on["max_reply"] == bytes_
    with pytest.raises(SystemExit):
        command([*base, "--max-reply", "0"])
