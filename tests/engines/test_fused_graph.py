"""Fused blocks as CUDA graphs: when one is kept, when it is given up, and that it does what the kernel does."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedalloy.algorithms import fedavg
from fedalloy.core.keys import Key
from fedalloy.core.types import Block, Context, Work
from fedalloy.engines import batched
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import fused, fused_graph
from fedalloy.engines.kernels.fused_graph import FusedGraphs, Kernel, agree
from fedalloy.engines.loop import Loop
from fedalloy.testing import small_task
from fedalloy.testing.cases import work
from tests.engines.rounds import gaps, play

ALGORITHM = fedavg(lr=0.3, batch_size=3, epochs=2)


class Replayed:
    """Stands in for a captured graph: remembers that it was asked, answers what it was told to."""

    def __init__(self, kernel: Kernel, ctx: Any, error: float) -> None:
        self.kernel, self.ctx, self.error, self.asked = kernel, ctx, error, 0

    def replay(self, params: Any, block: Any) -> Any:
        self.asked += 1
        deltas, totals = fused.descend(*self.kernel, params, block, self.ctx)
        return {name: leaf + self.error for name, leaf in deltas.items()}, totals


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """Pretend that models are on a GPU and everything can be captured."""
    made: list[Replayed] = []

    def capture(kernel: Any, params: Any, block: Any, ctx: Any) -> Replayed:
        made.append(Replayed(kernel, ctx, 0.0))
        return made[-1]

    monkeypatch.setattr(batched, "_on_gpu", lambda shared: True)
    monkeypatch.setattr(fused_graph, "capturable", lambda params, block: True)
    monkeypatch.setattr(fused_graph, "_capture", capture)
    return made


def test_a_graph_serves_all_rounds_of_its_shape(captured):
    engine, task = Batched(kernel="fused"), small_task()
    for round in (1, 2, 3):
        assert gaps(play(engine, ALGORITHM, task, round=round), play(Loop(), ALGORITHM, task, round=round)) == []
    assert [one.asked for one in captured] == [3]
    other = replace(work(*range(5)), epochs=torch.tensor([1, 1, 1, 1, 3]))
    play(engine, ALGORITHM, task, other)
    assert len(captured) == 2


def test_a_graph_that_differs_is_given_up(captured, monkeypatch):
    def wrong(kernel: Any, params: Any, block: Any, ctx: Any) -> Replayed:
        captured.append(Replayed(kernel, ctx, 0.5))
        return captured[-1]

    monkeypatch.setattr(fused_graph, "_capture", wrong)
    engine, task = Batched(kernel="fused"), small_task()
    with pytest.warns(RuntimeWarning, match="first replay differs"):
        first = play(engine, ALGORITHM, task)
    assert gaps(first, play(Loop(), ALGORITHM, task)) == []
    play(engine, ALGORITHM, task, round=2)
    assert [one.asked for one in captured] == [1]


def test_what_cannot_be_captured_runs_without(captured, monkeypatch):
    def failing(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(fused_graph, "_capture", failing)
    with pytest.warns(RuntimeWarning, match="not permitted when stream is capturing"):
        first = play(Batched(kernel="fused"), ALGORITHM, small_task())
    assert gaps(first, play(Loop(), ALGORITHM, small_task())) == []


def test_on_a_cpu_nobody_asks_for_graphs(monkeypatch):
    monkeypatch.setattr(FusedGraphs, "train", lambda *_: pytest.fail("asked"))
    engine = Batched(kernel="fused")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(engine, ALGORITHM, small_task())
    assert engine._fused_graphs is None


def test_agreement_is_relative_to_the_largest_update():
    expected = {"w": torch.tensor([1.0, 100.0])}, torch.ones(1, 2)
    assert agree(({"w": torch.tensor([1.05, 100.0])}, torch.ones(1, 2)), expected)
    assert not agree(({"w": torch.tensor([1.5, 100.0])}, torch.ones(1, 2)), expected)
    assert not agree(({"w": torch.tensor([1.0, 100.0])}, torch.ones(1, 2) * 1.1), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_does_what_the_kernel_does():
    task = small_task()
    block = task.block
    moved = replace(task, block=Block(block.x.cuda(), block.y.cuda(), block.start, block.size))
    engine, params = (
        Batched(kernel="fused"),
        {name: leaf.cuda() for name, leaf in task.objective.init(Key.of(1))[0].items()},
    )
    shared = ALGORITHM.init(params, 5, {})["shared"]
    here = ALGORITHM.init(task.objective.init(Key.of(1))[0], 5, {})["shared"]
    states = {client: ALGORITHM.init_client(shared, Key.of(0)) for client in range(5)}
    for round in (1, 2, 3):
        ctx = Context(round, 5, Key.of(3).fold(round), 0.3)
        found = engine(ALGORITHM, moved, shared, states, Work.of(torch.arange(5)), ctx).cohort.payload["delta"]
        expected = Batched()(ALGORITHM, task, here, states, Work.of(torch.arange(5)), ctx).cohort.payload["delta"]
        torch.testing.assert_close({name: leaf.cpu() for name, leaf in found.items()}, expected, rtol=1e-9, atol=1e-11)
    assert engine._fused_graphs is not None
    assert len(engine._fused_graphs._captured) == 1
