"""Send messages, gather the replies, and know whose reply is missing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedalloy.core.errors import FedalloyError


class NotSent(FedalloyError):
    """The SuperLink took none of a round's messages."""


def exchange(grid: Grid, messages: Sequence[Message], timeout: float | None, poll: float) -> list[Message]:
    """Send and wait until everybody answered or the time is over.

    Flower's own ``send_and_receive`` looks every three seconds, which is the larger part of a short round.
    """
    if not messages:
        return []
    waiting = {one for one in grid.push_messages(messages) if one}
    if not waiting:
        raise NotSent(
            "the SuperLink took none of this round's messages; the model may be too large for one message "
            "(its log then says so)"
        )
    replies: list[Message] = []
    end = time.monotonic() + timeout if timeout is not None else float("inf")
    while True:
        came = list(grid.pull_messages(waiting))
        replies += came
        waiting -= {reply.metadata.reply_to_message_id for reply in came}
        if not waiting or time.monotonic() >= end:
            return replies
        time.sleep(poll)


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
