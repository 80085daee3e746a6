"""The searches of a comparison: one per entry, with equal budgets, run together in several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.protocols import Task
from fedalloy.experiment.config import check_direction
from fedalloy.experiment.recipe.resolving import scored
from fedalloy.experiment.recipe.tables import Recipe, TuneTable
from fedalloy.studies.compare.jobs import Job, JobNews, Watcher, work_through
from fedalloy.studies.compare.naming import folders
from fedalloy.studies.compare.tuned import Stuck, Tries, Tuned
from fedalloy.studies.tune.searching import MakeJob, Search, tuning_seeds
from fedalloy.studies.tune.spaces import with_own_ranges
from fedalloy.studies.tune.storage import searching_alone

_AT_ONCE = 1000
"""Of so many clients' validation parts it is looked at a time whether there are any."""


def searches(
    entries: Sequence[tuple[str, Recipe]], folder: Path, make: MakeJob, grids: Mapping[str, Tries]
) -> list[Search]:
    """A search for every entry of a recipe with ``[tune]``, each with the same budget; none without that table."""
    table = entries[0][1].tune
    if table is None:
        return []
    if grids:
        raise SpecError(f"tune: '{next(iter(grids))}' has a grid too: give either a grid or a search")
    places = folders([name for name, _ in entries])
    entries = with_own_ranges(entries)
    for _, recipe in entries:
        check_search(recipe, table)
    return [Search(name, recipe, folder / "tuning" / places[name], make, table) for name, recipe in entries]


def check_search(recipe: Recipe, table: TuneTable) -> None:
    """A search needs one budget, seeds of its own, and a metric that is evaluated and has a direction."""
    _check_budget(table, recipe)
    check_tuning_seeds(recipe)
    found = scored(recipe)
    metric, evaluated = str(found.run.target_metric), found.evaluate.metrics or []
    if metric not in evaluated:
        raise SpecError(f"target_metric '{metric}' is not evaluated: {nearest(metric, evaluated)}")
    check_direction(metric, evaluated, "tuned on")


def check_tuning_seeds(recipe: Recipe) -> None:
    """Refuse reported seeds that are those of trials, also where these are the default."""
    both = sorted({*recipe.run.seeds} & {*tuning_seeds(recipe)})
    if both:
        raise SpecError(
            f"run.seeds has {', '.join(map(str, both))}, on which the search runs where run.tuning_seeds names no "
            "others: give run.tuning_seeds"
        )


def check_parts(task: Callable[[int], Task] | None, seeds: Sequence[int]) -> None:
    """A task that is given as an object must have validation parts: nobody can set some aside afterwards."""
    if task is None:
        return
    for seed in seeds:
        if not _has_valid(task(seed)):
            raise SpecError(
                "the task has no validation parts, on which a search scores its trials: make it with valid_fraction, "
                "fedalloy.task(..., valid_fraction=0.2)"
            )


def _has_valid(task: Task) -> bool:
    """Whether any client has validation examples; asked for some clients at a time, whose data may have to be read."""
    everyone = torch.arange(task.population)
    return any(bool(task.data("valid", some).size.any()) for some in everyone.split(_AT_ONCE))


def check_spent(found: Sequence[Search]) -> None:
    """Refuse a folder in which a search has had more than the budget: the others would get less than it."""
    for one in found:
        if one.total is not None and one.begun > one.total:
            had, asked = f"{one.begun} trials", f"{one.total}"
        elif one.table.rounds is not None and one.spent > one.table.rounds:
            had, asked = f"trials of {one.spent} rounds", f"{one.table.rounds} rounds"
        else:
            continue
        raise SpecError(
            f"{one.folder} holds {had}, more than the budget of {asked}, which all methods get: give at least as much, "
            "or choose another folder"
        )


def _check_budget(table: TuneTable, recipe: Recipe) -> None:
    budgets = [name for name in ("trials", "rounds", "seconds") if getattr(table, name) is not None]
    if len(budgets) > 1:
        raise SpecError(f"tune: give one budget, not {' and '.join(budgets)}")
    seeds = len(tuning_seeds(recipe))
    if table.rounds is not None and table.rounds < recipe.run.rounds * seeds:
        raise SpecError(
            f"tune: a budget of {table.rounds} rounds is less than one trial takes, {recipe.run.rounds * seeds}: "
            f"{recipe.run.rounds} rounds with each of {seeds} tuning seeds"
        )


def search_all(
    found: Sequence[Search], processes: int, watcher: Watcher, late: Callable[[], bool] = lambda: False
) -> tuple[list[Tuned], dict[str, Stuck]]:
    """Run all searches to the end of their budgets; those without a choice do not block the others. When it is
    ``late``, no search begins more trials than the others have begun."""
    by_name = {one.name: one for one in found}

    def feed() -> Job | None:
        """A run of the search that has spent the least, so that all advance together."""
        if late():
            most = max(one.begun for one in found)
            for one in found:
                one.limit(most)
        for one in sorted(found, key=lambda one: (len(one.tried) + len(one.running), one.spent)):
            if (job := one.next_job()) is not None:
                return job
        return None

    def tell(news: JobNews) -> None:
        if news.kind != "round":
            by_name[news.job.name].ended(news)
        watcher(news)

    if found:
        with searching_alone([one.folder for one in found]):
            work_through(feed, processes, tell)
    results = [(one, one.result) for one in found]
    tuned = [result for one, result in results if result is not None and not one.broken]
    return tuned, {one.name: _stuck(one) for one, result in results if one.broken or result is None}


def _stuck(search: Search) -> Stuck:
    if search.broken:
        return Stuck("interrupted", f"its search is not complete: {search.broken}")
    last = search.tried[-1].state if search.tried else "there was none"
    return Stuck("failed", f"every trial of its search failed on the tuning seeds, the last one with: {last}")
