"""The precision in which sources of data read numbers: that of the task they are read for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_read_as: ContextVar[torch.dtype] = ContextVar("read_as", default=torch.float32)


@contextmanager
def reading_as(dtype: torch.dtype | None) -> Iterator[None]:
    """Read numbers as float64 for a task in float64, in which rounding them to float32 first would be lost digits."""
    before = _read_as.set(torch.float64 if dtype == torch.float64 else torch.float32)
    try:
        yield
    finally:
        _read_as.reset(before)


def read_as() -> torch.dtype:
    """The type of features and quantities that are being read.

    >>> with reading_as(torch.float64):
    ...     read_as()
    torch.float64
    """
    return _read_as.get()
