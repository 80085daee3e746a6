"""The server's side of a task whose data it never sees: the model, the clients' names, and what nodes are told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.algorithm import facts_of
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart, Objective
from fedalloy.core.spec import from_spec
from fedalloy.core.types import Block, Facts
from fedalloy.recipe import Recipe
from fedalloy.recipe.resolving import task_of
from fedalloy.tasks.assembly import make_objective
from fedalloy.tasks.datasets.base import usual_of
from fedalloy.tasks.datasets.nodes import OnNodes

_TOLD = ("task", "partition", "noise")


@dataclass(frozen=True, eq=False)
class RemoteTask:
    """A model and clients somewhere else (:class:`fedalloy.core.protocols.Task`); ``spec`` is what nodes are told."""

    objective: Objective
    names: tuple[str, ...]
    spec: dict[str, Any]
    known: Facts

    @property
    def population(self) -> int:
        """How many clients exist."""
        return len(self.names)

    def data(self, part: DataPart, ids: Tensor) -> Block:
        """There are none here."""
        raise DataError(
            f"the {part} examples of the clients are on their nodes and cannot be looked at here (sampling 'by_size' "
            "and whatever else reads them needs a simulation); choose sampling 'uniform' or 'list'"
        )

    def facts(self) -> Facts:
        """The form of the data, for methods that make samples."""
        return self.known


def remote_task(recipe: Recipe) -> RemoteTask:
    """The task of a one-seed recipe for a federation.

    With ``dataset = { kind = "nodes", ... }`` the recipe itself says what the data look like. Any other dataset is
    read here once for its shape, its classes and its number of clients: such recipes are for trials.
    """
    loader = _nodes(recipe)
    if loader is None:
        return _trial(recipe)
    names = loader.clients or tuple(str(number) for number in range(recipe.partition.clients or 0))
    if not names:
        raise SpecError("dataset 'nodes': give the names of its clients, or their number as clients in [partition]")
    if recipe.noise:
        raise SpecError("noise: wrong labels are for simulations; leave [noise] out where the data are on nodes")
    spec = _spec(recipe, loader.shape, loader.classes, loader.bounds)
    model = {name: spec[name] for name in ("model", "loss", "dtype")}
    objective = make_objective(
        loader.shape, loader.classes, **model, trainable=tuple(spec["trainable"]), bounds=loader.bounds
    )
    return RemoteTask(objective, names, spec, _declared(loader, objective.dtype))


def _declared(loader: OnNodes, dtype: torch.dtype) -> Facts:
    """What the recipe says about the data; between which values they lie is known to their nodes alone."""
    return Facts(loader.shape, dtype, max(1, loader.classes), math.inf, -math.inf, bounds=loader.bounds)


def _nodes(recipe: Recipe) -> OnNodes | None:
    dataset = recipe.task.dataset
    if (dataset.get("kind") if isinstance(dataset, dict) else dataset) != "nodes":
        return None
    loader: OnNodes = from_spec("dataset", dataset, "task.dataset")
    return loader


def _trial(recipe: Recipe) -> RemoteTask:
    """What the recipe's own data say; then they are let go of."""
    task = task_of(recipe)
    shape = tuple(task.train.x.shape[1:])
    names = task.names or tuple(str(number) for number in range(task.population))
    classes = int(task.manifest.class_counts.shape[1])
    known = facts_of(task, Key.of(0))
    return RemoteTask(task.objective, names[: task.population], _spec(recipe, shape, classes, task.bounds), known)


def _spec(recipe: Recipe, shape: tuple[int, ...], classes: int, bounds: tuple[float, float] | None) -> dict[str, Any]:
    """What nodes need to know to make the same model and to split their data in the same way."""
    table, usual = recipe.task, usual_of(recipe.task.dataset)
    told = recipe.model_dump(exclude_none=True, include=set(_TOLD))
    return {
        "shape": list(shape),
        "classes": classes,
        "bounds": None if bounds is None else list(bounds),
        "model": usual.model if table.model is None else table.model,
        "loss": table.loss or usual.loss,
        "dtype": table.dtype,
        "trainable": list(table.trainable),
        "standardise": table.standardise or usual.standardise,
        "test_fraction": table.test_fraction,
        "valid_fraction": table.valid_fraction,
        "seed": recipe.run.seeds[0],
        "recipe": {**told, "run": {"seeds": recipe.run.seeds}},
    }
