"""Pieces of rows in a file, read into memory while the one before is in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from fedalloy.engines.direct_reads import LEAST, PAGE, FileReader
from fedalloy.engines.piece_memory import Recycled
from fedalloy.engines.shared_memory import Slot

READERS = 4
"""Threads that read: a disk answers several requests in the time of one, and waiting takes no processor."""
_ANNOUNCED_BYTES = 512 << 20
"""What the system is told to read ahead of us, where reads go through the page cache."""


@dataclass
class Pieces:
    """Pieces of one leaf of the rows that begin at ``starts`` in a file, ``width`` columns each; the last one may be
    narrower. With ``reuse`` a piece is overwritten by the one after the next."""

    reader: FileReader
    slot: Slot
    starts: list[int]
    width: int
    reuse: bool
    memory: Recycled = field(default_factory=Recycled)

    def __post_init__(self) -> None:
        self._size = self.slot.dtype.itemsize
        self._columns = self.slot.size // self._size
        self.width = min(self.width, self._columns)
        self._direct = self.reader.direct and self.width * self._size >= LEAST
        self._span = self._row_bytes()
        twice = self.reuse and self.width < self._columns
        self._regions = [self.memory.region(self._span * len(self.starts)) for _ in range(2)] if twice else []

    @property
    def begins(self) -> range:
        """The first column of every piece."""
        return range(0, self._columns, max(1, self.width))

    def begun(self, turn: int, readers: ThreadPoolExecutor, announcer: ThreadPoolExecutor) -> _Coming:
        """Begin to read a piece."""
        begin = self.begins[turn]
        count = min(self.width, self._columns - begin)
        if not self._direct:
            self._announce(announcer, begin)
        lead = (self.slot.begin + begin * self._size) % PAGE if self._direct else 0
        piece, memory = self._place(turn, lead, count)
        parts = [
            readers.submit(self._read, memory, range(first, len(self.starts), READERS), lead, begin, count)
            for first in range(min(READERS, len(self.starts)))
        ]
        return _Coming(piece, parts)

    def _place(self, turn: int, lead: int, count: int) -> tuple[Tensor, memoryview]:
        """Memory for a piece, as a tensor and as bytes."""
        rows, kind, size = len(self.starts), self.slot.dtype, count * self._size
        if not rows:
            return torch.empty(0, count, dtype=kind), memoryview(b"")
        region = self._regions[turn % 2] if self._regions else self.memory.region(self._span * rows)
        table = torch.frombuffer(region, dtype=torch.uint8).reshape(rows, self._span)
        return table[:, lead : lead + size].view(kind), memoryview(region)

    def _read(self, memory: memoryview, rows: range, lead: int, begin: int, count: int) -> None:
        """Read some rows of a piece."""
        for row in rows:
            at = self.starts[row] + self.slot.begin + begin * self._size
            self.reader.read(memory, row * self._span + lead, at, count * self._size)

    def _row_bytes(self) -> int:
        """Bytes between the rows of a piece. For direct reads the pages around the columns have room as well."""
        tight = self.width * self._size
        if not self._direct:
            return tight
        aligned = self.slot.begin % PAGE == 0 and tight % PAGE == 0
        return -(-tight // PAGE) * PAGE + (0 if aligned else PAGE)

    def _announce(self, announcer: ThreadPoolExecutor, begin: int) -> None:
        """Tell the system what is read soon: the first two windows, then always the one after the next."""
        piece = max(1, len(self.starts) * self.width * self._size)
        ahead = max(1, _ANNOUNCED_BYTES // piece) * self.width
        if begin % ahead == 0:
            low, high = begin + ahead if begin else 0, min(begin + 2 * ahead, self._columns)
            ats = [start + self.slot.begin + low * self._size for start in self.starts if low < high]
            announcer.submit(self.reader.announce, ats, (high - low) * self._size)


def in_order(leaves: Iterable[Pieces]) -> Iterator[tuple[Slot, int, Tensor]]:
    """Every piece of every leaf with its first column. The next one is read while the caller uses this one."""
    turns = [(leaf, turn) for leaf in leaves for turn in range(len(leaf.begins))]
    with ThreadPoolExecutor(READERS) as readers, ThreadPoolExecutor(1) as announcer:
        coming = turns[0][0].begun(0, readers, announcer) if turns else None
        for (leaf, turn), after in zip_longest(turns, turns[1:]):
            assert coming is not None
            piece = coming.whole()
            coming = after[0].begun(after[1], readers, announcer) if after else None
            yield leaf.slot, leaf.begins[turn], piece
            del piece  # its memory is used again once the caller lets it go


@dataclass
class _Coming:
    """A piece that is being read."""

    piece: Tensor
    parts: list[Future[None]]

    def whole(self) -> Tensor:
        """The piece, once all of it is there."""
        for part in self.parts:
            part.result()
        return self.piece
