"""Seeded schedules of faults on the transport in memory; ``tests/flower/schedules.py`` plays as many as one likes."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedalloy.flower.node.store import NodeStore, Start
from tests.flower.schedules import ROUNDS, check, play_point, play_schedule

pytestmark = pytest.mark.flower


@pytest.fixture
def place() -> Iterator[Path]:
    """In memory where possible: every round is synced to disk several times."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("block", range(8))
def test_a_study_ends_as_its_records_say_whatever_went_wrong(block, place):
    for seed in range(10 * block, 10 * block + 10):
        check(play_schedule(place / str(seed), seed), seed)


def test_a_study_ends_the_same_wherever_a_process_is_killed_once(place):
    """A server or a node, before and after every request and every file that it writes. Where a node is killed, its
    round waits, so that all clients count in all rounds."""
    for point in itertools.count(1):
        played = play_point(place / str(point), "scaffold", point)
        if played is None:
            break
        check(played, point)
        assert [row["ids"] for row in played.rows] == [[0, 1, 2]] * ROUNDS
        assert played.faults.total() == 1
    assert point > 50, "there are that many points"


def test_a_schedule_is_the_same_every_time(place):
    one, other = (play_schedule(place / name, 3) for name in ("one", "other"))
    assert one.faults == other.faults
    assert [row["dropped"] for row in one.rows] == [row["dropped"] for row in other.rows]


def test_a_node_that_always_continued_from_its_newest_state_would_be_found(place, monkeypatch):
    """A planted fault: the state of an answer that was lost counts."""
    honest = NodeStore.start

    def newest(store: NodeStore, wanted: int, on_lag: str = "continue") -> Start:
        after = store._index()["after"]
        return honest(store, after if wanted else 0, on_lag)

    monkeypatch.setattr(NodeStore, "start", newest)
    apart = [play_schedule(place / str(seed), seed).distance for seed in (0, 4, 8, 12)]
    assert max(apart) > 1e-4
