"""Clients that never take part: set aside, never heard, scored before and after local steps of their own."""

from __future__ import annotations

import json
import tomllib

import pytest
import torch
from torch.func import grad

from fedalloy import algorithms
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.fit import fit
from fedalloy.experiment.recipe import parse, reopen, reopening, resolve
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.store import read_store
from fedalloy.experiment.unseen import adapt, evaluate_unseen
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.evaluation import evaluate_clients
from fedalloy.testing import small_task
from fedalloy.testing.comparing import differences

PARTITION = {"kind": "classes", "per_client": 2}


def run(name="fedavg", newcomers=3, rounds=2, task=None, **local):
    made = task or make_task("digits", "logistic", PARTITION, 10, newcomers=newcomers)
    algorithm = algorithms.named(name, **{"lr": 0.2, "batch_size": 16, **local})
    return fit(algorithm, made, rounds=rounds, engine="loop"), made


def test_newcomers_are_drawn_from_all_clients_and_come_last():
    everyone = make_task("digits", "logistic", PARTITION, 10)
    aside = make_task("digits", "logistic", PARTITION, 10, newcomers=4)
    assert (aside.population, aside.unseen_ids.tolist()) == (6, [6, 7, 8, 9])
    before, after = (task.manifest.to_json()["class_counts"] for task in (everyone, aside))
    assert sorted(map(tuple, before)) == sorted(map(tuple, after))
    places = [before.index(counts) for counts in after]
    assert places[:6] == sorted(places[:6])
    assert places[6:] != [6, 7, 8, 9], "the last clients of a partition are not like the others: some are drawn"
    assert aside.global_test is not None
    assert len(aside.global_test) == int(aside.test.size[:6].sum())
    assert aside.data("test", aside.unseen_ids).size.tolist() == aside.test.size[6:].tolist()
    with pytest.raises(SpecError, match="somebody takes part"):
        make_task("digits", "logistic", PARTITION, 4, newcomers=4)


def test_newcomers_are_neither_sampled_nor_scored_in_a_run():
    result, task = run("scaffold", rounds=3)
    assert all(row["ids"] == list(range(7)) for row in result.rounds())
    assert all(row["ids"] == list(range(7)) for row in result.clients())
    assert task.population == 7


def test_without_steps_it_is_the_global_model():
    result, task = run()
    found = evaluate_unseen(result.trained, steps=(0,), metrics=("accuracy", "loss"))
    expected = evaluate_clients(task.objective, result.model, {}, task.data("test", found.ids), ("accuracy", "loss"))
    assert found.ids.tolist() == [7, 8, 9]
    for name, values in expected.items():
        assert torch.equal(found.scores[0][name], values)
    assert found.summary(0)["loss"]["mean"] == pytest.approx(float(expected["loss"].mean()))


def test_steps_are_those_of_the_local_solver():
    """Full batches, so that a step is a gradient step on all training examples."""
    task = small_task()
    result, _ = run(task=task, batch_size=None)
    model, own = dict(result.model), task.data("train", torch.tensor([3])).client(0)
    for _ in range(4):
        slope = grad(lambda leaves: task.objective.loss(leaves, {}, own.x, own.y, None, None)[0])(model)
        model = {name: leaf - 0.2 * slope[name] for name, leaf in model.items()}
    adapted, _ = adapt(result.trained, 3, 4)
    for name, leaf in model.items():
        assert torch.allclose(adapted[name], leaf, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["fedavg", "ditto", "fedper", "fedrep", "superfed_mm", "apfl", "scaffold", "local_only"]
)
def test_local_steps_help_and_leave_the_run_as_it_was(name):
    result, _ = run(name)
    before = {part: dict(leaves) for part, leaves in result.trained.shared.items()}
    known = dict(result.trained.store.get(range(10)))
    found = evaluate_unseen(result.trained, steps=(0, 1, 60), metrics=("accuracy", "loss"))
    assert found.summary(60)["accuracy"]["mean"] > found.summary(0)["accuracy"]["mean"] + 0.1
    with pytest.raises(SpecError, match="not scored after 7 steps; after: 0"):
        found.summary(7)
    assert list(differences(before, result.trained.shared)) == []
    assert sorted(result.trained.store.get(range(10))) == sorted(known)
    again = evaluate_unseen(result.trained, steps=(60,), metrics=("accuracy", "loss"))
    assert torch.equal(again.scores[60]["loss"], found.scores[60]["loss"])


def test_wrong_questions_are_refused():
    result, _ = run(newcomers=0)
    with pytest.raises(SpecError, match="no unseen clients: give ids"):
        evaluate_unseen(result.trained)
    with pytest.raises(SpecError, match="whole numbers from 0"):
        evaluate_unseen(result.trained, torch.tensor([1]), (-1,))
    assert evaluate_unseen(result.trained, torch.tensor([1]), (0,)).ids.tolist() == [1]


RECIPE = {
    "partition": {"clients": 6, "newcomers": 2}, "algorithm": {"name": "ditto", "lr": 0.2, "batch_size": 64},
    "run": {"rounds": 2, "client_memory_mb": 0.0},
}  # fmt: skip


def test_a_run_folder_is_enough(tmp_path):
    """States of clients are on disk here, and reading them removes nothing."""
    experiment = resolve(parse(RECIPE))
    ending, _ = experiment.run(tmp_path / "run")
    files = sorted(path.name for path in (tmp_path / "run" / "clients").iterdir())
    trained = reopen(tmp_path / "run")
    assert trained.round == 2
    assert list(differences(trained.shared, ending.state["shared"])) == []
    found, expected = (evaluate_unseen(one, steps=(0, 3)) for one in (trained, ending.trained))
    assert json.dumps(found.to_json()) == json.dumps(expected.to_json())
    assert sorted(path.name for path in (tmp_path / "run" / "clients").iterdir()) == files


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("error", [FileNotFoundError("0000001.index"), CheckpointError("states are missing")])
def test_a_run_that_goes_on_while_it_is_opened_is_looked_at_again(tmp_path, monkeypatch, error, goes_on):
    """It may rewrite states between two looks; in a folder that nobody writes the same is damage."""
    resolve(parse(RECIPE)).run(tmp_path / "run")
    left = [error] * 3

    def read(*given):
        if left:
            raise left.pop()
        return read_store(*given)

    monkeypatch.setattr(reopening, "read_store", read)
    with RunFolder(tmp_path / "run").lock() if goes_on else pytest.raises(type(error)):
        assert reopen(tmp_path / "run").round == 2


GENERATIVE = """
[task]
dataset = {kind = "digits", flat = false}
model = "cvae_rows"
classifier = "energy_mlp"

[partition]
kind = "dirichlet"
alpha = 1.0
clients = 5

[algorithm]
name = "fedcvae"
batch_size = 64
lr = 0.001

[evaluate]
every = 1
classifier = {epochs = 60, per_class = 10}

[engine]
kind = "batched"
threads = 1

[run]
rounds = 1
"""


def test_the_classifier_of_a_reopened_run_is_that_of_its_record(tmp_path):
    """Another engine or number of threads rounds other sums, which many passes over few samples make a score of."""
    ending, _ = resolve(parse(tomllib.loads(GENERATIVE))).run(tmp_path / "run")
    expected, before = ending.trained.server_model(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = reopen(tmp_path / "run").server_model()
    finally:
        torch.set_num_threads(before)
    assert list(differences(found.params, expected.params)) == []
