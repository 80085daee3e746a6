"""What a service writes: lines for people, or one JSON object per line for a log collector.

As JSON, the output of the processes that a service starts passes through it, so that every line has the time, the
process it comes from and a level.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import IO, Literal

LogFormat = Literal["text", "json"]
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"^\s*(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*:\s*")
Say = Callable[[str], None]


@dataclass
class ServiceLog:
    """The log of a service as text: processes write to the terminal themselves."""

    echo: Say = print

    def say(self, text: str) -> None:
        """A line of the service itself."""
        self.echo(text)

    def stream(self, process: str) -> int | None:
        """Where a process writes to; None: where this one does."""
        return None

    def close(self) -> None:
        """End it."""


@dataclass
class JsonLog(ServiceLog):
    """The log of a service as JSON, one object per line: ``time``, ``level``, ``process`` and ``message``."""

    out: IO[str] = field(default_factory=lambda: sys.stdout)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pipes: dict[str, int] = field(default_factory=dict)
    _readers: list[threading.Thread] = field(default_factory=list)

    def say(self, text: str) -> None:
        """A line of the service itself."""
        self._write("fedalloy", text)

    def stream(self, process: str) -> int:
        """A pipe for what a process writes; the same one when it is started again."""
        if process not in self._pipes:
            reading, self._pipes[process] = os.pipe()
            reader = threading.Thread(target=self._read, args=(process, reading), daemon=True)
            self._readers.append(reader)
            reader.start()
        return self._pipes[process]

    def close(self) -> None:
        """Wait a moment for what the processes have still written: one that outlives the service holds its pipe."""
        for pipe in self._pipes.values():
            os.close(pipe)
        self._pipes.clear()
        for reader in self._readers:
            reader.join(1.0)

    def _read(self, process: str, reading: int) -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._write(process, line)

    def _write(self, process: str, line: str) -> None:
        text = _COLOURS.sub("", line).rstrip()
        if not text:
            return
        found = _LEVEL.match(text)
        row = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": found[1].lower() if found else "info",
            "process": process,
            "message": text[found.end() :] if found else text,
        }
        with self._lock, contextlib.suppress(ValueError):  # ValueError: closed, as this process ends
            self.out.write(json.dumps(row) + "\n")
            self.out.flush()


def log_as(form: LogFormat, echo: Say = print) -> ServiceLog:
    """The log of a service in a form."""
    return JsonLog(echo) if form == "json" else ServiceLog(echo)
