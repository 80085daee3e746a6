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
from fedalloy.experiment.fit import fit
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.lock import holder, locked
from fedalloy.experiment.records.reading import read_run
from fedalloy.experiment.records.stop import REQUESTED, ask_to_stop
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


def test_a_request_to_an_earlier_session_is_ignored(tmp_path):
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


def test_a_lock_whose_process_id_was_given_to_another_process_has_no_holder(tmp_path):
    """After SIGKILL the file still names a process; ours has that number now, and holds nothing."""
    (tmp_path / "lock").write_text(f"{os.getpid()}\n")
    assert holder(tmp_path / "lock") is None
    with pytest.raises(CheckpointError, match="nothing is running"):
        ask_to_stop(tmp_path)


def test_looking_at_a_lock_never_keeps_a_run_from_starting(tmp_path):
    """Whoever looks has the lock for a moment, together with all others who look."""
    path, done = tmp_path / "lock", threading.Event()
    path.touch()

    def look() -> None:
        while not done.is_set():
            holder(path)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for thread in lookers:
        thread.start()
    try:
        for _ in range(30):
            with locked(path):
                assert holder(path) == os.getpid()
    finally:
        done.set()
        for thread in lookers:
            thread.join()


@pytest.mark.parametrize("shift", [-3600, 3600])
def test_a_request_does_not_depend_on_the_clock(tmp_path, shift):
    """A clock that was set back between the start and the request, or forward between two sessions."""

    def ask(event) -> None:
        if event.progress.round == 2:
            ask_to_stop(tmp_path / "run")
            moved = (tmp_path / "run" / "lock").stat().st_mtime + shift
            os.utime(tmp_path / "run" / "stop", (moved, moved))

    assert train(tmp_path / "run", watcher=ask).status == "stopped"


def test_a_request_to_a_session_that_was_killed_is_ignored_whatever_its_time(tmp_path):
    train(tmp_path / "run", watcher=asking_in(2, tmp_path / "run"))
    (tmp_path / "run" / "stop").write_text("word of a session that is gone\n")
    ahead = (tmp_path / "run" / "lock").stat().st_mtime + 3600
    os.utime(tmp_path / "run" / "stop", (ahead, ahead))
    assert train(tmp_path / "run", resume=True).status == "finished"


def test_a_file_made_by_hand_asks_whoever_is_running(tmp_path):
    def touch(event) -> None:
        if event.progress.round == 2:
            (tmp_path / "run" / "stop").touch()

    assert train(tmp_path / "run", watcher=touch).status == "stopped"


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "9" * 40])
def test_a_lock_without_a_process_has_no_holder(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    assert holder(tmp_path / "lock") is None


def test_rows_can_be_read_while_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("fedalloy.experiment.recorder.SHOWN_EVERY", 0.0)
    seen = []
    train(tmp_path / "run", watcher=lambda event: seen.append(read_run(tmp_path / "run").last_round))
    assert seen == [1, 2, 3, 4, 5, 6]


def test_the_lock_names_its_holder(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {}, {})
    with folder.lock():
        assert holder(tmp_path / "run" / "lock") == os.getpid()
