"""A gate in front of a SuperLink that admits SuperNodes only.

In Flower 1.41 one port of the SuperLink serves three interfaces: Fleet (for SuperNodes), Control
(`flwr run`, `flwr supernode register`) and Runtime (for the processes of apps). Control does not
authenticate: anybody who reaches that port can register a key and run an app on every machine of
the federation. So the SuperLink listens on the loopback interface only, and this process listens
on the network. It forwards the calls of SuperNodes, one by one and limited in size, and answers
everything else with 404.
"""

import logging
import ssl
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

from torchpisa.federated.flower.records import fingerprint

__all__ = ["Gate", "run_gate"]

_log = logging.getLogger("torchpisa.gate")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_SMALL = 64 * 1024
"""Bytes of a request that carries no tensors."""

_TREES = 4 * 1024 * 1024
"""Bytes of a request that announces a reply: the ids of its parts."""

_CHUNK = 16 * 1024 * 1024
"""Bytes of a request with a part of a reply. Flower cuts arrays into parts of 5 MiB."""

_LIMITS = {
    "activate-node": _SMALL,
    "deactivate-node": _SMALL,
    "send-node-heartbeat": _SMALL,
    "pull-messages": _SMALL,
    "push-messages": _TREES,
    "get-run": _SMALL,
    "get-fab": _SMALL,
    "push-object": _CHUNK,
    "pull-object": _SMALL,
    "confirm-message-received": _SMALL,
}
"""The calls of a SuperNode with a registered key, and how large a request may be.

Flower's Fleet interface has two more, with which a node registers itself: not through this door.
"""

_PREFIX = "/v1/fleet/"
_KEY, _SIGNATURE, _TIMESTAMP = "flwr-public-key", "flwr-signature", "flwr-timestamp"
_DROPPED = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
_MAX_NODES = 100_000
"""Keys that are remembered."""


class RefusedError(Exception):
    """Raised for a request that is not forwarded.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class _NodeLimits:
    """The state of a key at the gate.

    Attributes:
        accepted: True if the SuperLink has accepted the key.
        bytes_left: the bytes that its reply may still have.
    """

    accepted: bool = False
    bytes_left: int = 0


class Gate:
    """An ASGI application that forwards the calls of SuperNodes to a SuperLink.

    Args:
        client: connected to the SuperLink.
        max_reply: bytes that a SuperNode may send for every message it was given.
    """

    def __init__(self, client: httpx.AsyncClient, max_reply: int) -> None:
        self._client = client
        self._max_reply = max_reply
        self._nodes: OrderedDict[str, _NodeLimits] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            status, headers, body = await self._forward(scope, receive)
        except RefusedError as refusal:
            status, headers, body = refusal.status, {}, str(refusal).encode()
            if status != 404:
                _log.warning("%s %s: %s", _peer_address(scope), scope["path"], refusal)
        except httpx.HTTPError as error:
            _log.warning("the SuperLink cannot be reached: %s", error)
            status, headers, body = 503, {}, b"the SuperLink cannot be reached"
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})

    async def _forward(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, str], bytes]:
        call = scope["path"].removeprefix(_PREFIX)
        if scope["method"] != "POST" or scope["path"] != _PREFIX + call or call not in _LIMITS:
            raise RefusedError(404, "not found")
        # HTTP's encoding, in which any byte is a character.
        pairs = (
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        )
        headers = {name.lower(): value for name, value in pairs}
        name = _signer(headers)
        node = self._node(name)
        limit = _LIMITS[call] if node.accepted else _SMALL
        if call == "push-object" and node.accepted:
            if node.bytes_left <= 0:
                raise RefusedError(
                    413, f"node {name[:12]} has sent more than max-reply={self._max_reply} bytes"
                )
            limit = min(limit, node.bytes_left + _SMALL)
        body = await _read(receive, limit)
        if call == "push-object":
            node.bytes_left -= len(body)
        answer = await self._client.post(
            scope["path"],
            content=body,
            headers={
                key.encode("latin-1"): value.encode("latin-1")
                for key, value in headers.items()
                if key not in _DROPPED
            },
        )
        if answer.status_code == 200:
            node.accepted = True
            # The SuperLink hands out every message once, and every message allows one reply.
            if call == "pull-messages" and _holds_messages(answer.content):
                node.bytes_left = self._max_reply
        answer_headers = {
            key: value for key, value in answer.headers.items() if key not in _DROPPED
        }
        answer_headers.pop("content-encoding", None)  # httpx has undone it
        return answer.status_code, answer_headers, answer.content

    def _node(self, name: str) -> _NodeLimits:
        node = self._nodes.setdefault(name, _NodeLimits())
        self._nodes.move_to_end(name)
        while len(self._nodes) > _MAX_NODES:
            self._nodes.popitem(last=False)
        return node


def _signer(headers: dict[str, str]) -> str:
    """Return the fingerprint of the key that signed a request, which need not be registered."""
    try:
        key = b64decode(headers[_KEY], validate=True)
        signature = b64decode(headers[_SIGNATURE], validate=True)
        stamp = headers[_TIMESTAMP].encode("ascii")
        valid = verify_signature(bytes_to_public_key(key), stamp, signature)
    except Exception:  # the parsers of keys raise many kinds
        valid = False
    if not valid:
        raise RefusedError(401, "a SuperNode must sign its requests")
    return fingerprint(key)


async def _read(receive: Receive, limit: int) -> bytes:
    parts, total, more = [], 0, True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise RefusedError(400, "the request was cut off")
        part = event.get("body", b"")
        total += len(part)
        if total > limit:
            raise RefusedError(413, f"the request has more than {limit} bytes")
        parts.append(part)
        more = event.get("more_body", False)
    return b"".join(parts)


def _holds_messages(body: bytes) -> bool:
    try:
        return bool(PullMessagesResponse.FromString(body).messages_list)
    except Exception:  # not what Flower sends
        return False


def _peer_address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "somebody"


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = await receive()
        await send({"type": event["type"] + ".complete"})
        if event["type"] == "lifespan.shutdown":
            return


def run_gate(
    superlink: str,
    *,
    host: str,
    port: int,
    root_certificates: Path,
    certificate: Path,
    key: Path,
    max_reply: int,
) -> None:
    """Serve until a signal ends the process.

    Args:
        superlink: host:port of the SuperLink, on the loopback interface.
        host: the address to listen on.
        port: the port to listen on.
        root_certificates: the authority that has signed the SuperLink's certificate.
        certificate: shown to SuperNodes.
        key: the key of that certificate.
        max_reply: bytes that a SuperNode may send for every message it was given.
    """
    trust = ssl.create_default_context(cafile=str(root_certificates))
    client = httpx.AsyncClient(base_url=f"https://{superlink}", verify=trust, timeout=120)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _log.info("SuperNodes on %s:%d, SuperLink on %s", host, port, superlink)
    uvicorn.run(
        Gate(client, max_reply),
        host=host,
        port=port,
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        access_log=False,
        log_level="warning",
        server_header=False,
        limit_concurrency=1000,
    )
