"""Commands to a server by Flower's command line ``flwr``: start a run, follow it and end it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedalloy.core.errors import FedalloyError
from fedalloy.flower import prefork
from fedalloy.flower.config import as_arguments
from fedalloy.flower.layout import ServerPlace
from fedalloy.flower.programs import Program, environment, wait_until

CONNECTION = "fedalloy"
"""The server's name in the configuration of ``flwr``."""
ASK = 0.5
"""Seconds between two requests to a server."""
PATIENCE = 120.0
"""Seconds for which a server may leave requests about a run unanswered."""


class FlwrFailed(FedalloyError):
    """A ``flwr`` command failed; the message has the command and its output."""


@dataclass
class FlwrCli:
    """``flwr`` for one server. Closed by ``close`` or when this process ends."""

    place: ServerPlace
    extra: dict[str, str] = field(default_factory=dict)
    launcher: prefork.Launcher = field(default_factory=prefork.launcher)
    _process: prefork.FlwrProcess | None = None

    def ask(self, *arguments: str) -> dict[str, Any]:
        """Run ``flwr ARGUMENTS`` with ``--format json``; its answer."""
        code, said = self._run([*arguments, "--format", "json"])
        found = _last_object(said)
        if code or not found.get("success"):
            raise self._failure(arguments, found, said)
        return found

    def text(self, *arguments: str) -> str:
        """The output of ``flwr ARGUMENTS``."""
        code, said = self._run(list(arguments))
        if code:
            raise self._failure(arguments, {}, said)
        return said

    def runs(self) -> list[dict[str, Any]]:
        """All runs of the server, newest first."""
        return list(self.ask("list", CONNECTION)["runs"])

    def start_run(self, app: Path, config: Mapping[str, str | int] | None = None) -> SubmittedRun:
        """Start a run of a Flower app."""
        settings = ("--run-config", as_arguments(config)) if config else ()
        return SubmittedRun(self, str(self.ask("run", str(app), CONNECTION, *settings)["run-id"]))

    def close(self) -> None:
        """End the ``flwr`` process; the next command starts it again."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _run(self, arguments: list[str]) -> tuple[int, str]:
        if self._process is None:
            write_connection(self.place)
            self._process = self.launcher.flwr(environment(self.launcher, self.place.home, self.extra))
        try:
            return self._process.run(arguments)
        except OSError as error:
            raise FlwrFailed(f"'flwr {' '.join(arguments)}' ended without an answer") from error

    def _failure(self, arguments: tuple[str, ...], found: dict[str, Any], said: str) -> FlwrFailed:
        self.close()
        reason = str(found.get("error-message") or found.get("error") or said.strip()[-500:] or "no output")
        return FlwrFailed(f"'flwr {' '.join(arguments)}' failed: {reason}")


@dataclass(frozen=True)
class SubmittedRun:
    """One run of an app on a server."""

    cli: FlwrCli
    id: str

    def status(self) -> str:
        """pending, starting, running, finished:completed, finished:failed or finished:stopped."""
        return str(self.cli.ask("list", CONNECTION, "--run-id", self.id)["runs"][0]["status"])

    def wait(
        self, limit: float, programs: tuple[Program, ...] = (), meanwhile: Callable[[], None] = lambda: None
    ) -> str:
        """Return how it ended; ``meanwhile`` is called between checks. A server that does not answer for a while does
        not end this: the run itself may continue."""
        ended, answered = "", time.monotonic()

        def over() -> bool:
            nonlocal ended, answered
            try:
                ended, answered = self.status(), time.monotonic()
            except FlwrFailed:
                if time.monotonic() - answered > PATIENCE:
                    raise
            meanwhile()
            return ended.startswith("finished")

        wait_until(over, f"the end of run {self.id}", limit, programs, ASK)
        return ended

    def stop(self) -> None:
        """End it; its folder is kept."""
        try:
            self.cli.ask("stop", self.id, CONNECTION)
        except FlwrFailed:
            if not self.status().startswith("finished"):
                raise

    def log(self) -> str:
        """The output of its ServerApp so far."""
        how = "--stream" if self.status().startswith("finished") else "--show"
        return self.cli.text("log", self.id, CONNECTION, how)


def write_connection(place: ServerPlace) -> None:
    """Write the server's address for ``flwr`` if it is not there yet: a port may have changed. Others may read or write
    the file at the same time, and always find a complete one."""
    lines = ["[superlink]", f'default = "{CONNECTION}"', f"[superlink.{CONNECTION}]"]
    lines += [f'address = "{place.local_address}"']
    lines += [f'root-certificates = "{place.files.ca_certificate}"'] if place.secure else ["insecure = true"]
    place.home.mkdir(parents=True, exist_ok=True)
    file, text = place.home / "config.toml", "\n".join(lines) + "\n"
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        draft = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}")
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)


def _last_object(text: str) -> dict[str, Any]:
    """The JSON object at the end of a command's output."""
    for position in (index for index, character in enumerate(text) if character == "{"):
        with contextlib.suppress(ValueError):
            found = json.loads(text[position:])
            return found if isinstance(found, dict) else {}
    return {}
