"""Sending messages and collecting answers: a few at a time, and never without a limit."""

import logging
import time
from collections.abc import Iterable, Iterator
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

__all__ = ["GONE", "TOO_LARGE", "Inbox", "PullError", "ask", "exchange"]

_log = logging.getLogger("flwr.torchpisa")

_REQUESTS = 20
"""How many requests a look for answers may take: the SuperLink needs milliseconds for each."""

_PARTS = 100_000
"""Parts of an answer: Flower cuts arrays into parts of 5 MiB."""

GONE = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}
"""Errors by which the SuperLink says that a node has not answered."""

TOO_LARGE = "is larger than"
"""What the reason says when an answer was not read because of its size."""


class PullError(ValueError):
    """An answer that Flower cannot decode."""


def exchange(
    grid: Grid, messages: Iterable[Message], seconds: float, poll: float, limit: int
) -> Iterator[Message]:
    """Send messages and yield the answers as they come, until all are there or time is up.

    `Grid.send_and_receive` holds all answers in memory, looks for them every three seconds, waits
    up to two hours for the parts of one that was announced, and fails altogether if one cannot be
    decoded. Here such an answer costs nobody else more than a round: those that are asked for in
    one request, which only happens with many clients.

    Args:
        grid: Flower's.
        messages: sent one by one.
        seconds: how long to wait in all.
        poll: seconds between two looks.
        limit: bytes that an answer may have.
    """
    end = time.monotonic() + seconds
    inbox = Inbox(limit)
    waiting = {message_id for message in messages if (message_id := ask(grid, message))}
    while waiting:
        late = time.monotonic() >= end
        order = sorted(waiting)
        size = -(-len(order) // _REQUESTS)
        for start in range(0, len(order), size):
            group = order[start : start + size]
            try:
                replies = inbox.pull(grid, group)
            except PullError as error:
                _log.warning("an answer cannot be decoded and is ignored: %s", error)
                waiting.difference_update(group)
                continue
            for reply in replies:
                waiting.discard(reply.metadata.reply_to_message_id)
                yield reply
        if late:  # that was the last look
            return
        if waiting:
            time.sleep(max(0.0, min(poll, end - time.monotonic())))


def ask(grid: Grid, message: Message) -> str | None:
    """Send one message; its id, or None if it was not taken."""
    found = list(grid.push_messages([message]))
    if not found or not found[0]:
        _log.warning("a message to node %d was not taken", message.metadata.dst_node_id)
        return None
    return str(found[0])


@dataclass
class _Arriving:
    """An answer that was announced.

    Attributes:
        metadata: what Flower says about it.
        parts: the ids of its parts.
        contents: the parts that are there.
    """

    metadata: Any
    parts: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)


class Inbox:
    """Reads answers, but not more of each than it may have.

    `Grid.pull_messages` reads whatever a client has sent, and waits for what it has not. Where
    the grid is a connection to a SuperLink, its requests are made here one by one instead.

    Args:
        limit: bytes that an answer may have.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arriving: dict[str, _Arriving] = {}

    def pull(self, grid: Grid, message_ids: list[str]) -> list[Message]:
        """The answers to messages, as far as they are there."""
        client = getattr(grid, "_runtime_client", None)
        try:
            if client is None:
                return list(grid.pull_messages(message_ids))
            return self._look(cast(Any, grid), client, message_ids)
        except (httpx.HTTPError, OSError):
            raise  # the SuperLink cannot be reached: not the fault of a client
        except Exception as error:
            raise PullError(str(error)) from error

    def _look(self, grid: Any, client: Any, message_ids: list[str]) -> list[Message]:
        wanted = [name for name in message_ids if name not in self._arriving]
        if wanted:
            found = client.PullMessages(PullAppMessagesRequest(message_ids=wanted))
            for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                parts = [part.object_id for part in iterate_object_tree(tree)]
                answered = proto.metadata.reply_to_message_id
                self._arriving[answered] = _Arriving(proto.metadata, parts)
        done = []
        for answered in message_ids:
            arriving = self._arriving.get(answered)
            if arriving is None:
                continue
            reply = self._complete(grid, client, answered, arriving)
            if reply is not None:
                del self._arriving[answered]
                done.append(reply)
        return done

    def _complete(
        self, grid: Any, client: Any, answered: str, arriving: _Arriving
    ) -> Message | None:
        run_id, message_id = grid.run.run_id, arriving.metadata.message_id
        fetch = make_pull_object_fn_protobuf(client.PullObject, grid.node, run_id)
        size = sum(len(part) for part in arriving.contents.values())
        large = len(arriving.parts) > _PARTS
        for part in arriving.parts:
            if large:
                break
            if part in arriving.contents:
                continue
            try:
                arriving.contents[part] = fetch(part)
            except ObjectUnavailableError:  # on its way
                return None
            except ObjectPullError as error:  # it was never sent, and will not be
                return _refused(run_id, answered, str(error), ErrorCode.MESSAGE_UNAVAILABLE)
            size += len(arriving.contents[part])
            large = size > self._limit
        # The SuperLink forgets it now.
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=grid.node, run_id=run_id, message_object_id=message_id
            )
        )
        if large:
            return _refused(run_id, answered, f"the answer {TOO_LARGE} {self._limit} bytes")
        try:
            message = cast(Message, inflate_object_from_contents(message_id, arriving.contents))
        except Exception as error:  # whatever a client has made up must harm nobody else
            return _refused(run_id, answered, f"the answer cannot be decoded: {error}")
        message.metadata.__dict__["_message_id"] = message_id
        return message


def _refused(run_id: int, answered: str, reason: str, code: int = ErrorCode.UNKNOWN) -> Message:
    metadata = Metadata(
        run_id=run_id,
        message_id="",
        src_node_id=0,
        dst_node_id=0,
        message_type="train",
        group_id="",
        ttl=0,
        reply_to_message_id=answered,
        created_at=time.time(),
    )
    error = Error(code=code, reason=reason)
    return make_message(metadata=metadata, error=error)
