"""A run that is asked to stop through its folder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from fedalloy import algorithms
from fedalloy.core.errors import CheckpointError
from fedalloy.records.folder import RunFolder
from fedalloy.records.lock import holder
from fedalloy.records.reading import read_run
from fedalloy.records.stop import REQUESTED, ask_to_stop
from fedalloy.run.fit import fit
from fedalloy.testing import small_task

TASK = small_task()
SETTINGS: dict[str, Any] = {"engine": "loop", "rounds": 6}


def train(folder, **more):
    return fit(algorithms.named("fedavg", lr=0.3, batch_size=4), TASK, folder=folder, **{**SETTINGS, **more})


def asking_in(round, folder):
    return lambda event: ask_to_stop(folder) if event.progress.round == round else None


def test_a_request_ends_the_run_after_its_round_and_it_can_go_on(tmp_path):
    whole = list(train(tmp_path / "whole").rounds())
    stopped = train(tmp_path / "run", watcher=asking_in(2, tmp_path / "run"))
    assert (stopped.status, stopped.ending.reason, stopped.ending.progress.round) == ("stopped", REQUESTED, 2)
    assert read_run(tmp_path / "run").status["reason"] == REQUESTED
    assert not (tmp_path / "run" / "stop").exists()
    assert list(train(tmp_path / "run", resume=True).rounds()) == whole


def test_a_request_is_heard_outside_the_main_thread_too(tmp_path):
    ended = []
    thread = threading.Thread(
        target=lambda: ended.append(train(tmp_path / "run", watcher=asking_in(3, tmp_path / "run")))
    )
    thread.start()
    thread.join()
    assert ended[0].status == "stopped"
    assert ended[0].ending.progress.round == 3


def test_a_request_to_an_earlier_sitting_is_not_heard(tmp_path):
    train(tmp_path / "run", watcher=asking_in(2, tmp_path / "run"))
    (tmp_path / "run" / "stop").touch()
    os.utime(tmp_path / "run" / "stop", (1, 1))
    assert train(tmp_path / "run", resume=True).status == "finished"


def test_nothing_is_asked_of_a_run_that_is_not_going(tmp_path):
    with pytest.raises(CheckpointError, match="nothing is running"):
        ask_to_stop(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "lock").write_text(f"{gone.pid}\n")
    assert holder(tmp_path / "lock") is None
    with pytest.raises(CheckpointError, match="nothing is running"):
        ask_to_stop(tmp_path)
    assert not (tmp_path / "stop").exists()


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "9" * 40])
def test_a_lock_without_a_process_has_no_holder(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    assert holder(tmp_path / "lock") is None


def test_rows_can_be_read_while_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("fedalloy.run.recorder.SHOWN_EVERY", 0.0)
    seen = []
    train(tmp_path / "run", watcher=lambda event: seen.append(read_run(tmp_path / "run").last_round))
    assert seen == [1, 2, 3, 4, 5, 6]


def test_the_lock_names_its_holder(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {}, {})
    with folder.lock():
        assert holder(tmp_path / "run" / "lock") == os.getpid()
