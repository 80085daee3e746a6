"""Kernels compiled for the CPU. A wheel for Linux contains them; everywhere else, and in a checkout where they were not
compiled (``python -m fedalloy.core.native.building``), engines use torch instead."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack

from fedalloy.core.native.building import HERE, LIBRARY, fingerprint


def tracing() -> bool:
    """Whether tensors may have no memory here now, even new ones: inside ``vmap``, ``grad`` and what is compiled, and
    where new ones are made on another device than the CPU (``torch.set_default_device``)."""
    if peek_interpreter_stack() is not None or _len_torch_dispatch_stack() > 0:
        return True
    # A default device is a mode of this kind; asking for it takes longer than a draw.
    return _len_torch_function_stack() > 0 and torch.get_default_device().type != "cpu"


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
