"""Measures the time of an engine's phases inside ``collecting``; elsewhere a ``phase`` costs almost nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

_collected: ContextVar[dict[str, float] | None] = ContextVar("fedalloy_profile", default=None)


@contextmanager
def collecting() -> Iterator[dict[str, float]]:
    """Yields a dict that collects the seconds of every phase run inside."""
    seconds: dict[str, float] = {}
    token = _collected.set(seconds)
    try:
        yield seconds
    finally:
        _collected.reset(token)


def phase(name: str) -> AbstractContextManager[None]:
    """Count the time inside as ``name``, without that of nested phases, which are counted under their own names. Waits
    for the GPU at the end, so that its work is counted in the phase that started it."""
    seconds = _collected.get()
    return _UNTIMED if seconds is None else _timed(name, seconds)


_UNTIMED = nullcontext()


@contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    begin, counted = time.perf_counter(), sum(seconds.values())
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        inside = sum(seconds.values()) - counted
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin - inside
