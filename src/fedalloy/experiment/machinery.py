"""A run's engine, its threads, the time of every phase, and its peak memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from fedalloy.core.arguments import build
from fedalloy.core.protocols import Engine
from fedalloy.core.registry import find
from fedalloy.engines.profile import collecting
from fedalloy.experiment.config import RunConfig


def make_engine(config: RunConfig) -> Engine:
    """The engine a configuration names."""
    if not isinstance(config.engine, str):
        return config.engine
    engine: Engine = build(find("engine", config.engine), config.engine_options, f"engine '{config.engine}'")
    if config.threads:
        engine.limit_threads(config.threads)
    return engine


@contextmanager
def closing(engine: Engine) -> Iterator[None]:
    """End an engine's processes at the end of a run."""
    try:
        yield
    finally:
        engine.close()


def profiled(config: RunConfig) -> AbstractContextManager[dict[str, float] | None]:
    """Collects the seconds of every phase, if profiling is on."""
    return collecting() if config.profile else nullcontext()


class Threads:
    """Run with the given number of torch threads, then restore the old number."""

    def __init__(self, config: RunConfig) -> None:
        self._wanted, self._before = config.threads, torch.get_num_threads()

    def __enter__(self) -> None:
        if self._wanted:
            torch.set_num_threads(self._wanted)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


def peak_memory() -> dict[str, int]:
    """The largest resident size of this process in bytes and, once a GPU is in use, the most it ever held.

    >>> peak_memory().get("memory", 1) > 0
    True
    """
    found = {} if (size := _resident()) is None else {"memory": size}
    if torch.cuda.is_initialized():
        found["device_memory"] = int(torch.cuda.max_memory_allocated())
    return found


def _resident() -> int | None:
    """None where the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
