"""Send messages, gather the replies, and know whose reply is missing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Error, Message
from flwr.serverapp import Grid

from fedalloy.core.errors import FedalloyError

_UNREADABLE = 0
"""Flower's code for an error of unknown kind."""


class NotSent(FedalloyError):
    """The SuperLink took none of a round's messages."""


def exchange(grid: Grid, messages: Sequence[Message], timeout: float | None, poll: float) -> list[Message]:
    """Send and wait until everybody answered or the time is over.

    Flower's own ``send_and_receive`` looks every three seconds, which is the larger part of a short round.
    """
    if not messages:
        return []
    waiting = _send(grid, messages)
    replies: list[Message] = []
    end = time.monotonic() + timeout if timeout is not None else float("inf")
    while True:
        came = _collect(grid, waiting)
        replies += came
        for reply in came:
            waiting.pop(reply.metadata.reply_to_message_id, None)
        if not waiting or time.monotonic() >= end:
            return replies
        time.sleep(poll)


def _send(grid: Grid, messages: Sequence[Message]) -> dict[str, Message]:
    """The messages that were taken, by id. Where all of them are too large for one request, they go one by one."""
    taken = [one for one in grid.push_messages(messages) if one]
    if not taken:
        taken = [one for message in messages for one in grid.push_messages([message]) if one]
    if not taken:
        raise NotSent(
            "the SuperLink took none of this round's messages; the model may be too large for one message "
            "(its log then says so)"
        )
    return {message.metadata.message_id: message for message in messages if message.metadata.message_id in taken}


def _collect(grid: Grid, waiting: Mapping[str, Message]) -> list[Message]:
    """What has arrived. One reply that cannot be read is its sender's error and keeps no other from being read."""
    try:
        return list(grid.pull_messages(list(waiting)))
    except Exception:
        grid.get_node_ids()  # where not even this works, it is the connection: let that be seen
    replies: list[Message] = []
    for number, message in waiting.items():
        try:
            replies += grid.pull_messages([number])
        except Exception as error:
            replies.append(Message(Error(_UNREADABLE, f"its reply cannot be read: {error}"), reply_to=message))
    return replies


def attribute(sent: Sequence[Message], replies: Iterable[Message]) -> tuple[dict[int, Message], list[int]]:
    """Replies by the node that was asked, and the nodes that did not answer.

    By the message that a reply answers: the sender that an error names may be the SuperLink.
    """
    asked = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    found: dict[int, Message] = {}
    for reply in replies:
        node = asked.get(reply.metadata.reply_to_message_id)
        if node is not None:
            found.setdefault(node, reply)
    return found, [node for node in asked.values() if node not in found]
