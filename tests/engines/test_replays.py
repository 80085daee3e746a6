"""What a card replays is what the loop computes: other rounds, cohorts, step sizes, failed links, clients' states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedalloy.algorithms import fedavg, fedprox, named, scaffold
from fedalloy.core.types import Work
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.tasks.dropout import Dropout
from fedalloy.testing import work
from tests.engines.fake_graphs import pretend
from tests.engines.rounds import gaps, play, task_of
from tests.engines.test_conv_sgd import dense_heavy, task

METHODS: dict[str, Any] = {
    "plain": fedavg(lr=0.3, batch_size=2, epochs=2), "schedule": fedavg(lr=0.3, batch_size=2, decay=0.5),
    "momentum, decay": fedavg(lr=0.1, batch_size=4, momentum=0.9, nesterov=True, weight_decay=0.01),
    "prox": fedprox(0.3, lr=0.2, batch_size=2, epochs=2), "adam": fedavg(lr=0.1, batch_size=2, optimizer="adam"),
    "scaffold": scaffold(lr=0.1, batch_size=2, epochs=2), "ditto": named("ditto", lr=0.1, batch_size=2),
}  # fmt: skip
WORKS: dict[str, Work] = {
    "everybody": work(*range(4)), "two of them": work(1, 2),
    "failed links": replace(work(*range(4)), active=torch.tensor([True, False, True, False])),
    "nobody heard": replace(work(*range(4)), active=torch.zeros(4, dtype=torch.bool)),
    "other epochs": replace(work(*range(4)), epochs=torch.tensor([1, 3, 2, 0])),
}  # fmt: skip


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Dropout(0.3), nn.Linear(6, 3))


TASKS = {
    "steps": task_of(model), "chain": task("two convolutions"), "factors": dense_heavy(),
}  # fmt: skip


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_round_is_the_loops(kind, method, monkeypatch):
    pretend(monkeypatch)
    engine, data, algorithm = Batched(), TASKS[kind], METHODS[method]
    for round, now in enumerate([*WORKS.values(), *WORKS.values()], start=1):
        found, right = play(engine, algorithm, data, now, round), play(Loop(), algorithm, data, now, round)
        assert gaps(found, right) == [], (round, now)
    chain = kind != "steps" and method not in ("adam", "scaffold", "ditto")
    assert (engine._conv_graphs is not None) == chain
    assert not engine._uncaptured
    assert not engine._unbatchable


def test_a_dense_chain_is_the_loops(monkeypatch):
    pretend(monkeypatch)
    data, algorithm = task_of(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))), METHODS["plain"]
    engine = Batched(kernel="mapped")
    for now in WORKS.values():
        assert gaps(play(engine, algorithm, data, now), play(Loop(), algorithm, data, now)) == []


def test_blocks_of_some_clients_are_the_loops(monkeypatch):
    """Every block replays the graph that the one before has replayed."""
    pretend(monkeypatch)
    for data in (task("two convolutions", (4, 4, 4, 4)), task_of(model, (4, 4, 4, 4))):
        engine = Batched(block=2)
        for round in (1, 2):
            found = play(engine, METHODS["plain"], data, round=round)
            assert gaps(found, play(Loop(), METHODS["plain"], data, round=round)) == []
