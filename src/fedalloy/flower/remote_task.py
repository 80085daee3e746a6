"""The server's side of a task whose data are on nodes: the model, the clients' names, and the spec for nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from fedalloy.core.algorithm import data_spec_of
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.inputs import Shape, is_one_shape, listed, shape_of
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart, Objective, Task
from fedalloy.core.spec import from_spec
from fedalloy.core.types import Block, DataSpec
from fedalloy.experiment.recipe import Recipe
from fedalloy.experiment.recipe.resolving import task_of
from fedalloy.flower.node.data import check_nameable
from fedalloy.flower.node.leaves import frozen_digest
from fedalloy.flower.protocol.header import Refused
from fedalloy.flower.protocol.orders import RuleSpec, check_task
from fedalloy.tasks.assembly import make_objective
from fedalloy.tasks.datasets.base import defaults_of
from fedalloy.tasks.datasets.nodes import OnNodes
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.kinds import KINDS
from fedalloy.tasks.lazy import LazyTask
from fedalloy.tasks.losses.loss import Loss
from fedalloy.tasks.sources.opening import spec_of

_KINDS = f"allowed: {', '.join(KINDS)}"


@dataclass(frozen=True, eq=False)
class RemoteTask(Task):
    """A model and remote clients; ``spec`` is sent to nodes. ``clients`` are the recipe's names of them, ``sites``
    those of the nodes' operators, for people."""

    objective: Objective
    clients: tuple[str, ...]
    spec: dict[str, Any]
    known: DataSpec
    kind: str | None = None
    sites: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the clients in records."""
        return self.sites or self.clients

    @property
    def population(self) -> int:
        """The number of clients."""
        return len(self.clients)

    def data(self, part: DataPart, ids: Tensor) -> Block:
        """Refused: the data are on the nodes."""
        raise DataError(
            f"the {part} examples of the clients are on their nodes and cannot be read here (sampling 'by_size' "
            "and everything else that reads them needs a simulation); choose sampling 'uniform' or 'list'"
        )

    def fingerprint(self) -> dict[str, Any]:
        """What identifies this task, as far as the server knows."""
        return {"names": list(self.clients), "spec": self.spec}

    def data_spec(self) -> DataSpec:
        """The form of the data, for generative methods."""
        return self.known


def remote_task(recipe: Recipe) -> RemoteTask:
    """The task of a one-seed recipe for a federation.

    With ``dataset = { kind = "nodes", ... }`` the recipe itself describes the data. Any other dataset is
    read here once for its shape, its classes and its number of clients: such recipes are for trials.
    """
    loader = _nodes(recipe)
    if loader is None:
        return _trial(recipe)
    names = loader.clients or tuple(str(number) for number in range(recipe.partition.clients or 0))
    if not names:
        raise SpecError("dataset 'nodes': give the names of its clients, or their number as clients in [partition]")
    if recipe.noise:
        raise SpecError("noise: wrong labels are for simulations; remove [noise] if the data are on nodes")
    if loader.targets and recipe.task.kind is None:
        raise SpecError(f"task.kind is missing: the targets on the nodes have shape {list(loader.targets)}; {_KINDS}")
    form = {"targets": list(loader.targets), "real": loader.real, "ignore_index": loader.ignore_index}
    spec = _spec(recipe, loader.shape, loader.classes, loader.bounds, None) | form
    model = {name: spec[name] for name in ("model", "loss", "dtype", "kind", "unit", "augment", "buckets")}
    patterns = None if recipe.task.trainable is None else tuple(recipe.task.trainable)
    objective = make_objective(
        loader.shape, loader.classes, **model, trainable=patterns, bounds=loader.bounds, targets=loader.targets,
        ignore_index=loader.ignore_index,
    )  # fmt: skip
    spec["frozen"] = frozen_digest(objective)
    return RemoteTask(objective, names, spec, _declared(loader, objective.dtype), recipe.task.kind)


def _declared(loader: OnNodes, dtype: torch.dtype) -> DataSpec:
    """The form of the data as declared in the recipe; their bounds are only known to their nodes."""
    shape, shapes = (loader.shape, None) if is_one_shape(loader.shape) else ((), loader.shape)
    outputs = max(1, loader.classes)
    return DataSpec(shape, dtype, outputs, math.inf, -math.inf, bounds=loader.bounds, shapes=shapes)  # type: ignore[arg-type]


def _nodes(recipe: Recipe) -> OnNodes | None:
    dataset = recipe.task.dataset
    if (dataset.get("kind") if isinstance(dataset, dict) else dataset) != "nodes":
        return None
    loader: OnNodes = from_spec("dataset", dataset, "task.dataset")
    return loader


def _trial(recipe: Recipe) -> RemoteTask:
    """The task from the recipe's own data, which are not kept."""
    task = task_of(recipe)
    x, _ = _first(task)
    shape = shape_of(x)
    names = tuple(task.names or (str(number) for number in range(task.population)))
    known = data_spec_of(task, Key.of(0))
    spec = _spec(recipe, shape, task.classes, task.bounds, _trial_spec(recipe)) | _targets(task)
    spec["frozen"] = frozen_digest(task.objective)
    return RemoteTask(task.objective, names[: task.population], spec, known, task.kind)


def _first(task: FederatedTask | LazyTask) -> tuple[Any, Any]:
    """Examples that show the form of all."""
    some = task.source.template if isinstance(task, LazyTask) else task.train
    return some.x, some.y


def _targets(task: FederatedTask | LazyTask) -> dict[str, Any]:
    """The form of the targets, for nodes; nothing for one class or quantity per example."""
    (_, y), rule = _first(task), task.objective.loss_rule
    ignored = rule.ignored if isinstance(rule, Loss) else None
    if y.dim() == 1 and y.is_floating_point() == (task.classes == 0):
        return {}
    form = {"kind": task.kind, "targets": list(y.shape[1:]), "real": y.is_floating_point()}
    return form if ignored is None else {**form, "ignore_index": ignored}


def _trial_spec(recipe: Recipe) -> dict[str, Any] | None:
    """The data that nodes of a trial can load; None if they are named by a path or a function."""
    dataset, dealt = recipe.task.dataset, recipe.partition
    try:
        check_nameable(RuleSpec.model_validate(spec_of(dataset)))
    except (Refused, ValidationError):
        return None
    return {
        "dataset": dataset,
        "partition": {"kind": dealt.kind, **dealt.arguments} if dealt.kind else None,
        "clients": dealt.clients,
        "newcomers": dealt.newcomers,
        "noise": recipe.noise.model_dump() if recipe.noise else None,
    }


def _spec(recipe: Recipe, shape: Shape, classes: int, bounds: tuple[float, float] | None, trial: Any) -> dict[str, Any]:
    """The spec from which nodes build the same model and split their data in the same way; what they would refuse is
    refused here, before anything is sent."""
    table, defaults = recipe.task, defaults_of(recipe.task.dataset)
    if table.synthetic is not None:
        raise SpecError(
            "task.synthetic is a file on this machine, and nodes accept no files from a server: remove it, or put the "
            "samples into the data of the nodes"
        )
    model = defaults.model if table.model is None else table.model
    spec = {
        "shape": listed(shape),
        "classes": classes,
        "bounds": None if bounds is None else list(bounds),
        "model": model,
        "loss": table.loss or defaults.loss,
        "kind": table.kind,
        "unit": table.unit,
        "augment": table.augment.model_dump() if table.augment else None,
        "buckets": table.buckets,
        "dtype": table.dtype,
        "trainable": table.trainable,
        "standardise": table.standardise or defaults.standardise,
        "test_fraction": table.test_fraction,
        "valid_fraction": table.valid_fraction,
        "seed": recipe.run.seeds[0],
        "trial": trial,
    }
    # Whether a model of another package is allowed is decided by the nodes: their policies list their models.
    kind = model.get("kind") if isinstance(model, dict) else model
    check_task(spec, models=[kind] if isinstance(kind, str) else ())
    return spec
