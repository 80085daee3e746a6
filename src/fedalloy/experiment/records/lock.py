"""One writer per run folder: a file lock that the operating system lets go of when its holder dies.

The file says who holds it in two lines, the process id and a word that is new for every session. Both are for people
and for requests; whether somebody holds the lock is asked of the lock itself, since a process id may have been given
to another process meanwhile.

What takes a run up again waits for whatever still carries it out: a ServerApp, say, outlives its SuperLink for a
while and continues with its round, and whoever gives the same command to a new SuperLink need not know that.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from fedalloy.core.errors import RunLocked

_held: set[int] = set()
_TRIES, _PAUSE = 20, 0.005
"""Somebody who looks whether the lock is held has it for a moment: whoever wants it tries a few times."""
_LONGEST = 128
_LOOK = 0.5
"""Seconds between two looks at a lock that is waited for."""
T = TypeVar("T")


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
        os.pwrite(file, f"{os.getpid()}\n{secrets.token_hex(8)}\n".encode(), 0)
        yield
    finally:
        # Absent in a forked child that walks out of this block: the parent still holds the lock.
        if file in _held:
            _held.remove(file)
            os.close(file)


def _take(file: int, path: Path) -> None:
    for _ in range(_TRIES):
        if _try(file, fcntl.LOCK_EX):
            return
        time.sleep(_PAUSE)
    pid = _lines(file)[0]
    raise RunLocked(
        f"the run folder {path.parent} is being written by {f'process {pid}' if pid else 'another process'}. Wait "
        f"until it ends, ask it to stop (touch {path.parent / 'stop'}) and resume, or choose another folder"
    )


def holder(path: Path) -> int | None:
    """The process that holds a lock file (0 where the file does not name it), or None where nobody does.

    The lock itself is asked, by taking it together with all others who look, for a moment.
    """
    with _looking(path) as file:
        if file is None or _try(file, fcntl.LOCK_SH):
            return None
        pid = _lines(file)[0]
        return int(pid) if pid.isdecimal() else 0


def session_id(path: Path) -> str:
    """The word of the session that holds, or last held, a lock file; empty where there was none."""
    with _looking(path) as file:
        return "" if file is None else _lines(file)[1]


def in_turn(folder: Path, work: Callable[[], T], say: Callable[[str], None]) -> T:
    """Do what needs the lock of a run folder as soon as nobody else has it."""
    while True:
        wait_for_turn(folder, say)
        # Somebody else who was waiting may have been quicker.
        with suppress(RunLocked):
            return work()


def wait_for_turn(folder: Path, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep) -> None:
    """Return when nobody writes a run folder; says once of every writer that it is waited for."""
    known: set[int] = set()
    while (writer := holder(folder / "lock")) is not None:
        if writer not in known:
            known.add(writer)
            say(
                f"the run in {folder} is still being carried out by process {writer}; going on when that has ended "
                f"(to end it after its round: touch {folder / 'stop'})"
            )
        sleep(_LOOK)


@contextmanager
def held(folder: Path, lock: Callable[[], AbstractContextManager[T]], say: Callable[[str], None]) -> Iterator[T]:
    """The lock of a run folder, as soon as nobody else has it."""
    with ExitStack() as stack:
        yield in_turn(folder, lambda: stack.enter_context(lock()), say)


@contextmanager
def _looking(path: Path) -> Iterator[int | None]:
    """The file opened for reading, None where it cannot be; nothing of the look is left, nor in a forked child."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    _held.add(file)
    try:
        yield file
    finally:
        if file in _held:
            _held.remove(file)
            fcntl.flock(file, fcntl.LOCK_UN)  # also for copies of it that a fork has made meanwhile
            os.close(file)


def _try(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lines(file: int) -> list[str]:
    """The first two lines of a lock file."""
    return [*os.pread(file, _LONGEST, 0).decode("ascii", "replace").split("\n"), "", ""][:2]
