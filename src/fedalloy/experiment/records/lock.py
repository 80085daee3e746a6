"""One writer per run folder: a file lock that the operating system releases when its holder dies.

The file names its holder in two lines, the process id and an id that is new for every session. Both are for people and
for stop requests; whether the lock is held is tested on the lock itself, since the operating system may have reused
the process id. The lock itself is ``filelock``'s, on an open file, so that everything here is the same on every
system.

Resuming waits for a process that is still writing the run: a ServerApp, for example, outlives its SuperLink for a while
and continues with its round, when the same command may already have been given to a new SuperLink.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from filelock import lock_descriptor, unlock_descriptor

from fedalloy.core.errors import RunLocked

_held: set[int] = set()
_TRIES, _PAUSE = 20, 0.005
"""Testing whether the lock is held takes it for a moment, so acquiring it is tried several times."""
_LOOKS, _LOOK_PAUSE = 5, 0.001
"""Others may be testing at the same moment, so a lock counts as held only after several attempts."""
_LONGEST = 128
_LOOK = 0.5
"""Seconds between two attempts while waiting for a lock."""
T = TypeVar("T")


def _forget_in_child() -> None:
    """A forked worker must not keep the lock of a parent that was killed."""
    for file in _held:
        os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, which names the holder's process id; refused while another holds it."""
    file = os.open(_locked_file(path), os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(file)
    try:
        _take(file, path)
        path.write_bytes(f"{os.getpid()}\n{secrets.token_hex(8)}\n".encode())
        yield
    finally:
        # Absent in a forked child that leaves this block: the parent still holds the lock.
        if file in _held:
            _held.remove(file)
            os.close(file)


def _take(file: int, path: Path) -> None:
    for _ in range(_TRIES):
        if lock_descriptor(file, blocking=False):
            return
        time.sleep(_PAUSE)
    pid = _lines(path)[0]
    raise RunLocked(
        f"the run folder {path.parent} is being written by {f'process {pid}' if pid else 'another process'}. Wait "
        f"until it ends, ask it to stop (touch {path.parent / 'stop'}) and resume, or choose another folder"
    )


def holder(path: Path) -> int | None:
    """The process that holds a lock file (0 where the file does not name it), or None if it is free.

    Takes the lock for a moment if it is free.
    """
    with _looking(path) as file:
        if file is None or _is_free(file):
            return None
        pid = _lines(path)[0]
        return int(pid) if pid.isdecimal() else 0


def session_id(path: Path) -> str:
    """The id of the session that holds, or last held, a lock file; empty where there was none."""
    return _lines(path)[1]


def in_turn(folder: Path, work: Callable[[], T], say: Callable[[str], None]) -> T:
    """Do what needs the lock of a run folder as soon as it is free."""
    while True:
        wait_for_turn(folder, say)
        # Another waiting process may have taken the lock first.
        with suppress(RunLocked):
            return work()


def wait_for_turn(folder: Path, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep) -> None:
    """Return when no process writes a run folder; calls ``say`` once for every writer that it waits for."""
    known: set[int] = set()
    while (writer := holder(folder / "lock")) is not None:
        if writer not in known:
            known.add(writer)
            say(
                f"the run in {folder} is still being written by process {writer}; waiting until it has ended "
                f"(to end it after its round: touch {folder / 'stop'})"
            )
        sleep(_LOOK)


@contextmanager
def held(folder: Path, lock: Callable[[], AbstractContextManager[T]], say: Callable[[str], None]) -> Iterator[T]:
    """The lock of a run folder, as soon as it is free."""
    with ExitStack() as stack:
        yield in_turn(folder, lambda: stack.enter_context(lock()), say)


@contextmanager
def _looking(path: Path) -> Iterator[int | None]:
    """The file opened for reading, None where it cannot be; closed and unlocked afterwards, also in a forked child."""
    try:
        file = os.open(_locked_file(path), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        yield None
        return
    _held.add(file)
    try:
        yield file
    finally:
        if file in _held:
            _held.remove(file)
            os.close(file)


def _is_free(file: int) -> bool:
    for _ in range(_LOOKS):
        if lock_descriptor(file, blocking=False):
            unlock_descriptor(file)  # also releases copies in forked children
            return True
        time.sleep(_LOOK_PAUSE)
    return False


def _locked_file(path: Path) -> Path:
    """The file that is locked: Windows lets nobody read the locked part of a file, so there it is another one."""
    return path.with_name(f"{path.name}.held") if os.name == "nt" else path


def _lines(path: Path) -> list[str]:
    """The first two lines of a lock file; empty where it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return ["", ""]
    try:
        text = os.read(file, _LONGEST)
    except OSError:
        return ["", ""]
    finally:
        os.close(file)
    return [*text.decode("ascii", "replace").split("\n"), "", ""][:2]
