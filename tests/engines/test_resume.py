"""Interrupted and resumed, a run is the uninterrupted one bit for bit, whatever the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedalloy import algorithms
from fedalloy.core.protocols import Engine
from fedalloy.engines import auto
from fedalloy.engines.auto import Auto
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.engines.workers import Workers
from fedalloy.experiment.fit import RunResult, fit
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.testing import small_task
from fedalloy.testing.comparing import differences

ENGINES: dict[str, Callable[[], Engine]] = {
    "loop": Loop,
    "batched": Batched,
    "batched, blocks of two": lambda: Batched(block=2),
    "mapped": lambda: Batched(kernel="mapped"),
    "workers": lambda: Workers(2),
    "auto": Auto,
}
RECORDS = ("rounds.jsonl", "clients.jsonl")
SETTINGS: dict[str, Any] = {
    "rounds": 6,
    "cohort": 3,
    "seed": 5,
    "checkpoint_every": 0.0,
    "devices": DeviceProfile(success=0.7, on_failure="resend"),
}


def run(name: str, algorithm: str, folder: Path, **more: Any) -> RunResult:
    chosen = algorithms.named(algorithm, lr=0.3, batch_size=4)
    return fit(chosen, TASKS[algorithm], folder=folder, engine=ENGINES[name](), **{**SETTINGS, **more})


TASKS = {"scaffold": small_task("dropout"), "fedavgm": small_task("mlp")}


@pytest.fixture(autouse=True)
def _same_choice(monkeypatch):
    """What auto measures depends on the clock; two runs are alike only if they pick alike."""
    monkeypatch.setattr(auto, "MUCH_FASTER", math.inf)


def interrupt(round: int, error: BaseException):
    def watch(event) -> None:
        if event.row["round"] == round:
            raise error

    return watch


def saved(folder: Path) -> dict[str, Any]:
    found = RunFolder.open(folder).latest()
    assert found is not None
    return {"server": found.server, "clients": {str(client): state for client, state in found.clients.items()}}


@pytest.mark.parametrize("algorithm", TASKS)
@pytest.mark.parametrize("name", ENGINES)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, name, algorithm):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(name, algorithm, whole)
    with pytest.raises(KeyboardInterrupt):
        run(name, algorithm, broken, watcher=interrupt(2, KeyboardInterrupt()))
    with pytest.raises(InterruptedError):
        run(name, algorithm, broken, resume=True, watcher=interrupt(4, InterruptedError()))
    result = run(name, algorithm, broken, resume=True)
    assert result.status == "finished"
    assert list(differences(result.model, expected.model)) == []
    assert list(differences(saved(broken), saved(whole))) == []
    for record in RECORDS:
        assert (broken / record).read_bytes() == (whole / record).read_bytes()


@pytest.mark.parametrize("name", ENGINES)
def test_a_run_that_is_prolonged_is_the_longer_one(tmp_path, name):
    expected = run(name, "scaffold", tmp_path / "whole")
    run(name, "scaffold", tmp_path / "short", rounds=3, evaluate_every=1)
    longer = run(name, "scaffold", tmp_path / "short", resume=True)
    assert list(differences(longer.model, expected.model)) == []
    for record in RECORDS:
        assert (tmp_path / "short" / record).read_bytes() == (tmp_path / "whole" / record).read_bytes()
