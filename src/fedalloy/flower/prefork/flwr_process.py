"""The ``flwr`` command line in a persistent process: loading it takes longer than most of its commands.

Run as a program it answers one JSON list of arguments per line of its input with one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass


@dataclass
class KeptOpen:
    """``flwr`` in one process, started by the first command and closed by ``close`` or when this process ends."""

    environment: dict[str, str]
    _process: subprocess.Popen[str] | None = None

    def run(self, arguments: list[str]) -> tuple[int, str]:
        """The exit code and output of a command; ``OSError`` when the process ended without an answer."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:
            self.close()
            raise OSError("flwr ended without an answer") from error
        if answer["code"]:
            # Flower ends a process a few seconds after a failure: use a new one for the next command.
            self.close()
        return int(answer["code"]), str(answer["out"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedalloy.flower.prefork.flwr_process"], env=self.environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        return self._process


def serve() -> None:
    """Answer until the input ends. Some output of ``flwr`` bypasses ``sys.stdout``, so the file descriptors themselves
    are redirected."""
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


if __name__ == "__main__":
    serve()
