"""A comparison given in Python, as the recipe that the command line would run: the same runs, folders and records."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.protocols import Task
from fedalloy.core.task import check_task
from fedalloy.experiment.describing import PATHS, devices_table, parts_of, sampling_table
from fedalloy.experiment.recipe.changes import merge
from fedalloy.experiment.recipe.reading import load, parse
from fedalloy.experiment.recipe.tables import Recipe
from fedalloy.experiment.records.reading import GIVEN
from fedalloy.studies.compare.checking import check_engine, check_folder, check_grid
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.source import TaskSource

RecipeLike = Recipe | Mapping[str, Any] | str | Path
TaskLike = Task | Callable[[int], Task]
AlgorithmLike = Algorithm | str | Mapping[str, Any]
Algorithms = Mapping[str, AlgorithmLike] | Sequence[str]
Grid = Mapping[str, Sequence[Any] | Mapping[str, Sequence[Any]]]
_TABLES = ("solver", "weighting", "server", "wire", "algorithm")
_SEEDS = ("seeds", "tuning_seeds")
_AT_ONCE = 4
"""How many seeds' tasks are kept in memory."""


@dataclass(frozen=True)
class Call:
    """A recipe and, where the data cannot be in it, the task of every seed."""

    recipe: Recipe
    task: Callable[[int], Task] | None
    folder: Path


def as_call(
    task: RecipeLike | TaskLike, algorithms: Algorithms | None, folder: str | Path | None, settings: Mapping[str, Any]
) -> Call:
    """The recipe of a comparison: that of the first argument, or one made from a task, with the changes applied."""
    if isinstance(algorithms, Task):
        raise SpecError("compare: the second argument is a task; the order is compare(task, algorithms)")
    if algorithms is not None and not algorithms:
        raise SpecError("compare: there are no algorithms: give {name: algorithm, ...}")
    check_folder(folder)
    check_engine(settings.get("engine"))
    settings = {**settings, **{name: _seeds(settings[name], name) for name in _SEEDS if settings.get(name) is not None}}
    given = task if isinstance(task, Recipe | Mapping | str | Path) else None
    where = Path(folder) if folder is not None else Path("runs") / _name(task)
    if given is not None:
        tables, own = _as_recipe(given).model_dump(exclude_none=True), None
    else:
        seeds = [*(settings.get("seeds") or [0]), *(settings.get("tuning_seeds") or ())]
        tables, own = _from_tasks(task, seeds)  # type: ignore[arg-type]
    tables = merge(tables, _unless_left_out(tables, dict(_placed(settings))))
    if settings.get("tune") is not None:
        search = {name: one for name, one in tables.get("tune", {}).items() if name not in ("rounds", "seconds")}
        tables["tune"] = {**search, "trials": settings["tune"]}
    if algorithms is not None:
        tables["compare"] = [_entry(name, one, tables) for name, one in _named(algorithms).items()]
    grid: Grid = {} if settings.get("grid") is None else settings["grid"]
    check_grid(grid)
    recipe = parse(_with_grid(tables, grid), "compare")
    if "tune" in settings and settings.get("tuning_seeds") is not None:
        _check_tunes(recipe)
    return Call(recipe, own, where)


def _check_tunes(recipe: Recipe) -> None:
    """Refuse tuning seeds of a comparison that tunes nothing."""
    if not recipe.grid and recipe.tune is None and not any(entry.grid for entry in recipe.compare):
        raise SpecError("compare: tuning_seeds are for tuning, and nothing is tuned: give grid or tune too")


def _unless_left_out(tables: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A task's own target metric is not that of runs whose ``metrics`` leave it out."""
    metrics, target = settings.get("evaluate.metrics"), tables.get("run", {}).get("target_metric")
    if not isinstance(metrics, list) or "run.target_metric" in settings or target is None or target in metrics:
        return settings
    return {**settings, "run.target_metric": metrics[0]} if metrics else settings


def _seeds(given: Any, name: str) -> list[Any]:
    """Seeds as a list; a number could be one seed or their number."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise SpecError(f"compare: {name} must be a list, such as [0, 1, 2] or range(3), got {given!r}")
    found = list(given)
    if not found and name == "seeds":
        raise SpecError("compare: seeds is empty: give at least one, such as [0, 1, 2]")
    return found


def _name(task: object) -> str:
    """The default folder's name, for a recipe file that of ``fedalloy compare``."""
    return Path(task).stem if isinstance(task, str | Path) else "comparison"


def _as_recipe(given: RecipeLike) -> Recipe:
    if isinstance(given, Recipe):
        return given
    return load(given) if isinstance(given, str | Path) else parse(given)


def _from_tasks(task: TaskLike, seeds: Sequence[int]) -> tuple[dict[str, Any], Callable[[int], Task] | None]:
    """The tables of a task, and the task of every seed where a recipe could not make the same ones.

    One task is used for all seeds; a function makes the task of a seed.
    """
    make = _maker(task)
    sources = [_source(make(seed)) for seed in seeds]
    first = make(seeds[0])
    named = list(first.metrics)
    tables: dict[str, Any] = {"evaluate": {"metrics": named}, "run": {"target_metric": named[0]}} if named else {}
    known = [one for one, seed in zip(sources, seeds, strict=True) if one is not None and one.seed == seed]
    if len(known) == len(seeds) and all(one.tables == known[0].tables for one in known):
        return {**tables, **known[0].tables}, None
    return {**tables, "task": {"dataset": GIVEN}}, make


def _maker(task: TaskLike) -> Callable[[int], Task]:
    if not isinstance(task, Task) and callable(task):
        if not _takes_one(task):
            raise SpecError(
                f"compare: {_called(task)} makes the task of a seed, so it must take one argument, the seed"
            )
        return lru_cache(_AT_ONCE)(lambda seed: _checked(task(seed)))
    _checked(task)
    return lambda seed: task


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(0)
    except TypeError:
        return False
    except ValueError:  # a function of C does not say what it takes
        pass
    return True


def _called(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _checked(task: object) -> Task:
    check_task(task, "compare: the first argument (a task, a function from a seed to a task, or a recipe)")
    assert isinstance(task, Task)
    return task


def _source(task: Task) -> TaskSource | None:
    return task.source if isinstance(task, FederatedTask) else None


def _placed(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The settings by their place in a recipe, under the names that ``fedalloy.fit`` has."""
    places = {**PATHS, "seeds": "run.seeds", "tuning_seeds": "run.tuning_seeds", "cohort": "sampling.cohort"}
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if name in ("grid", "tune") or value is None:
            continue
        if name == "engine":
            found.append(("engine.kind", value))
        elif name == "engine_options":
            found += [(f"engine.{key}", one) for key, one in value.items()]
        elif name in ("sampling", "devices"):
            found.append((name, sampling_table(value) if name == "sampling" else devices_table(value)))
        elif name in places:
            found.append((places[name], list(value) if isinstance(value, tuple | range) else value))
        else:
            if name == "resume":
                raise SpecError("compare: leave resume out; what was interrupted in the folder is resumed by itself")
            allowed = {*places, "grid", "tune", "engine", "engine_options", "sampling", "devices"}
            raise SpecError(f"compare: unknown setting '{name}'; {nearest(name, allowed)}")
    if any(value is None for _, value in found):
        raise SpecError("compare: sampling must be UniformSampling, BySize or Listed, which a recipe can hold")
    return found


def _named(algorithms: Algorithms) -> dict[str, AlgorithmLike]:
    if isinstance(algorithms, Mapping):
        return dict(algorithms)
    if isinstance(algorithms, str) or not all(isinstance(one, str) for one in algorithms):
        raise SpecError("compare: algorithms must be {name: algorithm, ...}, or a list of published methods' names")
    if twice := [name for place, name in enumerate(algorithms) if name in algorithms[:place]]:
        raise SpecError(f"compare: '{twice[0]}' is named twice; give {{name: algorithm, ...}} to compare two of a kind")
    return {name: name for name in algorithms}


def _entry(name: str, algorithm: AlgorithmLike, tables: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of the comparison; an algorithm given as a value replaces everything that a recipe says about it."""
    if isinstance(algorithm, str):
        return {"name": name, "set": {"algorithm.name": algorithm}}
    if isinstance(algorithm, Mapping):
        return {"name": name, "set": _settings(name, algorithm)}
    if not isinstance(algorithm, Algorithm):
        said = "fedavg(lr=0.05), the name of a method, or a table: {'name': 'fedprox', 'mu': 0.1}"
        raise SpecError(f"compare: '{name}' is a {type(algorithm).__name__}: give {said}")
    if there := [table for table in _TABLES if tables.get(table)]:
        raise SpecError(
            f"compare: the recipe's [{there[0]}] would not reach '{name}', which is given as a value: give the name of "
            "a method, or take that table out of the recipe"
        )
    return {"name": name, "set": parts_of(algorithm)}


def _settings(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """``{"name": "fedprox", "mu": 0.1}``, or the tables of a recipe: ``{"weighting": {"kind": "uniform"}}``."""
    if "name" in table:
        return {f"algorithm.{key}": value for key, value in table.items()}
    unknown = [key for key in table if key.split(".")[0] not in _TABLES]
    if unknown:
        raise SpecError(
            f"compare: '{name}' has '{unknown[0]}'; a table has the 'name' of a method and its settings, or parts: "
            f"{nearest(unknown[0], _TABLES)}"
        )
    return dict(table)


def _with_grid(tables: dict[str, Any], grid: Grid) -> dict[str, Any]:
    """The recipe with a grid for all entries, or by the name of an entry."""
    made = merge(tables, {})
    entries = {entry["name"]: entry for entry in made.get("compare", [])}
    for path, values in grid.items():
        _check_dotted(values if isinstance(values, Mapping) else [path])
        if isinstance(values, Mapping):
            if path not in entries:
                raise SpecError(f"compare: grid has '{path}', which is not compared: {nearest(path, entries)}")
            entries[path]["grid"] = {**entries[path].get("grid", {}), **{at: list(one) for at, one in values.items()}}
        else:
            made["grid"] = {**made.get("grid", {}), path: list(values)}
    _check_paths(made)
    return made


def _check_dotted(paths: Iterable[str]) -> None:
    """Refuse a setting without its table, such as ``lr``."""
    for path in paths:
        if "." not in path:
            raise SpecError(f"compare: the grid's '{path}' must name a table too, such as 'algorithm.{path}'")


def _check_paths(tables: Mapping[str, Any]) -> None:
    """Refuse a grid that would change nothing: settings of a method that is given by its parts."""
    for entry in tables.get("compare", []):
        parts = all(part in entry.get("set", {}) for part in ("solver", "weighting", "server"))
        paths = [path for path in {**tables.get("grid", {}), **entry.get("grid", {})} if path.startswith("algorithm.")]
        if parts and paths:
            raise SpecError(
                f"compare: '{paths[0]}' does not reach '{entry['name']}', which is given by its parts: write "
                f"'solver.{paths[0].partition('.')[2]}', or give the method as {{'name': ...}}"
            )
