"""Flower's database of a server, read directly and never written: its nodes and its runs.

Flower's commands show neither keys, names nor settings of runs, and need seconds to start.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records import atomic
from fedalloy.flower.config import FOLDER, SEED
from fedalloy.flower.layout import ServerPlace

GONE = "unregistered"
MOVED = "moved.json"
"""In the folder of a restored server: where the folders of its runs are now, by the runs' numbers. Flower's database
has those they had."""
_PATIENCE = 30.0
_NODES = "SELECT node_id, name, public_key, status, last_activated_at, last_deactivated_at, online_until FROM node"
_RUNS = (
    "SELECT run.run_id, run.override_config, task.pending_at, task.starting_at, task.running_at, task.finished_at, "
    "task.sub_status, task.details FROM run JOIN task ON task.task_id = run.primary_task_id ORDER BY task.pending_at"
)


@dataclass(frozen=True)
class Entry:
    """A registered node. ``since`` is when it went online or offline, in seconds since 1970."""

    number: str
    name: str
    key: bytes
    status: str
    since: float | None = None


@dataclass(frozen=True)
class RunEntry:
    """A run as Flower knows it: its state, since when, and its run folder and seed where it is one of fedalloy's;
    ``begun`` is when it was submitted. A ``restored`` one is known from a backup: no program here works for it."""

    number: str
    state: str
    since: float | None
    folder: Path | None = None
    seed: int | None = None
    details: str = ""
    begun: float | None = None
    restored: bool = False

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state.startswith("finished")


def entries(place: ServerPlace, now: float | None = None) -> list[Entry]:
    """All nodes, removed ones included. A node counts as offline when its last sign of life is too old, whether Flower
    has noticed it or not."""
    with _opened(place, "node") as database:
        rows = database.execute(_NODES).fetchall() if database else []
    at = datetime.now(UTC).timestamp() if now is None else now
    return [_entry(row, at) for row in rows]


def run_entries(place: ServerPlace) -> list[RunEntry]:
    """All runs, newest first."""
    with _opened(place, "run", "task") as database:
        rows = database.execute(_RUNS).fetchall() if database else []
    moved = _moved(place)
    return [_at(_run(row), moved) for row in reversed(rows)]


def is_empty(place: ServerPlace) -> bool:
    """Whether there is a database that holds no node and no run, nor ever did; not one that cannot be read."""
    if not place.database.exists():
        return False
    try:
        with closing(_connected(place)) as database:
            tables = _tables(database) & {"node", "run"}
            return not any(database.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in tables)
    except sqlite3.Error:
        return False


def unsigned(number: int) -> str:
    """Flower's ids are unsigned, but its tables store them signed."""
    return str(int.from_bytes(number.to_bytes(8, "big", signed=True), "big"))


@contextmanager
def _opened(place: ServerPlace, *tables: str) -> Iterator[sqlite3.Connection | None]:
    if not place.database.exists():
        yield None
        return
    try:
        with closing(_connected(place)) as database:
            # A SuperLink that starts makes the file before it makes the tables.
            yield database if _tables(database) >= {*tables} else None
    except sqlite3.Error as error:
        raise CheckpointError(f"Flower's database {place.database} cannot be read: {error}") from None


def _connected(place: ServerPlace) -> sqlite3.Connection:
    return sqlite3.connect(f"{place.database.as_uri()}?mode=ro", uri=True, timeout=_PATIENCE)


def _tables(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _entry(row: tuple[Any, ...], now: float) -> Entry:
    number, name, key, status, begun, ended, until = row
    if status == "online" and until is not None and until <= now:
        status, ended = "offline", datetime.fromtimestamp(until, UTC).isoformat()
    return Entry(unsigned(number), name or "", bytes(key), status, _seconds(begun if status == "online" else ended))


def note_moved(folder: Path, runs: Mapping[str, str]) -> None:
    """Write down where the runs of a restored server are, by number: paths relative to the server's folder."""
    atomic.write_text(folder / MOVED, json.dumps(dict(runs), indent=1) + "\n")


def _moved(place: ServerPlace) -> dict[str, Path]:
    file = place.folder / MOVED
    if not file.exists():
        return {}
    try:
        told = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    return {number: Path(os.path.normpath(place.folder / where)) for number, where in told.items()}


def _at(run: RunEntry, moved: Mapping[str, Path]) -> RunEntry:
    return replace(run, folder=moved[run.number], restored=True) if run.number in moved else run


def _run(row: tuple[Any, ...]) -> RunEntry:
    number, settings, pending, starting, running, finished, how, details = row
    times = {"pending": pending, "starting": starting, "running": running, f"finished:{how}": finished}
    state, since = [(state, at) for state, at in times.items() if at][-1]
    told = json.loads(settings or "{}")
    folder, seed = told.get(FOLDER), int(told.get(SEED, -1))
    return RunEntry(
        unsigned(number), state, _seconds(since), Path(folder) if folder else None, seed if seed >= 0 else None,
        details or "", _seconds(pending),
    )  # fmt: skip


def _seconds(told: Any) -> float | None:
    """A time in the tables, which is text with a time zone, or text in UTC without one."""
    if not told:
        return None
    found = datetime.fromisoformat(str(told))
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
