"""Supervision of the process that Flower starts and forgets: ``flower-superexec``, without which nothing is executed.

Flower's server and Flower's node each start one and never look at it again. Here it announces itself: it holds a lock
as long as it lives, which the operating system releases however it ends, and stores its command line. Whoever looks
after the program finds out that it died, and starts it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedalloy.core.errors import FedalloyError, RunLocked
from fedalloy.experiment.records import atomic
from fedalloy.experiment.records.lock import holder, locked
from fedalloy.flower.prefork import SUPEREXEC, TASKS, command_line

ANNOUNCE = "FEDALLOY_ANNOUNCE"
"""The environment variable with the folder in which a helper announces itself."""
SERVICE = "FEDALLOY_SERVICE"
"""The environment variable with the number of the service that a program must not outlive."""
_PDEATHSIG = 1
MOST, WITHIN = 5, 600.0
"""A program that ends more often than this, in so many seconds, is not started again."""
_TRIES = 50
"""Attempts of a tenth of a second to take the lock of a helper."""
_GRACE = 5.0
_HELD = contextlib.ExitStack()
Say = Callable[[str], None]


class Lost(FedalloyError):
    """A process of a server or a node ended and cannot be replaced."""


def of_this_service() -> dict[str, str]:
    """The environment variables of the programs of this service."""
    return {SERVICE: str(os.getpid())}


def end_with_parent() -> None:
    """Let this process be asked to end when the service that started it dies, however it does: it would keep its ports,
    and nobody would look after it. On Linux only."""
    parent = os.environ.pop(SERVICE, "")
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it was quicker
        os.kill(os.getpid(), signal.SIGTERM)


def announce(program: str, arguments: Sequence[str]) -> None:
    """Let this process be known as a helper until it ends. Without a folder to announce it in, nothing happens."""
    folder = os.environ.get(ANNOUNCE)
    if program != SUPEREXEC or not folder:
        return
    place = Path(folder)
    # Supervision must not prevent what it is for. A predecessor may take a moment to end.
    for _ in range(_TRIES):
        with contextlib.suppress(OSError, RunLocked):
            place.mkdir(parents=True, exist_ok=True)
            _HELD.enter_context(locked(place / f"{program}.lock"))
            told = {"arguments": list(arguments[1:]), "environment": {TASKS: os.environ.get(TASKS, "")}}
            atomic.write_text(place / f"{program}.json", json.dumps(told) + "\n")
            break


@dataclass
class Deaths:
    """How often a program ended lately, and in ``total``."""

    most: int = MOST
    within: float = WITHIN
    clock: Callable[[], float] = time.monotonic
    total: int = 0
    _times: deque[float] = field(default_factory=deque)

    def note(self, what: str) -> None:
        """Count one; :class:`Lost` if there were too many."""
        now = self.clock()
        self.total += 1
        self._times.append(now)
        while now - self._times[0] > self.within:
            self._times.popleft()
        if len(self._times) > self.most:
            raise Lost(f"{what} ended {len(self._times)} times within {self.within:g} s and is not started again")


@dataclass
class HelperWatch:
    """Looks after the helper of a program, which announces itself in ``folder``, and starts it again when it died. What
    that writes is appended to ``log``, by default written to ``out``, or else to this terminal."""

    folder: Path
    owner: str
    environment: Mapping[str, str]
    say: Say
    program: str = SUPEREXEC
    log: Path | None = None
    deaths: Deaths = field(default_factory=Deaths)
    out: int | None = None
    _command: list[str] = field(default_factory=list, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._file.unlink(missing_ok=True)

    @staticmethod
    def variables(folder: Path) -> dict[str, str]:
        """The environment variables by which a helper finds the folder."""
        return {ANNOUNCE: str(folder)}

    def look(self) -> None:
        """Start the helper again if it died; :class:`Lost` if that is no use. One that has not announced itself yet is
        not missed, unless it was started here and has ended."""
        told = self._told()
        ended = self._process is not None and self._process.poll() is not None
        if holder(self.folder / f"{self.program}.lock") is None and (told or ended):
            self._replace(told)

    def stop(self) -> None:
        """End what was started here; a helper ends by itself soon after the program that it belongs to."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
            self._process.kill()
            self._process.wait()
            self._process = None

    def _replace(self, told: dict[str, Any] | None) -> None:
        what = f"the process {self.program} of {self.owner}"
        self.deaths.note(what)
        self.say(f"{what} ended; it is started again")
        self.stop()
        self._file.unlink(missing_ok=True)
        if told:
            self._command = [*command_line(self.program), *told["arguments"]]
            self.environment = {**self.environment, **told["environment"]}
        with self.log.open("ab") if self.log else contextlib.nullcontext(self.out) as out:
            self._process = subprocess.Popen(
                self._command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.program}.json"

    def _told(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found
