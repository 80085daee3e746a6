"""Ctrl-C, SIGTERM and a request file end a run after the round in progress, with a checkpoint.

A second Ctrl-C ends it at once. A signal is delayed, not swallowed: it takes effect when the run has stopped.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fedalloy.experiment.records.lock import session_id
from fedalloy.experiment.records.stop import REQUESTED, is_asked, request_of, withdraw

BY_SIGNAL = "stopped by "
"""How the reason of a run begins that was stopped by a signal; its name follows."""

Caught = list[signal.Signals]
"""The signals that arrived during a run, in order."""


class Terminated(KeyboardInterrupt):
    """SIGTERM during several runs: ends all of them, as Ctrl-C does."""


@contextmanager
def put_off(keep: bool = False) -> Iterator[Caught]:
    """A list that collects the signals which stop the block. Afterwards the last of them takes effect: Ctrl-C raises
    KeyboardInterrupt, SIGTERM ends the process, and a handler that was set for the signal is called. With ``keep``
    Ctrl-C has had its effect when the block has ended: the stop button of a notebook means this run alone."""
    caught: Caught = []
    try:
        yield caught
    finally:
        if caught and not (keep and caught[-1] == signal.SIGINT):
            signal.raise_signal(caught[-1])


def interruption(caught: Caught) -> KeyboardInterrupt:
    """The last signal as an exception, for callers that end several runs."""
    return Terminated() if caught[-1] == signal.SIGTERM else KeyboardInterrupt()


def exit_code(caught: Caught) -> int:
    """The exit code of a command that was stopped: 130 after Ctrl-C or a request, 143 after SIGTERM."""
    return 128 + (caught[-1] if caught else signal.SIGINT)


class StopFlag:
    """True once the run was asked to end; checking for the request file costs a microsecond or two."""

    def __init__(self, folder: Path | None = None) -> None:
        self.reason: str | None = None
        self._request = request_of(folder) if folder else ""
        self._session_id = session_id(folder / "lock") if folder else ""
        if folder:
            withdraw(folder, unless=self._session_id)  # an old request was meant for an earlier session

    def __bool__(self) -> bool:
        if self.reason is None and self._request and is_asked(self._request, self._session_id):
            self.reason = REQUESTED
        return self.reason is not None


@contextmanager
def stop_when_asked(folder: Path | None = None, caught: Caught | None = None) -> Iterator[StopFlag]:
    """A flag set by signals and by a request in the run's folder, which is removed afterwards."""
    with stop_on_signal(folder, caught) as flag:
        try:
            yield flag
        finally:
            if folder:
                withdraw(folder)


@contextmanager
def stop_on_signal(folder: Path | None = None, caught: Caught | None = None) -> Iterator[StopFlag]:
    """A flag set by signals; handlers are restored afterwards, and the signals are in ``caught``. Outside the main
    thread no signal sets it."""
    flag, caught_signals = StopFlag(folder), [] if caught is None else caught
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if flag and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught_signals.append(signal.Signals(number))
        flag.reason = f"{BY_SIGNAL}{signal.Signals(number).name}"

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
