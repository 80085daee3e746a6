"""Working with a server: is it there, start a run and follow it."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fedalloy.flower import commands
from fedalloy.flower.config import as_arguments
from fedalloy.flower.layout import RUNNING, ServerPlace
from fedalloy.flower.processes import Program, alive, wait_until
from fedalloy.flower.shell import FlwrFailed, Shell

ASK = 0.5
"""Seconds between two questions to a server."""


def found(folder: Path) -> ServerPlace:
    """The server of a folder where it is now: a local federation has ports of its own while its starter lives."""
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
    """Whether the SuperLink is there, and is the one whose certificate we know."""
    return _status_of(place, place.local_address) == 200


def front_answers(place: ServerPlace) -> bool:
    """Whether the front is there, and turns away what is not for nodes."""
    return _status_of(place, place.door) == 404


def _status_of(place: ServerPlace, address: str) -> int | None:
    """How a program of the server answers the question for its health; None when it does not answer."""
    scheme, context = "http", None
    if place.secure:
        scheme, context = "https", ssl.create_default_context(cafile=place.files.ca_certificate)
        # Which of the machine's addresses the front listens on is not the certificate's business here.
        context.check_hostname = False
    # A proxy of the surroundings is for other machines, not for this one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{scheme}://{address}/health", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return None


def start_run(shell: Shell, app: Path, config: Mapping[str, str | int] | None = None) -> Run:
    """Start a run of a Flower app."""
    settings = ("--run-config", as_arguments(config)) if config else ()
    return Run(shell, str(shell.ask("run", str(app), commands.CONNECTION, *settings)["run-id"]))


@dataclass(frozen=True)
class Run:
    """One run of an app."""

    shell: Shell
    id: str

    def status(self) -> str:
        """pending, starting, running, finished:completed, finished:failed or finished:stopped."""
        return str(self.shell.ask("list", commands.CONNECTION, "--run-id", self.id)["runs"][0]["status"])

    def wait(
        self, limit: float, programs: tuple[Program, ...] = (), meanwhile: Callable[[], None] = lambda: None
    ) -> str:
        """Return how it ended; ``meanwhile`` is called now and then."""
        ended = ""

        def over() -> bool:
            nonlocal ended
            ended = self.status()
            meanwhile()
            return ended.startswith("finished")

        wait_until(over, f"the end of run {self.id}", limit, programs, ASK)
        return ended

    def stop(self) -> None:
        """End it; what it has in its folder stays."""
        try:
            self.shell.ask("stop", self.id, commands.CONNECTION)
        except FlwrFailed:
            if not self.status().startswith("finished"):
                raise

    def log(self) -> str:
        """What its ServerApp wrote so far."""
        how = "--stream" if self.status().startswith("finished") else "--show"
        return self.shell.text("log", self.id, commands.CONNECTION, how)
