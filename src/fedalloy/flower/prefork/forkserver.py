"""Programs of Flower's whose processes are forks of one in which everything is loaded already.

The program that starts processes keeps such a *template* beside it and sends it the arguments of each process by a
pipe. Where the template is gone, or what it has loaded was replaced on disk, a process is started as Flower does it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TextIO

from fedalloy.flower.prefork import ON, SWITCH, FlwrProcess, command_line, search_path
from fedalloy.flower.prefork.polling import Backoff, retry_sooner

if TYPE_CHECKING:
    from flwr.app import RecordDict

TASKS = "FEDALLOY_TASKS"
"""Set by a server or a node for the program that starts its processes: which of them to keep ready."""
_SUPEREXEC = "flower-superexec"
_STARTS = {"flower-superlink": "flwr-serverapp", "flower-supernode": "flwr-clientapp"}


@dataclass(frozen=True)
class Prefork:
    """A launcher that loads once what many processes need."""

    def command(self, program: str) -> list[str]:
        """One of Flower's programs, which forks its processes."""
        return command_line(program)

    def environment(self, home: Path) -> dict[str, str]:
        """Flower finds our way of starting processes before its own."""
        return {"PATH": search_path(write_stand_in(home / "bin")), SWITCH: ON}

    def flwr(self, environment: Mapping[str, str]) -> FlwrProcess:
        """One process for all commands."""
        from fedalloy.flower.prefork.flwr_process import KeptOpen

        return KeptOpen(dict(environment))

    def respond(self, store: Path, node_config: Mapping[str, Any], content: RecordDict) -> RecordDict:
        """Let the node's worker carry out an order."""
        from fedalloy.flower.prefork.worker import ask

        return ask(store, node_config, content)


def write_stand_in(folder: Path) -> Path:
    """A folder for the front of ``PATH`` in which Flower finds our way of starting processes instead of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _SUPEREXEC
    text = f'#!/bin/sh\nexec {shlex.join(command_line(_SUPEREXEC))} "$@"\n'
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_text(text, encoding="utf-8")
        draft.chmod(0o755)
        draft.replace(file)
    return folder


def entry(program: str) -> Callable[[], Any]:
    """The function behind one of Flower's programs; it is loaded by this."""
    (found,) = entry_points(group="console_scripts", name=program)
    function: Callable[[], Any] = found.load()
    return function


def preforked(program: str, run: Callable[[], Any]) -> Callable[[], Any]:
    """What a program is to do, with our ways of starting processes and of looking for work: every place of
    :data:`fedalloy.flower.compatibility.PREFORK` is replaced here."""
    retry_sooner()
    if program in _STARTS:
        os.environ[TASKS] = _STARTS[program]
    if program == "flower-supernode":
        from flwr.supernode import start_client_internal as node

        node.time = Backoff(0.3, 3.0, at_work=0.5)  # type: ignore[assignment, attr-defined]
        run = forking(run, node, _SUPEREXEC)
    if program == _SUPEREXEC and os.environ.get(TASKS):
        from flwr.supercore.superexec import run_superexec as tasks
        from flwr.supercore.superexec.executor import subprocess_executor as executor

        tasks.time = backoff = Backoff(0.1, 1.0)  # type: ignore[assignment, attr-defined]
        run = forking(run, executor, os.environ[TASKS], backoff.work)
    return run


def forking(
    run: Callable[[], Any], place: ModuleType, program: str, starting: Callable[[], None] = lambda: None
) -> Callable[[], Any]:
    """Let the processes of a program that a module of Flower's starts be forks of a template, where there are forks.

    What this process is to do next; the forks return from here as well, with what they are to do.
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
    if program == "flwr-serverapp":
        with contextlib.suppress(ImportError):
            import fedalloy.flower.server  # noqa: F401 (what its forks will want)
    loaded = _versions(("fedalloy", "flwr"))
    gc.freeze()
    for line in orders:
        if os.fork() == 0:
            order = json.loads(line)
            _be_new(order["silent"])
            sys.argv = order["arguments"]
            if _versions(("fedalloy", "flwr")) != loaded:
                os.execvp(sys.argv[0], sys.argv)
            return preforked(program, run)
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
