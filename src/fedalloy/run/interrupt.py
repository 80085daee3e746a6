"""Ctrl-C and SIGTERM end a run after the round in progress, with a checkpoint; a second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """Set when somebody asked the run to end."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is not None


@contextmanager
def stop_on_signal() -> Iterator[StopFlag]:
    """A flag that signals raise; handlers are restored afterwards. Outside the main thread it never rises."""
    flag = StopFlag()
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
