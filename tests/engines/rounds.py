"""Single rounds on small federations, for tests that lay one engine beside another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Engine, Outcome, Shared, Task
from fedalloy.core.types import Block, Context, Work
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.testing import SmallTask, work
from fedalloy.testing.comparing import differences

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Called(Engine):
    """A function as an engine."""

    function: Callable[..., Outcome]

    def __call__(self, *given: Any) -> Outcome:
        return self.function(*given)


def task_of(
    factory: Callable[[], nn.Module],
    sizes: tuple[int, ...] = (5, 3, 6, 1),
    shape: tuple[int, ...] = (4,),
    classes: int = 3,
    loss: str = "cross_entropy",
) -> SmallTask:
    """Clients of the given sizes with normal inputs and uniform labels, in float64."""
    size, key = torch.tensor(sizes), Key.of(4)
    rows = int(size.sum())
    x = key.fold("x").normal(rows, *shape, dtype=torch.float64)
    y = (key.fold("y").uniform(rows, dtype=torch.float64) * classes).long()
    objective = ModuleObjective(factory, loss, dtype=torch.float64)
    return SmallTask(objective, Block(x, y, size.cumsum(0) - size, size))


def shared_of(algorithm: Algorithm, task: Task) -> Shared:
    params, buffers = task.objective.init(Key.of(1))
    return algorithm.init(params, task.population, buffers)["shared"]


def context(algorithm: Algorithm, task: Task, round: int = 1) -> Context:
    return Context(round, task.population, Key.of(3).fold("round", round), algorithm.solver.lr_at(round))


def play(engine: Engine, algorithm: Algorithm, task: Task, now: Work | None = None, round: int = 1) -> Outcome:
    """One round from the initial model and fresh client states."""
    now = now or work(*range(task.population))
    shared, fresh = shared_of(algorithm, task), task.objective.init
    ids = now.ids.tolist()
    states = {client: algorithm.init_client(shared, Key.of(2).fold(client), fresh) for client in ids}
    return engine(algorithm, task, shared, states, now, context(algorithm, task, round))


def visible(outcome: Outcome) -> dict[str, Any]:
    return {
        **{name: getattr(outcome.cohort, name) for name in ("ids", "payload", "stats")},
        "states": {str(client): state for client, state in outcome.states.items()},
        "failures": {str(client): why for client, why in outcome.failures.items()},
    }


def gaps(one: Outcome, other: Outcome, tolerance: float = TOLERANCE) -> list[str]:
    """Where two outcomes differ; states count where both engines tell them."""
    a, b = visible(one), visible(other)
    if not (a["states"] and b["states"]):
        del a["states"], b["states"]
    return list(differences(a, b, tolerance))
