"""Frozen backbones: only the head is trained, sent and counted; its features may be kept."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import fedalloy
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.experiment.fit import RunResult
from fedalloy.experiment.recipe import parse, resolve
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.dropout import Dropout
from fedalloy.tasks.features import cached_features
from fedalloy.tasks.federation import FederatedTask

HEAD = {"head.weight", "head.bias"}


def normed(inputs: int, classes: int) -> nn.Module:
    """A body with BatchNorm and a head."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 12), nn.BatchNorm1d(12), nn.ReLU())
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(12, classes)))


def dropping(inputs: int, classes: int) -> nn.Module:
    return nn.Sequential(
        OrderedDict(body=nn.Linear(inputs, 4), drop=Dropout(0.5), middle=nn.Linear(4, 4), head=nn.Linear(4, classes))
    )


def frozen_task(model=normed, **options) -> FederatedTask:
    return make_task("digits", model, clients=4, trainable=("head.*",), **options)


def run(task: FederatedTask, engine: str = "loop") -> RunResult:
    algorithm = fedalloy.algorithms.fedavg(lr=0.2, batch_size=64)
    return fedalloy.fit(algorithm, task, rounds=3, engine=engine, metrics=("accuracy", "loss"))


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_only_the_head_is_trained_sent_and_counted(engine):
    task = frozen_task()
    fresh, buffers = task.objective.init(Key.of(0).fold("model"))
    assert set(fresh) == HEAD
    assert buffers == {}
    result = run(task, engine)
    assert set(result.model) == HEAD
    assert not torch.equal(result.model["head.weight"], fresh["head.weight"])
    assert all(row["bytes_up"] == 4 * (12 * 10 + 10) * 4 for row in result.rounds())
    whole = run(make_task("digits", normed, clients=4), "loop")
    assert next(whole.rounds())["bytes_up"] > 4 * 4 * (64 * 12 + 12 + 130)


def test_the_frozen_body_stays_as_it_was_and_shares_batches_with_nobody():
    task = frozen_task()
    assert not task.objective.needs_full_batches
    result = run(task)
    structure = task.objective.structure
    assert structure is not None
    body: Any = structure.get_submodule("body")
    assert int(body[2].num_batches_tracked) == 0
    assert torch.equal(body[2].running_mean, torch.zeros(12))
    x = task.test.x[:5]
    with torch.no_grad():
        wanted = nn.functional.linear(body(x), result.model["head.weight"], result.model["head.bias"])
    torch.testing.assert_close(task.objective.outputs(result.model, {}, x), wanted)


def test_a_recipe_freezes_a_residual_network():
    recipe = parse({
        "task": {"dataset": {"kind": "digits", "flat": False}, "model": "resnet20", "trainable": ["head.*"]},
        "partition": {"kind": "iid", "clients": 30},
        "sampling": {"cohort": 2},
        "run": {"rounds": 1},
        "evaluate": {"clients": 1},
    })  # fmt: skip
    experiment = resolve(recipe)
    task = experiment.task()
    assert {name: leaf.numel() for name, leaf in task.objective.init(Key.of(0))[0].items()} == {
        "head.weight": 640, "head.bias": 10,
    }  # fmt: skip
    ending, _ = experiment.run()
    assert ending.status == "finished"
    assert ending.progress.bytes_up == 2 * 4 * 650


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_kept_features_give_the_same_model(engine):
    task = frozen_task(valid_fraction=0.1)
    kept = cached_features(task, "body")
    assert kept.train.x.shape == (len(task.train.x), 12)
    assert kept.valid.x.shape[1] == 12
    with_body, without = run(task, engine), run(kept, engine)
    assert set(without.model) == HEAD
    for name in HEAD:
        torch.testing.assert_close(without.model[name], with_body.model[name], rtol=1e-4, atol=1e-5)
    assert without.last() == pytest.approx(with_body.last(), abs=1e-6)
    rows = [next(result.rounds()) for result in (with_body, without)]
    assert rows[0]["global"] == pytest.approx(rows[1]["global"], rel=1e-5)


def test_features_of_a_residual_network_in_double_precision():
    task = make_task({"kind": "digits", "flat": False}, "resnet20", clients=40, trainable=("head.*",), dtype="float64")
    kept = cached_features(task, "flatten")
    params, _ = kept.objective.init(Key.of(3))
    assert kept.test.x.shape[1] == 64
    wanted = task.objective.outputs(params, {}, task.test.x[:9])
    torch.testing.assert_close(kept.objective.outputs(params, {}, kept.test.x[:9]), wanted)


def test_what_would_change_is_not_kept():
    with pytest.raises(SpecError, match=r"'body\.1\.bias' is trained"):
        cached_features(make_task("digits", normed, clients=2), "body")
    with pytest.raises(SpecError, match="has Dropout"):
        cached_features(frozen_task(dropping), "middle")
    assert cached_features(frozen_task(dropping), "body").train.x.shape[1] == 4
    with pytest.raises(SpecError, match="did you mean 'body'"):
        cached_features(frozen_task(), "bodi")
    with pytest.raises(SpecError, match="before its last"):
        cached_features(frozen_task(), "head")
    with pytest.raises(SpecError, match=r"only an nn\.Sequential"):
        cached_features(make_task("digits", lambda: nn.Linear(64, 10), clients=2), "weight")
