"""Working with a server: is it there, which nodes may come in, start a run and follow it."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedalloy.flower import commands
from fedalloy.flower.config import as_arguments
from fedalloy.flower.layout import ServerPlace
from fedalloy.flower.processes import Program, wait_until
from fedalloy.flower.shell import FlwrFailed, Shell

ASK = 0.5
"""Seconds between two questions to a server."""


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


def admit(place: ServerPlace, shell: Shell) -> dict[str, str]:
    """Let in the nodes whose public keys lie in the server's folder; the number of each by name. Known keys stay."""
    return {key.stem: _admit(key, shell) for key in place.node_keys}


def _admit(key: Path, shell: Shell) -> str:
    kept = key.with_suffix(".id")
    if kept.exists():
        known = kept.read_text(encoding="ascii")
        if known in shell.nodes():
            return known
    found = str(shell.ask("supernode", "register", str(key), commands.CONNECTION, "--name", key.stem)["node-id"])
    kept.write_text(found, encoding="ascii")
    return found


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
