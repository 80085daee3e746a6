"""An index of a run's records, stored beside them so that a long run is read only once.

``index.sqlite`` holds for every round its numbers (:func:`.scalars.scalars`) and where its row begins, for every
evaluation of clients where its row begins, the seconds of every round, the newest drops, and what the
:class:`Accumulator` objects collect. An update reads only what the run has added; each step is one
transaction. It is a cache: it is rebuilt if it does not match the records (a run that resumed from an earlier round),
deleted if it is damaged, and kept in memory if it cannot be written or another process has it.
The records themselves are never written.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records.client_tables import ClientTables
from fedalloy.experiment.records.index_tables import FILE, Floats, open_tables
from fedalloy.experiment.records.lines import LineBlock, is_unchanged, read_block
from fedalloy.experiment.records.scalars import scalars, seconds_of
from fedalloy.experiment.records.shapes import is_row
from fedalloy.experiment.records.stream import decode

AT_ONCE = 2 << 20
"""Bytes of a stream that one step reads."""
MOST_EVENTS = 1000
"""Drops that are kept individually; all of them are counted."""
_ADVICE = "resume the run or restore the file"
_STREAMS = ("rounds", "clients", "timings")
# The short entries of a row of clients.jsonl, before its long arrays.
_HEAD = re.compile(rb'(\{"round":\d+[^\[\]]*?),"ids":\[')


class Accumulator(Protocol):
    """Collects something of bounded size over all rounds."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Take in one row of ``rounds.jsonl``."""

    def dump(self) -> bytes:
        """The collected state as bytes."""

    def load(self, data: bytes) -> None:
        """Restore a dumped state; empty ``data`` means the initial state."""


@dataclass(frozen=True)
class Table:
    """Numbers by round: ``values[i, j]`` is column ``names[j]`` in round ``rounds[i]``, NaN where there is none."""

    names: tuple[str, ...]
    rounds: tuple[int, ...]
    values: Floats


class Index:
    """The index of one run. Safe to use from several threads."""

    def __init__(self, folder: Path, gathered: Mapping[str, Accumulator] | None = None) -> None:
        self.folder = folder
        self.gathered = dict(gathered or {})
        self._lock = threading.RLock()
        self._tables = open_tables(folder / FILE)
        if len(self) and any(not self._blob(name) for name in self.gathered):
            with self._tables:  # the index was made with fewer accumulators
                self._forget("rounds")
        self._reload()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._tables.close()

    def update(self) -> bool:
        """Read new rows, at most :data:`AT_ONCE` bytes per stream; returns whether there is more to read."""
        with self._lock:
            more = [self._read_on(name) for name in _STREAMS]
        return any(more)

    def update_fully(self) -> None:
        """Read all new rows."""
        while self.update():
            pass

    def __len__(self) -> int:
        """The number of indexed rounds."""
        with self._lock:
            return int(self._one("SELECT COUNT(*) FROM rounds"))

    @property
    def last_round(self) -> int:
        """The newest indexed round, 0 before the first."""
        with self._lock:
            return int(self._one("SELECT round FROM rounds ORDER BY n DESC LIMIT 1") or 0)

    def table(self, after: int = 0) -> Table:
        """The numbers of all rounds but the first ``after`` rows."""
        with self._lock:
            names = tuple(name for (name,) in self._tables.execute("SELECT name FROM columns ORDER BY id"))
            rows = self._tables.execute("SELECT round, numbers FROM rounds WHERE n > ? ORDER BY n", (after,)).fetchall()
        values = np.full((len(rows), len(names)), np.nan)
        for place, (_, blob) in enumerate(rows):
            numbers = np.frombuffer(blob)
            values[place, : len(numbers)] = numbers
        return Table(names, tuple(round for round, _ in rows), values)

    def numbers(self, round: int) -> dict[str, float]:
        """The numbers of one round; empty where it has none."""
        with self._lock:
            names = [name for (name,) in self._tables.execute("SELECT name FROM columns ORDER BY id")]
            asked = "SELECT numbers FROM rounds WHERE round = ? ORDER BY n DESC LIMIT 1"
            found = self._tables.execute(asked, (round,)).fetchone()
        values = np.frombuffer(found[0]).tolist() if found else []
        return {name: value for name, value in zip(names, values, strict=False) if not np.isnan(value)}

    def evaluations(self) -> list[tuple[int, str]]:
        """Round and model of every evaluation of clients, without those of mixtures."""
        with self._lock:
            return self._tables.execute("SELECT round, model FROM clients WHERE mix IS NULL ORDER BY n").fetchall()

    def clients(self, round: int | None = None) -> dict[str, Any]:
        """The row of clients' scores at ``round``, or at the last evaluation up to it; empty before the first."""
        with self._lock:
            found = self._tables.execute(
                "SELECT start, length FROM clients WHERE mix IS NULL AND round <= ? ORDER BY n DESC LIMIT 1",
                (round if round is not None else 1 << 60,),
            ).fetchone()
        if not found:
            return {}
        with (self.folder / "clients.jsonl").open("rb") as file:
            file.seek(found[0])
            row = decode(file.read(found[1]))
        row = ClientTables(self.folder).whole(row) if row is not None and is_row(row) else {}
        return row if row and is_row(row) else {}

    def events(self, most: int = 200) -> list[dict[str, Any]]:
        """The newest drops, newest first."""
        asked = "SELECT round, client, text FROM events ORDER BY n DESC LIMIT ?"
        with self._lock:
            rows = self._tables.execute(asked, (most,)).fetchall()
        return [dict(zip(("round", "client", "text"), row, strict=True)) for row in rows]

    def reasons(self) -> dict[str, int]:
        """How often contributions were dropped, by reason."""
        with self._lock:
            return dict(self._tables.execute("SELECT text, times FROM reasons ORDER BY times DESC, text"))

    def seconds(self, last: int | None = None) -> list[float]:
        """Seconds of all rounds, or of the last few, oldest first."""
        asked = "SELECT seconds FROM timings ORDER BY n DESC LIMIT ?"
        with self._lock:
            return [one for (one,) in self._tables.execute(asked, (last or -1,))][::-1]

    def _one(self, question: str) -> Any:
        found = self._tables.execute(question).fetchone()
        return found[0] if found else None

    def _read_on(self, stream: str) -> bool:
        path = self.folder / f"{stream}.jsonl"
        done, mark = self._tables.execute("SELECT done, mark FROM streams WHERE name = ?", (stream,)).fetchone()
        add = {"rounds": self._add_rounds, "clients": self._add_clients, "timings": self._add_timings}[stream]
        try:
            with self._tables:
                if not is_unchanged(path, done, mark):
                    self._forget(stream)
                    done = 0
                block = read_block(path, done, AT_ONCE)
                if block.lines:
                    add(block)
                    values = (block.end, block.mark, stream)
                    self._tables.execute("UPDATE streams SET done = ?, mark = ? WHERE name = ?", values)
        except (KeyError, TypeError, ValueError) as error:
            self._reload()
            raise CheckpointError(f"a row of {path.name} is invalid ({error!r}); {_ADVICE}") from error
        except BaseException:  # the transaction was rolled back: reload what is in memory
            self._reload()
            raise
        return block.more

    def _reload(self) -> None:
        for name, one in self.gathered.items():
            one.load(self._blob(name))

    def _blob(self, name: str) -> bytes:
        found = self._tables.execute("SELECT data FROM blobs WHERE name = ?", (name,)).fetchone()
        return bytes(found[0]) if found else b""

    def _forget(self, stream: str) -> None:
        tables = ("rounds", "columns", "events", "reasons", "blobs") if stream == "rounds" else (stream,)
        for table in tables:
            self._tables.execute(f"DELETE FROM {table}")
        self._tables.execute("UPDATE streams SET done = 0, mark = x'' WHERE name = ?", (stream,))
        if stream == "rounds":
            for one in self.gathered.values():
                one.load(b"")

    def _add_rounds(self, block: LineBlock) -> None:
        columns = dict(self._tables.execute("SELECT name, id FROM columns"))
        for start, line in block:
            row = _decoded(line, "rounds")
            numbers = scalars(row)
            for name in numbers:
                columns.setdefault(name, len(columns))
            packed = np.full(len(columns), np.nan)
            packed[[columns[name] for name in numbers]] = list(numbers.values())
            values = (row["round"], start, len(line), packed.tobytes())
            self._tables.execute("INSERT INTO rounds(round, start, length, numbers) VALUES (?, ?, ?, ?)", values)
            self._add_events(row)
            for one in self.gathered.values():
                one.add(row)
        self._tables.executemany("INSERT OR IGNORE INTO columns(name, id) VALUES (?, ?)", columns.items())
        for name, one in self.gathered.items():
            self._tables.execute("INSERT OR REPLACE INTO blobs(name, data) VALUES (?, ?)", (name, one.dump()))

    def _add_events(self, row: Mapping[str, Any]) -> None:
        dropped = row.get("dropped") or {}
        for client, why in list(dropped.items())[-MOST_EVENTS:]:
            values = (row["round"], int(client), why)
            self._tables.execute("INSERT INTO events(round, client, text) VALUES (?, ?, ?)", values)
        for why in dropped.values():
            self._tables.execute(
                "INSERT INTO reasons(text, times) VALUES (?, 1) ON CONFLICT(text) DO UPDATE SET times = times + 1",
                (why,),
            )
        if dropped:
            self._tables.execute("DELETE FROM events WHERE n <= (SELECT MAX(n) FROM events) - ?", (MOST_EVENTS,))

    def _add_clients(self, block: LineBlock) -> None:
        for start, line in block:
            row = _head(line)
            values = (row["round"], row.get("model", "global"), row.get("mix"), start, len(line))
            self._tables.execute("INSERT INTO clients(round, model, mix, start, length) VALUES (?, ?, ?, ?, ?)", values)

    def _add_timings(self, block: LineBlock) -> None:
        rows = [_decoded(line, "timings") for _, line in block]
        self._tables.executemany(
            "INSERT INTO timings(round, seconds) VALUES (?, ?)", [(row["round"], seconds_of(row)) for row in rows]
        )


def _head(line: bytes) -> dict[str, Any]:
    """The short entries of a row of clients, without parsing its long arrays."""
    match = _HEAD.match(line)
    if match:
        try:
            head: dict[str, Any] = json.loads(match[1] + b"}")
        except ValueError:
            head = {}
        if is_row(head):
            return head
    return _decoded(line, "clients")


def _decoded(line: bytes, stream: str) -> dict[str, Any]:
    row = decode(line)
    if row is None or not is_row(row):
        raise CheckpointError(f"a line of {stream}.jsonl is not a row of a run; {_ADVICE}")
    return row
