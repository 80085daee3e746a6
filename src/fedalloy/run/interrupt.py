"""Ctrl-C, SIGTERM and a request file end a run after the round in progress, with a checkpoint.

A second Ctrl-C ends it at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fedalloy.records.lock import sitting
from fedalloy.records.stop import REQUESTED, is_asked, withdraw


class StopFlag:
    """Set when somebody asked the run to end; looking for the request file costs a microsecond or two."""

    def __init__(self, folder: Path | None = None) -> None:
        self.reason: str | None = None
        self._folder = folder
        self._sitting = sitting(folder / "lock") if folder else ""
        if folder:
            withdraw(folder, unless=self._sitting)  # what lies there was meant for an earlier sitting

    def __bool__(self) -> bool:
        if self.reason is None and self._folder and is_asked(self._folder, self._sitting):
            self.reason = REQUESTED
        return self.reason is not None


@contextmanager
def stop_when_asked(folder: Path | None = None) -> Iterator[StopFlag]:
    """A flag that signals raise, and a request in the run's folder; both are forgotten afterwards."""
    with stop_on_signal(folder) as flag:
        try:
            yield flag
        finally:
            if folder:
                withdraw(folder)


@contextmanager
def stop_on_signal(folder: Path | None = None) -> Iterator[StopFlag]:
    """A flag that signals raise; handlers are restored afterwards. Outside the main thread no signal raises it."""
    flag = StopFlag(folder)
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if flag and number == signal.SIGINT:
            raise KeyboardInterrupt
        flag.reason = f"stopped by {signal.Signals(number).name}"

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
