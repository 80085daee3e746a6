"""The store on disk: what it remembers, what it forgets, and what a crash cannot take from it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core.errors import CheckpointError
from fedalloy.core.protocols import ClientStore
from fedalloy.core.types import State
from fedalloy.experiment.records import atomic
from fedalloy.experiment.records.disk_store import DiskStore
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.store import MemoryStore, nbytes, open_store, read_store

ROOT = Path(__file__).resolve().parents[3]


def state(value: float) -> State:
    return {"solver": {"local": {"w": torch.full((3,), value)}, "steps": int(value)}, "wire": {}}


def values(store: ClientStore, ids: Any = range(10)) -> dict[int, float]:
    return {client: float(kept["solver"]["local"]["w"][0]) for client, kept in store.get(list(ids)).items()}


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "clients"


def test_states_come_back_as_they_were_and_the_unknown_are_not_there(place: Path) -> None:
    store = DiskStore(place)
    store.put(1, {7: state(1.5), 2: state(2.0)})
    store.put(2, {2: state(3.0)})
    assert values(store, [2, 4, 7]) == {2: 3.0, 7: 1.5}
    assert store.get([7])[7]["solver"]["steps"] == 1
    assert len(store) == 2
    assert store.get([7])[7] is not store.get([7])[7], "only those who ask hold a state"


def test_a_checkpoint_holds_generations_and_no_state(place: Path) -> None:
    store = DiskStore(place)
    store.put(3, {1: state(1.0)})
    store.put(4, {0: state(1.0)})
    assert store.commit(4) == {0: {"generation": 4}, 1: {"generation": 3}}


def test_what_was_not_committed_is_undone(place: Path) -> None:
    store = DiskStore(place)
    store.put(1, {0: state(1.0), 1: state(1.0)})
    kept = store.commit(1)
    store.put(2, {0: state(2.0), 5: state(2.0)})
    (place / "0000006-000003.safetensors").write_bytes(b"half a fi")
    (place / ".tmpAbCdEf").write_bytes(b"half")
    again = DiskStore(place)
    again.restore(1, kept)
    assert values(again) == {0: 1.0, 1: 1.0}
    assert files(place) == ["0000000-000001.safetensors", "0000001-000001.safetensors"]


def test_before_the_first_checkpoint_everything_is_undone(place: Path) -> None:
    DiskStore(place).put(1, {0: state(1.0)})
    again = DiskStore(place)
    again.restore(0, {})
    assert values(again) == {}
    assert files(place) == []


def test_a_state_that_nobody_names_goes_at_once(place: Path) -> None:
    store = DiskStore(place)
    for round in range(1, 5):
        store.put(round, {0: state(round)})
    assert files(place) == ["0000000-000004.safetensors"]


def test_both_kept_checkpoints_can_be_gone_back_to_and_older_files_go(place: Path) -> None:
    store, kept = DiskStore(place), {}
    for round in range(1, 9):
        store.put(round, {0: state(round), round % 3: state(round)})
        kept[round] = store.commit(round)
    written = {int(name[8:14]) for name in files(place) if name.startswith("0000000")}
    assert written == {6, 7, 8}
    for round in (8, 7):
        again = DiskStore(place)
        again.restore(round, kept[round])
        assert values(again)[0] == round


def test_committing_a_round_again_drops_nothing_the_checkpoint_before_names(place: Path) -> None:
    """As at the end of a run, or when a finished one is resumed."""
    store = DiskStore(place)
    store.put(1, {0: state(1.0)})
    before = store.commit(1)
    store.put(2, {0: state(2.0)})
    for _ in range(5):
        store.commit(2)
    DiskStore(place).look(before)
    again = DiskStore(place)
    again.restore(2, store.commit(2))
    for _ in range(5):
        again.commit(2)
    DiskStore(place).look(before)


def test_what_a_restore_could_not_judge_is_cleaned_up_later(place: Path) -> None:
    store = DiskStore(place)
    for round in (1, 2):
        store.put(round, {0: state(round)})
        kept = store.commit(round)
    again = DiskStore(place)
    again.restore(2, kept)
    for round in range(3, 7):
        again.put(round, {1: state(round)})
        again.commit(round)
    assert [name for name in files(place) if name.startswith("0000000")] == ["0000000-000002.safetensors"]


def test_a_missing_file_makes_the_folder_fall_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {}, {})
    store = DiskStore(folder.clients)
    with folder.lock():
        for round in (1, 2):
            store.put(round, {0: state(round), round: state(round)})
            folder.checkpoint(round, {}, store.commit(round))
    (folder.clients / "0000002-000002.safetensors").unlink()
    told: list[str] = []
    again = DiskStore(folder.clients)
    last = folder.latest(told.append, accept=lambda found: again.check(found.clients))
    assert last is not None
    assert last.round == 1
    assert "0000002-000002.safetensors" in told[0]
    again.restore(last.round, last.clients)
    assert values(again) == {0: 1.0, 1: 1.0}


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_file_is_refused_and_named(place: Path, damage: str) -> None:
    store = DiskStore(place)
    store.put(1, {4: state(1.0)})
    kept = store.commit(1)
    file = place / "0000004-000001.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 4
    file.write_bytes(bytes(content) if damage == "flipped" else bytes(content[:-5]))
    again = DiskStore(place)
    again.restore(1, kept)
    with pytest.raises(CheckpointError, match=r"state of client 4 cannot be read \(0000004-000001"):
        again.get([4])


def test_looking_removes_nothing(place: Path) -> None:
    store = DiskStore(place)
    store.put(1, {0: state(1.0)})
    kept = store.commit(1)
    store.put(2, {0: state(2.0)})
    assert values(read_store(kept, place)) == {0: 1.0}
    assert len(files(place)) == 2


def test_a_temporary_folder_goes_with_its_store_but_not_with_a_worker() -> None:
    store = DiskStore()
    store.put(1, {0: state(1.0)})
    folder = store._folder
    child = os.fork()
    if child == 0:
        store._folder = folder
        del store
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.is_dir()
    del store
    gc.collect()
    assert not folder.exists()


# ---------------------------------------------------------------------------------------------- which store


def test_the_rule_is_the_size_of_the_whole_population(place: Path) -> None:
    one = state(1.0)
    assert nbytes(one) == 12
    assert isinstance(open_store(one, 100, 1200 / 1e6, place), MemoryStore)
    assert isinstance(open_store(one, 101, 1200 / 1e6, place), DiskStore)
    assert isinstance(open_store({"solver": {}, "wire": {}}, 10**9, 0.0, place), MemoryStore)


def test_a_checkpoint_of_the_other_kind_is_refused(place: Path) -> None:
    on_disk, in_memory = DiskStore(place), MemoryStore()
    for store in (on_disk, in_memory):
        store.put(1, {0: state(1.0)})
    with pytest.raises(CheckpointError, match="client_memory_mb"):
        MemoryStore().restore(1, on_disk.commit(1))
    with pytest.raises(CheckpointError, match="client_memory_mb"):
        DiskStore(place).restore(1, in_memory.commit(1))
    assert values(read_store(in_memory.commit(1), place)) == {0: 1.0}


# ---------------------------------------------------------------------------------------------- any history

ROUND = st.tuples(st.just("round"), st.sets(st.integers(0, 4), max_size=3))
STEPS = st.lists(st.one_of(ROUND, ROUND, st.just(("commit", None)), st.sampled_from([("crash", 1), ("crash", 2)])))


@settings(max_examples=60)
@given(steps=STEPS)
def test_any_history_of_rounds_commits_and_crashes(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:
    """Against a dict; a crash goes back to the last checkpoint, or to the one before if that is still there."""
    place = tmp_path_factory.mktemp("history") / "clients"
    store, round = DiskStore(place), 0
    truth: dict[int, float] = {}
    saved: list[tuple[int, dict[int, State], dict[int, float]]] = [(0, {}, {})]
    for kind, what in steps:
        if kind == "round":
            round += 1
            store.put(round, {client: state(round) for client in what})
            truth |= dict.fromkeys(what, float(round))
        elif kind == "commit":
            found = (round, store.commit(round), dict(truth))
            saved = [*[one for one in saved if one[0] != round][-1:], found]
        else:
            saved = saved[: len(saved) - what + 1] or saved[:1]
            store = DiskStore(place)
            round, kept, truth = saved[-1][0], saved[-1][1], dict(saved[-1][2])
            store.restore(round, kept)
        assert values(store, range(5)) == truth
        assert len(files(place)) <= 5 * 5


def test_memory_stays_small_while_the_states_do_not() -> None:
    """240 MB of states; the process grows by a few states only, and a checkpoint by nothing."""
    command = [sys.executable, "-m", "benchmarks.client_store", "--json", "--all"]
    command += ["--clients", "60", "--parameters", "1000000", "--cohort", "3", "--rounds", "20"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["states_mb"] > 240
    assert found["process_mb"] - found["process_before_mb"] < 100
    assert found["checkpoint_mb"] < 0.05


def test_the_name_of_the_folder_itself_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stops must not lose the folder of files that are safe."""
    synced: list[Path] = []
    monkeypatch.setattr(atomic, "sync", lambda path: synced.append(Path(path)))
    store = DiskStore(tmp_path / "run" / "clients")
    store.put(1, {3: {"w": torch.ones(1)}})
    store.commit(1)
    assert {tmp_path, tmp_path / "run"} <= set(synced)
