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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedalloy.core.errors import CheckpointError
from fedalloy.core.protocols import ClientStore
from fedalloy.core.store import Kept, StoredStates
from fedalloy.core.types import State
from fedalloy.experiment.records import atomic, checkpoint, disk_store, segments
from fedalloy.experiment.records.disk_store import DiskStore
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.segments import decode, encode
from fedalloy.experiment.records.stacked_states import pack, unpack
from fedalloy.experiment.records.store import MemoryStore, nbytes, open_store, read_store
from fedalloy.testing.comparing import differences

ROOT = Path(__file__).resolve().parents[3]


def state(value: float) -> State:
    return {"solver": {"local": {"w": torch.full((3,), value)}, "steps": int(value)}, "wire": {}}


def values(store: ClientStore, ids: Any = range(10)) -> dict[int, float]:
    return {client: float(kept["solver"]["local"]["w"][0]) for client, kept in store.get(list(ids)).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files(folder)}


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


def test_a_checkpoint_is_as_small_for_many_clients_as_for_one(place: Path) -> None:
    store = DiskStore(place)
    store.put(3, {1: state(1.0)})
    one = store.commit(3)
    store.put(4, {client: state(1.0) for client in range(300)})
    many = store.commit(4)
    assert isinstance(one, StoredStates)
    assert isinstance(many, StoredStates)
    assert one.where.keys() == many.where.keys()
    assert (one.where["clients"], many.where["clients"]) == (1, 300)
    assert len(files(place)) == 2


def test_what_was_not_committed_is_undone(place: Path) -> None:
    store = DiskStore(place)
    store.put(1, {0: state(1.0), 1: state(1.0)})
    kept, before = store.commit(1), contents(place)
    store.put(2, {0: state(2.0), 5: state(2.0)})
    (place / ".states.tmp").write_bytes(b"half")
    (place / "0000009.states").write_bytes(b"no index names these")
    again = DiskStore(place)
    again.restore(1, kept)
    assert values(again) == {0: 1.0, 1: 1.0}
    assert contents(place) == before


@pytest.mark.parametrize("tail", [b"", b"\0" * 40, b"\0" * 4096, b"half a row", os.urandom(200)])
def test_a_torn_end_of_an_index_is_cut_off(place: Path, tail: bytes) -> None:
    """After a power failure the end of a file may be zeros, garbage or missing."""
    store = DiskStore(place)
    store.put(1, {0: state(1.0)})
    kept = store.commit(1)
    with (place / "0000001.index").open("ab") as file:
        file.write(tail)
    again = DiskStore(place)
    again.restore(1, kept)
    assert values(again) == {0: 1.0}
    again.put(2, {0: state(2.0), 3: state(3.0)})
    assert values(again) == {0: 2.0, 3: 3.0}


def test_both_kept_checkpoints_can_be_gone_back_to(place: Path) -> None:
    store, kept = DiskStore(place), {}
    for round in range(1, 9):
        store.put(round, {0: state(round), round % 3: state(round)})
        kept[round] = store.commit(round)
    for round in (8, 7):
        again = DiskStore(place)
        again.restore(round, kept[round])
        assert values(again)[0] == round


def test_replaced_states_do_not_pile_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewriting keeps the files below a few times what is valid, however long the run is."""
    monkeypatch.setattr(disk_store, "SEGMENT_BYTES", 2000)
    monkeypatch.setattr(atomic, "sync", lambda path: None)
    store, sizes, rewritten = DiskStore(place), list[int](), 0
    for round in range(1, 200):
        some = {client: state(round) for client in ((7 * round) % 40, (11 * round) % 40, (13 * round) % 40)}
        store.put(round, some)
        before = set(files(place))
        kept = store.commit(round)
        rewritten += len(before - set(files(place)))
        sizes.append(sum(len(content) for content in contents(place).values()))
    assert rewritten > 50
    assert max(sizes[100:]) < 1.5 * max(sizes[50:100])
    assert max(sizes) < 6 * 40 * len(encode(state(1.0)))
    again = DiskStore(place)
    again.restore(199, kept)
    assert values(again, range(40)) == values(store, range(40))
    assert len(again) == 40


@pytest.mark.parametrize("every", [1, 3])
def test_replaced_states_do_not_pile_up_where_everybody_takes_part(
    place: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Every client has a newer state than any checkpoint, so that none is as it was at the oldest of them."""
    monkeypatch.setattr(disk_store, "SEGMENT_BYTES", 2000)
    monkeypatch.setattr(atomic, "sync", lambda path: None)
    one, copied = len(encode(state(1.0))), list[int]()
    monkeypatch.setattr(
        DiskStore, "_copy", watched(DiskStore._copy, lambda _, __, wanted, ___: copied.append(len(wanted)))
    )
    store, kept = DiskStore(place), dict[int, tuple[Kept, dict[int, float]]]()
    for round in range(1, 60):
        store.put(round, {client: state(round) for client in range(round % 2, 12)})
        if round % every == 0:
            kept[round] = store.commit(round), values(store, range(12))
            size = sum(len(content) for name, content in contents(place).items() if name.endswith(".states"))
            assert size < (2 + 2 * every) * 12 * one + 3 * 2000, "three checkpoints, and what came since"
            for told, truth in [*kept.values()][-3:]:
                assert values(read_store(told, place), range(12)) == truth
    assert sum(copied) < 59 * 12 / 4, "what is still needed is not copied again and again"


def watched(real: Any, look: Any) -> Any:
    """A function that is looked at."""

    def call(*given: Any) -> Any:
        look(*given)
        return real(*given)

    return call


def test_a_commit_costs_the_cohort_and_not_the_population(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    real = segments._write_at

    def noting(path: Path, at: int, content: bytes) -> None:
        written.append(len(content))
        real(path, at, content)

    monkeypatch.setattr(segments, "_write_at", noting)
    monkeypatch.setattr(atomic, "sync", lambda path: None)
    monkeypatch.setattr(disk_store, "SEGMENT_BYTES", 20_000)
    store = DiskStore(place)
    for begin in range(0, 2000, 100):
        store.put(1, {client: state(1.0) for client in range(begin, begin + 100)})
    store.commit(1)
    for round in range(2, 60):
        written.clear()
        store.put(round, {(17 * round + step) % 2000: state(round) for step in range(5)})
        store.commit(round)
        assert sum(written) < 60_000, "a round rewrites a few segments at most"


def test_a_missing_file_makes_the_folder_fall_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "SEGMENT_BYTES", 1)
    folder = RunFolder.create(tmp_path / "run", {}, {})
    store = DiskStore(folder.clients)
    with folder.lock():
        for round in (1, 2):
            store.put(round, {0: state(round), round: state(round)})
            folder.checkpoint(round, {}, store.commit(round))
    (folder.clients / "0000002.states").unlink()
    told: list[str] = []
    again = DiskStore(folder.clients)
    last = folder.latest(told.append, accept=lambda found: again.check(found.clients))
    assert last is not None
    assert last.round == 1
    assert "states of 1 clients are missing" in told[0]
    again.restore(last.round, last.clients)
    assert values(again) == {0: 1.0, 1: 1.0}


def test_a_newer_state_that_is_gone_is_not_replaced_by_an_older_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every client still has a state, but not that of the checkpoint."""
    monkeypatch.setattr(disk_store, "SEGMENT_BYTES", 1)
    store = DiskStore(place)
    store.put(1, {0: state(1.0)})
    store.put(2, {0: state(2.0)})
    kept = store.commit(2)
    for name in ("0000002.states", "0000002.index"):
        (place / name).unlink()
    with pytest.raises(CheckpointError, match="states of some clients are missing"):
        DiskStore(place).restore(2, kept)


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_file_is_refused(place: Path, damage: str) -> None:
    store = DiskStore(place)
    store.put(1, {4: state(1.0)})
    kept = store.commit(1)
    file = place / "0000001.states"
    content = bytearray(file.read_bytes())
    content[-18] ^= 4
    file.write_bytes(bytes(content) if damage == "flipped" else bytes(content[:-25]))
    again = DiskStore(place)
    if damage == "truncated":
        with pytest.raises(CheckpointError, match="states of 1 clients are missing"):
            again.restore(1, kept)
        return
    again.restore(1, kept)
    with pytest.raises(CheckpointError, match=r"state of client 4 cannot be read \(0000001"):
        again.get([4])


def test_looking_removes_nothing(place: Path) -> None:
    store = DiskStore(place)
    store.put(1, {0: state(1.0)})
    kept = store.commit(1)
    store.put(2, {0: state(2.0)})
    before = contents(place)
    assert values(read_store(kept, place)) == {0: 1.0}
    assert contents(place) == before


def test_states_that_a_running_run_has_rewritten_are_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "SEGMENT_BYTES", 1)
    store = DiskStore(place)
    store.put(1, {0: state(1.0)})
    reader = read_store(store.commit(1), place)
    for round in (2, 3, 4, 5):
        store.put(round, {0: state(round)})
        store.commit(round)
    with pytest.raises(CheckpointError, match=r"0000001.states is gone: if its run goes on, .* open the run again"):
        reader.get([0])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_state_is_the_same_after_it_was_on_disk(data: st.DataObject) -> None:
    kinds = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float16])
    leaf = st.one_of(
        st.tuples(kinds, st.lists(st.integers(0, 3), max_size=3)).map(lambda one: torch.ones(one[1]).to(one[0]) * 3),
        st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.booleans(), st.none(), st.text(max_size=3),
    )  # fmt: skip
    given = data.draw(
        st.dictionaries(st.text(max_size=4), st.one_of(leaf, st.lists(st.integers(0, 9), max_size=2)), max_size=4)
    )
    assert not list(differences(decode(encode(given)), given, 0.0))
    assert not list(differences(unpack(pack({3: given, 5: given}))[5], given, 0.0))


def test_before_the_first_checkpoint_everything_is_undone(place: Path) -> None:
    DiskStore(place).put(1, {0: state(1.0)})
    again = DiskStore(place)
    again.restore(0, {})
    assert values(again) == {}
    assert files(place) == []


def test_committing_a_round_again_drops_nothing_the_checkpoint_before_names(place: Path) -> None:
    """As at the end of a run, or when a finished one is resumed."""
    store = DiskStore(place)
    store.put(1, {0: state(1.0)})
    before = store.commit(1)
    store.put(2, {0: state(2.0)})
    for _ in range(5):
        store.commit(2)
    assert values(read_store(before, place)) == {0: 1.0}
    again = DiskStore(place)
    again.restore(2, store.commit(2))
    for _ in range(5):
        again.commit(2)
    assert values(again) == {0: 2.0}
    assert values(read_store(before, place)) == {0: 1.0}


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


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, size=st.sampled_from([1, 300, 900, 64 << 20]))
def test_any_history_of_rounds_commits_and_crashes(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, steps: list, size: int
) -> None:
    """Against a dict; a crash goes back to the last checkpoint, or to the one before if that is still there."""
    monkeypatch.setattr(disk_store, "SEGMENT_BYTES", size)
    place = tmp_path_factory.mktemp("history") / "clients"
    store, round = DiskStore(place), 0
    truth: dict[int, float] = {}
    saved: list[tuple[int, Kept, dict[int, float]]] = [(0, {}, {})]
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
        assert size < 64 << 20 or len(files(place)) <= 5 * 5


class Crash(BaseException):
    """The process ends here."""


def crashing(patch: pytest.MonkeyPatch, at: int) -> list[int]:
    """Everything that changes files ends at the call number ``at``: writes half-way, all others before or after."""
    calls = [0]

    def planted(real: Any, half: bool) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] != at:
                return real(*given, **named)
            if half:
                real(given[0], given[1], given[2][: len(given[2]) // 2])
            elif at % 2:
                real(*given, **named)
            raise Crash

        return call

    patch.setattr(atomic, "sync", lambda path: None)  # processes end here, not the machine
    patch.setattr(segments, "_write_at", planted(segments._write_at, half=True))
    for place, name in ((os, "replace"), (os, "truncate"), (Path, "unlink"), (atomic, "sync")):
        patch.setattr(place, name, planted(getattr(place, name), half=False))
    return calls


def lived(place: Path, at: int) -> tuple[bool, list[tuple[int, Kept, dict[int, float]]]]:
    """A run of 14 rounds that crashes at the ``at``-th change of a file; returns its last two checkpoints."""
    saved: list[tuple[int, Kept, dict[int, float]]] = [(0, {}, {})]
    truth: dict[int, float] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_store, "SEGMENT_BYTES", 700)
        crashing(patch, at)
        try:
            store = DiskStore(place)
            for round in range(1, 15):
                some = {client: float(round) for client in (round % 2, round % 3, 3 + round % 4)}
                store.put(round, {client: state(value) for client, value in some.items()})
                truth |= some
                if round % 2:
                    saved = [*saved[-1:], (round, store.commit(round), dict(truth))]
        except Crash:
            return True, saved
    return False, saved


def test_a_crash_at_any_change_of_a_file_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    """Both checkpoints that are kept can be restored, also if restoring crashes on the way; then the run goes on."""
    at, crashed = 0, True
    while crashed:
        at += 1
        place = tmp_path / str(at)
        crashed, saved = lived(place, at)
        for round, kept, truth in saved[::-1]:
            for again in (1 + at % 5, 0):
                store = DiskStore(place)
                with pytest.MonkeyPatch.context() as patch:
                    if again:
                        crashing(patch, again)
                    try:
                        store.restore(round, kept)
                    except Crash:
                        continue
                assert values(store) == truth, (at, round)
                break
        store.put(20, {1: state(20.0)})
        last = DiskStore(place)
        last.restore(20, store.commit(20))
        assert values(last) == {**truth, 1: 20.0}, at
    assert at > 60, "the run was long enough to rewrite segments"


# ---------------------------------------------------------------------------------------------- earlier layouts


def old_layout(place: Path, round: int, states: dict[int, State]) -> dict[int, State]:
    """What earlier versions wrote: a file per client and generation, and the generations in the checkpoint."""
    place.mkdir(parents=True, exist_ok=True)
    for client, mine in states.items():
        checkpoint.write(place / f"{client:07d}-{round:06d}.safetensors", mine)
    return {client: {"generation": round} for client in states}


def test_files_of_earlier_versions_are_taken_over_and_deleted_when_no_checkpoint_names_them(place: Path) -> None:
    kept = old_layout(place, 3, {0: state(1.0), 4: state(2.0)}) | old_layout(place, 5, {7: state(3.0)})
    assert values(read_store(kept, place)) == {0: 1.0, 4: 2.0, 7: 3.0}
    for _ in range(2):  # the second time as after a kill before the first checkpoint
        store = DiskStore(place)
        store.restore(5, kept)
        store.put(6, {4: state(4.0)})
    assert values(store) == {0: 1.0, 4: 4.0, 7: 3.0}
    for round in (6, 7, 8):
        assert "0000000-000003.safetensors" in files(place)
        found = store.commit(round)
    assert not [name for name in files(place) if name.endswith(".safetensors")]
    again = DiskStore(place)
    again.restore(8, found)
    assert values(again) == {0: 1.0, 4: 4.0, 7: 3.0}


def test_a_missing_file_of_an_earlier_version_is_named(place: Path) -> None:
    kept = old_layout(place, 3, {0: state(1.0), 4: state(2.0)})
    (place / "0000004-000003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="0000004-000003"):
        DiskStore(place).check(kept)


def test_many_clients_with_many_leaves_fit_into_a_checkpoint(tmp_path: Path) -> None:
    """One entry per client and tensor made the header of the file larger than the format allows."""
    folder, clients = RunFolder.create(tmp_path / "run", {}, {}), 20_000
    states = {client: {f"leaf{n}": torch.tensor([float(client + n)]) for n in range(6)} for client in range(clients)}
    with folder.lock():
        path = folder.checkpoint(1, {}, states)
    with path.open("rb") as file:
        assert int.from_bytes(file.read(8), "little") < 10_000
    last = folder.latest()
    assert last is not None
    assert not isinstance(last.clients, StoredStates)
    assert last.clients.keys() == states.keys()
    assert all(float(last.clients[client]["leaf5"]) == client + 5 for client in range(0, clients, 999))


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
