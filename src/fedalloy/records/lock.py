"""One writer per run folder: a file lock that the operating system lets go of when its holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedalloy.core.errors import RunLocked

_held: set[int] = set()


def _forget_in_child() -> None:
    """A forked worker must not keep the lock of a parent that was killed."""
    for file in _held:
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, which names the holder's process id; refused while another holds it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(file)
    try:
        _take(file, path)
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # Absent in a forked child that walks out of this block: the parent still holds the lock.
        if file in _held:
            _held.remove(file)
            os.close(file)


def _take(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(file, 32, 0).decode("ascii", "replace").strip()
        who = f"process {pid}" if pid else "another process"
        raise RunLocked(
            f"the run folder {path.parent} is being written by {who}. Wait until it ends, stop it"
            f"{f' (kill {pid})' if pid else ''} and resume, or choose another folder"
        ) from None


def holder(path: Path) -> int | None:
    """The process that holds a lock file, or None; only looks, so that it never gets in the way of a run that starts.

    The file keeps the number of its last holder, so the process must also be there.
    """
    try:
        pid = int(path.read_text(encoding="ascii"))
        if pid <= 0:  # would mean a whole group of processes
            return None
        os.kill(pid, 0)
    except PermissionError:  # it is there, and somebody else's
        return pid
    except (OSError, ValueError, OverflowError):
        return None
    return pid
