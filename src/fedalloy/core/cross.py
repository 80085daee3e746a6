"""The extra exchange of rules that require ``cross_score``: every client's model on every client's validation part."""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core import inputs, tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import DataError
from fedalloy.core.protocols import Objective, Shared, Task
from fedalloy.core.types import Block, Contributions, Tree

_CHUNK = 4096
_WITNESSES = 1000


def check_validation(algorithm: Algorithm, task: Task) -> None:
    """Refuse, before the first round, a task without validation parts if the weighting needs them."""
    if "cross_score" not in algorithm.weighting.requires:
        return
    some = torch.arange(min(task.population, _WITNESSES))
    if not bool(task.data("valid", some).size.any()):
        raise DataError(
            f"weighting '{type(algorithm.weighting).__name__}' scores models on the clients' validation parts, but the "
            "task has none: set its valid_fraction above 0, e.g. 0.1"
        )


def exchange_scores(algorithm: Algorithm, task: Task, shared: Shared, cohort: Contributions) -> Contributions:
    """The cohort with cross scores if the weighting requires them, else the same cohort."""
    if "cross_score" not in algorithm.weighting.requires or not len(cohort):
        return cohort
    with torch.no_grad():
        cross = cross_scores(task.objective, shared, cohort, task.data("valid", cohort.ids), algorithm.solver.update)
    return cohort.with_cross(cross)


def cross_scores(
    objective: Objective, shared: Shared, cohort: Contributions, valid: Block, update: str = "delta"
) -> Tensor:
    """``[C, V]`` in float64: the accuracy of model i (received plus its update) on the validation part of client j of
    ``valid``, usually the same clients.

    A column is NaN for a client without validation examples. One model is in memory at a time.
    """
    size, device = valid.size.cpu(), _device(shared)
    owner = torch.repeat_interleave(size)
    rows = (valid.start.cpu() - size.cumsum(0) + size)[owner] + torch.arange(len(owner))
    rows = rows.to(inputs.device_of(valid.y))
    hits, weight = (torch.zeros(len(cohort), len(size), dtype=torch.float64) for _ in range(2))
    for some, whose in zip(rows.split(_CHUNK), owner.split(_CHUNK), strict=True):
        x, y = (inputs.to(inputs.take(part, some), device) for part in (valid.x, valid.y))
        for row in range(len(cohort)):
            right = objective.hits(objective.outputs(*_model(shared, cohort, row, update), x), y)
            counts = objective.counts(y)
            each = torch.ones(len(whose), dtype=torch.float64) if counts is None else counts.cpu().double()
            hits[row].index_add_(0, whose, each * right.cpu().double())
            weight[row].index_add_(0, whose, each)
    return hits / weight


def _model(shared: Shared, cohort: Contributions, row: int, update: str) -> tuple[Tree, Tree]:
    one = cohort.ids[row : row + 1]
    params = tree.add(shared["params"], tree.rows(cohort.rows(update, one), 0))
    return params, tree.rows(cohort.rows("buffers", one), 0) if "buffers" in cohort.parts else shared["buffers"]


def _device(shared: Shared) -> torch.device:
    return next(iter(shared["params"].values())).device
