"""Files of client states: rows are only appended, so that nothing that a checkpoint needs is ever overwritten.

A segment is two files: ``0000012.states`` with the bytes of states, and ``0000012.index`` with a row of fixed width for
each of them (:data:`ROW`). Bytes are written before the row that names them, and a row has a checksum of itself and one
of its bytes: what a crash left half-written is recognised and cut off.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedalloy.core.types import State
from fedalloy.experiment.records import atomic, checkpoint

ROW = np.dtype([
    ("client", "<i8"), ("round", "<i8"), ("offset", "<i8"), ("length", "<i8"), ("crc", "<u4"), ("own", "<u4"),
])  # fmt: skip
"""A row of an index: whose state it is, the round that made it, where it is, its checksum, and that of the row."""
Table = np.ndarray[Any, np.dtype[np.void]]
_NAME = re.compile(r"(\d{7,})\.index")
_ALIGN = 16


class Segment:
    """One pair of files; ``size`` and ``rows`` count what is valid."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number
        self.size = self.rows = 0

    @property
    def states(self) -> Path:
        """The file of bytes."""
        return self.folder / f"{self.number:07d}.states"

    @property
    def index(self) -> Path:
        """The file of rows."""
        return self.folder / f"{self.number:07d}.index"

    def table(self) -> Table:
        """The valid rows, up to the first that is broken or whose bytes are missing."""
        content = self.index.read_bytes()
        table: Table = np.frombuffer(content[: len(content) // ROW.itemsize * ROW.itemsize], dtype=ROW)
        there = self.states.stat().st_size if self.states.exists() else 0
        good = (row_sums(table) == table["own"]) & (table["offset"] + table["length"] <= there)
        table = table[: len(table) if bool(good.all()) else int(np.argmin(good))]
        self.rows = len(table)
        self.size = _end_of(table)
        return table

    def append(self, records: Iterable[tuple[int, int, bytes]]) -> Table:
        """Write states, given as client, round and bytes; returns their rows."""
        kept, offset, made = list[bytes](), self.size, list[tuple[int, ...]]()
        for client, round, content in records:
            padded = content + bytes(-len(content) % _ALIGN)
            made.append((client, round, offset, len(content), zlib.crc32(content), 0))
            kept.append(padded)
            offset += len(padded)
        table: Table = np.array(made, dtype=ROW)
        table["own"] = row_sums(table)
        _write_at(self.states, self.size, b"".join(kept))
        _write_at(self.index, self.rows * ROW.itemsize, table.tobytes())
        self.size, self.rows = offset, self.rows + len(table)
        return table

    def cut(self, rows: int) -> None:
        """Keep only the first rows."""
        table = self.table()[:rows]
        self.size, self.rows = _end_of(table), len(table)
        os.truncate(self.index, self.rows * ROW.itemsize)
        if self.states.exists():
            os.truncate(self.states, min(self.size, self.states.stat().st_size))

    def read(self, table: Table) -> Iterator[tuple[int, int, bytes | None]]:
        """Client, round and bytes of some rows; None for bytes that do not match their checksum."""
        file = os.open(self.states, os.O_RDONLY | atomic.BINARY)
        try:
            for client, round, offset, length, crc, _ in table.tolist():
                content = _read_at(file, length, offset)
                yield client, round, content if zlib.crc32(content) == crc else None
        finally:
            os.close(file)

    def sync(self) -> None:
        """Let both files reach the disk."""
        atomic.sync(self.states)
        atomic.sync(self.index)

    def rename(self, number: int) -> None:
        """Take a number; the index comes last, because a segment exists once it has one."""
        new = Segment(self.folder, number)
        os.replace(self.states, new.states)
        os.replace(self.index, new.index)
        self.number = number

    def remove(self) -> None:
        """Delete both files."""
        self.index.unlink(missing_ok=True)
        self.states.unlink(missing_ok=True)


class Unfinished(Segment):
    """A segment under another name, until it is complete."""

    @property
    def states(self) -> Path:
        return self.folder / ".states.tmp"

    @property
    def index(self) -> Path:
        return self.folder / ".index.tmp"


def segments(folder: Path) -> list[Segment]:
    """The segments of a folder, in the order in which they were made."""
    names = map(_NAME.fullmatch, os.listdir(folder)) if folder.is_dir() else ()
    return [Segment(folder, number) for number in sorted(int(name[1]) for name in names if name)]


def without_index(folder: Path) -> list[Path]:
    """Files of bytes that no index names: left by a crash."""
    known = {segment.states.name for segment in segments(folder)}
    return [path for path in folder.glob("*.states") if path.name not in known]


def row_sums(table: Table) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """A checksum of every row: rows are many, so it is one that vectorises. Not 0 for a row of zeros."""
    total = np.full(len(table), 0x9E3779B97F4A7C15, dtype=np.uint64)
    for name in ("client", "round", "offset", "length", "crc"):
        total = mixed(total ^ table[name].astype(np.uint64))
    return (total >> np.uint64(32)).astype(np.uint32)


def mixed(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A bijection of 64-bit numbers whose results look independent."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def encode(state: State) -> bytes:
    """A state as bytes: the length of its form, the form as JSON, and the tensors at multiples of 16 bytes."""
    tensors, skeleton = checkpoint.flatten(state)
    leaves = [[name, str(leaf.dtype).removeprefix("torch."), list(leaf.shape)] for name, leaf in tensors.items()]
    form = json.dumps([skeleton, leaves], separators=(",", ":"), allow_nan=False).encode()
    form += b" " * (-(len(form) + 8) % _ALIGN)
    parts = [len(form).to_bytes(8, "little"), form]
    for leaf in tensors.values():
        content = checkpoint.bytes_of(leaf).numpy().tobytes()
        parts += [content, bytes(-len(content) % _ALIGN)]
    return b"".join(parts)


def decode(content: bytes) -> State:
    """The inverse of :func:`encode`; the tensors of a state share one piece of memory."""
    memory = bytearray(content)
    at = 8 + int.from_bytes(memory[:8], "little")
    skeleton, leaves = json.loads(memory[8:at])
    tensors = {}
    for name, kind, shape in leaves:
        dtype, count = getattr(torch, kind), int(np.prod(shape, dtype=np.int64))
        tensors[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=at) if count else torch.empty(0)
        tensors[name] = tensors[name].to(dtype).reshape(shape)
        at += count * dtype.itemsize
        at += -at % _ALIGN
    return checkpoint.unflatten(tensors, skeleton)


def _end_of(table: Table) -> int:
    end = int(table["offset"][-1] + table["length"][-1]) if len(table) else 0
    return end + -end % _ALIGN


def _write_at(path: Path, offset: int, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | atomic.BINARY, 0o666)
    try:
        os.lseek(file, offset, os.SEEK_SET)
        rest = memoryview(content)
        while len(rest):
            rest = rest[os.write(file, rest) :]
    finally:
        os.close(file)


def _read_at(file: int, length: int, offset: int) -> bytes:
    os.lseek(file, offset, os.SEEK_SET)  # the caller has just opened it; Windows has no pread
    found = bytearray()
    while len(found) < length and (piece := os.read(file, length - len(found))):
        found += piece  # one call reads at most 2 GB
    return bytes(found)
