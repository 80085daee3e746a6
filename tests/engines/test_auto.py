"""The engine that picks an engine: what it expects, what it measures, that it stays with it."""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedalloy import algorithms
from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import Engine, Outcome
from fedalloy.engines import auto
from fedalloy.engines.auto import Auto, Candidate, expected
from fedalloy.engines.batched import Batched
from fedalloy.engines.freed_memory import keep_freed_memory
from fedalloy.engines.loop import Loop
from fedalloy.engines.out_of_core import StorageLimit
from fedalloy.engines.processes import forks
from fedalloy.engines.workers import Workers
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.fit import fit
from fedalloy.experiment.machinery import make_engine
from fedalloy.testing import check_engine, engine_cases, small_task, work
from tests.engines.rounds import gaps, play, shared_of, task_of

FEDAVG = algorithms.fedavg(batch_size=3)
UNFUSED = algorithms.fedavg(clip_norm=1.0)


@pytest.fixture(autouse=True)
def _threads():
    """An engine that sets the number of threads must not leave it to the next test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def names(algorithm, task, clients=4, cores=2) -> list[str]:
    return [one.name for one in expected(algorithm, task, shared_of(algorithm, task), clients, cores)]


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))


# ---------------------------------------------------------------------------------------------- what is expected


def test_shapes_decide_what_is_tried_first():
    assert names(FEDAVG, task_of(lambda: nn.Linear(4, 3))) == ["batched"]
    assert names(UNFUSED, small_task()) == ["batched", "workers"]
    assert names(algorithms.scaffold(), small_task()) == ["batched"]
    assert names(FEDAVG, task_of(conv, shape=(1, 4, 4))) == ["workers", "batched"]
    large = task_of(lambda: nn.Linear(1000, 600), sizes=(1,), shape=(1000,))
    assert names(FEDAVG, large, clients=10) == ["batched", "batched", "workers"]


@pytest.mark.parametrize("model", [conv, lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3))])
def test_one_core_has_no_workers(model):
    task = task_of(model, shape=(1, 4, 4))
    for algorithm in (FEDAVG, UNFUSED):
        assert "workers" not in names(algorithm, task, cores=1)
    engine = make_engine(RunConfig(threads=1))
    assert isinstance(engine, Auto)
    play(engine, FEDAVG, task)
    assert "workers" not in str(engine.choice)
    assert engine.choice["threads"] == 1


def test_one_core_is_not_measured_so_that_comparisons_are_the_same_every_time():
    for task in (small_task("dropout"), task_of(conv, shape=(1, 4, 4))):
        for clients in (1, 4):
            assert len(names(UNFUSED, task, clients, cores=1)) == 1


def test_small_models_get_one_thread():
    (small,) = expected(FEDAVG, task := small_task(), shared_of(FEDAVG, task), 4, 8)
    assert (small.name, small.threads) == ("batched", 1)
    large = task_of(lambda: nn.Linear(1000, 300), sizes=(1,), shape=(1000,))
    wide = expected(FEDAVG, large, shared_of(FEDAVG, large), 4, 8)
    assert [(one.name, one.threads) for one in wide] == [("batched", 8), ("batched", 1)]


def test_it_uses_as_many_cores_as_torch_may():
    torch.set_num_threads(3)
    assert Auto()._threads == 3


# ---------------------------------------------------------------------------------------------- what is measured


@dataclass
class Fake(Engine):
    """An engine that takes as long as it is told to."""

    seconds: float
    broken: bool = False
    calls: int = 0
    closed: int = 0
    outcome: Any = None

    def __call__(self, *given) -> Outcome:
        self.calls += 1
        if self.broken:
            raise MemoryError
        CLOCK.now += self.seconds
        self.outcome = Loop()(*given)
        return self.outcome

    def close(self) -> None:
        self.closed += 1


@dataclass
class Clock:
    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@dataclass(frozen=True)
class FakeCandidate(Candidate):
    engine: Any = field(default=None)

    def make(self):
        return self.engine


@pytest.fixture
def trial(monkeypatch):
    """Auto with engines of the given seconds as candidates, the first being the expected one."""

    def prepare(*engines: Fake) -> Auto:
        candidates = [FakeCandidate(f"engine {place}", 1, engine=engine) for place, engine in enumerate(engines)]
        monkeypatch.setattr(auto, "expected", lambda *_: candidates)
        monkeypatch.setattr(auto, "time", CLOCK)
        return Auto()

    return prepare


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [((1.0, 0.9), 0), ((1.0, 0.67), 0), ((1.0, 0.66), 1), ((1.0, 5.0), 0), ((9.0, 8.0, 1.0), 2), ((0.2, 0.1), 1)],
)
def test_the_expected_engine_stays_unless_a_rival_is_much_faster(trial, seconds, winner):
    engines = [Fake(one) for one in seconds]
    chosen, task = trial(*engines), small_task()
    outcome = play(chosen, FEDAVG, task)
    assert chosen.choice["engine"] == f"engine {winner}"
    assert list(chosen.choice["measured_seconds"].values()) == [pytest.approx(one) for one in seconds]
    assert outcome is engines[winner].outcome
    # A winner that was not the first one begins again, with processes that hold nothing of the others.
    assert [engine.closed for engine in engines] == [int(place > 0 or winner > 0) for place in range(len(engines))]
    before = [engine.calls for engine in engines]
    play(chosen, FEDAVG, task, round=2)
    assert [engine.calls - calls for engine, calls in zip(engines, before, strict=True)] == [
        int(place == winner) for place in range(len(engines))
    ]


def test_contributions_of_a_trial_that_nobody_needs_are_let_go(trial):
    """They may be as large as a disk: at most those of the best engine are there when another one begins."""
    made: list[weakref.ref[Any]] = []

    class Watched(Fake):
        def __call__(self, *given):
            assert sum(one() is not None for one in made) <= 1
            found = super().__call__(*given)
            self.outcome = None
            made.append(weakref.ref(found))
            return found

    play(trial(Watched(1.0), Watched(0.1), Watched(5.0), Watched(0.01)), FEDAVG, small_task())
    assert len(made) == 7


@pytest.mark.skipif(not Path("/proc/self/maps").exists() or not forks(), reason="needs Linux")
def test_processes_of_the_winner_keep_no_contributions_of_other_trials(tmp_path, monkeypatch):
    """Their file has no name, so its space would not be free before the last process that has it ends."""
    candidates = [FakeCandidate(str(one), 1, engine=one) for one in (Batched(), Workers(2))]
    monkeypatch.setattr(auto, "expected", lambda *_: candidates)
    monkeypatch.setattr(auto, "MUCH_FASTER", 0.0)
    chosen, task = Auto(), small_task()
    chosen.keep_contributions(StorageLimit(0.0, tmp_path))
    try:
        for round in (1, 2):
            found = play(chosen, FEDAVG, task, round=round)
            assert found.cohort.combine("delta", torch.ones(5, dtype=torch.float64))
            del found
        assert isinstance(chosen._engine, Workers)
        assert chosen._engine._crew is not None
        for member in chosen._engine._crew.members:
            maps = Path(f"/proc/{member.process.pid}/maps").read_text()
            assert len({line.split()[4] for line in maps.splitlines() if str(tmp_path) in line}) == 1
    finally:
        chosen.close()


def test_short_rounds_get_a_second_look_because_the_first_pays_for_starting_up(trial):
    class Starting(Fake):
        def __call__(self, *given):
            self.seconds = 2.0 if self.calls == 0 else 0.01
            return super().__call__(*given)

    slow_start, rival, long = Starting(0.0), Fake(0.1), Fake(10.0)
    chosen = trial(slow_start, rival, long)
    play(chosen, FEDAVG, small_task())
    assert chosen.choice["engine"] == "engine 0"
    assert (slow_start.calls, rival.calls, long.calls) == (2, 2, 1)


def test_a_round_that_fails_leaves_no_engine_open(trial):
    engines = [Fake(1.0), Fake(1.0, broken=True)]
    chosen = trial(*engines)
    with pytest.raises(MemoryError):
        play(chosen, FEDAVG, small_task())
    assert [engine.closed for engine in engines] == [1, 1]
    assert chosen.choice == {}


# ---------------------------------------------------------------------------------------------- what is kept


def test_a_restored_choice_is_not_measured_again(monkeypatch):
    monkeypatch.setattr(auto, "expected", lambda *_: pytest.fail("measured again"))
    engine, task = Auto(), small_task()
    engine.restore({"engine": "loop", "threads": 1, "measured_seconds": {"loop x1": 0.5}})
    assert gaps(play(engine, FEDAVG, task), play(Loop(), FEDAVG, task), 0.0) == []
    assert isinstance(engine._engine, Loop)
    assert engine.choice["measured_seconds"] == {"loop x1": 0.5}


def test_a_choice_nobody_knows_is_refused():
    engine = Auto({"engine": "lop", "threads": 1})
    with pytest.raises(SpecError, match="auto cannot pick 'lop': did you mean 'loop'"):
        play(engine, FEDAVG, small_task())


def test_a_run_records_its_choice_and_a_resumed_one_keeps_it(tmp_path):
    task, settings = small_task("dropout"), {"rounds": 4, "checkpoint_every": 0.0, "folder": tmp_path / "run"}

    def stop(event):
        if event.row["round"] == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(FEDAVG, task, watcher=stop, **settings)
    fit(FEDAVG, task, resume=True, **settings)
    rows = [json.loads(line) for line in (tmp_path / "run" / "timings.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    (choice,) = [row["engine"] for row in rows if "engine" in row]
    assert {"engine", "threads", "measured_seconds"} == choice.keys()
    engine = Auto()
    fit(FEDAVG, task, engine=engine, resume=True, **{**settings, "rounds": 6})
    # What was measured depends on the clock: it is told once, and no part of the checkpoint.
    assert engine.choice == {name: choice[name] for name in ("engine", "threads")}


def test_another_run_with_the_same_object_chooses_again(trial):
    engines = [Fake(1.0), Fake(0.5)]
    chosen = trial(*engines)
    fit(FEDAVG, small_task(), rounds=2, engine=chosen)
    assert [engine.calls for engine in engines] == [2, 3]
    fit(FEDAVG, small_task("linear"), rounds=2, engine=chosen)
    assert [engine.calls for engine in engines] == [4, 6]
    given = Auto({"engine": "loop", "threads": 1})
    for _ in range(2):
        fit(FEDAVG, small_task(), rounds=1, engine=given)
        assert given.choice == {"engine": "loop", "threads": 1}


def test_it_agrees_with_the_loop():
    for case in [one for one in engine_cases() if one.name in {"fedavg", "scaffold", "batchnorm"}]:
        assert check_engine(Auto(), [case]) == []


def test_memory_settings_do_no_harm():
    keep_freed_memory()
    assert torch.zeros(1 << 20).sum() == 0
    assert len(play(Auto(), FEDAVG, small_task(), work(0, 2)).cohort) == 2
