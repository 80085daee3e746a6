"""FedEvg as a whole: digits and rows of a table that a classifier of real data recognises, runs that resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.engines.loop import Loop
from fedalloy.experiment.fit import RunResult
from fedalloy.experiment.unseen import evaluate_unseen
from fedalloy.methods.classifier import ClassifierTraining, classifier_of, train_classifier
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.federation import FederatedTask

SHORT = ClassifierTraining(epochs=40, batch_size=32, lr=0.01)
ROWS: dict[str, Any] = {
    "per_class": 5,
    "batch_size": 16,
    "epochs": 4,
    "lr": 0.02,
    "start": 1.0,
}


def digits(classes: int = 3, **settings: Any) -> FederatedTask:
    """The first digits, dealt unevenly."""
    whole = make_task("digits").train
    kept = whole.y < classes
    data = Dataset(whole.x[kept], whole.y[kept], classes, bounds=(0.0, 1.0))
    defaults: dict[str, Any] = {"model": {"kind": "energy_cnn", "width": 8}, "seed": 1, "clients": 3}
    return make_task(data, partition={"kind": "dirichlet", "alpha": 0.5}, **{**defaults, **settings})


def rows(seed: int = 0) -> FederatedTask:
    """Two classes of five numbers, apart in the first two, at three clients with different shares of them."""
    key = Key.of(seed).fold("rows")
    y = (key.uniform(240) < 0.5).long()
    x = key.fold("x").normal(240, 5) + 1.5 * (2.0 * y.unsqueeze(1) - 1.0) * torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0])
    model = {"kind": "energy_mlp", "hidden": (16,)}
    return make_task(Dataset(x, y, 2), model, {"kind": "dirichlet", "alpha": 1.0}, 3, seed=seed)


def fit(task: FederatedTask, rounds: int, folder: Any = None, **settings: Any) -> RunResult:
    run = {"evaluate_every": rounds, "classifier": SHORT, "engine": "batched", "seed": 2}
    own = {name: settings.pop(name) for name in list(settings) if name in {*run, "resume", "watcher"}}
    algorithm = fedalloy.algorithms.named("fedevg", **settings)
    return fedalloy.fit(algorithm, task, rounds=rounds, folder=folder, **{**run, **own})


def recognised(task: FederatedTask, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of samples to which a classifier of real data, by the nearest class mean, gives the intended class."""
    train, test = task.train, task.test
    means = torch.stack([train.x[train.y == label].mean(0) for label in train.y.unique()])
    real = (torch.cdist(test.x, means).argmin(1) == test.y).double().mean()
    assert float(real) > 0.9, "the judge itself must know the real data"
    return float((torch.cdist(x, means).argmin(1) == y).double().mean())


def test_a_short_run_makes_digits_that_a_classifier_of_real_digits_recognises():
    task = digits()
    result = fit(task, 10, epochs=2, batch_size=32, lr=0.003)
    x, y = result.synthetic()
    assert x.shape == (30, 64)
    assert float(x.min()) >= 0
    assert float(x.max()) <= 1
    noise = Key.of(0).normal(30, 64).clamp(0, 1)
    assert recognised(task, noise, y) < 0.6
    assert recognised(task, x, y) > 0.8
    assert result.last("accuracy")["mean"] > 0.6, "and a classifier trained on them alone knows real digits"
    last = list(result.rounds())[-1]
    assert last["bytes_up"] == 3 * 4 * (30 * 64 + 30)
    assert last["bytes_down"] == 3 * (4 * 30 * 64 + 8 * 30)
    params = result.ending.state["shared"]["params"]
    assert last["bytes_model"] == 3 * 4 * sum(leaf.numel() for leaf in params.values())
    assert len(last["weights"]) == 3


def test_rows_of_a_table_work_the_same_way():
    task = rows()
    result = fit(task, 8, **ROWS)
    x, y = result.synthetic()
    assert recognised(task, x, y) >= 0.9
    assert result.last("accuracy")["mean"] > 0.7
    apart = x[y == 1].mean(0) - x[y == 0].mean(0)
    assert float(apart[0] - apart[1]) > 1.0


@pytest.mark.parametrize("engine", ["loop", "workers"])
def test_engines_agree(engine):
    task = rows()
    batched, other = (fit(task, 2, engine=kind, **ROWS).synthetic()[0] for kind in ("batched", engine))
    assert torch.allclose(batched, other, atol=1e-4)


def test_a_resumed_run_is_the_run(tmp_path):
    task = rows()
    whole = fit(task, 4, tmp_path / "whole", **ROWS).synthetic()[0]

    def stop(event):
        if event.row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(task, 4, tmp_path / "cut", watcher=stop, **ROWS)
    again = fit(task, 4, tmp_path / "cut", resume=True, **ROWS).synthetic()[0]
    assert torch.equal(again, whole)


def test_seeds_draw_other_noise_and_other_local_models():
    one, other = (fit(rows(), 1, **{**ROWS, "seed": seed}).synthetic()[0] for seed in (0, 1))
    assert not torch.allclose(one, other)


def test_there_is_no_shared_model_for_newcomers_and_no_samples_of_fedavg():
    with pytest.raises(SpecError, match="exchanges samples"):
        evaluate_unseen(fit(rows(), 1, **ROWS).trained, torch.tensor([0]))
    plain = fedalloy.fit("fedavg", rows(), rounds=1)
    with pytest.raises(SpecError, match="makes no synthetic samples"):
        plain.synthetic()


def test_synthetic_samples_enter_the_training_of_every_client_and_nothing_else(tmp_path):
    x, y = np.full((6, 64), 0.5, dtype=np.float32), np.array([0, 0, 1, 1, 2, 2])
    np.savez(tmp_path / "made.npz", x=x, y=y)
    plain, mixed = digits(), digits(synthetic={"path": str(tmp_path / "made.npz"), "per_class": 1})
    assert (mixed.train.size - plain.train.size).tolist() == [3, 3, 3]
    for client in range(3):
        own, more = (task.data("train", torch.tensor([client])).client(0) for task in (plain, mixed))
        assert torch.equal(more.x[: len(own)], own.x)
        assert more.y[len(own) :].tolist() == [0, 1, 2]
        assert bool((more.x[len(own) :] == 0.5).all())
    assert torch.equal(mixed.test.x, plain.test.x)
    np.savez(tmp_path / "other.npz", x=x[:, :9], y=y)
    with pytest.raises(DataError, match="do not fit"):
        digits(synthetic=str(tmp_path / "other.npz"))
    with pytest.raises(SpecError, match="unknown key 'file'"):
        digits(synthetic={"file": "x"})


def test_another_model_may_learn_from_the_samples():
    task = digits(classifier="logistic")
    x, y = task.train.x[:60], task.train.y[:60]
    params, buffers = train_classifier(classifier_of(task), x, y, Key.of(0), Loop(), SHORT)
    assert params.keys() == {"output.weight", "output.bias"}
    assert not buffers
    assert fit(task, 1).model.keys() == {"output.weight", "output.bias"}
