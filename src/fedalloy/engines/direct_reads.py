"""Reads of a file without a copy through the page cache, where the system has them.

The disk writes into the memory of the piece itself, so that the processor is left to the rule: through the page cache
20 GB cost as much of it as trimming them. What is in the page cache already is copied from there, because that is
faster than any disk.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

PAGE = 4096
"""Direct reads begin and end at a multiple of this, in the file and in memory."""
HERE = hasattr(os, "preadv")
"""Whether this system can read into given memory at all; elsewhere rows are copied from their mapping."""
LEAST = 1 << 16
"""Shorter reads go through the page cache, which reads ahead."""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


class FileReader:
    """Fills memory from a file that is mapped at the address ``base``; several threads may read at once."""

    def __init__(self, file: int, base: int, size: int) -> None:
        self._file, self._base, self._size = file, base, size
        self._unbuffered, self._mincore = _opened(file), _mincore()
        self.direct = self._unbuffered is not None

    def close(self) -> None:
        """No read may be under way."""
        if self._unbuffered is not None:
            os.close(self._unbuffered)
        self.direct, self._unbuffered = False, None

    def read(self, region: memoryview, offset: int, at: int, size: int) -> None:
        """Fill ``region[offset : offset + size]`` with what the file has at ``at``. If both lie at the same place of
        their pages, the rest of these pages of ``region`` may be overwritten."""
        same_place = (offset - at) % PAGE == 0
        if not (self.direct and same_place and size >= LEAST and self._past_cache(region, offset, at, size)):
            _fully(self._file, region[offset : offset + size], at)

    def _past_cache(self, region: memoryview, offset: int, at: int, size: int) -> bool:
        """Whether that was done."""
        before, end = at % PAGE, -(-(at + size) // PAGE) * PAGE
        low, count = offset - before, end - at + before
        if end > self._size or low + count > len(region) or self.cached(at - before, count):
            return False
        assert self._unbuffered is not None
        try:
            found = os.preadv(self._unbuffered, [region[low : low + count]], at - before)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self.direct = False  # some file systems say it only now
            return False
        return found == count

    def announce(self, starts: Sequence[int], size: int) -> None:
        """Tell the system that ``size`` bytes from each of these places on are read soon."""
        for at in starts if hasattr(os, "posix_fadvise") else ():
            os.posix_fadvise(self._file, at, size, os.POSIX_FADV_WILLNEED)

    def cached(self, at: int, size: int) -> bool:
        """Whether all pages from ``at`` on are in the page cache; no, where the system does not say it."""
        begin = at - at % mmap.PAGESIZE
        flags = (ctypes.c_ubyte * -(-(at + size - begin) // mmap.PAGESIZE))()
        if self._mincore is None or self._mincore(self._base + begin, at + size - begin, flags):
            return False
        return not bytes(flags).strip(b"\x01")


def _opened(file: int) -> int | None:
    """The same file once more, for direct reads; it has no name, so that only the system's link to it can be opened."""
    if not hasattr(os, "O_DIRECT"):
        return None
    with suppress(OSError):
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT)
    return None


def _mincore() -> Callable[..., int] | None:
    """The system's answer to what is in the page cache."""
    with suppress(OSError, AttributeError, TypeError):  # the last is what Windows answers to None
        found = ctypes.CDLL(None).mincore
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        return cast("Callable[..., int]", found)
    return None


def _fully(file: int, into: memoryview, at: int) -> None:
    while len(into):
        if not (count := os.preadv(file, [into], at)):
            raise OSError(errno.EIO, "the file of the contributions ended early")
        into, at = into[count:], at + count
