"""A peer's process, and one turn of it: so many rounds while nobody else runs."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import ROOT, Peer
from benchmarks.peers.machine import DISTURBED, busy_seconds, seconds_of, wait_until_idle

LOAD_LIMIT = 120.0
"""Seconds in which a peer must have loaded a workload."""


class PeerFailed(Exception):
    """A peer that cannot run a workload, with its own words."""


@dataclass(frozen=True)
class Turn:
    """The seconds of every round of one turn, and what share of a core others used meanwhile."""

    seconds: list[float]
    others: float
    idle_before: bool

    @property
    def disturbed(self) -> bool:
        return self.others > DISTURBED or not self.idle_before


class Running:
    """A peer that has loaded a workload and waits for its turn.

    It is stopped while it waits: Flower's simulation of 100,000 nodes uses more than half a core between its rounds.
    """

    def __init__(self, peer: Peer, workload: Path, limit: float) -> None:
        self.peer, self._limit = peer, limit
        self._errors = workload / f"{peer.module}.log"
        command = [peer.python, "-m", f"benchmarks.peers.runners.run_{peer.module}", str(workload)]
        paths = os.pathsep.join((str(ROOT), str(ROOT / "src"))) if not peer.needs else str(ROOT)
        with self._errors.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def number(self) -> int:
        """That of the process."""
        return self._process.pid

    def ready(self) -> str:
        """Wait until it has loaded; returns its version."""
        return str(self._read("loading the workload", LOAD_LIMIT)["ready"])

    def check(self, rounds: int) -> float:
        """How far the first rounds move the model."""
        return float(self._ask(f"check {rounds}", f"{rounds} rounds")["moved"])

    def threads(self, count: int) -> None:
        """Use so many threads, where that can be chosen."""
        self._ask(f"threads {count}", "a number of threads")

    def turn(self, rounds: int, patience: float) -> Turn:
        """Some rounds, once the machine is idle or ``patience`` seconds have passed."""
        idle = wait_until_idle(patience)
        own, all_of, begin = seconds_of(self._process.pid), busy_seconds(), time.perf_counter()
        seconds = self._ask(f"rounds {rounds}", f"{rounds} rounds")["seconds"]
        elapsed = time.perf_counter() - begin
        others = (busy_seconds() - all_of) - (seconds_of(self._process.pid) - own)
        return Turn(seconds, max(0.0, others) / max(elapsed, 0.1), idle)

    def close(self) -> None:
        """End it and everything it has started; may be called again."""
        if self._process.returncode is not None:
            return
        with suppress(OSError):
            self._process.send_signal(signal.SIGCONT)
            self._send("quit")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _ask(self, command: str, what: str) -> Mapping[str, Any]:
        self._process.send_signal(signal.SIGCONT)
        self._send(command)
        return self._read(what, self._limit)

    def _send(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()

    def _read(self, what: str, limit: float) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit)[0]:
            raise PeerFailed(f"{what} took more than {limit:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(self._last_words())
        self._process.send_signal(signal.SIGSTOP)
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._errors.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it ended without a word"
