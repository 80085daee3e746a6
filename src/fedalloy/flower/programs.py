"""The programs of a federation: their command lines and environments, and how they start and end."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedalloy.core.errors import FedalloyError
from fedalloy.flower.bundle_guard import ALLOW
from fedalloy.flower.config import QUIET, as_arguments
from fedalloy.flower.knock import OPTION
from fedalloy.flower.layout import NodePlace, ServerPlace
from fedalloy.flower.prefork import MALLOC, Launcher
from fedalloy.flower.proxies import without_proxy

SEATS = "FEDALLOY_SEATS"
"""The environment variable with the file of seats, for everything that a server starts."""
TOKEN = "FEDALLOY_FEDERATION"
"""In the environment of every process of a federation, to find them all: Flower starts some in new sessions."""
POLL = 0.1
_GRACE = 10.0
"""Seconds that a program has to end by itself."""
_PORTS = (20_000, 32_000)
"""Below the ports that systems give to outgoing connections, which could take a port between its choice and its use."""


_DOORS = "FLWR_INTERNAL_"
"""Variables that would open more ports of a SuperLink, on every network of its machine."""


def superlink(launcher: Launcher, place: ServerPlace) -> list[str]:
    """The SuperLink, which listens on loopback only: encrypted and with registered nodes only, unless its folder is
    configured otherwise; it installs nothing."""
    command = [*launcher.command("flower-superlink"), "--host", "127.0.0.1", "--port", str(place.link_port)]
    command += ["--database", str(place.database), "--disable-runtime-dependency-installation"]
    if not place.secure:
        return [*command, "--insecure"]
    files = place.files
    command += ["--ssl-ca-certfile", str(files.ca_certificate), "--ssl-certfile", str(files.certificate)]
    return [*command, "--ssl-keyfile", str(files.key), "--enable-supernode-auth"]


def front(place: ServerPlace) -> list[str]:
    """The front, which partners reach: always encrypted, and only for what nodes need."""
    command = [sys.executable, "-P", "-m", "fedalloy.flower.front", str(place.folder)]
    return [*command, place.host, str(place.port), str(place.link_port)]


def supernode(
    launcher: Launcher, place: NodePlace, extra: Mapping[str, str | int] | None = None, bundles: Iterable[str] = (),
    patient: bool = False,
) -> list[str]:  # fmt: skip
    """One node; its configuration stays on its machine. A ``patient`` node asks until it is let in. For trials with
    apps that are not fedalloy's: ``extra`` keys for them, and the hashes of their ``bundles``, without which the node
    refuses them."""
    command = [*launcher.command("flower-supernode"), *(word for one in bundles for word in (ALLOW, one))]
    command += [OPTION, str(place.number_file)] if patient else []
    command += ["--superlink", place.server, "--host", "127.0.0.1", "--port", str(place.port)]
    command += ["--node-config", as_arguments({**place.config.to_keys(), **(extra or {})})]
    if not place.secure:
        return [*command, "--insecure"]
    return [*command, "--root-certificates", str(place.authority), "--auth-supernode-private-key", str(place.key)]


def environment(launcher: Launcher, home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a Flower program: without telemetry, and with its files in ``home``."""
    home.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith((_DOORS, SEATS))}
    inherited |= without_proxy(inherited)
    return {**MALLOC, **inherited, **QUIET, "FLWR_HOME": str(home), **launcher.environment(home), **(extra or {})}


def server_environment(
    launcher: Launcher, place: ServerPlace, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of the SuperLink and of its child processes."""
    seats = {SEATS: str(place.seats)} if place.secure else {}
    return environment(launcher, place.home, {**seats, **(extra or {})})


class DidNotStart(FedalloyError):
    """A program of a federation ended, or was not ready in time; holds the end of its log."""


@dataclass
class Program:
    """One running program; what it writes is appended to ``log``."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @staticmethod
    def start(name: str, command: Sequence[str], environment: dict[str, str], log: Path, cwd: Path) -> Program:
        """Start it in its own session, so that Ctrl-C does not reach it: the caller ends programs in order."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=cwd,
                start_new_session=True,
            )  # fmt: skip
        return Program(name, process, log)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None

    def stop(self) -> None:
        """Ask it to end, and kill it if it does not."""
        if self.running:
            self.process.terminate()
            try:
                self.process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        """Kill it, like a power failure."""
        self.process.kill()
        self.process.wait()

    def complaint(self) -> str:
        """The end of its log, for an error message."""
        if not self.log.is_file():  # it writes to the terminal
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"the end of {self.log}:\n" + "\n".join(lines[-15:])


def wait_until(
    ready: Callable[[], bool], what: str, limit: float, programs: Sequence[Program] = (), poll: float = POLL
) -> None:
    """Poll until ``ready`` returns true; if a program ends, or time runs out, the error shows its log."""
    end = time.monotonic() + limit
    while not ready():
        for program in programs:
            if not program.running:
                raise DidNotStart(
                    f"{program.name} ended with exit code {program.process.returncode} before {what}\n"
                    f"{program.complaint()}"
                )
        if time.monotonic() > end:
            logs = "\n".join(program.complaint() for program in programs)
            raise DidNotStart(f"{what} did not happen within {limit:g} s\n{logs}")
        time.sleep(poll)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free at the moment."""
    for _ in range(1000):
        port = _PORTS[0] + secrets.randbelow(_PORTS[1] - _PORTS[0])
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise DidNotStart(f"no free port was found between {_PORTS[0]} and {_PORTS[1]} on {host}")


def end_all(token: str, *, at_once: bool = False, variable: str = TOKEN) -> None:
    """End every process with ``token`` in its environment: those whose parents were killed before them. ``at_once``:
    without asking them first."""
    for number in (signal.SIGKILL,) if at_once else (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + _GRACE
        while left := list(carrying(token, variable)):
            for pid in left:
                _signal(pid, number)
            if time.monotonic() > end:
                break
            time.sleep(POLL)


def carrying(token: str, variable: str = TOKEN) -> Iterator[int]:
    """The processes of this user with ``token`` in their environment, except this one. Empty on systems without
    ``/proc``; there Flower's helpers end by themselves soon after their parents."""
    wanted = f"{variable}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # A zombie has an empty environment.
            values = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in values and int(entry.name) != os.getpid():
            yield int(entry.name)


def alive(pid: int, born: str = "") -> bool:
    """Whether a process exists, and is the one that was ``born`` then: its number may be another one's by now."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not born or birth(pid) in ("", born)


def birth(pid: int) -> str:
    """When a process began, also told apart from all before the machine was started; empty where the system does not
    say."""
    with contextlib.suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # Its own name, in brackets, may hold anything.
        after = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        return f"{boot} {after.split()[19]}"
    return ""


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
