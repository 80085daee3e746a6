"""Keyed draws of a batch of keys in one compiled call each; :mod:`fedalloy.core.keys` uses them where there are any."""

from __future__ import annotations

from ctypes import byref, c_int64, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.native import library

SHORT = 256
"""Larger choices are left to the caller."""


def folded(keys: Tensor, label: int) -> Tensor:
    """The keys below a batch of keys, for one label of 64 bits."""
    out = torch.empty_like(keys, memory_format=torch.contiguous_format)
    _LIBRARY.folded(keys.data_ptr(), keys.numel(), label, out.data_ptr())
    return out


def keyed(keys: int | Tensor, labels: Tensor) -> Tensor:
    """The keys below a key or a batch of keys, one for every integer label."""
    if isinstance(keys, int):
        out = torch.empty_like(labels)
        _LIBRARY.keyed(byref(c_uint64(keys)), 1, labels.data_ptr(), labels.numel(), out.data_ptr())
        return out
    out = torch.empty((*keys.shape, *labels.shape), dtype=torch.int64)
    _LIBRARY.keyed(keys.data_ptr(), keys.numel(), labels.data_ptr(), labels.numel(), out.data_ptr())
    return out


def drawn(keys: int | Tensor, count: int) -> Tensor:
    """The first draws of every key."""
    if isinstance(keys, int):
        out = torch.empty(count, dtype=torch.int64)
        _LIBRARY.drawn(byref(c_uint64(keys)), 1, count, out.data_ptr())
        return out
    out = torch.empty((*keys.shape, count), dtype=torch.int64)
    _LIBRARY.drawn(keys.data_ptr(), keys.numel(), count, out.data_ptr())
    return out


def ordered(keys: Tensor, length: int, valid: Tensor | None) -> Tensor | None:
    """Every key's permutation; None if there is no memory for it."""
    out = torch.empty((*keys.shape, length), dtype=torch.int64)
    counts = None if valid is None else valid.to(torch.int64).expand(keys.shape).contiguous()
    where = None if counts is None else counts.data_ptr()
    failed = _LIBRARY.ordered(keys.data_ptr(), keys.numel(), length, where, out.data_ptr())
    return None if failed else out


def chosen(key: int, population: int, size: int) -> Tensor | None:
    """Distinct members of a population; None if there are too many, or not so many."""
    if not 0 <= size <= min(SHORT, population):
        return None
    out = torch.empty(size, dtype=torch.int64)
    _LIBRARY.chosen(key, population, size, out.data_ptr())
    return out


def _prepared() -> Any:
    found = library()
    if found is not None:
        found.folded.argtypes = (c_void_p, c_int64, c_uint64, c_void_p)
        found.keyed.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_void_p)
        found.drawn.argtypes = (c_void_p, c_int64, c_int64, c_void_p)
        found.ordered.argtypes = (c_void_p, c_int64, c_int64, c_void_p, c_void_p)
        found.chosen.argtypes = (c_uint64, c_int64, c_int64, c_void_p)
        found.folded.restype = found.keyed.restype = found.drawn.restype = None
    return found


_LIBRARY = _prepared()
COMPILED = _LIBRARY is not None
