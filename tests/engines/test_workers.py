"""Worker processes: the loop's numbers, whatever happens to the processes; and no process is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedalloy import algorithms
from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import ClientError, SpecError
from fedalloy.core.keys import Key
from fedalloy.engines.loop import Loop
from fedalloy.engines.shared_cohort import Overwritten, SharedCohort
from fedalloy.engines.shared_memory import Layout, shared_rows
from fedalloy.engines.workers import Crew, Workers
from fedalloy.experiment.fit import fit
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.testing import SmallTask, Wavering, check_engine, engine_cases, small_task, work
from fedalloy.testing.answers import answered
from fedalloy.testing.comparing import differences
from fedalloy.testing.faults import FAULTS, wrong_answer
from tests.engines.rounds import gaps, play, task_of

FRAGILE = 2
"""The client whose examples bring a process down."""
CODE = 3
PATIENCE = 20.0


@pytest.fixture
def engine():
    made = Workers(2)
    yield made
    made.close()
    assert multiprocessing.active_children() == []


@dataclass
class Trouble:
    """Shared by all processes of a test: how often the fragile client still brings its process down."""

    folder: Path
    deaths: int

    def strike(self) -> None:
        taken = len(list(self.folder.iterdir()))
        if taken < self.deaths:
            (self.folder / f"death-{taken}").touch()
            os._exit(CODE)


class Fragile(nn.Module):
    """A linear model that does not survive inputs above 50 while there is trouble."""

    trouble: Trouble | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        if self.trouble is not None and float(x.max()) > 50:
            self.trouble.strike()
        return self.layer(x.clamp(max=50))


def fragile_task(folder: Path, deaths: int) -> SmallTask:
    module = type("Fragile", (Fragile,), {"trouble": Trouble(folder, deaths)})
    task = task_of(module)
    x = task.block.x.clone()
    x[int(task.block.start[FRAGILE])] = 99.0
    return replace(task, block=replace(task.block, x=x))


ALGORITHM = algorithms.scaffold(lr=0.3, batch_size=8)


# ---------------------------------------------------------------------------------------------- the same numbers


HARD = {"scaffold", "wire with memory", "wavering steps", "dropout", "batchnorm and state", "failing links"}


def test_it_is_the_loop_bit_for_bit(engine):
    """Within its tolerance every case passes in the table of ``test_conformance``; the hard ones are even equal."""
    cases = [case for case in engine_cases() if case.name in HARD]
    assert len(cases) == len(HARD)
    assert check_engine(engine, cases, tolerance=0.0) == []


@pytest.mark.parametrize("name", ["key_by_slot", "forgotten_mask", "lost_client_state", "shuffled_clients"])
def test_a_fault_planted_into_it_is_caught(name, engine):
    case = "wavering steps" if name != "shuffled_clients" else "lopsided weights"
    assert check_engine(FAULTS[name](engine), [one for one in engine_cases() if one.name == case])


def test_a_cohort_larger_than_the_first_gets_a_larger_crew(engine):
    task = small_task()
    for ids in ((0, 1), (0, 1, 2, 3, 4), (3,)):
        assert gaps(play(engine, ALGORITHM, task, work(*ids)), play(Loop(), ALGORITHM, task, work(*ids)), 0.0) == []


@dataclass(frozen=True)
class Counting(Wavering):
    """Keeps plain numbers beside tensors."""

    def init_client(self, shared, key):
        return super().init_client(shared, key) | {"rounds": 0, "share": 0.1, "new": True, "notes": {}}

    def end(self, carry, shared, mine, steps, ctx):
        payload, kept = super().end(carry, shared, mine, steps, ctx)
        counted = {"rounds": mine["rounds"] + 1, "share": mine["share"] / 3, "new": False, "notes": {}}
        return payload, {**kept, **counted}


def test_plain_numbers_in_a_state_survive(engine):
    algorithm, task = Algorithm(Counting(), Uniform(), ServerSgd()), small_task()
    found, expected = (play(one, algorithm, task) for one in (engine, Loop()))
    assert gaps(found, expected, 0.0) == []
    assert found.states[1]["solver"]["rounds"] == 1
    assert found.states[1]["solver"]["new"] is False
    assert found.states[1]["solver"]["share"] == 0.1 / 3


def test_a_state_that_changes_its_structure_is_refused(engine):
    @dataclass(frozen=True)
    class Growing(Wavering):
        def end(self, carry, shared, mine, steps, ctx):
            payload, kept = super().end(carry, shared, mine, steps, ctx)
            return payload, {**kept, "more": torch.zeros(1)}

    with pytest.raises(ClientError, match=r"changed its structure at solver\.more"):
        play(engine, Algorithm(Growing(), Uniform(), ServerSgd()), small_task())


def test_rows_hold_what_was_written():
    values = {"a": {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}, "b": {}, "c": 7, "d": {"e": {}}}
    layout = Layout.of(values)
    rows = shared_rows(2, layout)
    layout.write(rows[1], values)
    assert list(differences(layout.read(rows[1]), values)) == []
    assert not bool(rows[0].any())
    with pytest.raises(SpecError, match=r"changed its structure at b, b\.x"):
        layout.write(rows[0], {**values, "b": {"x": torch.ones(1)}})
    with pytest.raises(SpecError, match="'text' is a str: states hold tensors and plain numbers"):
        Layout.of({"a": "text"})


# ---------------------------------------------------------------------------------------------- crashes


def test_a_process_that_dies_once_is_replaced_and_nothing_shows(tmp_path, engine):
    task = fragile_task(tmp_path, deaths=1)
    found = play(engine, ALGORITHM, task)
    assert len(list(tmp_path.iterdir())) == 1
    assert gaps(found, play(Loop(), ALGORITHM, task), 0.0) == []


def test_one_that_dies_again_stops_the_run_and_names_its_client(tmp_path, engine):
    with pytest.raises(ClientError) as caught:
        play(engine, ALGORITHM, fragile_task(tmp_path, deaths=2), round=4)
    assert (caught.value.client, caught.value.round, caught.value.stage) == (FRAGILE, 4, "worker")
    assert f"its worker process died 2 times (exit code {CODE})" in str(caught.value)
    assert multiprocessing.active_children() == []
    # The trouble is over: the same engine starts new processes.
    assert len(play(engine, ALGORITHM, small_task()).cohort) == 5


def test_or_its_client_is_dropped_and_the_round_goes_on(tmp_path):
    engine, task = Workers(2, on_crash="drop"), fragile_task(tmp_path, deaths=2)
    found, expected = play(engine, ALGORITHM, task), play(Loop(), ALGORITHM, task)
    neutral = ALGORITHM.neutral({"params": task.objective.init(Key.of(0))[0], "buffers": {}})
    assert list(found.failures) == [FRAGILE]
    assert "died 2 times" in found.failures[FRAGILE]
    others = expected.cohort.select(expected.cohort.ids[expected.cohort.ids != FRAGILE])
    assert list(differences(answered(found.cohort, neutral), answered(others, neutral))) == []
    assert set(found.states) == set(expected.states) - {FRAGILE}
    assert gaps(play(engine, ALGORITHM, task), expected, 0.0) == []
    engine.close()


def test_a_run_goes_on_without_a_client_that_crashes(tmp_path):
    (tmp_path / "trouble").mkdir()
    task = fragile_task(tmp_path / "trouble", deaths=2)
    result = fit(ALGORITHM, task, rounds=2, engine=Workers(2, on_crash="drop"), metrics=("loss",))
    first, second = result.rounds()
    assert (first["absent"], second["absent"]) == ([FRAGILE], [])
    assert "died 2 times" in first["dropped"][str(FRAGILE)]
    assert multiprocessing.active_children() == []


def test_a_process_killed_between_rounds_is_replaced(engine):
    task = small_task()
    play(engine, ALGORITHM, task)
    victim = multiprocessing.active_children()[0]
    victim.kill()
    victim.join()
    assert gaps(play(engine, ALGORITHM, task, round=2), play(Loop(), ALGORITHM, task, round=2), 0.0) == []
    assert len(multiprocessing.active_children()) == 2


@dataclass(frozen=True)
class Breaks(Sgd):
    def step(self, carry, grad_at, draws, phase, ctx):
        raise FloatingPointError("too far")


def test_a_clients_own_error_comes_back_with_its_name(engine):
    with pytest.raises(ClientError) as caught:
        play(engine, Algorithm(Breaks(), Uniform(), ServerSgd()), small_task(), work(3), round=7)
    assert str(caught.value) == (
        "client 3 failed in round 7 at stage 'step 1 of 1': RuntimeError: FloatingPointError: too far"
    )
    assert multiprocessing.active_children() == []


def test_an_error_outside_a_clients_program_is_told_as_well(engine):
    parent = os.getpid()

    @dataclass(frozen=True, eq=False)
    class Locked(SmallTask):
        def data(self, part, ids):
            if os.getpid() != parent:
                raise PermissionError("the disk is locked")
            return super().data(part, ids)

    task = small_task()
    with pytest.raises(ClientError, match="at stage 'worker': PermissionError: the disk is locked"):
        play(engine, ALGORITHM, Locked(task.objective, task.block))


# ---------------------------------------------------------------------------------------------- nobody is left behind


def alive(pid: int) -> bool:
    """Whether a process still runs; one that nobody has waited for yet has ended as well."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + PATIENCE
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_no_process_survives_close_or_the_engine_itself():
    engine = Workers(2)
    play(engine, ALGORITHM, small_task())
    pids = [child.pid for child in multiprocessing.active_children() if child.pid]
    assert len(pids) == 2
    engine.close()
    assert multiprocessing.active_children() == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # not even a zombie
    play(engine, ALGORITHM, small_task())
    assert len(multiprocessing.active_children()) == 2
    del engine
    gc.collect()
    assert multiprocessing.active_children() == []


class Slow(nn.Module):
    """Takes a while, so that a signal comes in the middle of a round."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        time.sleep(0.5)
        return self.layer(x)


def run_in_a_child(report: Path, forever: bool) -> int:
    """Fork a process that plays rounds with two workers; ``report`` gets their ids, and what became of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine, task = Workers(2), task_of(Slow)
        play(engine, ALGORITHM, task, work(0, 1))
        children = [child.pid for child in multiprocessing.active_children()]
        report.with_suffix(".part").write_text(" ".join(map(str, children)))
        report.with_suffix(".part").rename(report)
        try:
            while forever:
                play(engine, ALGORITHM, task, work(0, 1))
        except KeyboardInterrupt:
            os._exit(len(multiprocessing.active_children()))
    finally:
        os._exit(99)


def started(report: Path) -> list[int]:
    end = time.monotonic() + PATIENCE
    while not report.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return [int(word) for word in report.read_text().split()]


def test_workers_end_when_their_parent_is_killed(tmp_path):
    parent = run_in_a_child(tmp_path / "report", forever=True)
    children = started(tmp_path / "report")
    assert len(children) == 2
    assert all(map(alive, children))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert gone(children)


def test_an_interrupt_leaves_no_children(tmp_path):
    parent = run_in_a_child(tmp_path / "report", forever=True)
    children = started(tmp_path / "report")
    time.sleep(0.1)
    os.kill(parent, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == 0
    assert gone(children)


# ---------------------------------------------------------------------------------------------- contributions


def test_processes_sum_in_place_what_one_process_would_sum(monkeypatch):
    monkeypatch.setattr("fedalloy.engines.shared_cohort.SHARED_FROM", 8)
    monkeypatch.setattr("fedalloy.core.tree.COLUMNS", 7)
    engine, asked = Workers(3), list[object]()
    cohort = play(engine, ALGORITHM, small_task("mlp")).cohort
    assert isinstance(cohort, SharedCohort)
    assert cohort.owner is not None
    sum_there = cohort.owner.sum_there

    def watched(*given):
        asked.append(given)
        return sum_there(*given)

    monkeypatch.setattr(cohort.owner, "sum_there", watched)
    weights = torch.rand(len(cohort), dtype=torch.float64)
    for part in cohort.parts:
        assert list(differences(cohort.combine(part, weights), tree.combine(cohort.payload[part], weights))) == []
    assert asked
    engine.close()


def test_a_late_clients_rows_are_not_the_ones_that_processes_see(monkeypatch):
    monkeypatch.setattr("fedalloy.engines.shared_cohort.SHARED_FROM", 8)
    engine, task = Workers(2), small_task("mlp")
    cohort = play(engine, ALGORITHM, task).cohort
    neutral = ALGORITHM.neutral({"params": task.objective.init(Key.of(0))[0], "buffers": {}})
    late, weights = cohort.resend(cohort.ids[:2], neutral), torch.ones(len(cohort), dtype=torch.float64)
    some = cohort.select(cohort.ids[2:])
    assert list(differences(late.combine("delta", weights), some.combine("delta", weights[2:]), 1e-12)) == []
    engine.close()


def test_a_worker_that_dies_while_it_sums_is_replaced(monkeypatch):
    monkeypatch.setattr("fedalloy.engines.shared_cohort.SHARED_FROM", 8)
    engine, task = Workers(2), small_task("mlp")
    cohort = play(engine, ALGORITHM, task).cohort
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    weights = torch.rand(len(cohort), dtype=torch.float64)
    expected = tree.combine(cohort.payload["delta"], weights)
    assert list(differences(cohort.combine("delta", weights), expected)) == []
    assert gaps(play(engine, ALGORITHM, task), play(Loop(), ALGORITHM, task), 0.0) == []
    engine.close()


def test_contributions_that_were_overwritten_say_so_and_kept_ones_last():
    engine, task = Workers(2), small_task("mlp")
    first = play(engine, ALGORITHM, task).cohort
    kept, before = first.keep(), {name: leaf.clone() for name, leaf in first.payload["delta"].items()}
    play(engine, ALGORITHM, task, round=2)
    assert list(differences(kept.payload["delta"], before)) == []
    with pytest.raises(Overwritten, match=r"keep\(\) copies them"):
        first.combine("delta", torch.ones(len(first)))
    engine.close()


@pytest.mark.parametrize(
    "late",
    [
        lambda cohort, alone, neutral: cohort.select(cohort.ids[:2]),
        lambda cohort, alone, neutral: cohort.resend(cohort.ids[:1], neutral),
        lambda cohort, alone, neutral: cohort.alone("delta", "delta"),
        lambda cohort, alone, neutral: alone.combine("delta", torch.ones(len(cohort))),
    ],
    ids=["select", "resend", "alone", "one part"],
)
def test_nothing_is_made_of_contributions_that_were_overwritten(engine, late):
    task = small_task("mlp")
    neutral = ALGORITHM.neutral({"params": task.objective.init(Key.of(0))[0], "buffers": {}})
    first = play(engine, ALGORITHM, task).cohort
    alone, resent = first.alone("delta", "delta"), first.resend(first.ids[:1], neutral)
    some, weights = first.select(first.ids[1:]), torch.ones(len(first), dtype=torch.float64)
    expected = resent.combine("delta", weights)
    play(engine, ALGORITHM, task, round=2)
    with pytest.raises(Overwritten):
        late(first, alone, neutral)
    assert list(differences(resent.combine("delta", weights), expected)) == []
    assert list(differences(some.combine("delta", weights[1:]), expected, 1e-12)) == []


def test_rows_beside_a_client_that_crashed_are_refused_when_overwritten(tmp_path):
    engine, task = Workers(2, on_crash="drop"), fragile_task(tmp_path, deaths=2)
    first = play(engine, ALGORITHM, task, work(0, 1, FRAGILE)).cohort
    assert first.ids.tolist() == [0, 1]
    play(engine, ALGORITHM, task, work(0, 1, FRAGILE), round=2)
    with pytest.raises(Overwritten):
        first.combine("delta", torch.ones(2))
    engine.close()


def test_contributions_of_an_engine_that_was_closed_start_no_processes(engine, monkeypatch):
    monkeypatch.setattr("fedalloy.engines.shared_cohort.SHARED_FROM", 8)
    cohort = play(engine, ALGORITHM, small_task("mlp")).cohort
    engine.close()
    weights = torch.rand(len(cohort), dtype=torch.float64)
    expected = tree.combine(cohort.payload["delta"], weights)
    assert list(differences(cohort.combine("delta", weights), expected)) == []
    assert multiprocessing.active_children() == []


def test_a_sum_that_is_interrupted_leaves_no_answer_behind(engine, monkeypatch):
    monkeypatch.setattr("fedalloy.engines.shared_cohort.SHARED_FROM", 8)
    task = small_task("mlp")
    cohort = play(engine, ALGORITHM, task).cohort
    assert isinstance(cohort, SharedCohort)
    assert isinstance(cohort.owner, Crew)
    first = cohort.owner.members[0]

    class Interrupted:
        def __getattr__(self, name):
            return getattr(first_pipe, name)

        def recv(self):
            raise KeyboardInterrupt

    first_pipe = first.pipe
    monkeypatch.setattr(first, "pipe", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        cohort.combine("delta", torch.ones(len(cohort)))
    assert gaps(play(engine, ALGORITHM, task), play(Loop(), ALGORITHM, task), 0.0) == []


def test_a_handle_that_does_not_copy_what_it_should_keep_is_caught():
    engine = Workers(2)
    case = next(one for one in engine_cases() if one.name == "fedavg")
    problems = check_engine(wrong_answer("keep", torch.clone)(engine), [case])
    assert any("kept contributions changed" in str(one) or "Overwritten" in str(one) for one in problems)
    engine.close()
