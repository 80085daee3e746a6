"""Stop requests from other processes: a file in the run folder, which the driver checks for after every round.

A file and not a signal: it reaches a run on every engine and in any thread (signals reach the main thread only),
and it cannot hit another process that has got the same process id. The file names the session it is meant for, so that
outdated requests are recognised without comparing times; an empty one, made by hand, is meant for any session.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records.lock import holder, session_id

REQUESTED = "stopped on request"
"""The reason in the status of a run that was stopped."""
_FILE = "stop"
_LONGEST = 128
_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""No symlink is followed and no pipe waited for, where the system can say so."""


def ask_to_stop(folder: Path) -> None:
    """Ask the run in ``folder`` to end after the round in progress, with a checkpoint."""
    if holder(folder / "lock") is None:
        raise CheckpointError(f"nothing is running in {folder.name}, so there is nothing to stop")
    # A symlink is not followed: nothing outside the run folder is written.
    how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _AS_IT_IS
    file = os.open(folder / _FILE, how, 0o666)
    os.write(file, f"{session_id(folder / 'lock')}\n".encode())
    os.close(file)


def request_of(folder: Path) -> str:
    """The file of a request, for :func:`is_asked`."""
    return str(folder / _FILE)


def is_asked(request: str, of: str) -> bool:
    """Whether there is a request for the session ``of``, or for any session."""
    try:
        file = os.open(request, os.O_RDONLY | _AS_IT_IS)
    except OSError:
        return False
    try:
        return os.read(file, _LONGEST).decode("ascii", "replace").strip() in ("", of)
    except OSError:
        return False
    finally:
        os.close(file)


def withdraw(folder: Path, unless: str | None = None) -> None:
    """Delete a request, except one for the session ``unless``."""
    file = folder / _FILE
    if unless is None or file.is_symlink() or _named(file) != unless:
        file.unlink(missing_ok=True)


def _named(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")[:_LONGEST].strip()
    except OSError:
        return ""
