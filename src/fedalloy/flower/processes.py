"""Programs that a federation consists of, each with a log of its own, and none of which outlives it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedalloy.core.errors import FedalloyError

TOKEN = "FEDALLOY_FEDERATION"
"""Every process of a federation carries this in its environment: Flower starts some in sessions of their own."""
POLL = 0.1
_GRACE = 10.0
"""Seconds that a program has for ending by itself."""
_PORTS = (20_000, 32_000)
"""Below the ports that systems give to outgoing connections, which could take a port between its choice and its use."""


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
        """Start it, away from the terminal's Ctrl-C: who started it decides in which order things end."""
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
        """Ask it to end, and end it if it does not."""
        if self.running:
            self.process.terminate()
            try:
                self.process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        """End it as a power failure would."""
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
    """Look until ``ready`` says so; a program that ends, or the end of the time, is an error that shows its log."""
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
    """A port that nobody listens on at the moment."""
    for _ in range(1000):
        port = _PORTS[0] + secrets.randbelow(_PORTS[1] - _PORTS[0])
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise DidNotStart(f"no free port was found between {_PORTS[0]} and {_PORTS[1]} on {host}")


def end_all(token: str) -> None:
    """End every process that carries ``token`` in its environment: those whose parents were killed before them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + _GRACE
        while left := list(carrying(token)):
            for pid in left:
                _signal(pid, number)
            if time.monotonic() > end:
                break
            time.sleep(POLL)


def carrying(token: str) -> Iterator[int]:
    """The processes of this user with ``token`` in their environment, this one excepted. Systems without ``/proc`` show
    none; there Flower's own rule must do, by which its helpers end soon after their parents."""
    wanted = f"{TOKEN}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # A process that has ended but was not waited for has an empty environment.
            values = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in values and int(entry.name) != os.getpid():
            yield int(entry.name)


def alive(pid: int) -> bool:
    """Whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
