"""The sum of minibatch losses: what it is, and that all engines agree on it."""

from __future__ import annotations

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core.keys import Key
from fedalloy.core.measuring import mean_loss
from fedalloy.core.types import Context, Stats
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.testing.cases import UNEVEN, work
from fedalloy.testing.problems import small_task


def stats(engine, algorithm, model="mlp", now=UNEVEN[0]) -> Stats:
    task = small_task(model)
    params, buffers = task.objective.init(Key.of(1))
    shared = algorithm.init(params, task.population, buffers)["shared"]
    states = {client: algorithm.init_client(shared, Key.of(2)) for client in now.ids.tolist()}
    ctx = Context(1, task.population, Key.of(3), algorithm.solver.lr_at(1))
    found: Stats = engine(algorithm, task, shared, states, now, ctx).cohort.stats
    return found


@pytest.mark.parametrize("kernel", ["best", "mapped"])
@pytest.mark.parametrize("model", ["mlp", "dropout", "batchnorm"])
def test_engines_agree(model, kernel):
    algorithm = algorithms.drfedavg(official=True, batch_size=3, lr=0.2)
    now = work(0, 1, 2, 3, epochs=(2, 1, 3, 1), active=(True, True, False, True))
    expected, found = (stats(engine, algorithm, model, now) for engine in (Loop(), Batched(kernel=kernel)))
    for name in ("running_loss", "train_loss"):
        assert torch.allclose(found[name], expected[name], atol=1e-9, rtol=0.0, equal_nan=True)
    assert float(expected["running_loss"][2]) == 0.0


def test_one_batch_per_round_is_the_loss_before_and_more_batches_add_up():
    task = small_task()
    params, _ = task.objective.init(Key.of(1))
    before = [mean_loss(task.objective, params, {}, task.data("train", torch.tensor([k])).client(0)) for k in range(5)]
    once = work(0, 1, 2, 3, 4)
    whole = stats(Loop(), algorithms.drfedavg(official=True, batch_size=None), now=once)
    assert whole["running_loss"].tolist() == pytest.approx(before)
    still = stats(Loop(), algorithms.drfedavg(official=True, batch_size=1, lr=1e-12), now=once)
    sizes = task.block.size.tolist()
    assert still["running_loss"].tolist() == pytest.approx([n * loss for n, loss in zip(sizes, before, strict=True)])


def test_nobody_sends_it_unless_asked():
    assert "running_loss" not in stats(Loop(), algorithms.fedavg())
    assert "running_loss" not in stats(Batched(), algorithms.fedavg())
