"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Make glibc keep the memory that one block frees for the next one: returning it to the system and getting it
    again costs page faults, a tenth of a round with blocks of 100 MB. Does nothing without ``mallopt``."""
    _set(mapped_from=256 << 20)


def return_large_blocks() -> None:
    """Make glibc return large pieces to the system when they are freed. By default it learns to keep them, and small
    results that are put between them leave gaps in which the next piece does not fit: with rows of 100 MB these add up
    to ten gigabytes. Pieces of 4 MB, which rules use for one chunk, are kept. Does nothing without ``mallopt``."""
    _set(mapped_from=6 << 20)


def _set(mapped_from: int) -> None:
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:  # who started this process has decided: a server of a federation does
        return
    with suppress(OSError, AttributeError, TypeError):  # the last is what Windows answers to None
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, mapped_from)
        libc.mallopt(_M_TRIM_THRESHOLD, 512 << 20)
