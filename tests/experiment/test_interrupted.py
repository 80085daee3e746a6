"""What would fail again has failed; what came from outside has interrupted the run, and it goes on."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core.errors import CheckpointError, ClientError, FedalloyError, RunLocked, is_passing
from fedalloy.engines.workers import WorkerDied
from fedalloy.experiment.fit import fit
from fedalloy.experiment.records import atomic, checkpoint
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.reading import read_run, read_status
from fedalloy.testing import small_task

TASK = small_task()
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def train(folder: Path, **settings: Any):
    return fit(algorithms.fedavg(lr=0.3, batch_size=4), TASK, folder=folder, rounds=4, engine="loop", **settings)


def caused(error: Exception, by: BaseException) -> Exception:
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (FULL, True),
        (PermissionError("no"), True),
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (KeyboardInterrupt(), True),
        (RunLocked("somebody"), True),
        (ClientError("step", MemoryError(), client=3, round=2), True),
        (caused(FedalloyError("told"), FULL), True),
        (ZeroDivisionError("in code"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ClientError("step", ZeroDivisionError(), client=3, round=2), False),
        (CheckpointError("a state holds tensors, not this"), False),
        (WorkerDied("segmentation fault"), False),
    ],
)
def test_errors_from_outside_are_told_from_errors_in_code(error, passing):
    assert is_passing(error) is passing


@pytest.mark.parametrize(
    ("error", "state"),
    [(FULL, "interrupted"), (MemoryError(), "interrupted"), (ZeroDivisionError("in code"), "failed")],
)
def test_the_folder_says_which_it_was_and_the_run_goes_on(tmp_path, error, state):
    def watch(event) -> None:
        if event.progress.round == 2:
            raise error

    with pytest.raises(type(error)):
        train(tmp_path / "run", watcher=watch, checkpoint_every=0.0)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["round"]) == (state, 2)
    assert status["reason"]
    train(tmp_path / "whole")
    assert train(tmp_path / "run", resume=True).status == "finished"
    for name in ("rounds.jsonl", "clients.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_on_a_full_disk_the_status_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise FULL

    def watch(event) -> None:
        if event.progress.round == 2:
            monkeypatch.setattr(atomic, "write_atomically", full)
            monkeypatch.setattr(checkpoint, "write_atomically", full)

    with pytest.raises(OSError, match="No space left"):
        train(tmp_path / "run", watcher=watch, checkpoint_every=0.0)
    monkeypatch.undo()
    status = read_run(tmp_path / "run").status
    assert (status["state"], status["round"]) == ("interrupted", 2)
    assert "No space left" in status["reason"]
    assert train(tmp_path / "run", resume=True).status == "finished"


@pytest.mark.parametrize("old", ["short\n", "long " * 100])
def test_a_text_written_into_the_room_of_another_is_whole(tmp_path, old):
    (tmp_path / "file").write_text(old)
    atomic.overwrite_text(tmp_path / "file", "something new\n")
    assert (tmp_path / "file").read_text() == "something new\n"


def test_a_checkpoint_that_finds_no_room_says_so_as_the_operating_system_does(tmp_path):
    """The writer of the format has an error of its own; here for a limit on the size of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            checkpoint.write(tmp_path / "state.safetensors", {"w": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.errno == errno.EFBIG


def test_a_run_that_says_running_while_nobody_writes_was_interrupted(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {}, {})
    with folder.lock():
        folder.set_status("running", 3)
        assert read_status(folder.path)["state"] == "running"
    assert read_status(folder.path) == {"state": "interrupted", "round": 3, "reason": ""}
    assert read_run(folder.path).status["state"] == "interrupted"
    for broken in ("", "{", "[1]"):
        (folder.path / "status.json").write_text(broken)
        assert read_status(folder.path)["state"] == "interrupted"
