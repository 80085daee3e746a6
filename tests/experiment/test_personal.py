"""Clients with a model of their own: how they are scored, from where, and that a run with them can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedalloy
from fedalloy import algorithms
from fedalloy.core.errors import CheckpointError
from fedalloy.core.keys import Key
from fedalloy.core.store import StoredStates
from fedalloy.experiment import trained as trained_module
from fedalloy.experiment.fit import RunResult, fit
from fedalloy.experiment.mixing import LAMBDAS, readings
from fedalloy.experiment.records.disk_store import DiskStore
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.segments import segments
from fedalloy.experiment.records.store import MemoryStore, read_store
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.tasks.evaluation import evaluate_clients, evaluate_models, evaluate_pool
from fedalloy.tasks.metrics.summary import summarise
from fedalloy.testing import small_task
from fedalloy.testing.comparing import differences

TASK = small_task(sizes=(4, 7, 12, 9, 5, 8))
LOCAL: dict[str, Any] = {"lr": 0.3, "batch_size": 4}
METRICS = ("accuracy", "loss")


def train(name: str, **settings) -> RunResult:
    extra = {"start": 0.0} if name.startswith("superfed") else {}
    algorithm = algorithms.named(name, **LOCAL, **extra)
    return fit(algorithm, TASK, **{"rounds": 3, "cohort": 3, "engine": "loop", "metrics": METRICS, **settings})


def rows_of(result: RunResult, round: int, model: str) -> list[dict[str, Any]]:
    return [row for row in result.clients() if row["round"] == round and row["model"] == model]


# ---------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("name", ["ditto", "fedper", "superfed_mm", "apfl", "local_only"])
def test_every_client_is_scored_with_its_own_model_and_the_global_one_stands_beside(name):
    result = train(name)
    ids = torch.arange(TASK.population)
    (personal,), (shared,) = (rows_of(result, 3, model) for model in ("personal", "global"))
    assert personal["ids"] == shared["ids"] == ids.tolist()
    for client, (params, buffers) in enumerate(result.trained.models(ids)):
        alone = evaluate_pool(TASK.objective, params, buffers, TASK.data("test", ids).client(client), METRICS)
        for metric in METRICS:
            assert personal[metric][client] == pytest.approx(alone[metric], abs=1e-12)
    common = evaluate_clients(TASK.objective, result.model, {}, TASK.data("test", ids), METRICS)
    assert shared["loss"] == common["loss"].tolist()
    assert personal["loss"] != shared["loss"]
    last = list(result.rounds())[-1]
    for column, row in (("evaluation", personal), ("evaluation_global", shared)):
        for metric in METRICS:
            assert last[column][metric] == summarise(
                torch.tensor(row[metric], dtype=torch.float64), higher_is_better=metric == "accuracy"
            )
    assert list(result.clients())[-1]["model"] == "personal", "who reads the last row gets what counts"


def test_without_models_of_their_own_there_is_one_row_and_it_says_so():
    result = train("fedavg")
    assert [row["model"] for row in result.clients()] == ["global"] * 3
    assert all("evaluation_global" not in row and "evaluation_mix" not in row for row in result.rounds())


def test_a_client_that_never_took_part_has_its_initial_model():
    result = train("superfed_mm", rounds=1, cohort=2)
    took_part = set(next(result.rounds())["ids"])
    trained = result.trained
    assert set(trained.store.get(range(6))) == took_part
    for client in set(range(6)) - took_part:
        key = trained.fed.root.fold("new client").fold(client)
        initial = trained.fed.algorithm.init_client(trained.shared, key, TASK.objective.init)
        assert list(differences(trained.states(torch.tensor([client]))[client], initial)) == []
        expected = evaluate_pool(
            TASK.objective, *trained.model_of(initial), TASK.data("test", torch.tensor([client])).client(0), METRICS
        )
        assert rows_of(result, 1, "personal")[0]["loss"][client] == pytest.approx(expected["loss"], abs=1e-12)


def test_states_are_read_a_few_clients_at_a_time(monkeypatch):
    whole = train("ditto")
    monkeypatch.setattr(trained_module, "_MOST", 2)
    asked: list[int] = []
    real = MemoryStore.get

    def counting(self, ids):
        asked.append(len(ids))
        return real(self, ids)

    monkeypatch.setattr(MemoryStore, "get", counting)
    few = train("ditto", cohort=2)
    assert max(asked) == 2
    monkeypatch.setattr(MemoryStore, "get", real)
    again = train("ditto")
    assert [json.dumps(row) for row in again.clients()] == [json.dumps(row) for row in whole.clients()]
    assert few.status == "finished"


# ---------------------------------------------------------------------------------------------- mixtures


@pytest.mark.parametrize("name", ["superfed_mm", "superfed_lm", "apfl"])
def test_mixtures_are_recorded_for_every_client_and_read_in_three_ways(name):
    result = train(name)
    mixed = rows_of(result, 3, "mixed")
    assert [row["mix"] for row in mixed] == list(LAMBDAS) == [pytest.approx(step / 10) for step in range(11)]
    assert mixed[0]["loss"] == pytest.approx(rows_of(result, 3, "global")[0]["loss"], abs=1e-12)
    table = torch.tensor([row["accuracy"] for row in mixed], dtype=torch.float64)
    last = list(result.rounds())[-1]["evaluation_mix"]["accuracy"]
    assert last["mean"] == pytest.approx(table.mean(1).tolist())
    assert last["fixed"]["lambda"] == 0.5
    assert last["fixed"]["mean"] == pytest.approx(float(table[5].mean()))
    assert last["best_mean"]["mean"] == pytest.approx(float(table.mean(1).max()))
    assert last["best_mean"]["lambda"] == LAMBDAS[int(table.mean(1).argmax())]
    assert last["oracle"]["mean"] == pytest.approx(float(table.max(0).values.mean()))
    assert last["fixed"]["mean"] <= last["best_mean"]["mean"] <= last["oracle"]["mean"]
    losses = list(result.rounds())[-1]["evaluation_mix"]["loss"]
    assert losses["oracle"]["mean"] <= losses["best_mean"]["mean"] <= losses["fixed"]["mean"]


def test_lambda_is_chosen_on_the_validation_part_and_scored_on_the_test_part():
    test = torch.tensor([[0.1] * 3, *[[0.3] * 3] * 4, [0.5] * 3, *[[0.7] * 3] * 4, [0.9] * 3])
    valid = torch.full((11, 3), torch.nan)
    valid[:, 0] = torch.arange(11)  # best at lambda = 1, where its test value is 0.9
    valid[:, 1] = 1.0  # a tie: the nearest to 0.5
    assert readings(test, True, valid)["validated"]["mean"] == pytest.approx((0.9 + 0.5 + 0.5) / 3)
    assert readings(test, False, valid)["validated"]["mean"] == pytest.approx((0.1 + 0.5 + 0.5) / 3)
    assert "validated" not in readings(test, True)
    assert "validated" not in readings(test, None, valid)


def test_a_run_has_a_validated_mixture_only_if_the_task_has_validation_parts():
    def mixtures(valid_fraction: float) -> tuple[Any, RunResult, dict[str, Any]]:
        task = fedalloy.task("digits", clients=4, valid_fraction=valid_fraction)
        result = fit(algorithms.named("superfed_mm", **LOCAL, start=0.0), task, rounds=2, engine="loop")
        return task, result, list(result.rounds())[-1]["evaluation_mix"]["accuracy"]

    assert "validated" not in mixtures(0.0)[2]
    task, result, last = mixtures(0.05)
    ids = torch.arange(4)
    models = [result.trained.models(ids, mix) for mix in LAMBDAS]
    valid, test = (
        torch.stack([evaluate_models(task.objective, some, task.data(part, ids))["accuracy"] for some in models])
        for part in ("valid", "test")
    )
    order = [5, 4, 6, 3, 7, 2, 8, 1, 9, 0, 10]  # away from 0.5: max() keeps the first of equal ones
    chosen = [max(order, key=lambda mix: float(valid[mix, client])) for client in range(4)]
    assert last["validated"]["mean"] == pytest.approx(float(test[chosen, ids].mean()))
    assert last["validated"]["mean"] < last["oracle"]["mean"]


def test_mixtures_follow_their_schedule_and_the_last_round_has_one():
    def rounds(**settings):
        result = train("superfed_mm", rounds=7, evaluate_every=4, **settings)
        return [row["round"] for row in result.rounds() if "evaluation_mix" in row]

    assert rounds() == [7]
    assert rounds(mix_every=3) == [3, 6, 7]
    assert all("evaluation_mix" not in row for row in train("ditto", mix_every=1).rounds())


def test_a_client_without_a_value_is_skipped_in_every_reading():
    values = torch.tensor([[0.2, torch.nan]] * 5 + [[0.4, torch.nan]] * 6)
    for higher in (True, False):
        found = readings(values, higher)
        assert found["oracle"]["mean"] == pytest.approx(0.4 if higher else 0.2)
        assert found["oracle"]["skipped"] == 1
        assert found["best_mean"]["lambda"] == (0.5 if higher else 0.0)
    assert readings(values, higher=None).keys() == {"lambda", "mean", "fixed"}, "no lambda is better than another"


# ---------------------------------------------------------------------------------------------- resume

SETTINGS: dict[str, Any] = {"rounds": 5, "devices": DeviceProfile(success=0.7, on_failure="resend")}


class Stop(Exception):
    """Raised by a watcher to end a run without warning."""


def after(round: int):
    def watch(event) -> None:
        if event.row["round"] == round:
            raise Stop

    return watch


def states(folder: Path) -> dict[str, Any]:
    opened = RunFolder.open(folder)
    saved = opened.latest()
    assert saved is not None
    clients = read_store(saved.clients, opened.clients).get(range(TASK.population))
    return {"server": saved.server, "clients": {str(client): mine for client, mine in clients.items()}}


@pytest.mark.parametrize(
    ("name", "every", "memory"),
    [
        ("superfed_mm", 0.0, 0.0),
        ("superfed_mm", 1e9, 0.0),
        ("superfed_mm", 0.0, 64.0),
        ("ditto", 0.0, 0.0),
        ("fedper", 0.0, 0.0),
        ("scaffold", 0.0, 0.0),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_personal_state_included(tmp_path, name, every, memory):
    """With a checkpoint after every round, and with none; with the states in memory, and on disk."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = {**SETTINGS, "checkpoint_every": every, "client_memory_mb": memory}
    expected = train(name, folder=whole, **settings)
    for stop in (2, 4):
        with pytest.raises(Stop):
            train(name, folder=broken, resume=stop > 2, watcher=after(stop), **settings)
    result = train(name, folder=broken, resume=True, **settings)
    assert result.status == "finished"
    assert list(differences(result.model, expected.model)) == []
    assert list(differences(states(broken), states(whole))) == []
    for record in ("rounds.jsonl", "clients.jsonl"):
        assert (broken / record).read_bytes() == (whole / record).read_bytes()
    assert (memory == 0) == (whole / "clients").is_dir()


@pytest.mark.parametrize("name", ["superfed_mm", "scaffold"])
def test_where_states_are_kept_changes_nothing(name):
    in_memory, on_disk = (train(name, **SETTINGS, client_memory_mb=memory) for memory in (64.0, 0.0))
    assert isinstance(in_memory.trained.store, MemoryStore)
    assert isinstance(on_disk.trained.store, DiskStore)
    assert [json.dumps(row) for row in in_memory.clients()] == [json.dumps(row) for row in on_disk.clients()]
    assert list(differences(in_memory.model, on_disk.model)) == []


def test_a_checkpoint_of_a_large_run_holds_no_clients_state(tmp_path):
    train("ditto", folder=tmp_path / "run", client_memory_mb=0.0)
    saved = RunFolder.open(tmp_path / "run").latest()
    assert saved is not None
    assert isinstance(saved.clients, StoredStates)
    assert not saved.clients
    assert saved.clients.where["clients"] == TASK.population


def test_a_state_that_is_gone_makes_the_run_go_on_from_the_checkpoint_before(tmp_path):
    settings = {**SETTINGS, "checkpoint_every": 0.0, "client_memory_mb": 0.0}
    whole = train("ditto", folder=tmp_path / "whole", **settings)
    with pytest.raises(Stop):
        train("ditto", folder=tmp_path / "broken", watcher=after(4), **settings)
    folder = RunFolder.open(tmp_path / "broken")
    last = folder.latest()
    assert last is not None
    (segment,) = segments(folder.clients)
    segment.cut(int((segment.table()["round"] <= last.round).sum()) - 1)  # without the newest state that it needs
    with pytest.warns(RuntimeWarning, match="missing"):
        result = train("ditto", folder=tmp_path / "broken", resume=True, **settings)
    assert list(differences(result.model, whole.model)) == []


@pytest.mark.parametrize(("first", "then"), [(0.0, 64.0), (64.0, 0.0)])
def test_resuming_with_another_kind_of_store_is_refused(tmp_path, first, then):
    with pytest.raises(Stop):
        train("ditto", folder=tmp_path, watcher=after(2), checkpoint_every=0.0, client_memory_mb=first)
    with pytest.raises(CheckpointError, match="client_memory_mb it began with"):
        train("ditto", folder=tmp_path, resume=True, client_memory_mb=then)
    assert train("ditto", folder=tmp_path, resume=True, client_memory_mb=first).status == "finished"


def test_the_key_of_a_client_does_not_depend_on_when_it_is_met():
    late, early = (train("superfed_mm", rounds=rounds).trained for rounds in (1, 2))
    missing = set(range(6)) - set(early.store.get(range(6)))
    for client in missing:
        one, other = (run.states(torch.tensor([client]))[client]["solver"]["local"] for run in (late, early))
        assert list(differences(one, other)) == []
    assert Key.of(0).fold("new client").seed() == late.fed.root.fold("new client").seed()
