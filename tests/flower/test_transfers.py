"""Large messages: as Flower makes and reads them, with fewer copies at the same time."""

from __future__ import annotations

import gc
import os
import socket
import sqlite3
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore import sql_mixin as _sql_mixin
from flwr.supercore.inflatable import inflatable_utils as _utils
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.task_identity import TaskIdentity

import fedalloy
from fedalloy.flower.prefork import NotCarriedOut, transfers, worker
from fedalloy.flower.prefork.transfers import fewer_copies, push_in_turn
from fedalloy.flower.protocol.header import signed
from fedalloy.flower.protocol.replies import read_reply
from fedalloy.flower.protocol.tensor_messages import TensorMessage, pack, unpack
from fedalloy.flower.transport import Answer, Transport, _emptied
from tests.flower.fake import FakeClock
from tests.flower.grids import Grid

pytestmark = pytest.mark.flower
sql_mixin: Any = _sql_mixin
inflatable_utils: Any = _utils
CHUNK = 5 << 20
PLAIN, PRAGMAS = inflatable_utils.inflate_object_from_contents, sql_mixin.SQLITE_PRAGMAS


@pytest.fixture(autouse=True)
def _hooked(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    for name in ("push_object_contents_from_iterable", "inflate_object_from_contents"):
        monkeypatch.setattr(inflatable_utils, name, getattr(inflatable_utils, name))
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)
    fewer_copies("flower-superlink")


def array(data: bytes, stype: str = "fedalloy.raw", shape: tuple[int, ...] | None = None) -> Array:
    return Array("uint8", shape or (len(data),), stype, data)


def contents(content: RecordDict) -> tuple[str, dict[str, bytes]]:
    """A message as it travels: the id and the content of each of its objects."""
    message = Message(content, 1, "train")
    return message.object_id, {known: one.deflate() for known, one in get_all_nested_objects(message).items()}


DATA = b"".join((os.urandom(2 * CHUNK), bytes(3 * CHUNK), os.urandom(17)))  # three chunks are the same


@pytest.mark.parametrize(
    "content",
    [
        lambda: RecordDict({"tensors": ArrayRecord({"all": array(DATA)}), "fedalloy": ConfigRecord({"header": "{}"})}),
        lambda: RecordDict({"tensors": ArrayRecord({"all": array(b"")})}),
        lambda: RecordDict({"model": ArrayRecord({"w": array(DATA), "v": array(DATA, shape=(len(DATA), 1))})}),
        lambda: RecordDict({"model": ArrayRecord({"w": array(DATA)}), "again": ArrayRecord({"w": array(DATA)})}),
        lambda: RecordDict({"model": ArrayRecord({"w": array(DATA, "numpy.ndarray")})}),
        lambda: RecordDict({"only": ConfigRecord({"header": "{}"})}),
    ],
)
def test_a_message_is_what_flower_makes_of_it(content: Callable[[], RecordDict]):
    known, parts = contents(content())
    ours = inflatable_utils.inflate_object_from_contents(known, dict(parts))
    assert ours.content == PLAIN(known, dict(parts)).content == content()


def test_another_app_gets_bytes_as_from_flower():
    known, parts = contents(RecordDict({"model": ArrayRecord({"w": array(DATA, "numpy.ndarray")})}))
    message = inflatable_utils.inflate_object_from_contents(known, parts)
    assert type(message.content["model"]["w"].data) is bytes


def test_a_chunk_that_is_missing_or_is_something_else_is_an_error():
    known, parts = contents(RecordDict({"tensors": ArrayRecord({"all": array(DATA)})}))
    chunk = next(one for one, content in parts.items() if content.startswith(b"ArrayChunk "))
    with pytest.raises(KeyError):
        inflatable_utils.inflate_object_from_contents(known, _without(parts, chunk))
    with pytest.raises(ValueError, match="something else than chunks"):
        inflatable_utils.inflate_object_from_contents(known, {**parts, chunk: parts[known]})


def _without(parts: dict[str, bytes], one: str) -> dict[str, bytes]:
    return {known: content for known, content in parts.items() if known != one}


def test_a_received_message_is_in_memory_once():
    data = os.urandom(8 * CHUNK)
    known, parts = contents(RecordDict({"tensors": ArrayRecord({"all": array(data)})}))

    def most(inflate: Callable[..., Message]) -> float:
        mine = {one: bytes(bytearray(content)) for one, content in parts.items()}
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        inflate(known, mine)
        return (tracemalloc.get_traced_memory()[1] - before) / len(data)

    tracemalloc.start()
    try:
        ours, flowers = most(inflatable_utils.inflate_object_from_contents), most(PLAIN)
    finally:
        tracemalloc.stop()
    assert ours < 0.35, "beside the contents, which shrink as it grows: a chunk, and the room that a bytearray reserves"
    assert flowers > 1.5, "what it was before"


def test_a_chunk_is_made_when_a_thread_is_free_to_send_it():
    made: list[int] = []
    ahead: list[int] = []
    sent: list[str] = []
    lock = threading.Lock()

    def source():
        for number in range(20):
            made.append(number)
            yield str(number), b""

    def push(known: str, content: bytes) -> None:
        with lock:
            ahead.append(len(made) - len(sent))
            sent.append(known)

    push_in_turn(source(), push, max_concurrent_pushes=2)
    assert sorted(sent, key=int) == [str(number) for number in range(20)]
    assert max(ahead) <= 3


def test_the_first_chunk_that_cannot_be_sent_ends_it():
    sent: list[str] = []

    def push(known: str, content: bytes) -> None:
        sent.append(known)
        if known == "3":
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        push_in_turn(((str(number), b"") for number in range(1000)), push)
    assert len(sent) < 100


@pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")  # of Flower's own migrations
def test_a_new_database_is_made_for_large_rows_and_an_old_one_is_read_as_it_is(tmp_path: Path, monkeypatch):
    new, old = tmp_path / "new.db", tmp_path / "old.db"
    ours = sql_mixin.SQLITE_PRAGMAS
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", PRAGMAS)
    SqlObjectStore(str(old)).initialize()
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", ours)
    for file, size in ((new, int(transfers.PRAGMAS["page_size"])), (old, 4096)):
        store, (known, content) = SqlObjectStore(str(file)), next(iter(contents(RecordDict())[1].items()))
        store.initialize()
        store.preregister(1, ObjectTree(object_id=known))
        store.put(known, content)
        assert store.get(known) == content
        with sqlite3.connect(file) as link:
            assert link.execute("PRAGMA page_size").fetchone() == (size,)


class Counting(Grid):
    """Notes how many messages were asked for at once."""

    def pull_messages(self, message_ids):
        self.together = [*getattr(self, "together", []), len(list(message_ids))]
        return super().pull_messages(message_ids)


@pytest.mark.parametrize(("numbers", "together"), [(10, [3]), (3_000_000, [1, 1, 1])])
def test_large_answers_are_fetched_and_used_one_by_one(numbers, together):
    """What was used of one is no longer there when the next is fetched, and the orders are gone once they are sent."""
    model = {"shared/params": {"w": torch.zeros(numbers)}}
    held: list[int] = []

    def answer(_: Message) -> RecordDict:
        return pack(TensorMessage(signed(status="ok", stats={}), {"delta": {"w": torch.ones(numbers)}}))

    def take(node: int, answer: Answer) -> bool:
        assert answer.content is not None
        assert read_reply(answer.content, full=True).parts["delta"]["w"].sum() == numbers
        held.append(len(answer.content.array_records))
        return True

    grid, clock = Counting({1: answer, 2: answer, 3: answer}), FakeClock()
    orders = dict.fromkeys(grid.nodes, TensorMessage(signed(kind="train"), model))
    found = Transport(grid, clock, clock.sleep).ask(orders, "train", "1", 5.0, take=take)
    assert grid.together == together
    assert held == [0, 0, 0]
    assert [one.problem for one in found.values()] == ["", "", ""]


def test_records_keep_their_tensors_unless_they_are_told_to_release_them():
    content = pack(TensorMessage(signed(status="ok"), {"delta": {"w": torch.ones(100_000)}}))
    assert unpack(content).parts["delta"]["w"].sum() == 100_000
    assert unpack(content, release=True).parts["delta"]["w"].sum() == 100_000
    assert not content.array_records


def test_a_large_order_is_not_kept_for_a_second_worker(tmp_path, monkeypatch):
    """The memory is the worker's; if it dies of the order, the server is told, and asks again."""
    monkeypatch.setattr(worker, "_LARGE", 1 << 20)
    kept: list[int] = []

    def exchange(store: Path, config: object, content: RecordDict) -> None:
        kept.append(len(content.array_records["tensors"]["all"].data))
        raise ConnectionError("it died")

    monkeypatch.setattr(worker, "_exchange", exchange)
    small, large = (pack(TensorMessage({}, {"part": {"w": torch.ones(size)}})) for size in (100_000, 1_000_000))
    for content, tries in ((small, 2), (large, 1)):
        kept.clear()
        with pytest.raises(NotCarriedOut, match="the node's worker ended during the order"):
            worker.ask(tmp_path, {}, content)
        assert len(kept) == tries


LARGE = 1 << 19


def parts_of(*sizes: int) -> dict[str, dict[str, torch.Tensor]]:
    leaves = {f"w{size}": torch.arange(size, dtype=torch.float32).reshape(-1, 1) for size in sizes}
    return {"delta": {**leaves, "none": torch.zeros(0, 3), "turned": torch.rand(3, 5).T, "bits": torch.ones(3).bool()}}


@pytest.mark.parametrize("sizes", [(3, 5), (3, LARGE, 5)])
def test_a_message_that_gives_its_tensors_away_has_the_same_bytes_and_no_tensors(sizes):
    parts = parts_of(*sizes)
    kept = pack(TensorMessage(signed(), {"delta": dict(parts["delta"])}))
    given = pack(TensorMessage(signed(), parts), release=True)
    assert parts == {"delta": {}}
    one, other = unpack(kept), unpack(given)
    assert one.header == other.header
    assert all(torch.equal(leaf, other.parts["delta"][name]) for name, leaf in one.parts["delta"].items())


def test_a_received_message_that_was_read_keeps_no_memory_and_one_that_others_read_keeps_it():
    """Flower's records are circles: what they hold is free only when garbage is collected."""
    received = pack(TensorMessage(signed(), parts_of(LARGE)), release=True)
    mine = next(iter(received.array_records["tensors"].values()))
    read = unpack(received, release=True).parts["delta"]
    assert mine.data == b""
    assert torch.equal(read[f"w{LARGE}"], parts_of(LARGE)["delta"][f"w{LARGE}"])
    parts, packed = parts_of(LARGE), dict[int, RecordDict]()
    orders = [pack(TensorMessage(signed(), parts), packed) for _ in range(2)]
    for order in orders:  # in one process, orders to several nodes are one array
        assert torch.equal(unpack(order, release=True).parts["delta"]["bits"], torch.ones(3).bool())


def test_a_worker_forgets_an_answer_that_it_has_sent():
    answer = pack(TensorMessage(signed(), parts_of(LARGE)), release=True)
    array = next(iter(answer.array_records["tensors"].values()))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        question = threading.Thread(
            target=worker.send_frame, args=(theirs, {"fedalloy": fedalloy.__version__, "config": {}}, RecordDict())
        )
        found: list[Any] = []
        question.start()
        reader = threading.Thread(target=lambda: found.append(worker.receive_frame(theirs)))
        reader.start()
        assert worker._answer(ours, lambda content, config: answer)
        question.join()
        reader.join()
    assert array.data == b""
    assert unpack(found[0][1]).parts["delta"][f"w{LARGE}"].shape == (LARGE, 1)


def test_orders_that_were_sent_are_garbage_no_longer():
    """A grid that sends them over a network keeps none; their memory is free before the answers come."""
    alive: list[int] = []

    class Remote(Grid):
        def pull_messages(self, message_ids):
            gc.disable()  # only what the transport itself collects counts
            alive.append(sum(type(one) is Array and len(one.data) > LARGE for one in gc.get_objects()))
            gc.enable()
            return super().pull_messages(message_ids)

        def push_messages(self, messages):
            ids = super().push_messages(messages)
            self.waiting = {number: _emptied(message) for number, message in self.waiting.items()}
            return ids

    grid, clock = Remote({1: lambda _: RecordDict({}), 2: lambda _: RecordDict({})}), FakeClock()
    order = TensorMessage(signed(kind="hello"), parts_of(4 * LARGE, 2 * LARGE))
    Transport(grid, clock, clock.sleep).ask(dict.fromkeys(grid.nodes, order), "train", "1", 5.0)
    assert alive[0] == 0
