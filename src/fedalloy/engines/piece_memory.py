"""Memory for pieces of files, used again once nobody has a view of it."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress


class Recycled:
    """Pages that are there already are filled several times as fast as new ones. The system takes them back in the end.
    From the heap, every piece would leave a gap in which the small results of the next chunks are put, so that no later
    piece fits: 16 GB of gaps for 20 GB of rows."""

    def __init__(self) -> None:
        self._regions: list[mmap.mmap] = []
        self._alone = 0

    def region(self, size: int) -> mmap.mmap:
        """Memory of any content that nobody uses; it is used as long as there is a tensor or a view of it."""
        unused = [place for place in range(len(self._regions)) if self._references(place) == self._alone]
        place = next((place for place in unused if len(self._regions[place]) == size), None)
        if place is None:
            place = self._new(size, unused)
        return self._regions[place]

    def _new(self, size: int, unused: Sequence[int]) -> int:
        """Another region, instead of those of other sizes that nobody uses; its place."""
        self._regions = [region for place, region in enumerate(self._regions) if place not in unused]
        self._regions.append(mapped(size))
        self._alone = self._references(-1)
        return len(self._regions) - 1

    def _references(self, place: int) -> int:
        """One more as long as there is a tensor in the region: its storage keeps it."""
        return sys.getrefcount(self._regions[place])


def mapped(size: int) -> mmap.mmap:
    """In pages of 2 MB where there are such: faults of 4 KB take longer than reading what is put there."""
    if not (hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS")):
        return mmap.mmap(-1, size)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages only
    with suppress(OSError):  # a kernel without large pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return region
