"""Rows of bytes in a file, for contributions that do not fit into memory.

The file has no name: it is unlinked when it is made (on Windows: deleted when it is closed), so that the system frees
its space when the process ends, however it ends. Its space is reserved at once, because a write to a mapped page for
which the disk has no space would end the process by a signal instead of raising an error.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.engines import direct_reads
from fedalloy.engines.direct_reads import LEAST, PAGE, FileReader
from fedalloy.engines.file_pieces import Pieces, in_order
from fedalloy.engines.piece_memory import Recycled
from fedalloy.engines.shared_memory import Layout, Slot

SLAB_BYTES = 64 << 20
"""Bytes of one leaf that are read at a time, over all clients: a disk needs long reads to be fast."""
MOST_BYTES = 256 << 20
"""The limit for very many clients, whose reads would be too short otherwise."""
_LEAST_READ = 1 << 15
"""Shorter reads of one row are avoided, as long as the slab stays below its limit."""
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_MOUNTS = Path("/proc/self/mounts")


class MappedRows:
    """``bytes``, ``[rows, layout.size]``, in an unnamed file below ``folder`` (default: the system's temporary
    folder)."""

    def __init__(self, rows: int, layout: Layout, folder: Path | None = None) -> None:
        self.layout, self.stride = layout, _stride(layout.size)
        self.size = rows * self.stride
        where = Path(tempfile.gettempdir() if folder is None else folder)
        check_on_disk(where)
        where.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=where, buffering=0)  # noqa: SIM115, it lives as long as the rows
        weakref.finalize(self, self._file.close)
        _reserve(self._file.fileno(), self.size, where)
        # The tensor keeps the mapping; both are released with the last view.
        self._mapping = mmap.mmap(self._file.fileno(), self.size)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.bytes = whole.reshape(rows, self.stride)[:, : layout.size]
        self.reader = FileReader(self._file.fileno(), whole.data_ptr(), self.size)
        weakref.finalize(self, self.reader.close)

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
        yield from ((begin, piece) for _, begin, piece in self.stream([(slot, width)], places, reuse=reuse))

    def stream(
        self, slots: Sequence[tuple[Slot, int]], places: list[int], *, reuse: bool = False
    ) -> Iterator[tuple[Slot, int, Tensor]]:
        """The pieces of several leaves, each with its width, one leaf after the other."""
        if direct_reads.HERE:  # costs less than a fault for every page of the mapping
            starts, memory = [place * self.stride for place in places], Recycled()
            yield from in_order([Pieces(self.reader, slot, starts, width, reuse, memory) for slot, width in slots])
            return
        for slot, width in slots:
            flat = self.bytes[:, slot.begin : slot.begin + slot.size].view(slot.dtype)
            for begin in range(0, flat.shape[1], width):
                yield slot, begin, flat[torch.tensor(places, dtype=torch.int64), begin : begin + width]


def slab_width(clients: int, itemsize: int, unit: int) -> int:
    """How many columns are read at a time: a multiple of ``unit``.

    >>> slab_width(200, 4, 512), slab_width(100_000, 4, 512)
    (83456, 512)
    """
    wanted = SLAB_BYTES // max(1, clients * itemsize)
    least = min(_LEAST_READ // itemsize, MOST_BYTES // max(1, clients * itemsize))
    return max(1, max(wanted, least) // unit) * unit


def _stride(size: int) -> int:
    """Bytes from one row to the next: whole pages, where columns are read directly.

    >>> _stride(1000), _stride(100_000)
    (1000, 102400)
    """
    return size if size < LEAST else -(-size // PAGE) * PAGE


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
