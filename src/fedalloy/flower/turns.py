"""One after another: what takes a run up again waits for what still carries it out.

A ServerApp outlives its SuperLink for a while, and goes on with its round. Whoever gives the same command to a new
SuperLink meanwhile need not know that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from fedalloy.core.errors import RunLocked
from fedalloy.experiment.records.lock import holder

_LOOK = 0.5
T = TypeVar("T")


def in_turn(folder: Path, work: Callable[[], T], say: Callable[[str], None]) -> T:
    """Do what needs the lock of a run folder as soon as nobody else has it."""
    while True:
        wait_for_turn(folder, say)
        # Somebody else who was waiting may have been quicker.
        with contextlib.suppress(RunLocked):
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


@contextlib.contextmanager
def held(
    folder: Path, lock: Callable[[], contextlib.AbstractContextManager[T]], say: Callable[[str], None]
) -> Iterator[T]:
    """The lock of a run folder, as soon as nobody else has it."""
    with contextlib.ExitStack() as stack:
        yield in_turn(folder, lambda: stack.enter_context(lock()), say)
