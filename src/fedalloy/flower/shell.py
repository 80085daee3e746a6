"""The ``flwr`` command line, kept open: loading it takes longer than most of its commands.

Run as a program it answers one JSON list of arguments per line of its input with one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any

from fedalloy.core.errors import FedalloyError
from fedalloy.flower.commands import CONNECTION, environment, write_connection
from fedalloy.flower.layout import ServerPlace


class FlwrFailed(FedalloyError):
    """A ``flwr`` command failed; says which and what it wrote."""


@dataclass
class Shell:
    """Commands to one server. Closed by ``close`` or when this process ends."""

    place: ServerPlace
    extra: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None

    def ask(self, *arguments: str) -> dict[str, Any]:
        """Run ``flwr ARGUMENTS`` with ``--format json``; its answer."""
        answer = self._exchange([*arguments, "--format", "json"])
        found = _last_object(answer["out"])
        if answer["code"] or not found.get("success"):
            # Flower ends a process that has failed, a few seconds later: the next command gets a new one.
            self.close()
            raise FlwrFailed(f"'flwr {' '.join(arguments)}' failed: {_reason(found, answer['out'])}")
        return found

    def text(self, *arguments: str) -> str:
        """What ``flwr ARGUMENTS`` writes."""
        answer = self._exchange(list(arguments))
        if answer["code"]:
            self.close()
            raise FlwrFailed(f"'flwr {' '.join(arguments)}' failed: {_reason({}, answer['out'])}")
        return str(answer["out"])

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Every node that is let in by its id: its ``status`` (registered, online, offline) and since when
        (``online-at``)."""
        found = self.ask("supernode", "list", CONNECTION)["nodes"]
        return {one["node-id"]: one for one in found if one["status"] != "unregistered"}

    def runs(self) -> list[dict[str, Any]]:
        """All runs of the server, newest first."""
        return list(self.ask("list", CONNECTION)["runs"])

    def close(self) -> None:
        """End the program."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def _exchange(self, arguments: list[str]) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:
            self.close()
            raise FlwrFailed(f"'flwr {' '.join(arguments)}' ended without an answer") from error
        return answer

    def _start(self) -> subprocess.Popen[str]:
        write_connection(self.place)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedalloy.flower.shell"], env=environment(self.place.home, self.extra),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        return self._process


def serve() -> None:
    """Answer until the input ends. Some of what ``flwr`` says goes past ``sys.stdout``: the files themselves are
    exchanged."""
    with os.fdopen(os.dup(1), "w") as answers, tempfile.TemporaryFile() as said:
        for number in (1, 2):
            os.dup2(said.fileno(), number)
        for line in sys.stdin:
            said.seek(0)
            said.truncate()
            code = _invoke(json.loads(line))
            said.seek(0)
            answers.write(json.dumps({"code": code, "out": said.read().decode("utf-8", "replace")}) + "\n")
            answers.flush()


def _invoke(arguments: list[str]) -> int:
    """One command in this process; its exit code."""
    from flwr.cli.app import app

    try:
        app(arguments, prog_name="flwr")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _last_object(text: str) -> dict[str, Any]:
    """The JSON object at the end of what a command wrote."""
    for position in (index for index, letter in enumerate(text) if letter == "{"):
        with contextlib.suppress(ValueError):
            found = json.loads(text[position:])
            return found if isinstance(found, dict) else {}
    return {}


def _reason(found: dict[str, Any], text: str) -> str:
    return str(found.get("error-message") or found.get("error") or text.strip()[-500:] or "it said nothing")


if __name__ == "__main__":
    serve()
