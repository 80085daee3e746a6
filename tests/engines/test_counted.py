"""Targets that do not count: in the training loss, in the number of steps, and in what follows from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedalloy
from fedalloy.engines.batched import Batched
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.federation import FederatedTask

ENGINES = ["loop", "batched", "workers"]


def task() -> FederatedTask:
    """Two clients whose second batch of three has no target that counts, and tokens that count unevenly."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 4, 5, generator=draw), torch.randint(0, 3, (12, 4), generator=draw)
    y[1::2, 1:] = -100
    y[[2, 3, 8, 9]] = -100
    made = fedalloy.task(
        Dataset(x, y, 3, torch.arange(2).repeat_interleave(6)), model=lambda: nn.Linear(5, 3), kind="tokens",
        test_fraction=0.0, dtype="float64",
    )  # fmt: skip
    assert isinstance(made, FederatedTask)
    return made


def run(engine: Any, method: str = "fedavg", **how: Any) -> Any:
    algorithm = fedalloy.algorithms.named(method, batch_size=2, shuffle=False, **how)
    return fedalloy.fit(algorithm, task(), rounds=1, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_training_loss_is_the_mean_over_tokens_that_count(engine):
    result, given = run(engine, lr=1e-12), task()
    module = result.module()
    with torch.no_grad():
        logits = module(given.train.x).flatten(0, 1)
    each = nn.functional.cross_entropy(logits, given.train.y.flatten(), reduction="none", ignore_index=-100)
    counted = given.train.y.flatten() != -100
    means = [each[rows][counted[rows]].mean() for rows in (slice(0, 24), slice(24, 48))]
    assert next(result.rounds())["train_loss"] == pytest.approx(float(torch.stack(means).mean()), abs=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_in_which_nothing_counts_is_no_step(engine):
    assert next(run(engine, lr=0.5).rounds())["num_steps"] == [2, 2]


@pytest.mark.parametrize("method", ["scaffold", "fednova"])
def test_rules_that_use_the_number_of_steps_get_those_that_were_taken(method):
    """Without the empty batches the same clients take the same steps."""
    given = task()
    kept = (given.train.y != -100).any(1)
    full = Dataset(given.train.x[kept], given.train.y[kept], 3, torch.arange(2).repeat_interleave(4))
    other = fedalloy.task(full, model=lambda: nn.Linear(5, 3), kind="tokens", test_fraction=0.0, dtype="float64")
    algorithm = fedalloy.algorithms.named(method, batch_size=2, shuffle=False, lr=0.5)
    expected = fedalloy.fit(algorithm, other, rounds=2, engine="loop").ending.state
    for engine in ("loop", Batched()):
        found = fedalloy.fit(algorithm, given, rounds=2, engine=engine).ending.state
        for part, leaves in expected["shared"].items():
            for name, leaf in leaves.items():
                assert torch.allclose(found["shared"][part][name], leaf, atol=1e-12), (part, name)
