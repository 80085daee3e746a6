"""A served folder of runs, and a client that speaks to it as a browser would."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedalloy import algorithms
from fedalloy.experiment.fit import RunResult, fit
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.report.live.server import LiveServer
from fedalloy.testing import small_task

TOKEN = "a-long-enough-token"
RECIPE = {"algorithm": {"name": "fedavg"}, "run": {"rounds": 5, "seeds": [3], "target_metric": "accuracy"}}


def round_row(round: int, clients: int = 3) -> dict[str, Any]:
    return {
        "round": round, "ids": list(range(clients)), "weights": [1 / clients] * clients, "train_loss": 1 / round,
        "absent": [], "late": [], "dropped": {"1": "not finite"} if round == 2 else {}, "bytes_up": 8, "bytes_down": 8,
        "simulated_seconds": 1.0, "info": {}, "evaluation": {"accuracy": {"mean": round / 10, "worst": 0.1}},
    }  # fmt: skip


def make_run(path: Path, rounds: int = 3, state: str = "finished", recipe: dict[str, Any] | None = None) -> Path:
    folder = RunFolder.create(path, recipe or RECIPE, {"python": "3"}, {"names": ["ann", "bob", "eve"]})
    with folder.lock():
        for round in range(1, rounds + 1):
            folder.append("rounds", round_row(round))
            scores = {"ids": [0, 1, 2], "accuracy": [0.5, round / 10, None]}
            folder.append("clients", {"round": round, "split": "test", "model": "global", **scores})
            folder.append("timings", {"round": round, "clients": 0.5})
        folder.set_status(state, rounds)  # type: ignore[arg-type]
    return path


class Answer(NamedTuple):
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Sends what it is told; nothing is added but the right Host, unless another is given."""

    def __init__(self, server: LiveServer) -> None:
        self.server, self.port = server, int(server.server_address[1])

    def send(
        self, method: str, target: str, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, target, body, headers or {})
            found = connection.getresponse()
            return Answer(found.status, found.headers, found.read())
        finally:
            connection.close()

    def get(self, target: str, **headers: str) -> Answer:
        return self.send("GET", target, {name.replace("_", "-"): value for name, value in headers.items()})

    def stop(self, run: str, token: str | None = TOKEN, **headers: str) -> Answer:
        sent = {
            "Content-Type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        if token is not None:
            sent["X-Fedalloy-Token"] = token
        return self.send("POST", "/api/stop", sent, json.dumps({"run": run}).encode())

    def events(self, target: str) -> Stream:
        return Stream(self.port, target)


class Stream:
    """A stream of events that remembers what came."""

    def __init__(self, port: int, target: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request("GET", target)
        self._stream, self.seen = self._connection.getresponse(), list[tuple[str, Any]]()
        assert self._stream.status == 200, self._stream.read()
        assert self._stream.headers["Content-Type"].startswith("text/event-stream")

    def until(self, kind: str, wanted: Callable[[Any], bool] = lambda value: True) -> Any:
        """The first value, among those that came and those to come, for which ``wanted`` holds."""
        for known, value in self.seen:
            if known == kind and wanted(value):
                return value
        while True:
            known, value = self._next()
            if known == kind and wanted(value):
                return value

    def _next(self) -> tuple[str, Any]:
        kind, silences = "", 0
        for line in self._stream:
            if line.startswith(b"event: "):
                kind = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                self.seen.append((kind, json.loads(line[6:])))
                return self.seen[-1]
            silences += line.startswith(b":")
            assert silences < 8, f"what was expected did not come; what came: {self.seen}"
        raise AssertionError(f"the stream ended; what came: {self.seen}")

    def close(self) -> None:
        self._stream.close()
        self._connection.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def serving(root: Path) -> Iterator[Callable[..., Client]]:
    """Starts servers over ``root``, which end with the test."""
    started: list[tuple[LiveServer, threading.Thread]] = []

    def start(token: str | None = TOKEN) -> Client:
        server = LiveServer(root, 0, token, every=0.02)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        started.append((server, thread))
        return Client(server)

    yield start
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()


class Going:
    """A real run in a thread, which plays a round whenever it is told to."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self._go, self._played = folder, threading.Semaphore(0), threading.Semaphore(0)
        self._hurry, self.result = False, list[RunResult]()
        self._thread = threading.Thread(target=self._run, args=(rounds,))
        self._thread.start()

    def play(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self._go.release()
            assert self._played.acquire(timeout=120)

    def end(self) -> RunResult | None:
        """Play on without waiting until the run ends by itself or because it was asked to."""
        self._hurry = True
        self._go.release()
        self._thread.join()
        return self.result[0] if self.result else None

    def _run(self, rounds: int) -> None:
        algorithm = algorithms.named("fedavg", lr=0.3, batch_size=4)
        self.result.append(
            fit(algorithm, small_task(), rounds=rounds, engine="loop", folder=self.folder, watcher=self._watch)
        )

    def _watch(self, event: Any) -> None:
        self._played.release()
        if not self._hurry:
            self._go.acquire(timeout=120)


@pytest.fixture
def going(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Going]]:
    monkeypatch.setattr("fedalloy.experiment.recorder.SHOWN_EVERY", 0.0)
    begun: list[Going] = []

    def begin(name: str = "live", rounds: int = 12) -> Going:
        begun.append(Going(root / name, rounds))
        assert begun[-1]._played.acquire(timeout=120)
        return begun[-1]

    yield begin
    for one in begun:
        one.end()
