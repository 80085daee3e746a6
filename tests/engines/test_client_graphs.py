"""Clients one after another, each step one traced graph: the loop's numbers, and only where it was asked for."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedalloy.algorithms import fedavg, scaffold
from fedalloy.core.types import Block
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import client_graphs, vmap_kernel
from fedalloy.engines.kernels.client_graphs import ClientGraphs, Lane
from fedalloy.engines.kernels.tracing import trace
from fedalloy.engines.loop import Loop
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.tasks.dropout import Dropout
from fedalloy.testing import work
from tests.engines.rounds import gaps, play, task_of

METHODS = {
    "adam, schedule": fedavg(lr=0.1, batch_size=2, optimizer="adam", decay=0.5),
    "scaffold": scaffold(lr=0.1, batch_size=2, epochs=2),
}


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.SiLU(), nn.Flatten(), Dropout(0.3), nn.Linear(32, 3)
    )


@pytest.fixture(scope="module")
def task() -> Any:
    return task_of(model, sizes=(5, 3, 6, 1, 0, 4), shape=(1, 6, 6))


@pytest.mark.parametrize("method", METHODS)
def test_a_round_is_the_loops(method, task):
    """Clients of several sizes, one without an example, dropout, and a step size that changes between rounds."""
    engine, algorithm = Batched(kernel="sequential"), METHODS[method]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for round in (1, 2):
            assert gaps(play(engine, algorithm, task, round=round), play(Loop(), algorithm, task, round=round)) == []
    assert engine._client_graphs is not None
    (lanes,) = engine._client_graphs._lanes.values()
    assert len(lanes) == 6, "small steps share the card"


def test_a_client_whose_link_failed_changes_nothing(task):
    now = replace(work(*range(6)), active=torch.tensor([True, False, True, True, True, False]))
    algorithm = METHODS["scaffold"]
    assert gaps(play(Batched(kernel="sequential"), algorithm, task, now), play(Loop(), algorithm, task, now)) == []


def first_batch(lane: Lane) -> None:
    lane.step.advance(lane.leaves)
    lane.values["at"].zero_()


FAULTS: dict[str, tuple[str, Any]] = {
    "always the first batch": ("advance", first_batch),
    "results not stored": ("store", lambda lane, into: None),
    "the last client's values": ("load", lambda lane, given, lr: lane.values["at"].zero_()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, task, monkeypatch):
    name, wrong = FAULTS[fault]
    monkeypatch.setattr(Lane, name, wrong)
    algorithm = METHODS["adam, schedule"]
    assert gaps(play(Batched(kernel="sequential"), algorithm, task), play(Loop(), algorithm, task)) != []


def trained_by(task: Any, limit: float, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(client_graphs, "LARGE_STEP", limit)
    used = []

    def mapped(training: Any) -> Any:
        used.append("mapped")
        return vmap_kernel.train(training)

    graphs = ClientGraphs(mapped)
    monkeypatch.setattr(Batched, "_kernel", lambda *_: graphs.train)
    algorithm = METHODS["adam, schedule"]
    assert gaps(play(Batched(), algorithm, task), play(Loop(), algorithm, task)) == []
    return used[0] if used else "one by one"


def test_only_large_steps_run_one_by_one(task, monkeypatch):
    assert trained_by(task, 1e9, monkeypatch) == "mapped"
    assert trained_by(task, 1e3, monkeypatch) == "one by one"


def test_examples_at_another_address_need_no_new_graph(task):
    """What is read again in every round runs mapped, with its own examples and not those of the first round."""
    engine, algorithm = Batched(kernel="sequential"), METHODS["adam, schedule"]
    play(engine, algorithm, task)
    block = task.block
    other = replace(task, block=Block(block.x + 1.0, block.y.clone(), block.start, block.size))
    client_graphs.warn_mapped.cache_clear()
    with pytest.warns(RuntimeWarning, match="takes clients at once: examples are read again"):
        found = play(engine, algorithm, other)
    assert gaps(found, play(Loop(), algorithm, other)) == []
    assert engine._client_graphs is not None
    assert len(engine._client_graphs._lanes) == 1


def test_a_model_that_cannot_run_one_by_one_says_so():
    normed = task_of(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), (4, 4, 6))
    client_graphs.warn_mapped.cache_clear()
    with pytest.warns(RuntimeWarning, match="takes clients at once: batches of its model must not be padded"):
        found = play(Batched(kernel="sequential"), fedavg(lr=0.1, batch_size=2), normed)
    assert gaps(found, play(Loop(), fedavg(lr=0.1, batch_size=2), normed)) == []


class Reading(Sgd):
    """A solver whose step reads a number."""

    def step(self, carry, grad_at, draws, phase, ctx):
        float(phase)
        return super().step(carry, grad_at, draws, phase, ctx)


def test_what_cannot_be_traced_runs_otherwise(task):
    algorithm = replace(fedavg(), solver=Reading(lr=0.1, batch_size=2))
    with pytest.warns(RuntimeWarning, match="cannot be batched"):
        found = play(Batched(kernel="sequential"), algorithm, task)
    assert gaps(found, play(Loop(), algorithm, task)) == []


def test_a_traced_step_computes_nothing_twice_and_writes_what_changes():
    def step(values: dict[str, Any]) -> dict[str, Any]:
        w, other = values["tree"]["w"], values["tree"]["other"]
        moved = w @ w.T + (w @ w.T).relu() + torch.arange(2).sum()
        return {"tree": {"other": other, "w": moved}}  # in another order, and one of them unchanged

    values: dict[str, Any] = {
        "x": torch.ones(3),
        "tree": {"w": torch.tensor([[1.0, 2.0], [0.0, 1.0]]), "other": torch.zeros(2)},
    }
    traced = trace(step, values)
    names = [str(node.target) for node in traced.graph.graph.nodes]
    assert names.count("aten.mm.default") == 1
    assert "aten.bitwise_or.Scalar" in names, "counters would be folded into 32-bit indices"
    leaves = [leaf.clone() for leaf in (values["x"], *values["tree"].values())]
    assert traced.targets == [1]
    traced.advance(leaves)
    expected = step(values)["tree"]["w"]
    assert torch.equal(leaves[1], expected)
    assert torch.equal(leaves[2], values["tree"]["other"])
    assert traced.flops(leaves) == 2 * 2 * 2 * 2
