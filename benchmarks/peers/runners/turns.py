"""How a runner takes turns: it reads commands from standard input and answers with lines of JSON.

``check N`` runs N rounds and answers how far they moved the model; ``rounds N`` runs N rounds and answers their
seconds; ``threads N`` sets the number of threads; ``quit`` ends the program. Everything that the framework prints goes
to standard error. Needs numpy alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Load:
    """A workload as it was written to a folder."""

    folder: Path
    name: str
    clients: int
    examples: int
    batch: int
    cohort: int
    lr: float

    @staticmethod
    def read(folder: str | Path) -> Load:
        return Load(Path(folder), **json.loads((Path(folder) / "workload.json").read_text()))

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Features and labels of all clients, client after client."""
        return np.load(self.folder / "x.npy"), np.load(self.folder / "y.npy")

    def initial(self) -> dict[str, np.ndarray]:
        """The model before the first round."""
        return dict(np.load(self.folder / "initial.npz"))

    def rows(self, client: int) -> slice:
        """The rows of one client."""
        return slice(client * self.examples, (client + 1) * self.examples)


class Turns:
    """Told after every round of a framework; blocks while it is the turn of another one."""

    def __init__(self, load: Load, package: str, set_threads: Callable[[int], None] | None = None) -> None:
        self.load, self._set_threads, self._initial = load, set_threads, load.initial()
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._seconds: list[float] = []
        self.wanted, self._checks, self._since = 0, False, 0.0
        self._version = version(package)

    def begin(self) -> None:
        """The framework is ready to run; returns when it is its turn."""
        self.answer({"ready": self._version})
        self.wait()

    def round_done(self, model: Callable[[], Arrays] | None = None) -> None:
        """A round has ended; ``model`` returns the server's model by the names of the initial one."""
        self._seconds.append(time.perf_counter() - self._since)
        if len(self._seconds) >= self.wanted:
            self.answer({"moved": self._moved(model())} if self._checks and model else {"seconds": self._seconds})
            self.wait()
        self._since = time.perf_counter()

    def wait(self) -> None:
        while True:
            command, *number = sys.stdin.readline().split() or ["quit"]
            if command in ("check", "rounds"):
                self._seconds, self.wanted, self._checks = [], int(number[0]), command == "check"
                self._since = time.perf_counter()
                return
            if command == "threads":
                if self._set_threads:
                    self._set_threads(int(number[0]))
                self.answer({"threads": int(number[0]) if self._set_threads else None})
            else:
                self._out.close()
                sys.stderr.flush()
                os._exit(0)  # the framework's own threads and processes need not agree

    def answer(self, answer: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()

    def _moved(self, model: Arrays) -> float:
        return moved(self._initial, model)


def moved(initial: Mapping[str, np.ndarray], model: Arrays) -> float:
    """The distance of a model from its initial values: equal work moves it equally far."""
    return float(np.sqrt(sum(float(np.square(np.asarray(model[name]) - initial[name]).sum()) for name in initial)))


def sample(generator: np.random.Generator, load: Load) -> Sequence[int]:
    """A cohort without replacement, for frameworks that leave sampling to their user."""
    chosen: dict[int, None] = {}
    while len(chosen) < load.cohort:
        chosen[int(generator.integers(load.clients))] = None
    return list(chosen)
