"""Weights on elements by compiled functions: a pass over memory where torch takes several, by one thread, so that
another one may read from the disk meanwhile. Each returns None where no compiled function can do it."""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.native import library, tracing


def between(values: Tensor, low: Tensor, high: Tensor, kept: int) -> tuple[Tensor, Tensor] | None:
    """Weight ``1 / kept`` for the values of each column from ``low`` to ``high``, and how many these are."""
    if _LIBRARY is None or tracing() or not all(map(_able, (values, low[None], high[None]))):
        return None
    weights = torch.empty(values.shape, dtype=values.dtype)
    inside = torch.empty(values.shape[1], dtype=torch.int32)
    _LIBRARY.between(
        values.data_ptr(), *values.shape, values.stride(0), low.data_ptr(), high.data_ptr(), 1.0 / kept,
        weights.data_ptr(), inside.data_ptr(),
    )  # fmt: skip
    return weights, inside


def weighed(values: Tensor, weights: Tensor) -> Tensor | None:
    """``(values * weights).sum(0)``, added in float64."""
    if _LIBRARY is None or tracing() or values.shape != weights.shape or not (_able(values) and _able(weights)):
        return None
    out = values.new_empty(values.shape[1])  # not torch.empty, whose dtype is the user's default
    strides = values.stride(0), weights.stride(0)
    _LIBRARY.weighed(values.data_ptr(), weights.data_ptr(), *values.shape, *strides, out.data_ptr())
    return out


def row_sums(rows: Tensor) -> Tensor | None:
    """``rows.sum(1)``, added in float64."""
    if _LIBRARY is None or tracing() or not _able(rows):
        return None
    totals = torch.empty(len(rows), dtype=torch.float64)
    _LIBRARY.row_sums(rows.data_ptr(), *rows.shape, rows.stride(0), totals.data_ptr())
    return totals


def _able(rows: Tensor) -> bool:
    """Whether a table is in memory as the functions expect it, and nobody asks for its gradient."""
    plain = rows.dtype == torch.float32 and rows.is_cpu and rows.dim() == 2 and rows.stride(1) == 1
    return plain and not (rows.requires_grad and torch.is_grad_enabled())


def _prepared() -> Any:
    found = library()
    if found is not None:
        where, number = c_void_p, c_int64
        found.between.argtypes = (where, number, number, number, where, where, c_float, where, where)
        found.weighed.argtypes = (where, where, number, number, number, number, where)
        found.row_sums.argtypes = (where, number, number, number, where)
        found.between.restype = found.weighed.restype = found.row_sums.restype = None
    return found


_LIBRARY = _prepared()
