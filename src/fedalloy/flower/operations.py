"""Operating a server: find it, check whether it answers, and run it in the foreground (``fedalloy flower server``)."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from fedalloy.flower import prefork
from fedalloy.flower.admission import admit
from fedalloy.flower.flwr_cli import FlwrCli
from fedalloy.flower.layout import RUNNING, ServerPlace
from fedalloy.flower.programs import (
    POLL,
    DidNotStart,
    Program,
    alive,
    front,
    server_environment,
    superlink,
    wait_until,
)

_STARTUP = 180.0
Say = Callable[[str], None]


def found(folder: Path) -> ServerPlace:
    """The server of a folder at its current address: a local federation has other ports while it runs."""
    place = ServerPlace.read(folder)
    try:
        known = json.loads((place.folder / RUNNING).read_text(encoding="utf-8"))
        here = alive(known["pid"])
    except (OSError, ValueError, KeyError):
        return place
    if not here:
        return place
    return replace(place, host="127.0.0.1", port=known["port"], local_port=known.get("local_port", 0))


def answers(place: ServerPlace) -> bool:
    """Whether the SuperLink answers with the expected certificate."""
    return _status_of(place, place.local_address) == 200


def front_answers(place: ServerPlace) -> bool:
    """Whether the front answers, and refuses a path that is not for nodes."""
    return _status_of(place, place.door) == 404


def _status_of(place: ServerPlace, address: str) -> int | None:
    """The HTTP status of a health check; None when there is no answer."""
    scheme, context = "http", None
    if place.secure:
        scheme, context = "https", ssl.create_default_context(cafile=place.files.ca_certificate)
        # Do not check the host name: the front may listen on any address of the machine.
        context.check_hostname = False
    # Ignore proxy settings of the environment: they are for other machines.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{scheme}://{address}/health", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return None


def serve(folder: Path, say: Say) -> int:
    """Start the SuperLink, admit the nodes, then open the front, and wait until one of the two ends; signals are
    forwarded. Returns the exit code."""
    place, launcher = ServerPlace.read(folder), prefork.launcher()
    environment = server_environment(launcher, place)
    with contextlib.ExitStack() as started:
        link = started.enter_context(_running(superlink(launcher, place), environment, place.folder))
        programs = [Program("the server", link, Path())]
        _pass_on_signals(link)
        try:
            wait_until(lambda: answers(place), "the server answered", _STARTUP, programs)
            admitted = _admitted(place, launcher)
            if place.secure:
                door = started.enter_context(_running(front(place), environment, place.folder))
                programs.append(Program("the front", door, Path()))
                wait_until(lambda: front_answers(place), "the front answered", _STARTUP, programs)
            say(f"the server is ready at {place.host}:{place.port}{admitted}")
            return _first_end(programs, say)
        except DidNotStart as error:
            say(str(error))
            return link.poll() or 1


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that writes to this terminal and is ended with this process."""
    process = subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True)
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
    """Wait until one of them ends: a server without its front cannot be reached, and must be restarted."""
    while all(program.running for program in programs):
        time.sleep(POLL)
    if programs[0].running:
        say("the front ended; the server ends too")
        return programs[1].process.returncode or 1
    return programs[0].process.wait()


def _admitted(place: ServerPlace, launcher: prefork.Launcher) -> str:
    if not place.secure:
        return " WITHOUT encryption, for everyone on this machine"
    cli = FlwrCli(place, launcher=launcher)
    try:
        return f" for {', '.join(admit(place, cli)) or 'no nodes yet (put public keys into nodes/)'}"
    finally:
        cli.close()
