"""Quick looks at a round's statistics by compiled functions (whether everything is in order), and weighted sums."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.native import library, tracing


def look_at_sizes(told: Tensor, known: Tensor | None, most: float, whole: bool) -> tuple[bool, bool, bool] | None:
    """Whether all sizes can be used, whether none differs from the known one, and whether all are known; None where
    that cannot be seen quickly."""
    if _LIBRARY is None or tracing() or not _plain(told):
        return None
    if known is not None and not (_plain(known) and len(known) == len(told)):
        return None
    found = _LIBRARY.sizes(told.data_ptr(), None if known is None else known.data_ptr(), len(told), most, whole)
    return bool(found & 1), bool(found & 2), bool(found & 4)


def in_range(values: Sequence[Tensor], ranges: Tensor, whole: Tensor) -> bool:
    """Whether all numbers are in their ranges, the rows of ``ranges``: lowest, highest, least above 0; the first row of
    ``whole`` says which are whole. False where that cannot be seen quickly."""
    if _LIBRARY is None or tracing() or not all(map(_plain, values)) or len({one.shape[0] for one in values}) != 1:
        return False
    low = ranges.data_ptr()
    columns = (c_void_p * len(values))(*(one.data_ptr() for one in values))
    step = 8 * len(values)
    return bool(
        _LIBRARY.in_range(columns, len(values), values[0].shape[0], low, low + step, low + 2 * step, whole.data_ptr())
    )


def combined(weights: Tensor, rows: Tensor) -> Tensor | None:
    """``weights @ rows``, added in float64, for rows in float32; None where no compiled function can do it."""
    able = rows.dtype == torch.float32 and rows.is_cpu and rows.dim() == 2
    able = able and weights.shape == rows.shape[:1] and (rows.stride(1) == 1 or rows.is_contiguous())
    recorded = torch.is_grad_enabled() and (weights.requires_grad or rows.requires_grad)
    if _LIBRARY is None or not able or recorded or tracing():
        return None
    # Not torch.empty, whose dtype is the user's default.
    weights, out = weights.detach().to("cpu", torch.float64).contiguous(), rows.new_empty(rows.shape[1])
    _LIBRARY.combined(weights.data_ptr(), rows.data_ptr(), *rows.shape, rows.stride(0), out.data_ptr())
    return out


def places(ids: Tensor, start: Tensor, size: Tensor) -> tuple[Tensor, Tensor] | None:
    """``start[ids], size[ids]``; None for ids that do not exist, and where no compiled function can do it."""
    given = (ids, start, size)
    whole = (one.dtype == torch.int64 and one.is_cpu and one.dim() == 1 and one.is_contiguous() for one in given)
    if _LIBRARY is None or tracing() or not all(whole) or len(start) != len(size):
        return None
    starts, sizes = torch.empty_like(ids), torch.empty_like(ids)
    wrong = _LIBRARY.clients_of(
        ids.data_ptr(), ids.shape[0], size.shape[0], start.data_ptr(), size.data_ptr(), starts.data_ptr(),
        sizes.data_ptr(),
    )  # fmt: skip
    return None if wrong else (starts, sizes)


def _plain(values: Tensor) -> bool:
    return values.dtype == torch.float64 and values.dim() == 1 and values.is_cpu and values.is_contiguous()


def _prepared() -> Any:
    found = library()
    if found is not None:
        found.sizes.argtypes = (c_void_p, c_void_p, c_int64, c_double, c_int)
        found.in_range.argtypes = (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)
        found.combined.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)
        found.combined.restype = None
        found.clients_of.argtypes = (c_void_p, c_int64, c_int64, *[c_void_p] * 4)
    return found


_LIBRARY = _prepared()
