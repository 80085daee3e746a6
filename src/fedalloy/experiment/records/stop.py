"""Asking a run to end from outside: a file in its folder, which the driver looks for after every round.

A file and not a signal: it reaches a run on every engine and in any thread (signals reach the main thread alone),
and it cannot hit another process that was given the same number. The file names the session it is meant for, so that
no clock decides whether a request is still of use; an empty one, made by hand, is meant for whoever is running.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records.lock import holder, session_id

REQUESTED = "stopped on request"
"""The reason that a run's status gives afterwards."""
_FILE = "stop"
_LONGEST = 128


def ask_to_stop(folder: Path) -> None:
    """Ask the run that is going in ``folder`` to end after the round in progress, with a checkpoint."""
    if holder(folder / "lock") is None:
        raise CheckpointError(f"nothing is running in {folder.name}, so there is nothing to stop")
    # A link in its place is not followed: nothing outside the run is touched.
    how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(folder / _FILE, how, 0o666)
    os.write(file, f"{session_id(folder / 'lock')}\n".encode())
    os.close(file)


def is_asked(folder: Path, of: str) -> bool:
    """Whether somebody asked the session ``of``, or whoever is running."""
    try:
        file = os.open(folder / _FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.read(file, _LONGEST).decode("ascii", "replace").strip() in ("", of)
    except OSError:
        return False
    finally:
        os.close(file)


def withdraw(folder: Path, unless: str | None = None) -> None:
    """Forget a request; ``unless`` keeps one that names this session."""
    file = folder / _FILE
    if unless is None or file.is_symlink() or _named(file) != unless:
        file.unlink(missing_ok=True)


def _named(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")[:_LONGEST].strip()
    except OSError:
        return ""
