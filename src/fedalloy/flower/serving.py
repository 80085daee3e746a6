"""``fedalloy flower server``: a SuperLink in the foreground that knows its nodes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from fedalloy.flower import commands
from fedalloy.flower.layout import ServerPlace
from fedalloy.flower.operating import admit, answers
from fedalloy.flower.processes import DidNotStart, Program, wait_until
from fedalloy.flower.shell import Shell

_STARTUP = 180.0


def serve(folder: Path, say: Callable[[str], None]) -> int:
    """Start the server, let its nodes in, and wait for its end; signals are passed on. Returns its exit code."""
    place = ServerPlace.read(folder)
    environment = commands.environment(place.home)
    process = subprocess.Popen(commands.superlink(place), env=environment, cwd=place.folder, start_new_session=True)

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    try:
        wait_until(lambda: answers(place), "the server answered", _STARTUP, [Program("the server", process, Path())])
        say(f"the server is ready at {place.host}:{place.port}{_admitted(place)}")
        return process.wait()
    except DidNotStart:
        if process.poll() is None:
            process.terminate()
        return process.wait() or 1
    finally:
        if process.poll() is None:
            process.kill()


def _admitted(place: ServerPlace) -> str:
    if not place.secure:
        return " WITHOUT encryption, for anybody"
    shell = Shell(place)
    try:
        return f" for {', '.join(admit(place, shell)) or 'nobody yet (put public keys into nodes/)'}"
    finally:
        shell.close()
