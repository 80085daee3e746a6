"""The exchange of scores: every model at every client, only where somebody asks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core import tree
from fedalloy.core.cross import check_validation, cross_scores, exchange_scores
from fedalloy.core.errors import DataError
from fedalloy.core.keys import Key
from fedalloy.core.screening import screen
from fedalloy.core.types import Block, Cohort
from fedalloy.testing.problems import SmallTask, small_task


def setting(model="mlp", ids=(0, 2, 4)):
    task, key = small_task(model), Key.of(3)
    params, buffers = task.objective.init(key)
    delta = {name: key.fold(name).normal(len(ids), *leaf.shape, dtype=torch.float64) for name, leaf in params.items()}
    payload = {"delta": delta}
    if buffers:
        sent = {
            name: torch.stack([leaf + 0.3 * k for k in range(len(ids))]).to(leaf.dtype)
            for name, leaf in buffers.items()
        }
        payload["buffers"] = sent
    return task, {"params": params, "buffers": buffers}, Cohort(torch.tensor(ids), payload, {})


def without(task: SmallTask, client: int) -> SmallTask:
    """The task with one client that has no validation examples."""
    size = task.block.size.clone()
    size[client] = 0
    return SmallTask(task.objective, replace(task.block, size=size))


@pytest.mark.parametrize("model", ["mlp", "batchnorm"])
def test_every_score_is_an_accuracy_of_one_model_at_one_client(model):
    task, shared, cohort = setting(model)
    found = cross_scores(task.objective, shared, cohort, task.data("valid", cohort.ids))
    assert found.shape == (3, 3)
    for i in range(3):
        params = tree.add(shared["params"], tree.rows(cohort.payload["delta"], i))
        buffers = tree.rows(cohort.payload["buffers"], i) if shared["buffers"] else {}
        for j, client in enumerate(cohort.ids.tolist()):
            examples = task.data("valid", torch.tensor([client])).client(0)
            hits = task.objective.hits(task.objective.outputs(params, buffers, examples.x), examples.y)
            assert float(found[i, j]) == pytest.approx(float(hits.double().mean()))
    assert float(found.std()) > 0


def test_a_client_without_validation_examples_is_a_column_of_nan():
    task, shared, cohort = setting()
    found = cross_scores(task.objective, shared, cohort, without(task, 2).data("valid", cohort.ids))
    assert found.isnan().tolist() == [[False, True, False]] * 3


def test_only_rules_that_ask_pay_for_it():
    task, shared, cohort = setting()
    assert exchange_scores(algorithms.fedavg(), task, shared, cohort) is cohort
    scored = exchange_scores(algorithms.fedboosting(), task, shared, cohort)
    assert scored.cross is not None
    assert scored.cross.shape == (3, 3)
    empty = cohort.select(cohort.ids[:0])
    assert exchange_scores(algorithms.fedboosting(), task, shared, empty).cross is None


def test_scores_follow_the_clients_that_are_left():
    task, shared, cohort = setting()
    scored = exchange_scores(algorithms.fedboosting(), task, shared, cohort)
    assert scored.cross is not None
    delta = {name: leaf.clone() for name, leaf in scored.payload["delta"].items()}
    next(iter(delta.values()))[1] = torch.nan
    bad = Cohort(scored.ids, {**scored.payload, "delta": delta}, scored.stats, scored.cross)
    left, dropped = screen(bad, "delta")
    assert list(dropped) == [2]
    assert left.cross is not None
    assert left.cross.tolist() == scored.cross[[0, 2]][:, [0, 2]].tolist()


def test_a_task_without_validation_parts_is_refused_before_the_first_round():
    task = small_task()
    nothing = Block(task.block.x, task.block.y, task.block.start, torch.zeros_like(task.block.size))
    check_validation(algorithms.fedboosting(), task)
    check_validation(algorithms.fedavg(), SmallTask(task.objective, nothing))
    with pytest.raises(DataError, match="valid_fraction"):
        check_validation(algorithms.fedboosting(), SmallTask(task.objective, nothing))
