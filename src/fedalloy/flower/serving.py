"""``fedalloy flower server``: a SuperLink that knows its nodes, and the front that they reach, in the foreground."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from fedalloy.flower import commands
from fedalloy.flower.admission import admit
from fedalloy.flower.layout import ServerPlace
from fedalloy.flower.operating import answers, front_answers
from fedalloy.flower.processes import POLL, DidNotStart, Program, wait_until
from fedalloy.flower.shell import Shell

_STARTUP = 180.0
Say = Callable[[str], None]


def serve(folder: Path, say: Say) -> int:
    """Start the SuperLink, decide who is let in, only then open the front, and stay until one of the two ends; signals
    are passed on. Returns the exit code."""
    place = ServerPlace.read(folder)
    with contextlib.ExitStack() as started:
        link = started.enter_context(_running(commands.superlink(place), place))
        programs = [Program("the server", link, Path())]
        _pass_on_signals(link)
        try:
            wait_until(lambda: answers(place), "the server answered", _STARTUP, programs)
            admitted = _admitted(place)
            if place.secure:
                front = started.enter_context(_running(commands.front(place), place))
                programs.append(Program("the front", front, Path()))
                wait_until(lambda: front_answers(place), "the front answered", _STARTUP, programs)
            say(f"the server is ready at {place.host}:{place.port}{admitted}")
            return _first_end(programs, say)
        except DidNotStart as error:
            say(str(error))
            return link.poll() or 1


@contextlib.contextmanager
def _running(command: list[str], place: ServerPlace) -> Iterator[subprocess.Popen[bytes]]:
    """A program that writes to this terminal and ends with this one."""
    environment = commands.server_environment(place)
    process = subprocess.Popen(command, env=environment, cwd=place.folder, start_new_session=True)
    try:
        yield process
    finally:
        Program("", process, Path()).stop()


def _pass_on_signals(link: subprocess.Popen[bytes]) -> None:
    def pass_on(number: int, _: FrameType | None) -> None:
        link.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)


def _first_end(programs: list[Program], say: Say) -> int:
    """Wait until one of them ends: a server without its front reaches nobody, and must be started again."""
    while all(program.running for program in programs):
        time.sleep(POLL)
    if programs[0].running:
        say("the front ended; the server ends too")
        return programs[1].process.returncode or 1
    return programs[0].process.wait()


def _admitted(place: ServerPlace) -> str:
    if not place.secure:
        return " WITHOUT encryption, for anybody on this machine"
    shell = Shell(place)
    try:
        return f" for {', '.join(admit(place, shell)) or 'nobody yet (put public keys into nodes/)'}"
    finally:
        shell.close()
