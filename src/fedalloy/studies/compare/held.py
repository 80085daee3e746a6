"""Tasks that a worker of a comparison keeps, because the next run often has the same clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedalloy.core import inputs, registry
from fedalloy.tasks.federation import FederatedTask

if TYPE_CHECKING:
    from fedalloy.experiment.recipe import Experiment

_MOST_MB = 256
"""What the kept tasks of one worker may take together."""
_TABLES = ("task", "partition", "noise")
_OWN = ("callable", "folder", "nodes")
"""Datasets that are whatever the user has there."""


class HeldTasks:
    """The tasks of the last runs. All algorithms of a comparison get the same ones, seed by seed, and reading and
    dividing the data can take longer than training on them. Tasks never change, so runs can share them."""

    def __init__(self, most_mb: float = _MOST_MB) -> None:
        self._most = most_mb * 2**20
        self._kept: dict[str, FederatedTask] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def within(self, experiment: Experiment) -> Experiment:
        """The same run, with a task that is made only if it is not among those that are kept."""
        name = _name(experiment.resolved)
        return replace(experiment, task=lambda: self._get(name, experiment.task)) if name else experiment

    def _get(self, name: str, make: Callable[[], Any]) -> Any:
        found = self._kept.pop(name, None)
        task = make() if found is None else found
        if isinstance(task, FederatedTask) and _bytes(task) <= self._most:
            self._kept[name] = task  # the newest is last
            self._shorten()
        return task

    def _shorten(self) -> None:
        while sum(map(_bytes, self._kept.values())) > self._most:
            del self._kept[next(iter(self._kept))]


def _name(recipe: dict[str, Any]) -> str:
    """All that a task depends on, as text; nothing for data that may be others at the next look: a user's files,
    functions and synthetic samples."""
    table = recipe["task"]
    dataset = table["dataset"] if isinstance(table["dataset"], str) else table["dataset"].get("kind", "")
    known = dataset in registry.names("dataset") and dataset not in _OWN and not recipe.get("imports")
    if not known or "synthetic" in table:
        return ""
    parts = [recipe["run"]["seeds"], recipe.get("engine", {}).get("device", "cpu")]
    return json.dumps([*parts, *(recipe.get(name) for name in _TABLES)], default=repr)


def _bytes(task: FederatedTask) -> int:
    pools = (task.train, task.valid, task.test, task.global_test)
    leaves = [leaf for pool in pools if pool is not None for one in (pool.x, pool.y) for leaf in inputs.leaves(one)]
    return sum(leaf.nbytes for leaf in leaves)
