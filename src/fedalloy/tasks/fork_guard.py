"""No process is forked in the middle of what a thread of ours does: a lock that it holds would stay locked in the
child for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ForkGuard:
    """What a thread does ``with guard.working()`` is finished before a process forks."""

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._close, after_in_parent=self._open, after_in_child=self._reset)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Wait for forks that have begun, and let others wait; a thread may fork in the middle of its own work."""
        with self._entrance:  # held by a fork that waits, so that work after work cannot keep it waiting
            self._work.acquire()
        try:
            yield
        finally:
            self._work.release()

    def _close(self) -> None:
        self._entrance.acquire()
        self._work.acquire()

    def _open(self) -> None:
        self._work.release()
        self._entrance.release()

    def _reset(self) -> None:
        self._entrance, self._work = threading.Lock(), threading.RLock()


GUARD = ForkGuard()
