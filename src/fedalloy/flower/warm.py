"""Flower's programs as fedalloy starts them: loaded once instead of for every message, and quick to notice work.

Flower starts a Python process for every message and every run, and each of them loads Flower anew, which takes longer
than most orders do. Here the program that starts them keeps a *template*: a process in which everything is loaded
already, of which each of those processes is a fork. A node that has just answered looks for its next order after a
fraction of a second, and less and less often while there is none, instead of every three seconds.

Nothing else changes, and nothing depends on it: where Flower is of a version that was not tested or is built
differently, or the template is gone, or what it has loaded was replaced on disk, processes are started as Flower does
it. What a node runs is watched over in every case (:mod:`fedalloy.flower.guard`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

from fedalloy.core.errors import SpecError
from fedalloy.flower import guard
from fedalloy.flower.versions import is_tested

TASKS = "FEDALLOY_TASKS"
"""Set by a server or a node for the program that starts its processes: which of them to keep ready."""
_STARTS = {"flower-superlink": "flwr-serverapp", "flower-supernode": "flwr-clientapp"}
_WANTS = {"flwr-serverapp": ("fedalloy.flower.server",)}
"""The modules that a process will want besides its own."""
_WORKING = 0.1
"""Seconds between two looks at what is being done just now."""
_SHARE = 0.1
"""Of the time since there was something to do: how long to sleep before looking again."""


def command(program: str) -> list[str]:
    """The command line that runs one of Flower's programs in this way; its arguments follow."""
    return [sys.executable, "-P", "-m", "fedalloy.flower.warm", program]


def write_stand_in(folder: Path) -> Path:
    """A folder for the front of ``PATH`` in which Flower finds our way of starting processes instead of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "flower-superexec"
    text = f'#!/bin/sh\nexec {shlex.join(command(file.name))} "$@"\n'
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_text(text, encoding="utf-8")
        draft.chmod(0o755)
        draft.replace(file)
    return folder


def main(arguments: list[str]) -> None:
    """Run the program that is named first."""
    sys.argv, allowed = guard.take_allowed(arguments)
    program = arguments[0]
    if program in _STARTS:
        os.environ[TASKS] = _STARTS[program]
    run = entry(program)
    if program == "flower-supernode":
        try:
            guard.install(allowed)
        except SpecError as error:
            sys.exit(str(error))
    sys.exit((_quickened(program, run) if is_tested() else run)())


def _quickened(program: str, run: Callable[[], Any]) -> Callable[[], Any]:
    """What a program is to do, with our ways of starting processes and of looking for work."""
    _ask_again_sooner()
    if program == "flower-supernode":
        _look_sooner("flwr.supernode.start_client_internal", Gaps(0.3, 3.0, at_work=0.5))
        run = _forking(run, "flwr.supernode.start_client_internal", "flower-superexec")
    if program == "flower-superexec" and os.environ.get(TASKS):
        gaps = Gaps(0.1, 1.0)
        _look_sooner("flwr.supercore.superexec.run_superexec", gaps)
        place = "flwr.supercore.superexec.executor.subprocess_executor"
        run = _forking(run, place, os.environ[TASKS], gaps.work)
    return run


def entry(program: str) -> Callable[[], Any]:
    """The function behind one of Flower's programs; it is loaded by this."""
    (found,) = entry_points(group="console_scripts", name=program)
    function: Callable[[], Any] = found.load()
    return function


class Gaps:
    """Stands in for the module ``time`` in a loop that sleeps while it has nothing to do.

    It sleeps for a tenth of the time that has passed since there was something; sleeping ``at_work`` seconds at most
    is how the loop waits for the end of what it does.
    """

    def __init__(
        self, shortest: float, longest: float, at_work: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shortest, self.longest, self.at_work, self.clock = shortest, longest, at_work, clock
        self.work()

    def work(self) -> None:
        """There is something to do."""
        self.busy = self.clock()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def gap(self, seconds: float) -> float:
        """How long to sleep where ``seconds`` were meant."""
        if seconds <= self.at_work:
            self.work()
            return min(seconds, _WORKING)
        return min(self.longest, max(self.shortest, _SHARE * (self.clock() - self.busy)))

    def sleep(self, seconds: float) -> None:
        """Sleep, but not so long."""
        time.sleep(self.gap(seconds))


def _look_sooner(module: str, gaps: Gaps) -> None:
    place = _using(module, time)
    if place is not None:
        setattr(place, "time", gaps)  # noqa: B010


def _ask_again_sooner() -> None:
    """A message may be announced before all of it is there; who asks for the rest too early waits for a tenth of a
    second at first, then for longer and longer, instead of a whole second."""
    with contextlib.suppress(ImportError):
        place = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
        for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
            defaults = getattr(getattr(place, name, None), "__kwdefaults__", None) or {}
            if defaults.get("initial_backoff") == 1:
                defaults["initial_backoff"] = _WORKING


def _forking(
    run: Callable[[], Any], module: str, program: str, starting: Callable[[], None] = lambda: None
) -> Callable[[], Any]:
    """Let the processes of a program that a module of Flower's starts be forks of a template, if that is possible.

    What this process is to do next; the forks return from here as well, with what they are to do.
    """
    place = _using(module, subprocess)
    if sys.platform != "linux" or place is None:
        return run
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        return _template(program, os.fdopen(reading, encoding="utf-8"))
    os.close(reading)
    starter = Starter(program, writing, starting)
    setattr(place, "subprocess", SimpleNamespace(Popen=starter, DEVNULL=subprocess.DEVNULL))  # noqa: B010
    return run


def _using(module: str, used: Any) -> Any:
    """A module of Flower's that uses another one by its name; none where it does not."""
    with contextlib.suppress(ImportError):
        found = importlib.import_module(module)
        if getattr(found, used.__name__, None) is used:
            return found
    return None


class Starter:
    """Stands in for ``subprocess.Popen`` where Flower starts a process and then forgets about it."""

    def __init__(self, program: str, orders: int, starting: Callable[[], None] = lambda: None) -> None:
        self.program, self.orders, self.starting = program, orders, starting

    def __call__(self, arguments: Sequence[str], **streams: Any) -> subprocess.Popen[bytes] | None:
        """Ask the template for a fork; without one, start a process."""
        self.starting()
        if arguments[0] == self.program:
            order = json.dumps({"arguments": list(arguments), "silent": bool(streams)}) + "\n"
            with contextlib.suppress(OSError):
                os.write(self.orders, order.encode())
                return None
        return subprocess.Popen(arguments, **streams)


def _template(program: str, orders: TextIO) -> Callable[[], Any]:
    """Load a program and fork for every order, until whoever gives orders is gone. Returns in the forks alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for those who give orders
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
    run = entry(program)
    for module in _WANTS.get(program, ()):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    loaded = _versions(("fedalloy", "flwr"))
    gc.freeze()
    for line in orders:
        if os.fork() == 0:
            order = json.loads(line)
            _be_new(order["silent"])
            sys.argv = order["arguments"]
            if _versions(("fedalloy", "flwr")) != loaded:
                os.execvp(sys.argv[0], sys.argv)
            return partial(main, sys.argv) if program == "flower-superexec" else run
    os._exit(0)


def _be_new(silent: bool) -> None:
    """Be as a new process is: with signals of one's own, and with chance that is nobody else's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if silent:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)
        os.close(nowhere)


def _versions(packages: Iterable[str]) -> list[tuple[int, int]]:
    """What tells one installation of packages from another."""
    found = []
    for package in packages:
        with contextlib.suppress(OSError, KeyError):
            told = os.stat(str(sys.modules[package].__file__))
            found.append((told.st_ino, told.st_mtime_ns))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
