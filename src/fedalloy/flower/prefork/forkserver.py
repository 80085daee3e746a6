"""Flower programs whose processes are forks of one in which everything is already loaded.

The program that starts processes keeps such a *template* process and sends it the arguments of each process through a
pipe. If the template is gone, or what it has loaded was replaced on disk, a process is started in Flower's own way.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TextIO

from fedalloy.flower.prefork import ON, SUPEREXEC, SWITCH, TASKS, FlwrProcess, command_line, search_path, write_stand_in
from fedalloy.flower.prefork.polling import Backoff, retry_sooner
from fedalloy.flower.prefork.transfers import collecting, fewer_copies
from fedalloy.flower.supervision import announce

if TYPE_CHECKING:
    from flwr.app import RecordDict

_STARTS = {"flower-superlink": "flwr-serverapp", "flower-supernode": "flwr-clientapp"}


@dataclass(frozen=True)
class Prefork:
    """A launcher that loads only once what many processes need."""

    def command(self, program: str) -> list[str]:
        """A Flower program that forks its processes."""
        return command_line(program)

    def environment(self, home: Path) -> dict[str, str]:
        """A ``PATH`` on which Flower finds our program for starting processes before its own."""
        return {"PATH": search_path(write_stand_in(home / "bin")), SWITCH: ON}

    def flwr(self, environment: Mapping[str, str]) -> FlwrProcess:
        """One process for all commands."""
        from fedalloy.flower.prefork.flwr_process import KeptOpen

        return KeptOpen(dict(environment))

    def respond(self, store: Path, node_config: Mapping[str, Any], content: RecordDict) -> RecordDict:
        """Let the node's worker carry out an order."""
        from fedalloy.flower.prefork.worker import ask

        return ask(store, node_config, content)


def entry(program: str) -> Callable[[], Any]:
    """Load and return the function of a Flower program."""
    (found,) = entry_points(group="console_scripts", name=program)
    function: Callable[[], Any] = found.load()
    return function


def preforked(program: str, run: Callable[[], Any], *, loaded: bool = False) -> Callable[[], Any]:
    """The function of a program with our ways of starting processes and of polling: every hook of
    :data:`fedalloy.flower.compatibility.PREFORK` is installed here. ``loaded``: it is a fork of one that is."""
    retry_sooner()
    fewer_copies(program)
    run = collecting(run, loaded=loaded)
    if program in _STARTS:
        os.environ[TASKS] = _STARTS[program]
    if program == "flower-supernode":
        from flwr.supernode import start_client_internal as node

        node.time = Backoff(0.3, 3.0, at_work=0.5)  # type: ignore[assignment, attr-defined]
        run = forking(run, node, SUPEREXEC)
    if program == SUPEREXEC and os.environ.get(TASKS):
        from flwr.supercore.superexec import run_superexec as tasks
        from flwr.supercore.superexec.executor import subprocess_executor as executor

        tasks.time = backoff = Backoff(0.1, 1.0)  # type: ignore[assignment, attr-defined]
        run = forking(run, executor, os.environ[TASKS], backoff.work)
    return run


def forking(
    run: Callable[[], Any], place: ModuleType, program: str, starting: Callable[[], None] = lambda: None
) -> Callable[[], Any]:
    """Make the processes that a Flower module starts forks of a template, on systems with ``fork``.

    Returns what this process must do next; the forks return from here too, with their own task.
    """
    if sys.platform != "linux":
        return run
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        return _template(program, os.fdopen(reading, encoding="utf-8"))
    os.close(reading)
    started = SimpleNamespace(Popen=Starter(program, writing, starting), DEVNULL=subprocess.DEVNULL)
    place.subprocess = started  # type: ignore[attr-defined]
    return run


class Starter:
    """Replaces ``subprocess.Popen`` where Flower starts a process without waiting for it."""

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
    """Load a program and fork for every order, until the sender is gone. Returns only in the forks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is handled by the sender
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap forks automatically
    run = entry(program)
    _name(f"{program}+")
    if program == "flwr-serverapp":
        with contextlib.suppress(ImportError):
            import fedalloy.flower.server  # noqa: F401 (what its forks will want)
    loaded = _versions(("fedalloy", "flwr"))
    gc.freeze()
    for line in orders:
        if os.fork() == 0:
            order = json.loads(line)
            _be_new(order["silent"])
            _name(program)
            sys.argv = order["arguments"]
            announce(program, sys.argv)
            if _versions(("fedalloy", "flwr")) != loaded:
                os.execvp(sys.argv[0], sys.argv)
            return preforked(program, run, loaded=True)
    os._exit(0)


def _be_new(silent: bool) -> None:
    """Reset what a fork inherits: signal handlers and numpy's random state; if ``silent``, discard its output."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if silent:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)
        os.close(nowhere)


def _name(program: str) -> None:
    """The name of this process in lists of processes; a fork has that of its parent."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(program, encoding="ascii")


def _versions(packages: Iterable[str]) -> list[tuple[int, int]]:
    """Inodes and times that change when packages are installed again."""
    found = []
    for package in packages:
        with contextlib.suppress(OSError, KeyError):
            told = os.stat(str(sys.modules[package].__file__))
            found.append((told.st_ino, told.st_mtime_ns))
    return found
