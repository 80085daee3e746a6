"""Ctrl-C, SIGTERM and a request file end a run after the round in progress, with a checkpoint.

A second Ctrl-C ends it at once. A signal is put off, not taken away: when the run has stopped, its own effect follows.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fedalloy.experiment.records.lock import session_id
from fedalloy.experiment.records.stop import REQUESTED, is_asked, withdraw

Caught = list[signal.Signals]
"""The signals that arrived while a run was going, in their order."""


class Terminated(KeyboardInterrupt):
    """SIGTERM where somebody waits for more than one run: ends everything, as Ctrl-C does."""


@contextmanager
def put_off() -> Iterator[Caught]:
    """A list for the signals that stop what happens inside. Afterwards the last of them has its own effect: Ctrl-C
    raises KeyboardInterrupt, SIGTERM ends the process, and whoever handles a signal is told of it."""
    caught: Caught = []
    try:
        yield caught
    finally:
        if caught:
            signal.raise_signal(caught[-1])


def interruption(caught: Caught) -> KeyboardInterrupt:
    """The last signal as an exception, for those who end several runs."""
    return Terminated() if caught[-1] == signal.SIGTERM else KeyboardInterrupt()


def exit_code(caught: Caught) -> int:
    """What a command that was stopped ends with: 130 after Ctrl-C or a request, 143 after SIGTERM."""
    return 128 + (caught[-1] if caught else signal.SIGINT)


class StopFlag:
    """Set when somebody asked the run to end; looking for the request file costs a microsecond or two."""

    def __init__(self, folder: Path | None = None) -> None:
        self.reason: str | None = None
        self._folder = folder
        self._session_id = session_id(folder / "lock") if folder else ""
        if folder:
            withdraw(folder, unless=self._session_id)  # what lies there was meant for an earlier session

    def __bool__(self) -> bool:
        if self.reason is None and self._folder and is_asked(self._folder, self._session_id):
            self.reason = REQUESTED
        return self.reason is not None


@contextmanager
def stop_when_asked(folder: Path | None = None, caught: Caught | None = None) -> Iterator[StopFlag]:
    """A flag that signals raise, and a request in the run's folder, which is forgotten afterwards."""
    with stop_on_signal(folder, caught) as flag:
        try:
            yield flag
        finally:
            if folder:
                withdraw(folder)


@contextmanager
def stop_on_signal(folder: Path | None = None, caught: Caught | None = None) -> Iterator[StopFlag]:
    """A flag that signals raise; handlers are restored afterwards, and what came is in ``caught``. Outside the main
    thread no signal raises it."""
    flag, caught_signals = StopFlag(folder), [] if caught is None else caught
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if flag and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught_signals.append(signal.Signals(number))
        flag.reason = f"stopped by {signal.Signals(number).name}"

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
