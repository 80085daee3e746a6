"""``fedalloy flower server``: the SuperLink, its front and their helper, looked after until the operator ends them."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fedalloy.core.errors import SpecError
from fedalloy.flower import prefork
from fedalloy.flower.admission import admit
from fedalloy.flower.database import is_empty
from fedalloy.flower.flwr_cli import FlwrCli
from fedalloy.flower.layout import SERVER_FILE, ServerPlace
from fedalloy.flower.operations import answers, front_answers
from fedalloy.flower.pki import expires
from fedalloy.flower.programs import (
    DidNotStart,
    Program,
    end_all,
    front,
    server_environment,
    superlink,
    wait_until,
)
from fedalloy.flower.prometheus import serving
from fedalloy.flower.server_metrics import server_metrics
from fedalloy.flower.service_log import ServiceLog
from fedalloy.flower.signals import EndRequest
from fedalloy.flower.supervision import ANNOUNCE, Deaths, HelperWatch, Lost, of_this_service

_LOOK = 1.0
"""Seconds between two looks at the processes."""
STARTUP = 180.0
"""Seconds until programs must be ready; a busy machine needs many times as long as an idle one."""


def serve(folder: Path, log: ServiceLog, metrics: int | None = None) -> int:
    """Start the SuperLink, admit the nodes, open the front, and look after them until a signal. The front and Flower's
    helper are started again when they die; the end of the SuperLink ends the server. Returns the exit code."""
    place = ServerPlace.read(folder)
    check_startable(place)
    server = ServerProcesses(place, log)
    with EndRequest() as request, serving(metrics, lambda: server_metrics(folder, server.restarts)):
        try:
            server.start(request)
            while not request.wait(_LOOK):
                server.look()
        except (DidNotStart, Lost) as error:
            log.say(f"the server ends: {error}")
            return 1
        finally:
            server.stop()
            log.close()
        return request.code


def check_startable(place: ServerPlace) -> None:
    """Refuse what cannot work before anything is started: missing or expired certificates, ports that are taken."""
    if place.secure:
        files = place.files
        for file in (files.ca_certificate, files.certificate, files.key):
            if not file.is_file():
                raise SpecError(f"{file} does not exist; 'fedalloy flower init' writes it")
        for file in (files.ca_certificate, files.certificate):
            if (end := expires(file)) <= datetime.now(UTC):
                raise SpecError(
                    f"the certificate {file} expired on {end:%Y-%m-%d}, so no node would connect; make new ones with "
                    f"'fedalloy flower renew {place.folder}', and give every node the new ca.crt"
                )
        _check_port(place.host, place.port, "port", place)
    _check_port("127.0.0.1", place.link_port, "local_port" if place.secure else "port", place)


def make_anew(place: ServerPlace) -> None:
    """Delete a database that holds nothing yet: one that Flower was making when it was killed stops every later
    start."""
    if is_empty(place):
        for file in place.folder.glob(f"{place.database.name}*"):
            file.unlink()


def _check_port(host: str, port: int, key: str, place: ServerPlace) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is taken: the server is running already, or another program uses it" if taken else str(error)
            raise SpecError(
                f"the server cannot listen on {host}:{port}, which {why}; end that program, or change '{key}' in "
                f"{place.folder / SERVER_FILE}"
            ) from None


@dataclass
class ServerProcesses:
    """The processes of a server, and the log to which they write."""

    place: ServerPlace
    log: ServiceLog
    launcher: prefork.Launcher = field(default_factory=prefork.launcher)
    link: Program | None = None
    front: Program | None = None
    watch: HelperWatch | None = None
    _front_deaths: Deaths = field(default_factory=Deaths)

    def start(self, request: EndRequest) -> None:
        """Start everything; the front last, when the nodes are admitted. A request to end is heeded on the way."""
        out = self.log.stream("flower-superexec")
        self.watch = HelperWatch(self._announced, "the server", self._environment, self.log.say, out=out)
        make_anew(self.place)
        self.link = self._run("the SuperLink", superlink(self.launcher, self.place))
        wait_until(lambda: bool(request) or answers(self.place), "the server answered", STARTUP, [self.link])
        if request:
            return
        admitted = self._admitted()
        if self.place.secure:
            self._open_front()
            wait_until(lambda: bool(request) or front_answers(self.place), "the front answered", STARTUP, self._all)
        self.log.say(f"the server is ready at {self.place.host}:{self.place.port}{admitted}")

    def look(self) -> None:
        """Start again what died; :class:`Lost` if that is not possible."""
        if self.link and not self.link.running:
            raise Lost(f"the SuperLink ended with exit code {self.link.process.returncode}; its output is above")
        if self.front and not self.front.running:
            self._front_deaths.note("the front")
            self.log.say(f"the front ended with exit code {self.front.process.returncode}; it is started again")
            self._open_front()
        if self.watch:
            self.watch.look()

    def stop(self) -> None:
        """End everything: first the front, so that nodes are not refused by a server that is half gone; last the runs,
        which would ask for the SuperLink for ever, and hold their folders."""
        for program in (self.front, self.link):
            if program:
                program.stop()
        if self.watch:
            self.watch.stop()
        end_all(str(self._announced), at_once=True, variable=ANNOUNCE)

    def restarts(self) -> dict[str, int]:
        """How often each process was started again."""
        helper = {self.watch.program: self.watch.deaths.total} if self.watch else {}
        return {"front": self._front_deaths.total, **helper}

    @property
    def _all(self) -> list[Program]:
        return [program for program in (self.link, self.front) if program]

    @property
    def _announced(self) -> Path:
        return self.place.home / "processes"

    @property
    def _environment(self) -> dict[str, str]:
        marks = {**of_this_service(), **HelperWatch.variables(self._announced)}
        return server_environment(self.launcher, self.place, marks)

    def _open_front(self) -> None:
        self.front = self._run("the front", front(self.place))

    def _run(self, name: str, command: list[str]) -> Program:
        out = self.log.stream(name.removeprefix("the ").lower())
        process = subprocess.Popen(
            command, env=self._environment, cwd=self.place.folder, start_new_session=True, stdout=out, stderr=out
        )
        return Program(name, process, Path())

    def _admitted(self) -> str:
        if not self.place.secure:
            return " WITHOUT encryption, for everyone on this machine"
        with contextlib.closing(FlwrCli(self.place, launcher=self.launcher)) as cli:
            return f" for {', '.join(admit(self.place, cli)) or 'no nodes yet (put public keys into nodes/)'}"
