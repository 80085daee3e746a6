"""Notes of many runs about their data: worker processes pass them on, and each is logged once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LOG = logging.getLogger("fedalloy")


@dataclass(frozen=True)
class Note:
    """A message that a run in another process logged."""

    level: int
    text: str

    def say(self) -> None:
        """Log it here."""
        _LOG.log(self.level, "%s", self.text)


class _PassedOn(logging.Handler):
    def __init__(self, send: Callable[[Note], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(Note(record.levelno, record.getMessage()))


def pass_on(send: Callable[[Note], None]) -> None:
    """Send what this process logs to the one that started it, and nowhere else."""
    _LOG.handlers[:] = [_PassedOn(send)]
    _LOG.propagate = False


@contextmanager
def each_once() -> Iterator[None]:
    """Log a message once, however many runs have it."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in said
        said.add(text)
        return new

    _LOG.addFilter(is_new)
    try:
        yield
    finally:
        _LOG.removeFilter(is_new)
