"""Messages to nodes over a Grid, and their replies: attributed by the message they answer, cut at a deadline."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedalloy.core.errors import FedalloyError
from fedalloy.flower.protocol.tensor_messages import TensorMessage, pack

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

_SHORT = 300
_SLOWER = 1.3
_LARGE = 1 << 23
"""Bytes of an order from which answers are fetched one by one, each when the one before is in its row."""
# Message times come from the clocks of two machines, which may differ a little.
_CLOCKS_DIFFER = 60.0
_UNSENT = "the message could not be sent: it is too large"
_OWN = 0
"""Flower's code for unknown errors, used for those found here, with their full text."""
_ERRORS = {
    1: "its app cannot be loaded",
    2: "its app raised an error",
    3: "the message is gone",
    4: "no answer in time",
    5: "its node is not connected",
    7: "it refused the bundle",
    8: "its app crashed",
}
"""What Flower's error codes mean."""


class RunEnded(FedalloyError):
    """The server has ended the run, and answers its app no longer."""

    passing = True


class NotSent(FedalloyError):
    """The SuperLink accepted none of a round's messages."""


@dataclass(frozen=True)
class Answer:
    """A node's reply, or why there is none."""

    content: RecordDict | None
    problem: str = ""


Take = Callable[[int, Answer], bool]
"""Uses the answer of a node, or of a client, when it arrives; whether it is one of those that are waited for."""


def every(who: int, answer: Answer) -> bool:
    """Any answer is as good as any other."""
    return True


@dataclass
class Transport:
    """Sends messages and collects replies. Polling is cheap, so it is done often: every 0.15 s at first, 0.5 s later.
    Flower's own ``send_and_receive`` polls every three seconds, which is most of the time of a short round."""

    grid: Grid
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    gaps: tuple[float, float] = (0.15, 0.5)

    def ask(
        self, tensor_messages: Mapping[int, TensorMessage], message_type: str, group: str, seconds: float,
        enough: int | None = None, take: Take = every,
    ) -> dict[int, Answer]:  # fmt: skip
        """One message to each node; an answer from each within ``seconds``, or the reason why not. As soon as there are
        ``enough`` answers, the others are not waited for. ``take`` gets every answer when it arrives, may empty it
        (large ones need not be held at the same time), and says whether it counts: a refusal is not what was asked."""
        from flwr.app import Message

        # A message expires soon after its deadline.
        packed: dict[int, RecordDict] = {}
        messages = [
            Message(pack(tensor_message, packed), node, message_type, ttl=seconds + _CLOCKS_DIFFER, group_id=group)
            for node, tensor_message in tensor_messages.items()
        ]
        del packed
        asked: dict[str, int] = {}

        def arrived(reply: Message) -> bool:
            return not reply.has_error() and take(asked[reply.metadata.reply_to_message_id], Answer(reply.content))

        with of_a_live_run():
            alone = sum(map(_size, messages[:1])) > _LARGE
            pending, replies = self._send(messages)
            messages = [_emptied(message) for message in messages]
            if alone:
                gc.collect()  # records refer to themselves in circles, and Python counts objects, not bytes
            asked |= {number: message.metadata.dst_node_id for number, message in pending.items()}
            counted = self._await(pending, replies, seconds, enough, arrived, alone)
        early = enough is not None and counted >= enough
        reason = f"it was not waited for: {enough} answers were enough" if early else f"no answer within {seconds:g} s"
        return attribute(messages, replies, reason)

    def exchange(self, messages: Sequence[Message], seconds: float, enough: int | None = None) -> list[Message]:
        """Send, and collect replies until all nodes, or ``enough`` of them, have answered or time is over. A message
        that could not be sent and a reply that cannot be read become error replies."""
        pending, replies = self._send(messages)
        self._await(pending, replies, seconds, enough)
        return replies

    def _await(
        self, pending: dict[str, Message], replies: list[Message], seconds: float, enough: int | None = None,
        arrived: Callable[[Message], bool] = lambda reply: not reply.has_error(), alone: bool = False,
    ) -> int:  # fmt: skip
        """Add what comes to ``replies``; returns how many count. ``alone`` if each is so large that they are fetched
        one by one."""
        until, gap, counted = self.clock() + seconds, self.gaps[0], 0
        while pending:
            for reply in _collect(self.grid, pending, alone):
                if pending.pop(reply.metadata.reply_to_message_id, None) is not None:
                    replies.append(reply)
                    counted += arrived(reply)
            if not pending or self.clock() >= until or (enough is not None and counted >= enough):
                return counted
            self.sleep(min(gap, max(0.0, until - self.clock())))
            gap = min(self.gaps[1], gap * _SLOWER)
        return counted

    def _send(self, messages: Sequence[Message]) -> tuple[dict[str, Message], list[Message]]:
        """The accepted messages by id, and error replies for the others."""
        ids = list(self.grid.push_messages(messages)) if messages else []
        if len(ids) != len(messages):  # together they were too large: send them one by one
            ids = [next(iter(self.grid.push_messages([message])), "") for message in messages]
        sent = {taken: _emptied(message) for message, taken in zip(messages, ids, strict=True) if taken}
        lost = [message for message, taken in zip(messages, ids, strict=True) if not taken]
        return sent, [_failed(message, _UNSENT) for message in lost]


@contextmanager
def of_a_live_run() -> Iterator[None]:
    """Requests to the server; :class:`RunEnded` instead of Flower's errors if it has ended the run."""
    try:
        yield
    except BaseException as error:  # Flower's own is no ordinary exception
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403) or type(error).__name__ == "RunNotRunningException":
            raise RunEnded("the run was ended at the server; the same command continues it") from error
        raise


def attribute(sent: Sequence[Message], replies: Iterable[Message], unanswered: str) -> dict[int, Answer]:
    """The answer of every node that was asked; ``unanswered`` is the problem of those that gave none.

    Matched by the message that a reply answers: the sender it names is not trusted, and an error may come from the
    SuperLink itself.
    """
    asked = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    answers: dict[int, Answer] = {}
    for reply in replies:
        node = asked.get(reply.metadata.reply_to_message_id)
        if node is not None:
            answers.setdefault(node, _answer(reply))
    return {node: answers.get(node, Answer(None, unanswered)) for node in asked.values()}


def check_sent(replies: Sequence[Message]) -> None:
    """Raise :class:`NotSent` if no message was sent."""
    if replies and all(reply.has_error() and reply.error.reason == _UNSENT for reply in replies):
        raise NotSent(
            "the SuperLink accepted none of this round's messages; the model may be too large for one message "
            "(see its log)"
        )


def _collect(grid: Grid, pending: Mapping[str, Message], alone: bool = False) -> Iterator[Message]:
    """The replies so far, fetched together, or each ``alone``. A reply that cannot be read becomes an error of its
    sender and does not affect others."""
    if not alone:
        try:
            together = list(grid.pull_messages(list(pending)))
        except Exception:
            grid.get_node_ids()  # raises if the connection itself is broken
        else:
            yield from together
            return
    for number, message in list(pending.items()):
        try:
            replies = list(grid.pull_messages([number]))
        except Exception as error:
            grid.get_node_ids()
            replies = [_failed(message, f"its reply cannot be read: {error!s:.{_SHORT}} ({type(error).__name__})")]
        yield from replies


def _emptied(message: Message) -> Message:
    """A message that has been sent, without its content, which may be large."""
    from flwr.app import RecordDict

    kept = copy.copy(message)
    kept.content = RecordDict()
    return kept


def _size(message: Message) -> int:
    """The bytes of a message's arrays."""
    return sum(len(array.data) for record in message.content.array_records.values() for array in record.values())


def _failed(message: Message, reason: str) -> Message:
    """An error reply to a message."""
    from flwr.app import Error, Message

    return Message(Error(_OWN, reason), reply_to=message)


def _answer(reply: Message) -> Answer:
    if not reply.has_error():
        return Answer(reply.content)
    code, text = reply.error.code, " ".join((reply.error.reason or "").split())[:_SHORT]
    if code == _OWN and text:
        return Answer(None, text)
    said = _ERRORS.get(code, f"Flower reports error {code}")
    return Answer(None, f"{said} ({text})" if text else said)
