"""Client states of large populations on disk: segments (what the library uses) beside SQLite.

    PYTHONPATH=src python -m benchmarks.client_states [--clients 1000 1000000] [--cohort 1000] [--parameters 1000]
                                                      [--rounds 20] [--layout segments sqlite] [--folder PATH]
                                                      [--output PATH]

No training: every round reads the states of its cohort (SCAFFOLD's controls, two leaves), changes them, puts them back
and commits, with the checkpoint of the run folder, as a run does that writes a checkpoint after every round. All states
are written before the first measured round. Printed are medians with the smallest and largest value, the processor time
of a round, the peak of anonymous memory, the number and size of files, and the time to restore.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.out_of_core import Memory
from benchmarks.scale_results import keep
from fedalloy.core.keys import Key
from fedalloy.core.store import Kept, StoredStates
from fedalloy.core.types import State
from fedalloy.experiment.records.disk_store import DiskStore
from fedalloy.experiment.records.folder import KEPT, RunFolder
from fedalloy.experiment.records.segments import decode, encode

FILLED_AT_ONCE = 5000


class SqliteStore:
    """The same store as a table with a row per client and round, in write-ahead mode; synced at a commit."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._base = sqlite3.connect(folder / "states.sqlite", isolation_level=None)
        for line in ("page_size=16384", "journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=4000"):
            self._base.execute(f"PRAGMA {line}")
        self._base.execute(
            "CREATE TABLE IF NOT EXISTS states (client INTEGER, round INTEGER, crc INTEGER, state BLOB, "
            "PRIMARY KEY (client, round)) WITHOUT ROWID"
        )
        self._held: list[int] = []
        self._touched: dict[int, list[int]] = {}

    def get(self, ids: Sequence[int]) -> dict[int, State]:
        """The newest state of every client."""
        asked = "SELECT crc, state FROM states WHERE client = ? ORDER BY round DESC LIMIT 1"
        found = ((client, self._base.execute(asked, (client,)).fetchone()) for client in ids)
        return {client: decode(row[1]) for client, row in found if row and zlib.crc32(row[1]) == row[0]}

    def put(self, round: int, states: Mapping[int, State]) -> None:
        """One transaction per round."""
        rows = [(client, round, zlib.crc32(content), content) for client, content in
                ((client, encode(state)) for client, state in states.items())]  # fmt: skip
        self._base.execute("BEGIN")
        self._base.executemany("INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)", rows)
        self._base.execute("COMMIT")
        self._touched.setdefault(round, []).extend(states)

    def commit(self, round: int) -> Kept:
        """Delete what no checkpoint needs, and sync."""
        self._held = [*self._held, round][-KEPT - 1 :]
        self._base.execute("PRAGMA synchronous=FULL")
        self._base.execute("BEGIN")
        for past in [one for one in self._touched if one <= self._held[0]]:
            drop = "DELETE FROM states WHERE client = ? AND round < ?"
            self._base.executemany(drop, [(client, past) for client in self._touched.pop(past)])
        self._base.execute("CREATE TABLE IF NOT EXISTS marks (round INTEGER)")
        self._base.execute("INSERT INTO marks VALUES (?)", (round,))
        self._base.execute("COMMIT")
        self._base.execute("PRAGMA synchronous=NORMAL")
        return StoredStates({"round": round, "clients": 0, "sum": ""})

    def restore(self, round: int, kept: Kept) -> None:
        """Delete what is newer."""
        self._base.execute("DELETE FROM states WHERE round > ?", (round,))


def first_state(client: int, parameters: int) -> State:
    """Controls that differ from client to client."""
    return {
        "solver": {
            "control": {"w": torch.full((parameters - 10,), float(client)), "b": torch.full((10,), float(client))}
        },
        "wire": {},
    }


def worked(state: State) -> State:
    """The state after a round."""
    return {
        "solver": {"control": {name: leaf + 1.0 for name, leaf in state["solver"]["control"].items()}},
        "wire": {},
    }


def cohort(round: int, clients: int, chosen: argparse.Namespace) -> list[int]:
    """The clients of a round."""
    ids: list[int] = Key.of(0).fold("round", round).choice(clients, min(chosen.cohort, clients)).sort().values.tolist()
    return ids


def make(layout: str, folder: Path) -> Any:
    """A store by name."""
    return SqliteStore(folder) if layout == "sqlite" else DiskStore(folder)


def measure(layout: str, clients: int, place: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Fill the store, then run rounds."""
    folder, memory = RunFolder.create(place / "run", {}, {}), Memory()
    store, seconds, saving, cpu = make(layout, folder.clients), list[float](), list[float](), list[float]()
    begin = time.perf_counter()
    for some in torch.arange(clients).split(FILLED_AT_ONCE):
        store.put(0, {client: first_state(client, chosen.parameters) for client in some.tolist()})
    store.commit(0)
    filling = time.perf_counter() - begin
    with folder.lock(), memory.watched():
        for round in range(1, chosen.rounds + 1):
            ids = cohort(round, clients, chosen)
            begin, begun = time.perf_counter(), time.thread_time()
            known = store.get(ids)
            assert len(known) == len(ids)
            store.put(round, {client: worked(state) for client, state in known.items()})
            middle = time.perf_counter()
            folder.checkpoint(round, {}, store.commit(round))
            saving.append(time.perf_counter() - middle)
            seconds.append(middle - begin)
            cpu.append(time.thread_time() - begun)  # without the thread that looks at the memory
    size = [file.stat().st_size for file in folder.clients.iterdir()]
    begin = time.perf_counter()
    again, last = make(layout, folder.clients), folder.latest()
    assert last is not None
    again.restore(last.round, last.clients)
    restoring = time.perf_counter() - begin
    counted = sum(5 in cohort(round, clients, chosen) for round in range(1, chosen.rounds + 1))
    assert float(again.get([5])[5]["solver"]["control"]["w"][0]) == 5.0 + counted, "a state was lost"
    return {
        "fill_s": filling, "round_s": seconds, "checkpoint_s": saving, "cpu_s": cpu, "memory_gb": memory.peak,
        "files": len(size), "gb": sum(size) / 1e9, "restore_s": restoring,
    }  # fmt: skip


def told(values: Any) -> str:
    """A median with its range, or a number."""
    if isinstance(values, list):
        return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
    return f"{values:.3f}" if isinstance(values, float) else str(values)


def main() -> None:
    """A line for every layout and population."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[1000, 1_000_000])
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layout", nargs="*", choices=["segments", "sqlite"], default=["segments", "sqlite"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path, help="A file of results that the figures are added to.")
    chosen, every = parser.parse_args(), dict[str, Any]()
    for layout in chosen.layout:
        for clients in chosen.clients:
            with tempfile.TemporaryDirectory(dir=chosen.folder) as place:
                found = measure(layout, clients, Path(place), chosen)
            print(f"{layout} {clients:,} clients: " + ", ".join(f"{n} {told(v)}" for n, v in found.items()), flush=True)
            every[f"{layout}, {clients}"] = found
    if chosen.output:
        keep(chosen.output, "client_states", {"cohort": chosen.cohort, "parameters": chosen.parameters, **every})


if __name__ == "__main__":
    main()
