"""A run that is still being written is waited for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("flwr")

from fedalloy.algorithms import fedavg
from fedalloy.core.errors import RunLocked
from fedalloy.experiment.records.lock import in_turn, locked, wait_for_turn
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.ledger import open_ledger
from tests.flower.fake import federation, play, recipe_file

pytestmark = pytest.mark.flower


def test_a_run_that_somebody_else_carries_out_is_taken_up_afterwards(tmp_path):
    recipe, folder = recipe_file(tmp_path, run={"rounds": 1}), tmp_path / "run"
    folder.mkdir()
    let_go, said = threading.Event(), list[str]()

    def hold() -> None:
        with locked(folder / "lock"):
            holding.set()
            let_go.wait(60)

    def hear(text: str) -> None:
        said.append(text)
        if "is still being written" in text:
            let_go.set()

    holding, other = threading.Event(), threading.Thread(target=hold)
    other.start()
    holding.wait(60)
    try:
        assert play(recipe, folder, federation(tmp_path), say=hear).status == "finished"
    finally:
        let_go.set()
        other.join()
    assert len(list(read_run(folder).rounds())) == 1
    assert "is still being written by process" in said[0]
    assert "(session 1)" not in str(said)
    assert sum("begins" in text for text in said) == 1, "it did not begin before its turn"


def test_who_was_quicker_is_waited_for_too(tmp_path):
    turns: Iterator[RunLocked | str] = iter([RunLocked("somebody"), RunLocked("somebody else"), "done"])

    def work() -> str:
        turn = next(turns)
        if isinstance(turn, RunLocked):
            raise turn
        return turn

    assert in_turn(tmp_path, work, print) == "done"


def test_every_writer_is_named_once(tmp_path):
    said: list[str] = []
    with locked(tmp_path / "lock"):
        waits = iter(range(3))

        def sleep(_: float) -> None:
            if next(waits, None) is None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            wait_for_turn(tmp_path, said.append, sleep)
    assert len(said) == 1


def test_a_strategy_waits_for_its_folder_as_well(tmp_path, caplog):
    caplog.set_level(logging.INFO, "flwr")
    with open_ledger(tmp_path / "run", fedavg(), 0):
        pass
    let_go = threading.Event()
    with locked(tmp_path / "run" / "lock"):
        opened = threading.Event()

        def take_up() -> None:
            with open_ledger(tmp_path / "run", fedavg(), 0):
                opened.set()

        waiting = threading.Thread(target=take_up)
        waiting.start()
        assert not opened.wait(0.3)
        let_go.set()
    waiting.join(60)
    assert opened.is_set()
