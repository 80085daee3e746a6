"""How the model serves every client, and the world: never averaged away, always summarised too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fedalloy.core.algorithm import ServerState
from fedalloy.core.protocols import Task
from fedalloy.core.types import Examples
from fedalloy.tasks.evaluation import evaluate_clients, evaluate_pool
from fedalloy.tasks.metrics.summary import summarise


@dataclass(frozen=True)
class Evaluation:
    """Per-client values by metric in id order, their summaries, and the values on the global test set."""

    clients: dict[str, list[float | None]]
    summary: dict[str, dict[str, float]]
    overall: dict[str, float]


def evaluate(task: Task, state: ServerState, metrics: tuple[str, ...], ids: torch.Tensor) -> Evaluation:
    """Score the global model on the test parts of ``ids`` and on the global test set."""
    params, buffers = state["shared"]["params"], state["shared"]["buffers"]
    values = evaluate_clients(task.objective, params, buffers, task.data("test", ids), metrics)
    pool: Examples | None = getattr(task, "global_test", None)
    overall = evaluate_pool(task.objective, params, buffers, pool, metrics) if pool is not None else {}
    return Evaluation(
        {name: [_number(value) for value in vector.tolist()] for name, vector in values.items()},
        {name: summarise(vector) for name, vector in values.items()},
        overall,
    )


def rows(evaluation: Evaluation, ids: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """What goes into the row of the round, and what into ``clients.jsonl``."""
    brief = {"evaluation": evaluation.summary, "global": evaluation.overall}
    return brief, {"split": "test", "ids": ids.tolist(), **evaluation.clients}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
