"""A writer killed at any moment leaves a folder that continues to the same files as one never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedalloy.core.errors import RunLocked
from fedalloy.core.protocols import ClientStore
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.segments import encode
from fedalloy.experiment.records.store import read_store
from tests.cli.lines import Nursery
from tests.experiment.records import writing

STREAMS = ("rounds", "clients", "timings")


class Writers:
    """Starts writers in processes of their own and kills them, one at a time."""

    def __init__(self, cli: Nursery, root: Path) -> None:
        self.cli, self.begin = cli, f"import sys; sys.path.insert(0, {str(root)!r})\n"
        self.begin += "from pathlib import Path\nfrom tests.experiment.records.writing import write_run\n"

    def start(self, folder: Path, kind: str = "memory") -> int:
        self.child = self.cli.start(code=f"{self.begin}write_run({kind!r}, Path({str(folder)!r}))")
        return self.child[0]

    def wait(self) -> None:
        done = self.cli.wait(self.child)
        assert done.code == 0, done.err

    def kill(self, pid: int) -> None:
        """The number belongs to this writer until it is waited for, dead or alive."""
        os.kill(pid, signal.SIGKILL)
        done = self.cli.wait(self.child)
        assert done.code in (0, -signal.SIGKILL), done.err


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, "the writer does not get on"
        time.sleep(0.0005)


def wait_for_round(folder: RunFolder, goal: int) -> None:
    """Until a checkpoint of round ``goal`` or later is there."""
    wait_until(lambda: goal == 0 or any(int(path.stem[6:]) >= goal for path in folder.path.glob("checkpoints/round-*")))


@pytest.fixture
def writers(cli: Nursery, root: Path) -> Writers:
    return Writers(cli, root)


def fresh(path: Path) -> RunFolder:
    return RunFolder.create(path, {"run": {"rounds": writing.ROUNDS}}, {})


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a run but its lock, which names a process, and the clients' states of its last checkpoint: where
    these are in their files depends on when the run was resumed."""
    folder = RunFolder.open(path)
    last = folder.latest()
    states = read_store(last.clients, folder.clients).get(range(20)) if last else {}
    return {f"state of {client}": encode(state) for client, state in states.items()} | {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "lock" and file.parent.name != "clients"
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp("run") / kind for kind in ("memory", "disk")}
    for kind, path in paths.items():
        fresh(path)
        writing.write_run(kind, path)
    return paths


def expected_states(round: int) -> dict[int, int]:
    """In which round each client's state was made."""
    seen: dict[int, int] = {}
    for past in range(1, round + 1):
        seen |= {past % 5: past, 7 * past % 11: past}
    return seen


def check_states(store: ClientStore, round: int) -> None:
    found = store.get(range(11))
    assert {client: int(mine["solver"]["seen"]) for client, mine in found.items()} == expected_states(round)
    for client, seen in expected_states(round).items():
        assert torch.equal(found[client]["solver"]["model"], writing.client_after(seen)["solver"]["model"])


def check_prefix(folder: RunFolder, whole: Path, kind: str) -> int:
    """After a kill: the newest checkpoint is whole, and the records go back to exactly its rounds."""
    with folder.lock():
        last = folder.latest(report=pytest.fail)
        folder.rewind(last)
        store = writing.make_store(kind, folder)
        store.restore(last.round if last else 0, last.clients if last else {})
    done = last.round if last else 0
    check_states(store, done)
    for name in STREAMS:
        lines = (whole / f"{name}.jsonl").read_bytes().splitlines(keepends=True)[:done]
        assert (folder.path / f"{name}.jsonl").read_bytes() == b"".join(lines)
    if last is not None:
        assert bool((last.server["params"]["w"] == writing.server_after(done)["params"]["w"]).all())
    assert not list(folder.path.rglob(".*"))
    return done


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_killed_at_random_moments_it_ends_in_the_same_files(
    tmp_path: Path, writers: Writers, undisturbed: dict[str, Path], kind: str
) -> None:
    folder, chance, reached = fresh(tmp_path / "killed"), random.Random(4), [0]
    for _ in range(12):
        pid = writers.start(folder.path, kind)
        wait_for_round(folder, min(reached[-1] + chance.randrange(20), writing.ROUNDS))
        time.sleep(chance.uniform(0, 0.005))
        writers.kill(pid)
        reached.append(check_prefix(folder, undisturbed[kind], kind))
        assert reached[-1] >= reached[-2]
    assert len({*reached} - {0, writing.ROUNDS}) > 0, "no writer was killed in the middle of its work"
    writers.start(folder.path, kind)
    writers.wait()
    assert contents(folder.path) == contents(undisturbed[kind])
    assert (kind == "disk") == folder.clients.is_dir()


def test_the_lock_is_refused_while_held_and_free_after_a_kill(tmp_path: Path, writers: Writers) -> None:
    folder = fresh(tmp_path / "busy")
    os.mkfifo(tmp_path / "gate")
    # The writer blocks while it holds the lock: its first stream is a pipe that nobody reads.
    (folder.path / "rounds.jsonl").unlink()
    os.link(tmp_path / "gate", folder.path / "rounds.jsonl")
    pid = writers.start(folder.path)
    wait_until(lambda: (folder.path / "lock").read_text().startswith(f"{pid}\n"))
    try:
        with pytest.raises(RunLocked, match=rf"process {pid}\. Wait .*\(touch .*/stop\)"), folder.lock():
            pass
    finally:
        writers.kill(pid)
    (folder.path / "rounds.jsonl").unlink()
    with folder.lock():
        assert (folder.path / "lock").read_text().startswith(f"{os.getpid()}\n")


def test_the_status_tells_how_it_ended(undisturbed: dict[str, Path]) -> None:
    status = json.loads((undisturbed["memory"] / "status.json").read_text())
    assert status == {"state": "finished", "round": writing.ROUNDS, "reason": ""}
