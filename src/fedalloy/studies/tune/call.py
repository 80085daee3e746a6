"""``fedalloy.tune``: good settings for one or several algorithms, found with equal budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from fedalloy.core.errors import FedalloyError
from fedalloy.experiment.recipe.changes import leaves
from fedalloy.experiment.recipe.resolving import entry_names
from fedalloy.experiment.recipe.tables import Recipe
from fedalloy.experiment.records import atomic
from fedalloy.experiment.records.toml import dumps
from fedalloy.experiment.settings import SearchSettings
from fedalloy.studies.compare.calling import Algorithms, Call, RecipeLike, TaskLike, as_call
from fedalloy.studies.compare.comparing import (
    algorithms_or_folder,
    as_entries,
    check_seeds,
    default_processes,
    grid_of,
    job_of,
    single_threaded,
    with_entries,
    write_json,
)
from fedalloy.studies.compare.jobs import Watcher, leave_if_starting
from fedalloy.studies.compare.tuned import Tries, Tuned, tuned_json
from fedalloy.studies.tune.searching import Search
from fedalloy.studies.tune.tuning import check_parts, check_spent, search_all, searches


@dataclass(frozen=True, repr=False)
class Tuning:
    """What was found for every algorithm, and the recipe that runs it: ``fedalloy compare FILE``.

    >>> Tuning(Path("runs"), (Tuned("fedavg", {"algorithm.lr": 0.2}, ()),), Path("runs/tuned.toml")).best
    {'fedavg': {'algorithm.lr': 0.2}}
    """

    folder: Path
    tuned: tuple[Tuned, ...]
    file: Path
    spaces: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __repr__(self) -> str:
        said = "; ".join(f"{one.name} after {one.how}: {one.best}" for one in self.tuned)
        return f"<{said}; recipe {self.file}>"

    @property
    def best(self) -> dict[str, dict[str, Any]]:
        """The best settings, by algorithm."""
        return {one.name: one.best for one in self.tuned}

    def sensitivity(self, name: str) -> dict[str, dict[str, tuple[float | None, int]]]:
        """By setting: the best score in the low, the middle and the high third of its range (on its scale), and how
        many trials finished or were stopped there."""
        found = next(one for one in self.tuned if one.name == name).thirds
        return {path: dict(thirds) for path, thirds in found.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain values for machines."""
        sensitivity = {one.name: self.sensitivity(one.name) for one in self.tuned}
        found = [tuned_json(one) for one in self.tuned]
        return {"folder": str(self.folder), "recipe": str(self.file), "tuned": found, "sensitivity": sensitivity}


def tune(
    task: RecipeLike | TaskLike,
    algorithms: Algorithms | str | Path | None = None,
    folder: str | Path | None = None,
    *,
    trials: int | None = None,
    budget_rounds: int | None = None,
    seconds: float | None = None,
    space: Mapping[str, Any] | None = None,
    sampler: str | None = None,
    pruner: str | None = None,
    tuning_seeds: Sequence[int] | None = None,
    processes: int | None = None,
    watcher: Watcher | None = None,
    **settings: Unpack[SearchSettings],
) -> Tuning:
    """Search for good settings of every algorithm, each with the same budget: ``trials`` (default 20),
    ``budget_rounds`` or ``seconds``.

    ``task`` and ``algorithms`` are those of :func:`fedalloy.compare`. Trials run on the ``tuning_seeds`` and are scored
    on validation parts; test parts are not looked at. After about a ninth and a third of the rounds those that fall
    behind are stopped (``pruner``: asha, hyperband, none); their rounds count. ``space`` replaces the ranges that the
    rules declare: ``{"algorithm.lr": {"low": 0.01, "high": 1.0, "log": True}}``. Everything is kept in the folder
    (default ``runs/comparison``, or ``runs/<recipe>``); the same call continues after an interrupt.

    >>> import tempfile
    >>> space = {"algorithm.lr": [0.1, 0.4], "algorithm.server_lr": [1.0, 0.5]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     data = {"task": {"dataset": "digits"}, "partition": {"kind": "iid", "clients": 3}}
    ...     found = tune(data, ["fedavg"], folder, trials=2, rounds=2, space=space, processes=1)
    >>> len(found.tuned[0].tried)
    2
    """
    leave_if_starting()
    call = as_call(
        task, *algorithms_or_folder(task, algorithms, folder, "tune"), {"tuning_seeds": tuning_seeds, **settings}
    )
    table: dict[str, Any] = {"trials": trials, "rounds": budget_rounds, "seconds": seconds}
    table |= {"space": space, "sampler": sampler, "pruner": pruner}
    return _tuned(call, with_budget(call.recipe, table), processes, watcher or (lambda news: None))


def _tuned(call: Call, recipe: Recipe, processes: int | None, watcher: Watcher) -> Tuning:
    entries = single_threaded(as_entries(recipe))
    check_seeds(entries)
    grids: dict[str, Tries] = {name: [] for name in entry_names(entries) if grid_of(entries, name)}
    found = searches(with_entries(entries), call.folder, partial(job_of, call=call), grids)
    check_parts(call.task, found[0].recipe.run.tuning_seeds)
    check_spent(found)
    tuned, stuck = search_all(found, 1 if call.task else processes or default_processes(entries), watcher)
    if stuck:
        name, reason = next(iter(stuck.items()))
        raise FedalloyError(f"{name}: {reason.reason}")
    write_json(call.folder / "tuning.json", [tuned_json(one) for one in tuned])
    return Tuning(call.folder, tuple(tuned), _write(call.folder, recipe, tuned), _spaces(found))


def with_budget(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """The recipe with ``[tune]``; a budget that is given replaces the recipe's."""
    from fedalloy.experiment.recipe.reading import parse

    given = {name: value for name, value in given.items() if value is not None}
    table = recipe.tune.model_dump(exclude_none=True) if recipe.tune else {}
    if any(name in given for name in ("trials", "rounds", "seconds")):
        table = {name: value for name, value in table.items() if name not in ("trials", "rounds", "seconds")}
    made = {**recipe.model_dump(exclude_none=True), "tune": {**table, **given}}
    return parse(made, "tune")


def _write(folder: Path, recipe: Recipe, tuned: Sequence[Tuned]) -> Path:
    """A recipe with the settings that were found."""
    best = {one.name: one.best for one in tuned}
    made = as_entries(recipe).model_dump(exclude_none=True, exclude_defaults=True)
    made.pop("tune", None)
    for entry in made["compare"]:
        entry["set"] = {**dict(leaves(entry.get("set", {}))), **best[entry["name"]]}
    file = folder / "tuned.toml"
    atomic.write_text(file, dumps(made))
    return file


def _spaces(found: Sequence[Search]) -> dict[str, Mapping[str, Any]]:
    return {one.name: one.space for one in found}
