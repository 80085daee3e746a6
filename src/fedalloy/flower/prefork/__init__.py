"""How the processes of a federation are started: loaded once and forked, or as Flower does it.

:func:`launcher` decides, and is the only function that others call. Flower starts a process for every message and every
run, and loading Flower, torch and the data takes longer than most orders. Therefore:

* a Flower program that starts processes keeps one in which everything is loaded, and forks it
  (:mod:`~fedalloy.flower.prefork.forkserver`), and polls for work more often after it had some
  (:mod:`~fedalloy.flower.prefork.polling`);
* a node has one process that carries out its orders and keeps torch and its data
  (:mod:`~fedalloy.flower.prefork.worker`);
* the ``flwr`` command line is one process that answers many commands
  (:mod:`~fedalloy.flower.prefork.flwr_process`).

Results do not depend on it. If Flower differs from :data:`fedalloy.flower.compatibility.PREFORK`, or the variable
``FEDALLOY_PREFORK`` is ``off``, each of these is a new process (:mod:`~fedalloy.flower.prefork.fallback`): slower, with
the same results. In both cases nodes check the app that they run (:mod:`fedalloy.flower.bundle_guard`).
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedalloy.core.errors import SpecError

if TYPE_CHECKING:
    from flwr.app import RecordDict

SWITCH, ON, OFF = "FEDALLOY_PREFORK", "on", "off"
"""Operators may set it to ``off``; a launcher uses it to pass its choice to the processes it starts."""
TASKS = "FEDALLOY_TASKS"
"""Set by a server or a node for the program that starts its processes: which of them to prepare."""
SUPEREXEC = "flower-superexec"
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4194304", "MALLOC_ARENA_MAX": "2"}
"""Let glibc return the memory of a message's chunks, five megabytes each, as soon as they are freed. By itself it keeps
them for later, in as many places as there were threads."""
log = logging.getLogger("fedalloy.flower")


class NotCarriedOut(Exception):
    """An order could not be carried out because of its process, with the reason."""


class FlwrProcess(Protocol):
    """The ``flwr`` command line."""

    def run(self, arguments: list[str]) -> tuple[int, str]:
        """The exit code and output of ``flwr ARGUMENTS``; ``OSError`` when it ended without an answer."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


class Launcher(Protocol):
    """A way of starting processes."""

    def command(self, program: str) -> list[str]:
        """The command line of a Flower program, without its arguments."""
        ...

    def environment(self, home: Path) -> dict[str, str]:
        """The environment variables of a program; ``home`` is for its files."""
        ...

    def flwr(self, environment: Mapping[str, str]) -> FlwrProcess:
        """The ``flwr`` command line in an environment."""
        ...

    def respond(self, store: Path, node_config: Mapping[str, Any], content: RecordDict) -> RecordDict:
        """A node's answer to an order, made with ``store`` as the working directory; may raise
        :class:`NotCarriedOut`."""
        ...


def launcher() -> Launcher:
    """The launcher for this installation."""
    from fedalloy.flower.prefork.fallback import Fallback
    from fedalloy.flower.prefork.forkserver import Prefork

    chosen = os.environ.get(SWITCH) if hasattr(os, "fork") else OFF
    return Fallback() if chosen == OFF or (chosen != ON and _looks_different()) else Prefork()


@functools.cache
def _looks_different() -> bool:
    """Whether Flower differs from what the hooks expect; warns once."""
    from fedalloy.flower.compatibility import differences

    found = differences()
    if found:
        log.warning("processes are started in Flower's own, slower way: %s", "; ".join(found))
    return bool(found)


def command_line(program: str) -> list[str]:
    """The command line of a Flower program, without its arguments; the environment selects the way it starts."""
    if not entry_points(group="console_scripts", name=program):
        raise SpecError(f"'{program}' is not installed here; run: pip install 'fedalloy[flower]'")
    return [sys.executable, "-P", "-m", "fedalloy.flower.prefork", program]


def search_path(*folders: Path) -> str:
    """``PATH`` with folders, and the scripts beside this interpreter, before all others."""
    first = (*map(str, folders), str(Path(sys.executable).parent))
    return os.pathsep.join((*first, os.environ.get("PATH", os.defpath)))


def write_stand_in(folder: Path) -> Path:
    """A folder for the front of ``PATH`` with our replacement of Flower's program for starting processes."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / SUPEREXEC
    text = f'#!/bin/sh\nexec {shlex.join(command_line(SUPEREXEC))} "$@"\n'
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_text(text, encoding="utf-8")
        draft.chmod(0o755)
        draft.replace(file)
    return folder
