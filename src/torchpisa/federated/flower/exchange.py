"""Sending messages and collecting answers, a few at a time and never without a limit."""

import logging
import time
from collections.abc import Iterable, Iterator

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

__all__ = ["PullError", "ask", "exchange", "pull"]

_log = logging.getLogger("flwr.torchpisa")

_REQUESTS = 20
"""How many requests a look for answers may take: the SuperLink needs milliseconds for each."""


class PullError(ValueError):
    """An answer that Flower cannot decode."""


def exchange(
    grid: Grid, messages: Iterable[Message], seconds: float, poll: float
) -> Iterator[Message]:
    """Send messages and yield the answers as they come, until all are there or time is up.

    `Grid.send_and_receive` holds all answers in memory, looks for them every three seconds, and
    fails altogether if one of them cannot be decoded. Here such an answer costs nobody else more
    than a round: those that are asked for in one request, which only happens with many clients.

    Args:
        grid: Flower's.
        messages: sent one by one.
        seconds: how long to wait in all.
        poll: seconds between two looks.
    """
    end = time.monotonic() + seconds
    waiting = {message_id for message in messages if (message_id := ask(grid, message))}
    while waiting:
        late = time.monotonic() >= end
        order = sorted(waiting)
        size = -(-len(order) // _REQUESTS)
        for start in range(0, len(order), size):
            group = order[start : start + size]
            try:
                replies = pull(grid, group)
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


def pull(grid: Grid, message_ids: list[str]) -> list[Message]:
    """The answers to messages, as far as they are there."""
    try:
        return list(grid.pull_messages(message_ids))
    except (httpx.HTTPError, OSError):
        raise  # the SuperLink cannot be reached: not the fault of a client
    except Exception as error:
        raise PullError(str(error)) from error
