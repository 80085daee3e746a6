"""The run folder: what is written, kept, cut back, refused and cleaned."""

from __future__ import annotations

import json
import os
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from fedalloy.core.errors import CheckpointError, RunLocked, SpecError
from fedalloy.core.protocols import ClientStore
from fedalloy.experiment.records import checkpoint as files
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.lock import holder, locked
from fedalloy.experiment.records.store import MemoryStore
from fedalloy.experiment.records.stream import Stream, encode


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", {"run": {"rounds": 9}}, {"torch": "x"}, {"sizes": [3, 4]})


def advance(folder: RunFolder, first: int, last: int) -> None:
    """Rounds with one row each and a checkpoint each."""
    for round in range(first, last + 1):
        folder.append("rounds", {"round": round, "loss": 1 / round})
        folder.append("timings", {"round": round, "seconds": 0.1})
        folder.checkpoint(round, {"w": torch.tensor(float(round))}, {3: {"seen": round}}, {"best": 0.5})


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in (folder.path / "checkpoints").iterdir())


def rounds_on_disk(folder: RunFolder) -> list[int]:
    return [json.loads(line)["round"] for line in (folder.path / "rounds.jsonl").read_bytes().splitlines()]


def test_the_beginning_is_complete(folder: RunFolder) -> None:
    assert tomllib.loads((folder.path / "recipe.toml").read_text()) == {"run": {"rounds": 9}}
    assert json.loads((folder.path / "environment.json").read_text()) == {"torch": "x"}
    assert json.loads((folder.path / "manifest.json").read_text()) == {"sizes": [3, 4]}
    assert json.loads((folder.path / "status.json").read_text()) == {"state": "running", "round": 0, "reason": ""}
    assert RunFolder.open(folder.path).latest() is None


def test_a_folder_with_a_run_is_not_started_again(folder: RunFolder) -> None:
    with pytest.raises(CheckpointError, match="holds a run already; resume"):
        RunFolder.create(folder.path, {}, {})


def test_a_beginning_cut_short_can_be_made_again(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text("{}")
    assert RunFolder.create(tmp_path, {"a": 1}, {"torch": "x"}).path == tmp_path


def test_a_folder_without_a_run_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no run"):
        RunFolder.open(tmp_path)


def test_everything_of_a_checkpoint_comes_back(folder: RunFolder) -> None:
    with folder.lock():
        advance(folder, 1, 1)
    last = folder.latest()
    assert last is not None
    assert (last.round, last.clients, last.extra) == (1, {3: {"seen": 1}}, {"best": 0.5})
    assert last.server == {"w": torch.tensor(1.0)}
    assert last.lengths == {"rounds": (folder.path / "rounds.jsonl").stat().st_size, "clients": 0}


def test_the_last_two_are_kept(folder: RunFolder) -> None:
    with folder.lock():
        advance(folder, 9, 11)
    assert names(folder) == ["round-000010.safetensors", "round-000011.safetensors"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(folder: RunFolder, damage: str) -> None:
    with folder.lock():
        advance(folder, 1, 3)
    newest = folder.path / "checkpoints" / "round-000003.safetensors"
    content = bytearray(newest.read_bytes())
    content[-2] ^= 4
    newest.write_bytes({"truncated": bytes(content[:-9]), "flipped": bytes(content), "empty": b""}[damage])
    told: list[str] = []
    last = folder.latest(told.append)
    assert last is not None
    assert last.round == 2
    assert len(told) == 1
    assert "round-000003.safetensors cannot be used" in told[0]
    with pytest.warns(RuntimeWarning, match="round-000003"):
        folder.latest()


def test_after_a_fallback_two_good_ones_are_kept_again(folder: RunFolder) -> None:
    with folder.lock():
        advance(folder, 1, 5)
        (folder.path / "checkpoints" / "round-000005.safetensors").write_bytes(b"")
        folder.rewind(folder.latest(lambda _: None))
        assert names(folder) == ["round-000004.safetensors"]
        advance(folder, 5, 5)
    assert rounds_on_disk(folder) == [1, 2, 3, 4, 5]
    assert names(folder) == ["round-000004.safetensors", "round-000005.safetensors"]


def test_rewind_cuts_all_three_streams(folder: RunFolder) -> None:
    with folder.lock():
        advance(folder, 1, 2)
        for name in ("rounds", "clients", "timings"):
            folder.append(name, {"round": 3})
        folder.flush()
        with (folder.path / "timings.jsonl").open("ab") as timings:
            timings.write(b'{"round":3,"sec')
        folder.rewind(folder.latest())
        folder.append("rounds", {"round": 3})
    assert rounds_on_disk(folder) == [1, 2, 3]
    assert (folder.path / "clients.jsonl").read_bytes() == b""
    kept = b'{"round":1,"seconds":0.1}\n{"round":2,"seconds":0.1}\n'
    assert (folder.path / "timings.jsonl").read_bytes() == kept


def test_rewind_to_nothing(folder: RunFolder) -> None:
    with folder.lock():
        advance(folder, 1, 2)
        folder.rewind(None)
    assert names(folder) == []
    assert {(folder.path / f"{name}.jsonl").stat().st_size for name in ("rounds", "clients", "timings")} == {0}


def test_rewind_refuses_records_that_were_shortened(folder: RunFolder) -> None:
    with folder.lock():
        advance(folder, 1, 1)
        (folder.path / "rounds.jsonl").write_bytes(b"")
        with pytest.raises(CheckpointError, match="expects"):
            folder.rewind(folder.latest())
    assert names(folder) == ["round-000001.safetensors"]


def test_leftovers_of_a_kill_are_ignored_and_cleaned(folder: RunFolder) -> None:
    with folder.lock():
        advance(folder, 1, 1)
    for name in ("checkpoints/.round-000002.safetensors.tmp", "checkpoints/.tmpAbCdEf", ".status.json.tmp"):
        (folder.path / name).write_bytes(b"half a fi")
    last = folder.latest(report=pytest.fail)
    assert last is not None
    assert last.round == 1
    with folder.lock():
        assert not list(folder.path.rglob(".*"))
    assert names(folder) == ["round-000001.safetensors"]


def test_records_reach_the_disk_before_the_checkpoint_that_counts_them(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []

    def look(path: Path, state: Any) -> None:
        lengths.append(((folder.path / "rounds.jsonl").stat().st_size, state["lengths"]["rounds"]))

    monkeypatch.setattr(files, "save", look)
    with folder.lock():
        folder.append("rounds", {"round": 1})
        folder.checkpoint(1, {}, {})
    assert lengths == [(12, 12)]


def test_writing_needs_the_lock(folder: RunFolder) -> None:
    for apply_capability in (
        lambda: folder.append("rounds", {}), lambda: folder.checkpoint(1, {}, {}), lambda: folder.rewind(None),
        lambda: folder.set_status("failed", 1), folder.flush,
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"folder\.lock"):
            apply_capability()


def test_a_second_writer_in_the_same_process_is_refused_too(folder: RunFolder) -> None:
    other = RunFolder.open(folder.path)
    with folder.lock(), pytest.raises(RunLocked, match=str(os.getpid())), other.lock():
        pass
    with folder.lock(), pytest.raises(RunLocked):
        RunFolder.create(folder.path, {}, {})
    with other.lock():
        pass


def test_rows_are_flushed_when_the_run_fails(folder: RunFolder) -> None:
    def fail() -> None:
        with folder.lock():
            folder.append("rounds", {"round": 1})
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert rounds_on_disk(folder) == [1]


def test_unknown_names_get_a_hint(folder: RunFolder) -> None:
    with folder.lock():
        with pytest.raises(SpecError, match="did you mean 'rounds'"):
            folder.append("round", {})  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="did you mean 'finished'"):
            folder.set_status("finish", 3)  # type: ignore[arg-type]
        folder.set_status("failed", 3, "diverged")
    status = json.loads((folder.path / "status.json").read_text())
    assert status == {"state": "failed", "round": 3, "reason": "diverged"}


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Else a surviving worker of a killed run would lock its folder for ever."""
    ready, done = os.pipe(), os.pipe()
    with locked(tmp_path / "lock"):
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
    try:
        assert holder(tmp_path / "lock") is None
        with locked(tmp_path / "lock"):
            assert holder(tmp_path / "lock") is not None
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)


def test_rows_are_compact_exact_json() -> None:
    row = {
        "round": 3, "b": torch.tensor([0.1, float("nan")], dtype=torch.float64), "a": 0.1 + 0.2, "inf": float("-inf"),
        "dropped": {7: "not finite"}, "deep": [{"x": (1, float("nan"))}], "int": torch.tensor(4), "text": "ü",
    }  # fmt: skip
    assert encode(row) == (
        '{"round":3,"b":[0.1,null],"a":0.30000000000000004,"inf":null,'
        '"dropped":{"7":"not finite"},"deep":[{"x":[1,null]}],"int":4,"text":"\\u00fc"}'
    )
    with pytest.raises(SpecError, match="is a object"):
        encode({"x": object()})


def test_a_full_buffer_is_written_in_whole_lines(tmp_path: Path) -> None:
    stream = Stream(tmp_path / "s.jsonl")
    for number in range(20_000):
        stream.append({"round": number})
    early = (tmp_path / "s.jsonl").read_bytes()
    assert early
    assert early.endswith(b"\n")
    stream.close()
    assert len((tmp_path / "s.jsonl").read_bytes().splitlines()) == 20_000


def test_a_round_of_ten_clients_is_cheap_to_record(folder: RunFolder) -> None:
    """Well under 0.1 ms where measured; the limit is wide because test machines are shared."""
    row = {
        "round": 1, "ids": list(range(10)), "weights": torch.rand(10), "dropped": {}, "absent": [], "train_loss": 0.5,
        "bytes_up": 10**6, "bytes_down": 10**6, "simulated_seconds": 1.5, "info": {"tau": torch.rand(10)},
    }  # fmt: skip
    with folder.lock():
        best = min(_seconds(folder, row) for _ in range(5))
    assert best < 0.0005


def _seconds(folder: RunFolder, row: dict[str, Any]) -> float:
    begin = time.perf_counter()
    for _ in range(200):
        folder.append("rounds", row)
    return (time.perf_counter() - begin) / 200


def test_the_store_remembers_clients_that_miss_rounds() -> None:
    store = MemoryStore({2: {"a": 1}})
    as_protocol: ClientStore = store
    as_protocol.put(1, {9: {"a": 2}, 1: {"a": 3}})
    as_protocol.put(2, {9: {"a": 4}})
    assert store.get([1, 5, 9]) == {1: {"a": 3}, 9: {"a": 4}}
    assert list(store.commit(2)) == [1, 2, 9]
    assert len(store) == 3
