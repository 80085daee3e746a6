"""Messages and their replies on a grid without a network: who answered what, who did not and why."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.app import Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedalloy.flower.protocol.header import signed
from fedalloy.flower.protocol.tensor_messages import TensorMessage
from fedalloy.flower.transport import Answer, NotSent, Transport, attribute, check_sent
from tests.flower.fake import FakeClock
from tests.flower.grids import Grid

pytestmark = pytest.mark.flower


@pytest.fixture(autouse=True)
def _inside_a_run(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Deaf(Grid):
    """Takes nothing for these nodes."""

    deaf: tuple[int, ...] = ()

    def push_messages(self, messages):
        wanted = [message for message in messages if message.metadata.dst_node_id not in self.deaf]
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"lost-{message.metadata.dst_node_id}"
        taken = iter(super().push_messages(wanted))
        return [next(taken) if message in wanted else None for message in messages]


def transport(grid: Grid, clock: FakeClock | None = None) -> Transport:
    clock = clock or FakeClock()
    return Transport(grid, clock, clock.sleep)


def asked(grid: Grid, seconds: float = 5.0) -> dict[int, Answer]:
    tensor_messages = dict.fromkeys(grid.nodes, TensorMessage(signed(kind="hello")))
    return transport(grid).ask(tensor_messages, "query", "hello", seconds)


def test_every_node_that_was_asked_has_an_answer_or_a_reason():
    content = RecordDict({})
    grid = Grid({1: lambda _: content, 2: lambda _: None, 3: lambda _: Error(2, "it broke"), 4: lambda _: Error(99)})
    found = asked(grid)
    assert found[1].content is not None
    assert found[2] == Answer(None, "no answer within 5 s")
    assert found[3] == Answer(None, "its app raised an error (it broke)")
    assert found[4] == Answer(None, "Flower reports error 99")


def test_what_could_not_be_sent_is_known_at_once():
    grid = Deaf({1: lambda _: RecordDict({}), 2: lambda _: RecordDict({})})
    grid.deaf = (2,)
    found = asked(grid)
    assert found[1].content is not None
    assert found[2] == Answer(None, "the message could not be sent: it is too large")


def test_a_round_of_which_nothing_could_be_sent_is_an_error_for_the_strategy():
    grid = Deaf({1: lambda _: RecordDict({}), 2: lambda _: None})
    messages = [Message(RecordDict({}), node, "train") for node in grid.nodes]
    check_sent(transport(grid).exchange(messages, 1.0))
    grid.deaf = (1,)
    check_sent([])
    grid.deaf = (1, 2)
    with pytest.raises(NotSent, match="accepted none of this round's messages"):
        check_sent(transport(grid).exchange(messages, 1.0))


def test_a_reply_counts_for_the_node_that_was_asked_whoever_says_it_sent_it():
    grid = Grid({1: lambda _: RecordDict({}), 2: lambda _: RecordDict({})})
    messages = [Message(RecordDict({}), node, "train") for node in grid.nodes]
    grid.push_messages(messages)
    (first,) = grid.pull_messages([messages[0].metadata.message_id])
    first.metadata.__dict__["_src_node_id"] = 2
    found = attribute(messages, [first, first], "nothing")
    assert found[1].content is not None
    assert found[2] == Answer(None, "nothing")


def test_looking_for_replies_becomes_rarer():
    slept: list[float] = []
    clock = FakeClock(on_sleep=slept.append)
    messages = [Message(RecordDict({}), 1, "train")]
    transport(Grid({1: lambda _: None}), clock).exchange(messages, 4.0)
    gaps = [after - before for before, after in zip([0.0, *slept], slept, strict=False)]
    assert gaps[0] == pytest.approx(0.15)
    assert max(gaps) == pytest.approx(0.5)
    assert clock.now == pytest.approx(4.0, abs=0.02)
