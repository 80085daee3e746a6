"""What a run works with: its engine, its threads, and a collector of where the time goes."""

from __future__ import annotations

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
    """Let an engine's processes go at the end of a run."""
    try:
        yield
    finally:
        engine.close()


def profiled(config: RunConfig) -> AbstractContextManager[dict[str, float] | None]:
    """A place for the seconds of every phase, where they are wanted."""
    return collecting() if config.profile else nullcontext()


class Threads:
    """Run with the stated number of torch threads, then go back."""

    def __init__(self, config: RunConfig) -> None:
        self._wanted, self._before = config.threads, torch.get_num_threads()

    def __enter__(self) -> None:
        if self._wanted:
            torch.set_num_threads(self._wanted)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)
