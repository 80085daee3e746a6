"""The script that counts calls, files and package crossings: on a toy whose figures are known, and on a round."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.round_calls import Calls, count_round

TOY = {
    "toy/__init__.py": "",
    "toy/low/__init__.py": "",
    "toy/low/maths.py": """
from dataclasses import dataclass

@dataclass
class Point:
    x: int

    def __post_init__(self):
        self.x += 1

    @property
    def double(self):
        return 2 * self.x

def numbers():
    yield 1
    yield 2
    yield 3

def square(x):
    return x * x
""",
    "toy/high/__init__.py": "",
    "toy/high/work.py": """
from functools import reduce
from toy.low.maths import Point, numbers, square

def work():
    class Local:
        found = [helper(one) for one in numbers()]
    return Point(3).double + sum(map(square, Local.found)) + reduce(lambda a, b: a + b, [1, 2, 3])

def helper(x):
    return x
""",
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    for name, text in TOY.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    import toy.high.work  # type: ignore[import-not-found]

    yield toy.high.work.work
    for name in [name for name in sys.modules if name.split(".")[0] == "toy"]:
        del sys.modules[name]


def counted(work, packages=None):
    calls = Calls(Path(sys.modules["toy"].__file__ or "").parent, packages or {})
    calls.start()
    work()
    calls.stop()
    work()
    return calls.total()


def test_a_toy_is_counted_right(toy):
    found = counted(toy)
    # work, helper 3 times, the lambda twice; numbers once although resumed, square 3 times, __post_init__, double.
    assert found["calls by file"] == {"toy/high/work.py": 6, "toy/low/maths.py": 6}
    assert (found["calls"], found["files"], found["crossings"]) == (12, 2, 6)
    assert found["crossings by packages"] == {"high -> low": 6}


def test_modules_can_be_counted_for_other_packages(toy):
    assert counted(toy, {"toy": "all"})["crossings"] == 0
    moved = counted(toy, {"toy.low": "all", "toy.low.maths": "sums", "toy.high": "all"})
    assert moved["crossings by packages"] == {"all -> sums": 6}


def test_a_round_is_counted_and_is_the_same_every_time():
    found = [count_round("batched", {}) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0]["files"] > 20
    assert found[0]["crossings by packages"]["experiment -> core"] > 0
    assert "fedalloy/core/algorithm.py" in found[0]["calls by file"]


@pytest.mark.parametrize(("engine", "calls", "crossings"), [("loop", 1100, 188), ("batched", 436, 92)])
def test_a_round_walks_no_further_than_this(engine, calls, crossings):
    """Half of what the loop once took, and no more than small batched rounds once did: it must not creep up again."""
    found = count_round(engine, {})
    assert found["calls"] <= calls, found["calls by file"]
    assert found["crossings"] <= crossings, found["crossings by packages"]
