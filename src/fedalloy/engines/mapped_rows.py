"""Rows of bytes in a file, for contributions that do not fit into memory.

The file has no name: it is unlinked when it is made (on Windows: deleted when it is closed), so that the system frees
its space when the process ends, however it ends. Its space is reserved at once, because a write to a mapped page for
which the disk has no space would end the process by a signal instead of raising an error.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.engines.shared_memory import Layout, Slot

SLAB_BYTES = 32 << 20
"""Bytes of one leaf that are read at a time, over all clients: small enough for the cache of the processor."""
MOST_BYTES = 256 << 20
"""The limit for very many clients, whose reads would be too short otherwise."""
_LEAST_READ = 1 << 15
"""Shorter reads of one row are avoided, as long as the slab stays below its limit."""
_ANNOUNCED_BYTES = 512 << 20
"""What the system is told to read ahead of us."""
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_MOUNTS = Path("/proc/self/mounts")


class MappedRows:
    """``[rows, layout.size]`` bytes in an unnamed file below ``folder`` (default: the system's temporary folder)."""

    def __init__(self, rows: int, layout: Layout, folder: Path | None = None) -> None:
        self.layout, self.size = layout, rows * layout.size
        where = Path(tempfile.gettempdir() if folder is None else folder)
        check_on_disk(where)
        where.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=where, buffering=0)  # noqa: SIM115, it lives as long as the rows
        weakref.finalize(self, self._file.close)
        _reserve(self._file.fileno(), self.size, where)
        # The tensor keeps the mapping; both are released with the last view.
        self._mapping = mmap.mmap(self._file.fileno(), self.size)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8).reshape(rows, layout.size)

    def leaf(self, slot: Slot) -> Tensor:
        """All rows of one leaf, ``[rows, *shape]``, as a view of the file."""
        flat = self.bytes[:, slot.begin : slot.begin + slot.size].view(slot.dtype)
        return flat.reshape(len(self.bytes), *slot.shape)

    def written(self) -> None:
        """Give back the memory of what was written: the file has it, and the system writes it to the disk when it needs
        the memory. Pages of the mapping would otherwise count as this process's own."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def slabs(self, slot: Slot, places: list[int], width: int, *, reuse: bool = False) -> Iterator[tuple[int, Tensor]]:
        """``[len(places), n]`` pieces of a leaf, ``width`` columns each, in memory, with their first column.

        The next one is read while the caller uses this one. With ``reuse`` a piece is overwritten by the one after
        the next.
        """
        columns = slot.size // slot.dtype.itemsize
        begins = range(0, columns, width)
        shape = (len(places), min(width, columns))
        recycled = _Recycled()
        buffers = [recycled.pages(*shape, slot.dtype) for _ in range(min(2, len(begins)))] if reuse else []
        ahead = max(1, _ANNOUNCED_BYTES // max(1, len(places) * width * slot.dtype.itemsize)) * width

        def fresh(turn: int) -> Tensor:
            count = min(width, columns - begins[turn])
            return buffers[turn % 2] if reuse and count == shape[1] else recycled.pages(len(places), count, slot.dtype)

        def submit(turn: int) -> Future[Tensor]:
            begin = begins[turn]
            if begin % ahead == 0:  # the first two windows, then always the one after the next
                low = begin + ahead if begin else 0
                announcer.submit(self._announce, slot, places, low, min(begin + 2 * ahead, columns))
            return reader.submit(self._read, slot, places, begin, fresh(turn))

        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as announcer:
            coming = submit(0) if len(begins) else None
            for turn, begin in enumerate(begins):
                assert coming is not None
                piece = coming.result()
                coming = submit(turn + 1) if turn + 1 < len(begins) else None
                yield begin, piece

    def _read(self, slot: Slot, places: list[int], begin: int, piece: Tensor) -> Tensor:
        if not hasattr(os, "preadv"):  # Windows
            flat = self.bytes[:, slot.begin : slot.begin + slot.size].view(slot.dtype)
            return piece.copy_(flat[torch.tensor(places), begin : begin + piece.shape[1]])
        # A read costs less than a fault for every page of the mapping, and other threads run during it.
        file, size = self._file.fileno(), slot.dtype.itemsize
        into = memoryview(piece.view(torch.uint8).numpy().data).cast("B")
        step = piece.shape[1] * size
        for row, place in enumerate(places):
            at = place * self.layout.size + slot.begin + begin * size
            _read_fully(file, into[row * step : (row + 1) * step], at)
        return piece

    def _announce(self, slot: Slot, places: list[int], begin: int, end: int) -> None:
        if hasattr(os, "posix_fadvise"):
            size = slot.dtype.itemsize
            for place in places if end > begin else ():
                at = place * self.layout.size + slot.begin + begin * size
                os.posix_fadvise(self._file.fileno(), at, (end - begin) * size, os.POSIX_FADV_WILLNEED)


class _Recycled:
    """Memory for pieces, used again once nobody has a view of it: pages that are there already are filled several times
    as fast as new ones. The system takes it back in the end. From the heap, every piece would leave a gap in which the
    small results of the next chunks are put, so that no later piece fits: 16 GB of gaps for 20 GB of rows."""

    def __init__(self) -> None:
        self._regions: list[mmap.mmap] = []
        self._alone = 0

    def pages(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A piece of any content."""
        size = rows * columns * dtype.itemsize
        if not size:
            return torch.empty(rows, columns, dtype=dtype)
        unused = [place for place in range(len(self._regions)) if self._references(place) == self._alone]
        place = next((place for place in unused if len(self._regions[place]) == size), None)
        if place is None:
            place = self._new(size, unused)
        return torch.frombuffer(self._regions[place], dtype=dtype).reshape(rows, columns)

    def _new(self, size: int, unused: Sequence[int]) -> int:
        """Another region, instead of those of other sizes that nobody uses; its place."""
        self._regions = [region for place, region in enumerate(self._regions) if place not in unused]
        self._regions.append(_region(size))
        self._alone = self._references(-1)
        return len(self._regions) - 1

    def _references(self, place: int) -> int:
        """One more as long as there is a tensor in the region: its storage keeps it."""
        return sys.getrefcount(self._regions[place])


def _region(size: int) -> mmap.mmap:
    """In pages of 2 MB where there are such: faults of 4 KB take longer than reading what is put there."""
    if not (hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS")):
        return mmap.mmap(-1, size)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages only
    with suppress(OSError):  # a kernel without large pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return region


def slab_width(clients: int, itemsize: int, unit: int) -> int:
    """How many columns are read at a time: a multiple of ``unit``.

    >>> slab_width(200, 4, 512), slab_width(100_000, 4, 512)
    (41472, 512)
    """
    wanted = SLAB_BYTES // max(1, clients * itemsize)
    least = min(_LEAST_READ // itemsize, MOST_BYTES // max(1, clients * itemsize))
    return max(1, max(wanted, least) // unit) * unit


def check_on_disk(folder: Path) -> None:
    """Refuse a folder whose files are in memory: contributions there would not leave it."""
    kind, point = _file_system(folder)
    if kind in _MEMORY_FILE_SYSTEMS:
        raise SpecError(
            f"{folder} is in memory ({kind} at {point}), so contributions that do not fit into memory cannot be kept "
            "there: set contributions_folder in [engine] to a folder on a disk, or raise contributions_mb"
        )


def _file_system(folder: Path) -> tuple[str, str]:
    """The type and the mount point of the file system of a folder; empty where the system does not say it."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", ""
    place, found = folder.absolute().resolve(), ("", "")
    for line in lines:
        _, point, kind, *_ = [*line.split(" "), "", "", ""]
        at = point.replace("\\040", " ")
        if place.is_relative_to(at) and len(at) >= len(found[1]):
            found = kind, at
    return found


def _reserve(file: int, size: int, where: Path) -> None:
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        error.strerror = (
            f"{error.strerror}: a round's contributions need {size / 1e9:.1f} GB in {where} (contributions_folder in "
            "[engine] names another folder, a larger contributions_mb keeps them in memory)"
        )
        raise


def _read_fully(file: int, into: memoryview, at: int) -> None:
    while len(into):
        if not (count := os.preadv(file, [into], at)):
            raise OSError(errno.EIO, "the file of the contributions ended early")
        into, at = into[count:], at + count
