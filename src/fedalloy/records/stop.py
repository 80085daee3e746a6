"""Asking a run to end from outside: a file in its folder, which the driver looks for after every round.

A file and not a signal: it reaches a run on every engine and in any thread (signals reach the main thread alone),
and it cannot hit another process that was given the same number.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedalloy.core.errors import CheckpointError
from fedalloy.records.lock import holder

REQUESTED = "stopped on request"
"""The reason that a run's status gives afterwards."""
_FILE = "stop"


def ask_to_stop(folder: Path) -> None:
    """Ask the run that is going in ``folder`` to end after the round in progress, with a checkpoint."""
    if holder(folder / "lock") is None:
        raise CheckpointError(f"nothing is running in {folder.name}, so there is nothing to stop")
    # A link in its place is not followed: nothing outside the run is touched.
    file = os.open(folder / _FILE, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    os.utime(file)
    os.close(file)


def asked_since(folder: Path, moment: int) -> bool:
    """Whether somebody asked at or after a moment, in nanoseconds of the file system's clock."""
    try:
        return (folder / _FILE).stat().st_mtime_ns >= moment
    except OSError:
        return False


def withdraw(folder: Path) -> None:
    """Forget a request."""
    (folder / _FILE).unlink(missing_ok=True)
