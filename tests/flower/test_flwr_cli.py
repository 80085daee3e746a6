"""Requests to a server by Flower's command line: what survives a server that does not answer."""

from __future__ import annotations

import json
import threading
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedalloy.flower import flwr_cli
from fedalloy.flower.flwr_cli import FlwrCli, FlwrFailed, SubmittedRun, write_connection
from fedalloy.flower.layout import ServerPlace

pytestmark = pytest.mark.flower


class Answers:
    """``flwr`` that answers from a list: a status of the run, or nothing."""

    def __init__(self, *statuses: str | None) -> None:
        self.statuses = list(statuses)

    def run(self, arguments: list[str]) -> tuple[int, str]:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status is None:
            return 1, "connection refused"
        return 0, json.dumps({"success": True, "runs": [{"status": status}]})

    def close(self) -> None: ...

    def flwr(self, environment: object) -> Answers:
        return self

    def environment(self, home: Path) -> dict[str, str]:
        return {}


def submitted(tmp_path: Path, *statuses: str | None) -> SubmittedRun:
    place = ServerPlace(tmp_path, "127.0.0.1", 1, secure=False)
    return SubmittedRun(FlwrCli(place, launcher=Answers(*statuses)), "7")  # type: ignore[arg-type]


def test_a_failed_request_does_not_end_the_follower(tmp_path, monkeypatch):
    monkeypatch.setattr(flwr_cli, "ASK", 0.001)
    seen: list[int] = []
    run = submitted(tmp_path, "running", None, None, "running", None, "finished:completed")
    assert run.wait(60, meanwhile=lambda: seen.append(1)) == "finished:completed"
    assert len(seen) == 6


def test_a_server_that_stays_silent_does(tmp_path, monkeypatch):
    monkeypatch.setattr(flwr_cli, "ASK", 0.001)
    monkeypatch.setattr(flwr_cli, "PATIENCE", 0.05)
    with pytest.raises(FlwrFailed, match="connection refused"):
        submitted(tmp_path, "running", None).wait(60)


def test_the_address_is_written_when_it_changes_and_a_reader_never_sees_half_of_it(tmp_path):
    one, other = (ServerPlace(tmp_path, "127.0.0.1", port, secure=False) for port in (1111, 2222))
    file = tmp_path / "flwr" / "config.toml"
    write_connection(one)
    before = file.stat().st_mtime_ns
    write_connection(one)
    assert file.stat().st_mtime_ns == before, "nothing changed, nothing is written"
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            write_connection(one)
            write_connection(other)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(1000):
            assert tomllib.loads(file.read_text())["superlink"]["default"] == "fedalloy"
    finally:
        over.set()
        for writer in writers:
            writer.join()
    assert [path.name for path in file.parent.iterdir()] == ["config.toml"], "no draft is left"
