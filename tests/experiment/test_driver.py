"""Runs: ends, failures, resume, signals."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import CheckpointError, ClientError, RunLocked, SpecError
from fedalloy.core.keys import Key
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.fit import RunResult, as_algorithm, fit
from fedalloy.experiment.health import EMPTY_LIMIT
from fedalloy.experiment.interrupt import stop_on_signal
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.reading import read_run
from fedalloy.experiment.sampling import Listed
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.results.outcome import read_outcome
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.testing import small_task
from fedalloy.testing.comparing import differences

TASK = small_task()
LOCAL: dict[str, Any] = {"lr": 0.3, "batch_size": 4}
COMMON: dict[str, Any] = {"engine": "loop"}


def train(algorithm="fedavg", task=TASK, **settings) -> RunResult:
    chosen = algorithms.named(algorithm, **LOCAL) if isinstance(algorithm, str) else algorithm
    return fit(chosen, task, **{"rounds": 4, **COMMON, **settings})


# ---------------------------------------------------------------------------------------------- plain runs


def test_a_run_records_every_round_and_learns():
    result = train("fedavg", rounds=30)
    rows = list(result.rounds())
    assert result.status == "finished"
    assert [row["round"] for row in rows] == list(range(1, 31))
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] - 0.2
    assert result.last()["mean"] > rows[0]["evaluation"]["accuracy"]["mean"]
    assert len(next(result.clients())["accuracy"]) == TASK.population
    assert set(result.model) == set(TASK.objective.init(Key.of(0))[0])


def test_one_seed_one_run_and_another_seed_another():
    rows = [[json.dumps(row) for row in train("scaffold", cohort=3, seed=seed).rounds()] for seed in (1, 1, 2)]
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]


def test_the_initial_model_depends_on_the_seed_alone():
    def initial(name, **settings):
        result = train(name, rounds=1, devices=DeviceProfile(success=0.0), **settings)
        return result.model["output.bias"]

    assert torch.equal(initial("fedavg"), initial("scaffold"))
    assert not torch.equal(initial("fedavg"), initial("fedavg", seed=1))
    given = {"output.bias": torch.full((3,), 7.0, dtype=torch.float64)}
    assert torch.equal(initial("fedavg", initial=given), given["output.bias"])


@pytest.mark.parametrize(
    ("initial", "fault"),
    [
        ({"module.output.bias": torch.zeros(3)}, "model has no 'module.output.bias': did you mean 'output.bias'"),
        ({"output.bias": torch.zeros(4)}, r"'output.bias' must be a tensor of shape \(3,\), got shape \(4,\)"),
        ({"output.bias": [0.0]}, "got a list"),
        ({"output.bias": torch.full((3,), math.nan)}, "NaN"),
        (torch.nn.Linear(2, 2), r"got a Linear: give its state_dict\(\)"),
    ],
)
def test_an_initial_model_that_does_not_fit_is_refused(initial, fault):
    with pytest.raises(SpecError, match=fault):
        train("fedavg", rounds=1, initial=initial)


def test_buffers_of_an_initial_model_are_buffers():
    task = make_task(
        "digits", clients=2, model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64))
    )
    nobody: dict[str, Any] = {"rounds": 1, "devices": DeviceProfile(success=0.0)}
    before = fit("fedavg", task, **nobody).model
    changed = {name: leaf + 1 for name, leaf in before.items()}
    result = fit("fedavg", task, initial=changed, **nobody)
    assert list(differences(result.model, changed)) == []
    assert not {"1.running_mean"} & result.trained.shared["params"].keys()


def test_evaluation_follows_its_schedule_and_the_last_round_has_one():
    evaluated = [row["round"] for row in train(rounds=7, evaluate_every=3).rounds() if "evaluation" in row]
    assert evaluated == [3, 6, 7]


def test_the_watcher_hears_of_every_round():
    events: list[Any] = []
    train(watcher=events.append)
    assert [event.row["round"] for event in events] == [1, 2, 3, 4]
    assert all(event.rounds == 4 and event.seconds["clients"] > 0 for event in events)


def test_totals_are_kept():
    result = train(devices=DeviceProfile(seconds_per_step=1.0))
    rows = list(result.rounds())
    progress = result.ending.progress
    assert progress.simulated_seconds == sum(row["simulated_seconds"] for row in rows) > 0
    assert progress.bytes_up == sum(row["bytes_up"] for row in rows) > 0
    assert progress.bytes_down == sum(row["bytes_down"] for row in rows) > 0


def test_threads_are_set_for_the_run_and_put_back():
    seen = []
    before = torch.get_num_threads()
    train(threads=2, watcher=lambda event: seen.append(torch.get_num_threads()))
    assert set(seen) == {2}
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------------------------------- ends


def test_the_round_that_reaches_the_target_is_known():
    accuracy = [row["evaluation"]["accuracy"]["mean"] for row in train(rounds=30).rounds()]
    target = sorted(accuracy)[20]
    expected = next(round for round, value in enumerate(accuracy, start=1) if value >= target)
    result = train(rounds=30, target=target)
    assert (result.reached, result.ending.progress.round) == (expected, 30)
    stopped = train(rounds=30, target=target, stop_at_target=True)
    assert stopped.status == "finished"
    assert stopped.ending.reason == f"target reached in round {expected}"
    assert stopped.ending.progress.round == expected


def test_a_target_for_a_loss_is_reached_from_above():
    losses = [row["evaluation"]["loss"]["mean"] for row in train(rounds=6).rounds()]
    assert losses[0] > losses[3]
    result = train(rounds=6, target=losses[3], target_metric="loss", stop_at_target=True)
    assert result.reached == next(round for round, value in enumerate(losses, start=1) if value <= losses[3])


def test_a_target_on_the_global_test_set_looks_there(tmp_path):
    rows = list(train(rounds=30).rounds())
    overall, clients = ([row[key]["accuracy"] for row in rows] for key in ("global", "evaluation"))
    target = sorted(overall)[20]
    expected = next(round for round, value in enumerate(overall, start=1) if value >= target)
    assert expected != next((round for round, value in enumerate(clients, start=1) if value["mean"] >= target), None)
    result = train(rounds=30, target=target, target_on="global", stop_at_target=True, folder=tmp_path)
    assert result.reached == result.ending.progress.round == expected
    outcome = read_outcome(tmp_path)
    assert (outcome.reached, outcome.scores) == (expected, {"mean": overall[expected - 1]})


def test_patience_ends_a_run_that_does_not_improve():
    still = algorithms.fedavg(lr=1e-12, batch_size=4)
    result = train(still, rounds=50, patience=3)
    assert result.status == "finished"
    assert result.ending.progress.round == 4
    assert "no better accuracy in 3 evaluations" in result.ending.reason


@pytest.mark.parametrize("watched", [{"target": 0.5}, {"patience": 3}])
def test_watching_a_metric_that_is_not_evaluated_is_refused(watched: dict[str, Any]):
    with pytest.raises(SpecError, match="target_metric 'accuracy' is not evaluated"):
        RunConfig(metrics=("loss",), **watched)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"rounds": 0}, "rounds must be 1 or more"),
        ({"evaluate_every": 0}, "evaluate every"),
        ({"metrics": ("acuracy",)}, "did you mean 'accuracy'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, error):
    with pytest.raises(Exception, match=error):
        RunConfig(**settings)


def test_generic_metric_names_are_accepted():
    assert "top2" in next(train(rounds=1, metrics=("accuracy", "top2")).rounds())["evaluation"]


# ---------------------------------------------------------------------------------------------- failures


def test_a_diverged_run_ends_as_failed_with_its_round(tmp_path):
    wild = algorithms.fedavg(lr=1e30, weight_decay=1.0, batch_size=4)
    result = train(wild, rounds=20, folder=tmp_path / "run")
    assert result.status == "failed"
    last = result.ending.progress.round
    assert 1 <= last < 20
    assert f"round {last}" in result.ending.reason
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["round"]) == ("failed", last)
    again = train(wild, rounds=20, folder=tmp_path / "run", resume=True)
    assert (again.status, again.ending.progress.round) == ("failed", last)


def test_rounds_in_a_row_without_a_valid_contribution_end_a_run():
    result = train(rounds=20, max_norm=1e-9)
    assert result.status == "failed"
    assert result.ending.progress.round == EMPTY_LIMIT
    assert "no valid contribution for 3 rounds" in result.ending.reason


def test_rounds_in_which_nobody_is_there_do_not():
    first = Listed(((0,), (0,), (0,), (0,), (1,)))
    away = DeviceProfile(availability=(0.0, 1.0, 1.0, 1.0, 1.0))
    assert train(rounds=6, sampling=first, devices=away).status == "finished"


def test_stopping_at_a_target_that_is_not_given_is_refused():
    with pytest.raises(SpecError, match="stop_at_target ends a run at its target, and there is none: give target"):
        train(rounds=1, stop_at_target=True)


@pytest.mark.parametrize("settings", [{}, {"patience": 2}, {"target": 0.0, "stop_at_target": True}])
def test_a_run_in_which_nobody_ever_counted_has_failed(tmp_path, settings):
    result = train(rounds=6, devices=DeviceProfile(success=0.0), folder=tmp_path / "run", **settings)
    assert result.status == "failed"
    assert f"no client contributed in any of {result.ending.progress.round} rounds" in result.ending.reason
    assert read_run(tmp_path / "run").status["state"] == "failed"


def test_a_run_in_which_nobody_took_a_step_has_failed_though_all_count():
    still = train(rounds=3, devices=DeviceProfile(epochs=(0, 0, 0, 0, 0)))
    assert all(row["ids"] == row["idle"] for row in still.rounds())
    assert (still.status, still.ending.reason[:35]) == ("failed", "no client contributed in any of 3 r")
    assert train(rounds=3, devices=DeviceProfile(epochs=(0, 0, 1, 0, 0))).status == "finished"


@dataclass(frozen=True)
class BreaksLater(Sgd):
    def step(self, carry, grad_at, draws, phase, ctx):
        if ctx.round == 3:
            raise ZeroDivisionError("in round three")
        return super().step(carry, grad_at, draws, phase, ctx)


def test_an_error_in_a_client_is_raised_and_told_in_the_folder(tmp_path, monkeypatch):
    from fedalloy.core import registry

    monkeypatch.setitem(registry._rules["solver"], "breaks later", BreaksLater)
    with pytest.raises(ClientError, match="client 0 failed in round 3"):
        train(Algorithm(BreaksLater(**LOCAL), Uniform(), ServerSgd()), folder=tmp_path / "run")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["round"]) == ("failed", 2)
    assert "in round three" in status["reason"]


def test_bad_combinations_fail_before_the_first_round():
    with pytest.raises(SpecError, match="cohort must be between"):
        train(cohort=99)
    with pytest.raises(SpecError, match=r"devices\.epochs lists 2 values for 5 clients"):
        train(devices=DeviceProfile(epochs=(1, 2)))
    with pytest.raises(SpecError, match="fit: unknown setting 'evaluate_evry'; did you mean 'evaluate_every'"):
        train(evaluate_evry=2)
    with pytest.raises(SpecError, match="give one of them"):
        train(cohort=2, sampling=Listed(((0,),)))
    with pytest.raises(CheckpointError, match="resuming needs the folder"):
        train(resume=True)


def test_settings_of_the_method_are_told_from_those_of_the_run():
    with pytest.raises(SpecError, match=r"'lr' is a setting of the method, not of fit: .*fedavg\(lr=\.\.\.\)"):
        train(lr=0.1)


def test_an_algorithm_by_name_value_or_spec():
    spec = {"solver": "sgd", "weighting": "samples", "server": "sgd"}
    assert as_algorithm("fedavg") == as_algorithm(algorithms.fedavg()) == as_algorithm(spec)


# ---------------------------------------------------------------------------------------------- folders and resume

RECORDS = ("rounds.jsonl", "clients.jsonl")


class Stop(Exception):
    """Raised by a watcher to end a run without warning."""


def after(round: int):
    def watch(event) -> None:
        if event.row["round"] == round:
            raise Stop

    return watch


def states(folder: Path) -> dict:
    saved = RunFolder.open(folder).latest()
    assert saved is not None
    return {"server": saved.server, "clients": {str(client): state for client, state in saved.clients.items()}}


SETTINGS: dict[str, Any] = {"rounds": 8, "cohort": 3, "devices": DeviceProfile(success=0.7, on_failure="resend")}


@pytest.mark.parametrize("name", ["scaffold", "fedavgm"])
@pytest.mark.parametrize("every", [0.0, 1e9])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, name, every):
    """With a checkpoint after every round, and with none: then it begins again."""
    task, whole, broken = small_task("dropout"), tmp_path / "whole", tmp_path / "broken"
    settings = {**SETTINGS, "task": task, "checkpoint_every": every}
    expected = train(name, folder=whole, **settings)
    for stop in (3, 6):
        with pytest.raises(Stop):
            train(name, folder=broken, resume=stop > 3, watcher=after(stop), **settings)
    result = train(name, folder=broken, resume=True, **settings)
    assert result.status == "finished"
    assert list(differences(result.model, expected.model)) == []
    assert list(differences(states(broken), states(whole))) == []
    for record in RECORDS:
        assert (broken / record).read_bytes() == (whole / record).read_bytes()
    rounds = [json.loads(line)["round"] for line in (broken / "timings.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, 9))
    assert [row["round"] for row in result.rounds()] == rounds


def test_patience_and_target_survive_a_resume(tmp_path):
    settings = {"rounds": 30, "patience": 4, "checkpoint_every": 0.0}
    whole = train(folder=tmp_path / "whole", **settings)
    with pytest.raises(Stop):
        train(folder=tmp_path / "broken", watcher=after(3), **settings)
    result = train(folder=tmp_path / "broken", resume=True, **settings)
    assert (result.ending.progress, result.ending.reason) == (whole.ending.progress, whole.ending.reason)


def test_a_finished_run_stays_finished(tmp_path):
    first = train(folder=tmp_path)
    again = train(folder=tmp_path, resume=True)
    assert again.status == "finished"
    assert len(list(again.rounds())) == 4
    assert list(differences(again.model, first.model)) == []


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    train(folder=tmp_path)
    with pytest.raises(CheckpointError, match="holds a run already"):
        train(folder=tmp_path)


def test_a_second_writer_is_refused(tmp_path):
    refused = []

    def second(event) -> None:
        try:
            train(folder=tmp_path, resume=True)
        except RunLocked as error:
            refused.append(str(error))

    train(folder=tmp_path, watcher=second)
    assert len(refused) == 4


def test_resuming_where_nothing_began_begins(tmp_path):
    assert train(folder=tmp_path / "new", resume=True).status == "finished"


# ---------------------------------------------------------------------------------------------- signals


def signalling(number, round=2):
    return lambda event: os.kill(os.getpid(), number) if event.row["round"] == round else None


@contextmanager
def handled(number, handler) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_round_and_is_passed_to_who_handles_it(tmp_path, number):
    told: list[int] = []

    def note(number, frame) -> None:
        with RunFolder.open(tmp_path / "run").lock():  # by now everything is safe, and the folder free
            told.append(number)

    settings = {**SETTINGS, "folder": tmp_path / "run"}
    with handled(number, note):
        result = train("scaffold", watcher=signalling(number), **settings)
        assert signal.getsignal(number) is note
    assert told == [number]
    assert result.status == "stopped"
    assert result.ending.reason == f"stopped by {number.name}"
    assert result.ending.progress.round == 2
    resumed = train("scaffold", resume=True, **settings)
    whole = train("scaffold", **SETTINGS)
    assert resumed.status == "finished"
    assert list(differences(resumed.model, whole.model)) == []


def test_ctrl_c_is_raised_when_the_run_is_safe_also_in_its_last_round(tmp_path):
    with handled(signal.SIGINT, signal.default_int_handler):
        for round, state in ((2, "stopped"), (4, "finished")):
            with pytest.raises(KeyboardInterrupt):
                train(watcher=signalling(signal.SIGINT, round), folder=tmp_path / state)
            assert read_outcome(tmp_path / state).state == state


def test_a_signal_is_not_lost_when_the_run_breaks():
    def watch(event) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("broken")

    with handled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt) as interrupted:
        train(watcher=watch)
    assert str(interrupted.value.__context__) == "broken"


def test_an_ignored_signal_stops_the_run_and_nothing_else():
    with handled(signal.SIGTERM, signal.SIG_IGN):
        assert train(watcher=signalling(signal.SIGTERM)).status == "stopped"


def test_sigterm_ends_the_script_and_not_one_of_its_runs_only(tmp_path):
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for seed in range(3):
                train(watcher=signalling(signal.SIGTERM), folder=tmp_path / str(seed), seed=seed)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    outcome = read_outcome(tmp_path / "0")
    assert (outcome.state, outcome.round) == ("stopped", 2)


def test_a_second_interrupt_ends_at_once():
    with stop_on_signal() as flag:
        os.kill(os.getpid(), signal.SIGINT)
        assert flag
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_signals_are_left_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def target() -> None:
        with stop_on_signal() as flag:
            seen.append((bool(flag), signal.getsignal(signal.SIGINT) == before))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    assert seen == [(False, True)]


def test_records_hold_no_numbers_that_json_cannot_say(tmp_path):
    empty = small_task(sizes=(3, 0, 4))
    train(task=empty, folder=tmp_path, rounds=2)
    for record in RECORDS:
        for line in (tmp_path / record).read_text().splitlines():
            json.loads(line, parse_constant=lambda name: pytest.fail(f"a row holds {name}"))
    assert not math.isnan(train(task=empty).last()["mean"])
