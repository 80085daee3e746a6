"""Rounds for tests of the kernels that take a solver's steps for many clients at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.protocols import Engine, LocalSolver, Wire
from fedalloy.core.types import Work
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.tasks.models.linear import twonn
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.testing import check_engine, small_task
from fedalloy.testing.cases import CHANGING, EngineCase
from fedalloy.testing.problems import CLASSES, INPUTS
from fedalloy.testing.toys import Lopsided

LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 3, "epochs": 2}


def case(
    solver: LocalSolver, rounds: tuple[Work, ...] = CHANGING, wire: tuple[Wire, ...] = (), model: Any = "mlp"
) -> EngineCase:
    """Several rounds: in the first one all control variates are zero."""
    task = small_task("mlp" if model == "twonn" else model)
    if model == "twonn":
        task = replace(task, objective=ModuleObjective(lambda: twonn(INPUTS, CLASSES, 5), dtype=torch.float64))
    return EngineCase("fused", "", Algorithm(solver, Lopsided(), ServerSgd(), wire), task, rounds)


def agrees(engine: Engine, played: EngineCase) -> None:
    """The engine gives what the loop gives, and not because it left the work to the loop."""
    assert check_engine(engine, [played]) == []
    assert not getattr(engine, "_unbatchable", "")
