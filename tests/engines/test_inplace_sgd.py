"""The kernel for plain descent on any model: equal to the loop, and only for solvers that are nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fedalloy.core.algorithm import Algorithm
from fedalloy.engines import loop
from fedalloy.engines.kernels import inplace_sgd
from fedalloy.engines.loop import Loop, run_one
from fedalloy.engines.workers import Workers
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.solvers.superfed import SuPerFed
from fedalloy.tasks.dropout import Dropout
from fedalloy.testing import work
from fedalloy.testing.toys import Lopsided
from tests.engines.rounds import gaps, play, task_of

SOLVERS = [
    Sgd(lr=0.3, batch_size=2, epochs=2),
    Sgd(lr=0.3, batch_size=2, epochs=2, momentum=0.9, weight_decay=0.1),
    Sgd(lr=0.3, batch_size=2, epochs=2, momentum=0.9, nesterov=True),
    Prox(lr=0.3, batch_size=2, epochs=3, mu=0.7),
    Prox(lr=0.3, batch_size=2, epochs=3, mu=0.7, momentum=0.5),
]


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2), nn.Flatten(),
        Dropout(0.3), nn.Linear(2, 3),
    )  # fmt: skip


@pytest.fixture
def kernel(monkeypatch):
    """The loop with this kernel in place of its own training, in this process."""
    monkeypatch.setattr(loop, "run_one", partial(run_one, kernel=inplace_sgd.train))
    return Loop()


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_it_is_the_loop(solver, kernel, monkeypatch):
    algorithm, task = Algorithm(solver, Lopsided(), ServerSgd()), task_of(pictures, (5, 3, 6, 1), (1, 5, 5))
    now = work(0, 1, 2, 3, epochs=(-1, 2, 0, 1), active=(True, True, True, False))
    found = play(kernel, algorithm, task, now)
    monkeypatch.undo()
    assert gaps(found, play(Loop(), algorithm, task, now)) == []


def _without(right, **changes):
    def descend(self, loss, lr):
        self.sgd = replace(self.sgd, **changes)
        return right(self, loss, lr)

    return descend


def _standing(right):
    def descend(self, loss, lr):
        for velocity in self.velocity:
            velocity.zero_()
        return right(self, loss, lr)

    return descend


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "velocity is forgotten": (inplace_sgd.InplaceModel, "descend", _standing),
    "decay is forgotten": (inplace_sgd.InplaceModel, "descend", partial(_without, weight_decay=0.0)),
    "the pull is forgotten": (inplace_sgd.InplaceModel, "descend", partial(_without, pull=0.0)),
    "batches come in another order": (
        inplace_sgd, "batches_of_one", lambda right: lambda *given: list(right(*given))[::-1]
    ),
    "losses are counted twice": (inplace_sgd, "loss_sums", lambda right: lambda losses: right(losses * 2)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_noticed(fault, kernel, monkeypatch):
    owner, name, breaks = FAULTS[fault]
    solver = Prox(lr=0.3, batch_size=2, epochs=2, mu=0.7, momentum=0.5, weight_decay=0.1)
    algorithm, task = Algorithm(solver, Lopsided(), ServerSgd()), task_of(lambda: nn.Linear(4, 3))
    monkeypatch.setattr(owner, name, breaks(getattr(owner, name)))
    found = play(kernel, algorithm, task)
    monkeypatch.undo()
    assert gaps(found, play(Loop(), algorithm, task)) != []


class Gated(nn.Module):
    """One part is never used, and another one only by some batches: an expert that nobody asked, a mask token."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.expert, self.idle = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(x) + self.expert(x) if x.mean() > 0 else self.head(x)
        return made


@pytest.mark.parametrize("solver", SOLVERS[:2], ids=str)
def test_parameters_that_a_batch_does_not_use_have_the_gradient_zero(solver, kernel, monkeypatch):
    algorithm, task = Algorithm(solver, Lopsided(), ServerSgd()), task_of(Gated)
    found = play(kernel, algorithm, task)
    monkeypatch.undo()
    assert gaps(found, play(Loop(), algorithm, task)) == []


def test_images_lie_channels_last_where_maxima_are_taken_of_them(monkeypatch):
    seen: list[tuple[int, ...]] = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.stride())
            return x

    def strides(pool: nn.Module) -> set[tuple[int, ...]]:
        seen.clear()
        task = task_of(lambda: nn.Sequential(Looks(), pool, nn.Flatten(), nn.Linear(4, 3)), (2,), (1, 4, 4))
        monkeypatch.setattr(loop, "run_one", partial(run_one, kernel=inplace_sgd.train))
        play(Loop(), Algorithm(Sgd(batch_size=None), Lopsided(), ServerSgd()), task)
        return set(seen)

    assert (16, 1, 4, 1) in strides(nn.MaxPool2d(2))
    assert strides(nn.AvgPool2d(2)) == {(16, 16, 4, 1)}


def test_processes_use_it_for_convolutions():
    algorithm = Algorithm(Sgd(lr=0.3, batch_size=2), Lopsided(), ServerSgd())
    task, engine = task_of(pictures, shape=(1, 5, 5)), Workers(2)
    try:
        assert gaps(play(engine, algorithm, task), play(Loop(), algorithm, task)) == []
        assert engine._crew is not None
        assert engine._crew.kernel(task.block)[0] is inplace_sgd.train
    finally:
        engine.close()


@pytest.mark.parametrize("kind", [Sgd, Prox, SuPerFed])
def test_what_is_made_from_a_plain_solver_does_not_pass_for_one(kind):
    """An engine that believed it would leave out what the new class adds."""

    @dataclass(frozen=True)
    class Changed(kind):  # type: ignore[misc, valid-type]
        pass

    plain = kind()
    assert plain.fusing is not None
    assert Changed().fusing is None
