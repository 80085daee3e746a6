"""Checks whether a recipe would run, without running it and without importing anything that it names.

The data are loaded and split, the model is built, and everything that a run checks before its first round is checked.
What depends on the recipe's own code is reported as unchecked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.capabilities import check_capabilities
from fedalloy.core.cross import check_validation
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Task
from fedalloy.core.spec import from_spec
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.health import check_able
from fedalloy.experiment.machinery import closing, make_engine
from fedalloy.experiment.recipe.changes import merge
from fedalloy.experiment.recipe.learned import table_file
from fedalloy.experiment.recipe.reading import parse, without_imports
from fedalloy.experiment.recipe.resolving import algorithm_of, config_of, entry_names, single_of, task_of
from fedalloy.experiment.recipe.tables import Recipe
from fedalloy.tasks.metrics.metric import choose
from fedalloy.tasks.sources.opening import spec_of


@dataclass
class Findings:
    """What could not be checked, and a cache of the tasks that were made."""

    unchecked: list[str] = field(default_factory=list)
    tasks: dict[str, Task] = field(default_factory=dict)

    def skip(self, what: str) -> None:
        """Note once that something was not checked."""
        if what not in self.unchecked:
            self.unchecked.append(what)


def check(recipe: Recipe) -> list[str]:
    """Refuse a recipe that would not run; returns what could not be checked without its own code."""
    found = Findings()
    with without_imports():
        for one in _runs(recipe):
            _check_run(one, found)
    return found.unchecked


def _runs(recipe: Recipe) -> Iterator[Recipe]:
    """Every entry with the recipe's values, and once for every value of its grid."""
    seed = recipe.run.seeds[0]
    names: list[str | None] = [*entry_names(recipe)]
    for name in names or [None]:
        single = single_of(recipe, seed, name)
        yield single
        own = next((entry.grid for entry in recipe.compare if entry.name == name), {})
        for path, values in {**recipe.grid, **own}.items():
            for value in values:
                yield parse(merge(single.model_dump(exclude_none=True), {path: value}), f"grid {path}")


def _check_run(recipe: Recipe, found: Findings) -> None:
    config = config_of(recipe)
    _check_names(recipe, config)
    algorithm = None if _foreign_rules(recipe, found) else algorithm_of(recipe)
    with closing(make_engine(config)):
        pass
    population, task = _clients(recipe, found)
    if population is not None:
        _check_clients(config, population, algorithm)
    if algorithm is not None and task is not None:
        _check_together(algorithm, task, config)


def _check_names(recipe: Recipe, config: RunConfig) -> None:
    if not recipe.imports:
        choose(config.metrics)
    for seed in recipe.run.seeds:
        table = table_file(recipe, seed)
        if table is not None and not table.exists():
            raise SpecError(
                f"there is no table of weights {table}: learn it with 'fedalloy unfold', or correct its name"
            )


def _foreign_rules(recipe: Recipe, found: Findings) -> bool:
    """Whether the algorithm has rules that may be in the modules which the recipe imports."""
    named = [
        (category, getattr(recipe, category).kind)
        for category in ("solver", "weighting", "server")
        if getattr(recipe, category)
    ]
    named += [("wire", one.kind) for one in recipe.wire or ()] + [("algorithm", recipe.algorithm.name or "fedavg")]
    unknown = [kind for category, kind in named if not registry.knows(category, kind)]
    if recipe.imports:
        found.skip(f"what the modules in imports do ({', '.join(recipe.imports)})")
    if unknown and recipe.imports:
        found.skip(f"the algorithm: {', '.join(unknown)} must be defined in these modules")
    return bool(unknown and recipe.imports)


def _clients(recipe: Recipe, found: Findings) -> tuple[int | None, Task | None]:
    """The number of clients and, unless it depends on the recipe's own code, the task."""
    dataset = spec_of(recipe.task.dataset)
    kind, loader = _kind(dataset), None
    if kind in registry.names("dataset") or not recipe.imports:
        loader = from_spec("dataset", dataset, "task.dataset")
    if loader is None or kind == "callable":
        found.skip(f"the data: {kind if loader is None else loader.function} is the recipe's own code")
        return recipe.partition.clients, None
    known, own = _with_known_model(recipe, found)
    what = json.dumps(known.model_dump(include={"task", "partition", "noise"}), sort_keys=True, default=str)
    if what not in found.tasks:
        found.tasks[what] = _made(known, kind)
    task = found.tasks[what]
    return task.population, None if own or kind == "nodes" else task


def _made(recipe: Recipe, kind: str) -> Task:
    if kind != "nodes":
        return task_of(recipe)
    # For data on nodes, only what the engine that reaches them provides is known here.
    engine: Any = registry.find("engine", "flower")
    task: Task = engine.task_of(recipe)
    return task


def _with_known_model(recipe: Recipe, found: Findings) -> tuple[Recipe, bool]:
    """The recipe on a CPU, with the default model instead of one built by its own code, and whether it was replaced."""
    changes: dict[str, Any] = {}
    for name in ("model", "classifier"):
        kind = _kind(getattr(recipe.task, name))
        if ":" in kind or (recipe.imports and kind and kind not in registry.names("model")):
            found.skip(f"the {name} {kind}: it is the recipe's own code")
            changes |= {name: None, "trainable": None}
    task, engine = recipe.task.model_copy(update=changes), recipe.engine.model_copy(update={"device": "cpu"})
    return recipe.model_copy(update={"task": task, "engine": engine}), bool(changes)


def _check_clients(config: RunConfig, population: int, algorithm: Algorithm | None) -> None:
    config.devices.check(population)
    config.sampling.check(population)
    if algorithm is not None:
        algorithm.check_cohort(config.sampling.size(population), population)
        algorithm.check_able(config.sampling.smallest(population), population)


def _check_together(algorithm: Algorithm, task: Task, config: RunConfig) -> None:
    """Check that model, data and method fit together."""
    bind = algorithm.bind(task, Key.of(config.seed))
    check_capabilities(bind, task)
    check_validation(bind, task)
    check_able(bind, task, config)
    with torch.no_grad():
        params, buffers = task.objective.init(Key.of(0))
        bind.init(params, task.population, buffers)


def _kind(spec: str | Mapping[str, Any] | None) -> str:
    return str(spec.get("kind", "")) if isinstance(spec, Mapping) else spec or ""
