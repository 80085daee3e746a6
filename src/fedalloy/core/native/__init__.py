"""Kernels compiled for the CPU. A wheel for Linux contains them; everywhere else, and in a checkout where they were not
compiled (``python -m fedalloy.core.native.building``), engines use torch instead."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from fedalloy.core.native.building import HERE, LIBRARY, fingerprint


@lru_cache(1)
def library() -> ctypes.CDLL | None:
    """The kernels; None if there are none for these sources and this machine."""
    path = HERE / LIBRARY
    if not path.exists():
        return None
    try:
        found = ctypes.CDLL(str(path))
        found.sources.restype = ctypes.c_char_p
        return found if found.sources() == fingerprint().encode("ascii") else None
    except (OSError, AttributeError):  # made for another system, or something else entirely
        return None
