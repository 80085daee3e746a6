"""Requests to end a service: SIGTERM, as systemd sends it, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class EndRequest:
    """In a ``with`` block: whether this process was asked to end. The service then ends its own processes in order."""

    number: int = 0
    _came: threading.Event = field(default_factory=threading.Event)
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> EndRequest:
        self._before = {number: signal.signal(number, self._note) for number in _NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self._came.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until the request comes; whether it came."""
        return self._came.wait(seconds)

    @property
    def code(self) -> int:
        """The exit code after a request: 0, or 130 after Ctrl-C."""
        return 130 if self.number == signal.SIGINT else 0

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self._came.set()
