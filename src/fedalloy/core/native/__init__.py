"""Kernels compiled for the CPU. A wheel for Linux contains them; everywhere else, and in a checkout where they were not
compiled (``python -m fedalloy.core.native.building``), engines use torch instead."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack

from fedalloy.core.native.building import HERE, LIBRARY, fingerprint


def tracing() -> bool:
    """Whether tensors may have no memory now, even new ones: inside ``vmap``, ``grad`` and what is compiled."""
    return peek_interpreter_stack() is not None or _len_torch_dispatch_stack() > 0


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
