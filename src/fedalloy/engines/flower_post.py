"""Letters to nodes over a Grid, and their answers: attributed by the message they answer, cut at a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedalloy.engines.flower_letters import Letter, pack

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

_FIRST_GAP, _LONGEST_GAP = 0.15, 0.5
_SHORT = 300
# Messages are timed by the clocks of two machines: let these differ a little.
_CLOCKS_DIFFER = 60.0
_ERRORS = {
    1: "its app cannot be loaded",
    2: "its app raised an error",
    3: "the message is no longer there",
    4: "no answer in time",
    5: "its node is not connected",
    7: "it refused the bundle",
    8: "its app crashed",
}
"""What Flower's error codes mean."""


@dataclass(frozen=True)
class Answer:
    """What a node sent back, or why there is nothing."""

    content: RecordDict | None
    problem: str = ""


@dataclass
class Post:
    """Sends and collects. Looking for answers costs little, so it is done often: every 0.15 s at first, 0.5 s later."""

    grid: Grid
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def exchange(
        self, letters: Mapping[int, Letter], message_type: str, group: str, seconds: float
    ) -> dict[int, Answer]:
        """One letter to each node; an answer from each within so many seconds, or the reason why not."""
        sent, answers = self._send(letters, message_type, group, seconds)
        round = _Waiting(self.grid, sent, answers)
        until, gap = self.clock() + seconds, _FIRST_GAP
        while round.pending:
            round.collect()
            if not round.pending or self.clock() >= until:
                break
            self.sleep(min(gap, max(0.0, until - self.clock())))
            gap = min(_LONGEST_GAP, gap * 1.3)
        return answers | {node: Answer(None, f"no answer within {seconds:g} s") for node in round.pending.values()}

    def _send(
        self, letters: Mapping[int, Letter], message_type: str, group: str, seconds: float
    ) -> tuple[dict[str, int], dict[int, Answer]]:
        """The message ids with the nodes they went to; a message does not outlive its deadline by much."""
        from flwr.app import Message

        messages = {
            node: Message(pack(letter), node, message_type, ttl=seconds + _CLOCKS_DIFFER, group_id=group)
            for node, letter in letters.items()
        }
        ids = list(self.grid.push_messages(list(messages.values())))
        if len(ids) != len(messages):  # together they were too large: one by one
            ids = [next(iter(self.grid.push_messages([message])), "") for message in messages.values()]
        sent = {message_id: node for node, message_id in zip(messages, ids, strict=True) if message_id}
        lost = messages.keys() - sent.values()
        return sent, {node: Answer(None, "the message could not be sent: it is too large") for node in lost}


@dataclass
class _Waiting:
    """The messages of one exchange that nobody has answered yet, by id with their nodes."""

    grid: Grid
    pending: dict[str, int]
    answers: dict[int, Answer] = field(default_factory=dict)

    def collect(self) -> None:
        """Take what has arrived. One answer that cannot be read does not keep the others from being read."""
        try:
            self._take(self.grid.pull_messages(list(self.pending)))
        except Exception:
            self.grid.get_node_ids()  # if not even this works, it is the connection: let that be seen
            for message_id in list(self.pending):
                self._collect_one(message_id)

    def _collect_one(self, message_id: str) -> None:
        try:
            self._take(self.grid.pull_messages([message_id]))
        except Exception as error:
            problem = f"its answer cannot be read ({type(error).__name__})"
            self.answers[self.pending.pop(message_id)] = Answer(None, problem)

    def _take(self, messages: Iterable[Message]) -> None:
        """The sender that an answer names is not to be trusted: an error comes from the SuperLink itself."""
        for message in messages:
            node = self.pending.pop(message.metadata.reply_to_message_id, None)
            if node is None:
                continue
            if message.has_error():
                self.answers[node] = Answer(None, _trouble(message.error.code, message.error.reason))
            else:
                self.answers[node] = Answer(message.content)


def _trouble(code: int, reason: str | None) -> str:
    """An error of Flower's in words."""
    said, text = _ERRORS.get(code, f"Flower reports error {code}"), " ".join((reason or "").split())
    return f"{said} ({text:.{_SHORT}})" if text else said
