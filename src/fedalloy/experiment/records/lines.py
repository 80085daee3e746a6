"""Whole lines of a growing file, in blocks, and whether the part that was read before is unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SAMPLE = 256


@dataclass(frozen=True)
class LineBlock:
    """Lines with their ends; ``end`` is where the next block begins, ``mark`` a fingerprint of what comes before."""

    begin: int
    lines: tuple[bytes, ...]
    end: int
    mark: bytes
    more: bool

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Where each line begins, and the line."""
        start = self.begin
        for line in self.lines:
            yield start, line
            start += len(line)


def read_block(path: Path, begin: int, most: int) -> LineBlock:
    """The whole lines from ``begin`` on, of at most ``most`` bytes unless the first is longer."""
    if not path.exists():
        return LineBlock(begin, (), begin, b"", False)
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read(most)
        if len(data) == most and not data.endswith(b"\n"):
            data += file.readline()
        data = data[: data.rfind(b"\n") + 1]
        end = begin + len(data)
        return LineBlock(
            begin, tuple(data.splitlines(keepends=True)), end, _mark(path, end), bool(file.read(1)) and bool(data)
        )


def is_unchanged(path: Path, end: int, mark: bytes) -> bool:
    """Whether a file still begins with what was read up to ``end``, judged by its length and two samples."""
    return end == 0 or (path.exists() and path.stat().st_size >= end and _mark(path, end) == mark)


def _mark(path: Path, end: int) -> bytes:
    with path.open("rb") as file:
        head = file.read(min(_SAMPLE, end))
        file.seek(max(0, end - _SAMPLE))
        return hashlib.sha256(head + file.read(min(_SAMPLE, end))).digest()
