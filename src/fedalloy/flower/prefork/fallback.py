"""Flower's own way of starting processes: a new one for every message, every run and every command."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedalloy.flower.prefork import OFF, SWITCH, FlwrProcess, command_line, search_path, write_stand_in
from fedalloy.flower.prefork.worker import LOG, LOG_FORMAT

if TYPE_CHECKING:
    from flwr.app import RecordDict


_SELDOM = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5"}
"""A process for an order takes seconds to start; asking for orders ten times a second would take a tenth of a core of
an idle server, and as much of an idle node."""


@dataclass(frozen=True)
class Fallback:
    """A launcher that does not change Flower."""

    def command(self, program: str) -> list[str]:
        """A Flower program."""
        return command_line(program)

    def environment(self, home: Path) -> dict[str, str]:
        """A ``PATH`` on which Flower finds its program for starting processes as one that announces itself."""
        return {"PATH": search_path(write_stand_in(home / "bin")), SWITCH: OFF, **_SELDOM}

    def flwr(self, environment: Mapping[str, str]) -> FlwrProcess:
        """A process for every command."""
        return OneProcessEach(dict(environment))

    def respond(self, store: Path, node_config: Mapping[str, Any], content: RecordDict) -> RecordDict:
        """Carry out an order in this process, which Flower has started for it."""
        from fedalloy.flower.node.answer import respond

        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.chdir(store):
            logging.basicConfig(filename=LOG, level=logging.INFO, format=LOG_FORMAT)
            return respond(content, node_config)


@dataclass(frozen=True)
class OneProcessEach:
    """``flwr``, started for every command."""

    environment: dict[str, str]

    def run(self, arguments: list[str]) -> tuple[int, str]:
        """The exit code and output of a command."""
        done = subprocess.run(
            [*command_line("flwr"), *arguments], env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False, start_new_session=True,
        )  # fmt: skip
        return done.returncode, done.stdout.decode("utf-8", "replace")

    def close(self) -> None:
        """Nothing to end."""
