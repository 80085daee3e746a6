"""Client states on disk, in a few large files; only those in use are in memory.

The state of a client after a round is a row of a segment (:mod:`.segments`); at a checkpoint the newest of that round
or an earlier one is valid, so that a checkpoint holds a count and a checksum whatever the population. Rows are only
appended. What later states replaced is dropped by copying the rest of a segment to a new one, once no checkpoint can
need it.

| moment of a kill | what is on disk | after ``restore`` |
|---|---|---|
| while states are written | a part of a row, or rows of a later round | cut off |
| between rounds, before a checkpoint | rows of later rounds | cut off |
| while the checkpoint is written | everything it would need | the previous checkpoint is used |
| while a segment is rewritten | a part under another name, or some states twice | removed, or harmless (equal) |
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedalloy.core.errors import CheckpointError
from fedalloy.core.store import Kept, StoredStates
from fedalloy.core.types import State
from fedalloy.experiment.records import atomic
from fedalloy.experiment.records.client_files import OldClientFiles, is_place
from fedalloy.experiment.records.folder import KEPT
from fedalloy.experiment.records.segments import (
    ROW,
    Segment,
    Table,
    Unfinished,
    decode,
    encode,
    mixed,
    segments,
    without_index,
)

SEGMENT_BYTES = 64 << 20
"""A segment of this size is closed and a new one begun."""
_HELD = KEPT + 1
"""A round is committed before its checkpoint is written: until then earlier checkpoints may be needed."""
_MOST_DEAD = 0.5
_ENTRY = np.dtype([*((name, ROW[name]) for name in ROW.names or ()), ("segment", "<i8")])
_IMPORTED_AT_ONCE = 1000
Pairs = np.ndarray[Any, np.dtype[np.uint64]]
_OTHER_KIND = "this run keeps the states of its clients in memory: resume it with the client_memory_mb it began with"


class DiskStore:
    """States in segments below a folder (:class:`fedalloy.core.protocols.ClientStore`); without one, below a temporary
    folder that is removed with the store. States are returned on ``device``."""

    def __init__(self, folder: Path | None = None, device: str = "cpu") -> None:
        self._folder, self._device = folder or _temporary(self), device
        self._old: OldClientFiles | None = None
        self._old_until = 0
        self._segments: dict[int, Segment] = {}
        self._current = _nobody(0)
        self._dead: dict[int, int] = defaultdict(int)
        self._unsynced: set[int] = set()
        self._held: list[int] = []
        self._needed: dict[int, list[Pairs]] = {}  # what was replaced after a checkpoint, which needs it
        self._count = self._sum = self._written = 0
        self._open: int | None = None

    def __len__(self) -> int:
        return self._count

    def get(self, ids: Sequence[int]) -> dict[int, State]:
        """The known states of ``ids``, read from disk at every call."""
        wanted = np.array([client for client in ids if 0 <= client < len(self._current)], dtype=np.int64)
        rows = self._current[wanted]
        rows = rows[rows["segment"] >= 0]
        found: dict[int, State] = {}
        for number in np.unique(rows["segment"]).tolist():
            some = rows[rows["segment"] == number]
            for client, _, content in self._read(self._segments[number], some[list(ROW.names or ())]):
                found[client] = self._decoded(client, content, self._segments[number])
        return {client: found[client] for client in ids if client in found}

    def _read(self, segment: Segment, table: Table) -> Iterator[tuple[int, int, bytes | None]]:
        try:
            yield from segment.read(table)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{segment.states} is gone: if its run goes on, it has rewritten its states since they were opened "
                "here, so open the run again; otherwise restore the file"
            ) from error

    def put(self, round: int, states: Mapping[int, State]) -> None:
        """Append the states of a round; those of other clients stay as they are."""
        if states:
            self._append([(client, round, encode(state)) for client, state in states.items()])

    def commit(self, round: int) -> Kept:
        """Sync every state to disk; returns what a checkpoint needs to find those of this round."""
        for number in self._unsynced & self._segments.keys():
            self._segments[number].sync()
        if self._unsynced:
            atomic.sync(self._folder)
        self._unsynced.clear()
        self._held = [*(one for one in self._held if one != round), round][-_HELD:]
        self._needed = {one: rows for one, rows in self._needed.items() if one in self._held}
        if len(self._held) == _HELD:
            self._compact()
        if self._old is not None and self._old_until not in self._held:
            self._old.remove()
            self._old = None
        self._written = 0
        return StoredStates({"round": round, "clients": self._count, "sum": f"{self._sum:016x}"})

    def check(self, kept: Kept) -> None:
        """Refuse a checkpoint that holds the states themselves, or whose states are missing."""
        if isinstance(kept, StoredStates):
            self._whole(segments(self._folder), kept)
        elif all(map(is_place, kept.values())):
            OldClientFiles(self._folder, kept).check()
        else:
            raise CheckpointError(_OTHER_KIND)

    def restore(self, round: int, kept: Kept) -> None:
        """Go back to a committed round; what was written later is removed."""
        self.check(kept)
        for leftover in (*atomic.leftovers(self._folder), *without_index(self._folder)):
            leftover.unlink(missing_ok=True)
        through = round if isinstance(kept, StoredStates) else -1
        for segment in segments(self._folder):
            rows = int((segment.table()["round"] <= through).sum())  # in ascending order where they exceed it
            segment.cut(rows) if rows else segment.remove()
        self._forget_all()
        if isinstance(kept, StoredStates):
            self.look(kept)
        else:
            self._import(OldClientFiles(self._folder, kept))
        # Until further checkpoints are there, the one before this may be needed.
        self._held, self._written, self._old_until = [round], 0, round
        last = max(self._segments, default=None)
        self._open = last if last is not None and self._segments[last].size < SEGMENT_BYTES else None

    def look(self, kept: Kept) -> None:
        """Read what a checkpoint refers to and remove nothing: for readers other than the run itself."""
        if not isinstance(kept, StoredStates):
            self.check(kept)
            raise CheckpointError("the states are in files of an earlier version")
        found = segments(self._folder)  # listed once: a run that goes on makes and removes some meanwhile
        newest = self._whole(found, kept)
        self._forget_all()
        self._segments = {segment.number: segment for segment in found}
        self._grow(int(newest["client"].max(initial=-1)))
        self._current[newest["client"]] = newest
        self._count, self._sum = len(newest), _total(newest)
        live = np.bincount(newest["segment"], weights=newest["length"]) if len(newest) else np.zeros(0)
        for number, segment in self._segments.items():
            self._dead[number] = segment.size - (int(live[number]) if number < len(live) else 0)

    def _forget_all(self) -> None:
        self._segments, self._current, self._dead = {}, _nobody(0), defaultdict(int)
        self._unsynced, self._held, self._needed, self._open = set(), [], {}, None
        self._count = self._sum = self._written = 0

    def _append(self, records: list[tuple[int, int, bytes]]) -> None:
        if self._open is None or self._segments[self._open].size >= SEGMENT_BYTES:
            atomic.make_folder(self._folder)
            self._open = max(self._segments, default=0) + 1
            self._segments[self._open] = Segment(self._folder, self._open)
        segment = self._segments[self._open]
        self._unsynced.add(segment.number)
        before = segment.size
        self._point_to(segment.append(records), segment.number)
        self._written += segment.size - before

    def _point_to(self, table: Table, number: int) -> None:
        """These rows are their clients' states now."""
        clients = table["client"]
        self._grow(int(clients.max()))
        replaced = self._current[clients]
        replaced = replaced[replaced["segment"] >= 0]
        if self._held:
            needed = replaced[replaced["round"] <= self._held[-1]]
            self._needed.setdefault(self._held[-1], []).append(_pairs(needed))
        for where, size in zip(replaced["segment"].tolist(), replaced["length"].tolist(), strict=True):
            self._dead[where] += size
        self._count += len(table) - len(replaced)
        self._sum = (self._sum - _total(replaced) + _total(table)) % (1 << 64)
        self._current[clients] = _entries(table, number)

    def _grow(self, client: int) -> None:
        if client >= len(self._current):
            more = max(client + 1, 2 * len(self._current)) - len(self._current)
            self._current = np.concatenate([self._current, _nobody(more)])

    def _whole(self, found: Sequence[Segment], kept: StoredStates) -> Table:
        """The valid row of every client at a checkpoint; refused if some are missing."""
        tables = [_entries(segment.table(), segment.number) for segment in found]
        table: Table = np.concatenate(tables) if tables else np.zeros(0, dtype=_ENTRY)
        newest = _newest(table[table["round"] <= kept.where["round"]])
        if len(newest) == kept.where["clients"] and f"{_total(newest):016x}" == kept.where["sum"]:
            return newest
        missing = kept.where["clients"] - len(newest)
        raise CheckpointError(
            f"the states of {missing or 'some'} clients are missing in {self._folder} (round {kept.where['round']} had "
            f"those of {kept.where['clients']}): restore the files"
        )

    def _compact(self) -> None:
        """Rewrite segments most of which is replaced; not more of them than is in proportion to what was written."""
        budget = max(2 * self._written, SEGMENT_BYTES)
        order = sorted(self._segments, key=lambda number: -self._dead[number] / max(1, self._segments[number].size))
        needed = np.concatenate([np.zeros(0, np.uint64), *chain.from_iterable(self._needed.values())])
        for number in order:
            segment = self._segments[number]
            if budget <= 0 or number == self._open or self._dead[number] <= _MOST_DEAD * segment.size:
                continue
            table = segment.table()
            now = self._current[table["client"]]
            current = (now["segment"] == number) & (now["offset"] == table["offset"])
            wanted = current | np.isin(_pairs(table), needed)
            if int(table["length"][wanted].sum()) > _MOST_DEAD * segment.size:
                continue  # a later checkpoint needs less of it
            budget -= segment.size
            self._rewrite(segment, table[wanted], current[wanted])

    def _rewrite(self, segment: Segment, wanted: Table, current: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Copy some rows of a segment, of which some are the current ones, to a new one, then delete it."""
        if len(wanted):
            self._copy(segment, wanted, current)
        segment.remove()
        del self._segments[segment.number]
        self._dead.pop(segment.number, None)

    def _copy(self, segment: Segment, wanted: Table, current: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        new = Unfinished(self._folder, 0)
        new.remove()
        number = max(self._segments) + 1
        records = [(client, round, self._intact(client, content, segment))
                   for client, round, content in segment.read(wanted)]  # fmt: skip
        table = new.append(records)
        new.sync()
        new.rename(number)
        atomic.sync(self._folder)
        self._segments[number] = Segment(self._folder, number)
        self._segments[number].table()
        self._current[table["client"][current]] = _entries(table[current], number)
        self._dead[number] = int(table["length"][~current].sum())

    def _import(self, old: OldClientFiles) -> None:
        """Copy the states of the earlier layout; its files are deleted once no checkpoint can name them."""
        clients = old.clients()
        for begin in range(0, len(clients), _IMPORTED_AT_ONCE):
            found = old.get(clients[begin : begin + _IMPORTED_AT_ONCE])
            self._append([(client, round, encode(state)) for client, round, state in found])
        self._old = old if clients else None
        if not clients:
            old.remove()

    def _decoded(self, client: int, content: bytes | None, segment: Segment) -> State:
        found: State = placed(decode(self._intact(client, content, segment)), self._device)
        return found

    def _intact(self, client: int, content: bytes | None, segment: Segment) -> bytes:
        if content is None:
            raise CheckpointError(
                f"the state of client {client} cannot be read ({segment.states.name}: its checksum does not match its "
                "content); restore the file, or delete the newest checkpoint and resume from the one before"
            )
        return content


def placed(state: Any, device: str) -> Any:
    """A nested state with its tensors on a device."""
    if isinstance(state, dict):
        return {name: placed(value, device) for name, value in state.items()}
    return state.to(device) if isinstance(state, Tensor) else state


def _nobody(clients: int) -> Table:
    empty: Table = np.zeros(clients, dtype=_ENTRY)
    empty["segment"] = -1
    return empty


def _entries(table: Table, number: int) -> Table:
    made: Table = np.zeros(len(table), dtype=_ENTRY)
    for name in ROW.names or ():
        made[name] = table[name]
    made["segment"] = number
    return made


def _newest(table: Table) -> Table:
    """The newest row of every client."""
    order = np.lexsort((table["round"], table["client"]))
    table = table[order]
    last = np.ones(len(table), dtype=bool)
    last[:-1] = table["client"][1:] != table["client"][:-1]
    return table[last]


def _total(table: Table) -> int:
    """A checksum of which clients have a state of which round; rows can be added to it and taken from it."""
    return int(_pairs(table).sum(dtype=np.uint64))


def _pairs(table: Table) -> Pairs:
    """Client and round of every row as one number."""
    return mixed(mixed(table["client"].astype(np.uint64)) ^ table["round"].astype(np.uint64))


def _temporary(owner: object) -> Path:
    """A folder that is removed with its owner, but not when the owner's copy in a forked worker is deleted."""
    folder = Path(tempfile.mkdtemp(prefix="fedalloy-clients-"))
    weakref.finalize(owner, _remove, folder, os.getpid())
    return folder


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
