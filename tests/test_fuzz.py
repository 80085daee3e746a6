"""A short fixed-seed run of every way in, and a planted fault for every detector of the fuzzer."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.fuzz import canary, driving
from benchmarks.fuzz.driving import Finding, RunningSums, Way, isolated, keep, kept, packed, unpacked
from benchmarks.fuzz.mutating import VALUES, Case, changed
from benchmarks.fuzz.watching import Fault
from fedalloy.core.errors import DataError, FedalloyError

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer counts on /proc and on limits of Linux")
SEED = 20261116
SHORT = {
    "node-messages": 200, "strategy-replies": 400, "orders": 500, "http-requests": 1000, "checkpoints": 300,
    "run-folders": 60, "recipes": 100, "data-folders": 250,
}  # fmt: skip
"""Cases of each way in: 40 seconds in all on two cores. A long run (``python -m benchmarks.fuzz``) has thousands."""
FLOWER = ("node-messages", "strategy-replies", "orders")


@pytest.fixture(scope="module")
def ways() -> dict[str, Way]:
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    from benchmarks.fuzz.ways import WAYS, ready

    ready()
    return WAYS


@pytest.mark.parametrize("name", SHORT)
def test_nothing_harmful_comes_in(ways, name):
    tally = isolated(ways[name], seconds=120.0, start=SEED, most=SHORT[name])
    assert tally.findings == []
    assert tally.cases >= SHORT[name]
    clean = {"refused", "dropped"} & tally.said.keys()
    assert clean, f"mutations must lead to refusals: {tally.said}"
    assert tally.said.keys() - clean, f"and to results: {tally.said}"


def test_every_way_in_is_tried(ways):
    assert set(SHORT) == set(ways)
    assert {name for name, way in ways.items() if way.least >= 10_000} == {*FLOWER, "http-requests"}
    assert all(way.least >= 1000 for way in ways.values())


# ---------------------------------------------------------------------------------------------- planted faults


def planted(misbehave: Any, most: int = 30) -> RunningSums:
    """What the fuzzer finds in a way in that misbehaves on everything that is not the valid example."""

    def read(case: Case, folder: Path) -> str:
        return misbehave(folder) or "fine" if case["piece"] != b"valid" else "fine"

    way = Way("planted", lambda: [{"piece": b"valid"}], read, 1, change=lambda case, random: {"piece": b"other"})
    return isolated(way, seconds=60.0, most=most)


def kinds(misbehave: Any, most: int = 30) -> set[str]:
    return {finding.kind for finding in planted(misbehave, most).findings}


def busy(folder: Path) -> None:
    while True:
        pass


def asleep(folder: Path) -> None:
    time.sleep(60)


def stubborn(folder: Path) -> None:
    try:
        time.sleep(60)
    except Exception:  # must not be able to swallow the alarm
        return


@pytest.mark.parametrize("misbehave", [busy, asleep, stubborn])
def test_a_hang_is_found(misbehave, monkeypatch):
    monkeypatch.setattr("benchmarks.fuzz.watching.SECONDS", 0.2)
    assert kinds(misbehave, most=6) == {"hang"}


def large_tensor(folder: Path) -> None:
    torch.empty(320 << 20, dtype=torch.uint8)


def large_list(folder: Path) -> None:
    _ = [0] * (40 << 20)


def swallowed(folder: Path) -> None:
    try:
        bytearray(1 << 40)
    except MemoryError as error:
        raise DataError("too large") from error


def test_too_much_memory_is_found():
    """In a process of its own: among other tests an input was once missed, and why was not found."""
    names = [one.__name__ for one in (large_tensor, large_list, swallowed)]
    program = (
        "import tests.test_fuzz as fuzz\n"
        f"found = {{name: fuzz.kinds(vars(fuzz)[name], most=6) for name in {names}}}\n"
        f"assert found == dict.fromkeys({names}, {{'memory'}}), found\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_that_malloc_kept_is_found_too():
    """A process that holds on to freed memory, as other tests may have told this one to."""
    program = (
        "import ctypes, torch, tests.test_fuzz as fuzz\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.mallopt(-3, 1 << 30), libc.mallopt(-1, 1 << 30)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD\n"
        "held = [0] * (60 << 20)\n"
        "del held\n"
        "assert fuzz.kinds(fuzz.large_list, most=6) == {'memory'}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_little_memory_is_not_found():
    assert kinds(lambda folder: str(len(torch.zeros(50 << 20, dtype=torch.uint8)))[:0], most=6) == set()


@pytest.mark.parametrize(
    "misbehave",
    [
        lambda folder: (folder.parent / "beside").write_text("x") and None,
        lambda folder: (folder / ".." / "beside").mkdir(),
        lambda folder: os.symlink("/etc/passwd", folder.parent / "link"),
        lambda folder: Path("/etc/hostname").read_bytes() and None,
        lambda folder: os.rename(folder, folder.parent / "elsewhere"),
    ],
)
def test_a_file_outside_is_found(misbehave):
    assert kinds(misbehave, most=6) == {"outside"}


def test_files_inside_are_not_found():
    assert kinds(lambda folder: (folder / "mine").write_text("x") and None, most=6) == set()


@pytest.mark.parametrize(
    "misbehave",
    [
        lambda folder: setattr(__import__("this"), "seen", 1),
        lambda folder: canary.sing("heard"),
        lambda folder: __import__("pickle").loads(b"cbuiltins\nlen\n.") and None,
    ],
)
def test_an_import_is_found(misbehave):
    assert kinds(misbehave, most=6) == {"import"}


@pytest.mark.parametrize(
    "misbehave",
    [
        lambda folder: subprocess.call(["true"]) and None,
        lambda folder: os.system("true") and None,
        lambda folder: __import__("socket").create_connection(("127.0.0.1", 9), 0.1),
    ],
)
def test_a_process_or_a_connection_is_found(misbehave):
    assert kinds(misbehave, most=6) & {"process"}


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), OSError("x"), AssertionError("x")])
def test_any_error_but_ours_is_found(error):
    def misbehave(folder: Path) -> None:
        raise error

    assert kinds(misbehave) == {"crash"}


def test_a_refusal_is_not_found():
    def refuse(folder: Path) -> None:
        raise FedalloyError("no")

    tally = planted(refuse)
    assert tally.findings == []
    assert tally.said["refused"] > 1


def test_the_death_of_the_process_is_found():
    found = planted(lambda folder: os.kill(os.getpid(), signal.SIGKILL)).findings
    assert [one.kind for one in found] == ["crash"]
    assert found[0].case == {"piece": "other"}


# ---------------------------------------------------------------------------------------------- the server's state


def altered(ways: dict[str, Way], change: Any) -> Case:
    """An honest answer whose numbers are changed."""
    import numpy as np

    case = ways["node-messages"].examples()[0]
    return {**case, "tensors": change(np.frombuffer(case["tensors"], dtype=np.float64).copy()).tobytes()}


def enlarged(numbers: Any) -> Any:
    return numbers * 1e6


def not_finite(numbers: Any) -> Any:
    numbers[3] = math.nan
    return numbers


@pytest.mark.parametrize(("change", "kind"), [(enlarged, "norm"), (not_finite, "nan")])
def test_a_server_that_does_not_screen_is_found(ways, tmp_path, monkeypatch, change, kind):
    read, case = ways["node-messages"].read, altered(ways, change)
    assert read(case, tmp_path) == "dropped"
    monkeypatch.setattr("fedalloy.core.algorithm.screen", lambda cohort, *rest, **more: (cohort, {}))
    with pytest.raises(Fault) as fault:
        read(case, tmp_path)
    assert fault.value.kind == kind


# ---------------------------------------------------------------------------------------------- the fuzzer itself


def test_a_finding_is_made_small_and_kept_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(driving, "FOUND", tmp_path)

    def read(case: Case, folder: Path) -> str:
        if b"!" in case.get("piece", b""):
            raise ValueError("an exclamation")
        return "fine"

    way = Way("planted", lambda: [{"piece": b"valid", "other": b"1"}], read, 1,
              change=lambda case, random: {**case, "piece": case["piece"] + b"?!"[random.randrange(2) :]})  # fmt: skip
    found = isolated(way, seconds=60.0, most=200).findings
    assert [one.kind for one in found] == ["crash"]
    keep("planted", found[0], tmp_path)
    assert [case["piece"].count(b"!") for case in kept("planted")] == [1], "one change is enough"
    again = isolated(way, seconds=0.0)
    assert [one.kind for one in again.findings] == ["crash"]


def test_a_run_is_repeated_by_its_seed():
    def read(case: Case, folder: Path) -> str:
        return str(len(case["piece"]))

    way = Way("planted", lambda: [{"piece": bytes(40)}], read, 1)
    once, again, other = (isolated(way, 60.0, start, most=200).said for start in (1, 1, 2))
    assert once == again != other
    assert len(once) > 20


def test_cases_survive_being_written_down():
    case = {"text": "grün".encode(), "bytes": b"\xff\x00", "tricky": b"base64:x"}
    assert unpacked(json.loads(json.dumps(packed(case)))) == case


def test_mutations_keep_the_form_of_what_they_change():
    from random import Random

    case = {"a.json": b'{"x": [1, 2]}', "b.toml": b"x = 1\n", "c.jsonl": b'{"round":1}\n{"round":2}\n'}
    made = [changed(case, Random(seed)) for seed in range(300)]
    assert len({str(one) for one in made}) > 150
    good = [one for one in made if one.get("a.json") not in (None, case["a.json"]) and _is_json(one["a.json"])]
    assert len(good) > 20
    assert any(value == canary.NAME for value in VALUES)


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def test_what_was_found_is_named(tmp_path):
    path = keep("some way", Finding("crash", "KeyError at a.py:1", {"piece": "x"}), tmp_path)
    assert json.loads(path.read_text())["text"] == "KeyError at a.py:1"
