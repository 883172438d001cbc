"""Send messages to clients and read their replies: few at a time, and with limits."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
)

__all__ = ["NOT_ANSWERED", "TOO_LARGE", "Inbox", "PullError", "exchange", "in_requests", "send"]

_log = logging.getLogger("flwr.torchpisa")

_MAX_REQUESTS = 20
"""Requests with which all replies are asked for; the SuperLink needs milliseconds for each."""

_MAX_PARTS = 100_000
"""Parts that a reply may have; Flower cuts arrays into parts of 5 MiB."""

NOT_ANSWERED = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}
"""Error codes of the SuperLink for a node that has not answered."""

TOO_LARGE = "is larger than"
"""Part of the reason if a reply was not read because of its size."""


class PullError(ValueError):
    """Raised for a reply that Flower cannot decode."""


def exchange(
    grid: Grid,
    messages: Iterable[Message],
    seconds: float,
    poll: float,
    inbox: "Inbox",
    sent_before: Iterable[str] = (),
    enough: Callable[[], bool] = lambda: False,
) -> Iterator[Message]:
    """Send messages and yield the replies as they arrive, until all are there or time is up.

    `Grid.send_and_receive` holds all replies in memory, polls every three seconds, waits up to two
    hours for the parts of an announced reply, and fails completely if one cannot be decoded. Here
    such a reply affects at most the clients in the same request, and only for this round.

    Args:
        grid: Flower's grid.
        messages: the messages, sent one by one.
        seconds: the time to wait in all.
        poll: seconds between two requests for replies.
        inbox: reads the replies. It may hold parts of replies to earlier messages.
        sent_before: ids of earlier messages whose replies are expected as well.
        enough: returns True if no more replies are needed. Replies read so far are yielded first.
    """
    end = time.monotonic() + seconds
    waiting = {message_id for message in messages if (message_id := send(grid, message))}
    waiting.update(sent_before)
    inbox.expect(waiting)
    while waiting:
        late = time.monotonic() >= end
        for group in in_requests(sorted(waiting)):
            try:
                replies = inbox.pull(grid, group)
            except PullError as error:
                _log.warning("an answer cannot be decoded and is ignored: %s", error)
                code = ErrorCode.REPLY_MESSAGE_UNAVAILABLE
                replies = [_refused(0, message_id, str(error), code) for message_id in group]
            for reply in replies:
                waiting.discard(reply.metadata.reply_to_message_id)
                yield reply
        if late or enough():  # replies that had arrived by the deadline were read just now
            return
        if waiting:
            time.sleep(max(0.0, min(poll, end - time.monotonic())))


def in_requests(message_ids: list[str]) -> Iterator[list[str]]:
    """Yield messages in groups, few enough to ask for the replies to each in one request."""
    size = -(-len(message_ids) // _MAX_REQUESTS)
    for start in range(0, len(message_ids), max(1, size)):
        yield message_ids[start : start + size]


def send(grid: Grid, message: Message) -> str | None:
    """Send one message and return its id, or None if it was not accepted."""
    message_ids = list(grid.push_messages([message]))
    if not message_ids or not message_ids[0]:
        _log.warning("a message to node %d was not taken", message.metadata.dst_node_id)
        return None
    return str(message_ids[0])


@dataclass
class _AnnouncedReply:
    """An announced reply whose parts are being fetched.

    Attributes:
        metadata: Flower's metadata of the message.
        parts: the ids of its parts.
        contents: the parts fetched so far.
    """

    metadata: Any
    parts: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)


class Inbox:
    """A reader of replies that stops at a limit of bytes.

    `Grid.pull_messages` reads replies of any size, and waits for missing parts. If the grid is a
    connection to a SuperLink, this class makes its requests one by one instead.

    Args:
        limit: bytes that an answer may have.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arriving: dict[str, _AnnouncedReply] = {}

    def expect(self, message_ids: set[str]) -> None:
        """Drop parts of replies to other messages."""
        self._arriving = {
            name: self._arriving[name] for name in message_ids & self._arriving.keys()
        }

    def pull(self, grid: Grid, message_ids: list[str]) -> list[Message]:
        """Return the replies that have arrived."""
        client = getattr(grid, "_runtime_client", None)
        try:
            if client is None:
                return list(grid.pull_messages(message_ids))
            return self._pull_from_superlink(cast(Any, grid), client, message_ids)
        except (httpx.HTTPError, OSError):
            raise  # the SuperLink cannot be reached, which is no client's fault
        except Exception as error:
            raise PullError(str(error)) from error

    def _pull_from_superlink(self, grid: Any, client: Any, message_ids: list[str]) -> list[Message]:
        wanted = [name for name in message_ids if name not in self._arriving]
        if wanted:
            response = client.PullMessages(PullAppMessagesRequest(message_ids=wanted))
            pairs = zip(response.messages_list, response.message_object_trees, strict=True)
            for proto, tree in pairs:
                parts = [part.object_id for part in iterate_object_tree(tree)]
                question = proto.metadata.reply_to_message_id
                self._arriving[question] = _AnnouncedReply(proto.metadata, parts)
        done = []
        for question in message_ids:
            arriving = self._arriving.get(question)
            if arriving is None:
                continue
            reply = self._fetch(grid, client, question, arriving)
            if reply is not None:
                del self._arriving[question]
                done.append(reply)
        return done

    def _fetch(
        self, grid: Any, client: Any, question: str, arriving: _AnnouncedReply
    ) -> Message | None:
        run_id, message_id = grid.run.run_id, arriving.metadata.message_id
        fetch = make_pull_object_fn_protobuf(client.PullObject, grid.node, run_id)
        size = sum(len(part) for part in arriving.contents.values())
        large = len(arriving.parts) > _MAX_PARTS
        for part in arriving.parts:
            if large:
                break
            if part in arriving.contents:
                continue
            try:
                arriving.contents[part] = fetch(part)
            except ObjectUnavailableError:  # still under way
                return None
            except ObjectPullError as error:  # will never be sent
                return _refused(run_id, question, str(error), ErrorCode.MESSAGE_UNAVAILABLE)
            size += len(arriving.contents[part])
            large = size > self._limit
        # Lets the SuperLink forget the reply.
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=grid.node, run_id=run_id, message_object_id=message_id
            )
        )
        if large:
            return _refused(run_id, question, f"the answer {TOO_LARGE} {self._limit} bytes")
        try:
            message = cast(Message, inflate_object_from_contents(message_id, arriving.contents))
        except Exception as error:  # nothing that one client sends may harm the others
            return _refused(run_id, question, f"the answer cannot be decoded: {error}")
        message.metadata.__dict__["_message_id"] = message_id
        return message


def _refused(run_id: int, question: str, reason: str, code: int = ErrorCode.UNKNOWN) -> Message:
    metadata = Metadata(
        run_id=run_id,
        message_id="",
        src_node_id=0,
        dst_node_id=0,
        message_type="train",
        group_id="",
        ttl=0,
        reply_to_message_id=question,
        created_at=time.time(),
    )
    error = Error(code=code, reason=reason)
    return make_message(metadata=metadata, error=error)
