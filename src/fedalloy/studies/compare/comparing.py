"""Several algorithms times seeds on one recipe, after tuning each on separate seeds."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from fedalloy.core import registry
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.showing import ShownRuns
from fedalloy.experiment.config import check_direction
from fedalloy.experiment.notebook import in_notebook
from fedalloy.experiment.recipe.changes import merge
from fedalloy.experiment.recipe.reading import parse
from fedalloy.experiment.recipe.resolving import cores, entry_names, resolve, scored, with_entry
from fedalloy.experiment.recipe.tables import EntryTable, Recipe
from fedalloy.experiment.records import atomic
from fedalloy.experiment.records.reading import RunRecord, find_runs, is_run, read_run
from fedalloy.experiment.settings import ComparisonSettings
from fedalloy.results.conclusion import conclusion, notes
from fedalloy.results.gains import ClientGains, client_gains, read_scores
from fedalloy.results.looks import Look, read_looks, record_look
from fedalloy.results.outcome import RunOutcome, read_outcome
from fedalloy.results.table import ResultRow, spreads, summarise
from fedalloy.studies.compare.calling import Algorithms, Call, Grid, RecipeLike, TaskLike, as_call
from fedalloy.studies.compare.checking import check_arguments
from fedalloy.studies.compare.jobs import Broken, Job, Watcher, is_done, leave_if_starting, run_jobs
from fedalloy.studies.compare.naming import folders, safe, settings_folders
from fedalloy.studies.compare.progress import JobsBar
from fedalloy.studies.compare.tuned import Stuck, Tried, Tries, Tuned, check_untuned, set_aside, tuned_json
from fedalloy.studies.tune.searching import Search
from fedalloy.studies.tune.tuning import check_parts, check_spent, search_all, searches
from fedalloy.tasks.metrics.direction import best, higher_is_better


@dataclass(frozen=True, repr=False)
class Comparison(ShownRuns):
    """All outcomes, what tuning chose, the looks at the comparison, this one included, and the table."""

    folder: Path
    outcomes: tuple[RunOutcome, ...]
    tuned: tuple[Tuned, ...]
    looks: tuple[Look, ...] = ()

    def __repr__(self) -> str:
        names = dict.fromkeys(run.name for run in self.outcomes)
        finished = sum(run.finished for run in self.outcomes)
        return f"<{', '.join(names)}: {finished} of {len(self.outcomes)} runs finished; folder {self.folder}>"

    @property
    def rows(self) -> list[ResultRow]:
        """One row per algorithm."""
        return summarise(self.outcomes, self.looks)

    @property
    def conclusion(self) -> str:
        """What the runs decide, in a sentence."""
        return conclusion(self.outcomes, self.looks)

    @property
    def notes(self) -> list[str]:
        """What the intervals and verdicts of the table mean, and what a seed redraws."""
        return notes(self.outcomes, self.looks)

    @property
    def gains(self) -> list[ClientGains]:
        """Every algorithm against the first one, client by client."""
        return client_gains([read_scores(outcome) for outcome in self.outcomes], self.outcomes[0].metric)

    def run(self, name: str, seed: int | None = None) -> RunRecord:
        """The records of one run; without a seed, that of the lowest."""
        seeds = {one.seed: one for one in self.outcomes if one.name == name}
        if not seeds:
            raise SpecError(f"'{name}' was not compared: {nearest(name, {one.name for one in self.outcomes})}")
        if seed is not None and seed not in seeds:
            raise SpecError(f"'{name}' has no run with seed {seed}: its seeds are {', '.join(map(str, seeds))}")
        found = seeds[min(seeds) if seed is None else seed]
        if found.folder is None:
            raise SpecError(f"{found} has no records, because it was not started")
        return read_run(found.folder)

    def to_json(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "folder": str(self.folder),
            "conclusion": self.conclusion,
            "notes": self.notes,
            "looks": [asdict(look) for look in self.looks],
            "table": [row.to_json() for row in self.rows],
            "clients": [one.to_json() for one in self.gains],
            "tuned": [tuned_json(tuned) for tuned in self.tuned],
            "runs": [outcome.to_json() for outcome in self.outcomes],
        }


def compare(
    task: RecipeLike | TaskLike,
    algorithms: Algorithms | str | Path | None = None,
    folder: str | Path | None = None,
    *,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    grid: Grid | None = None,
    tune: int | None = None,
    tuning_seeds: Sequence[int] | None = None,
    processes: int | None = None,
    watcher: Watcher | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Unpack[ComparisonSettings],
) -> Comparison:
    """Run every algorithm with every seed; each run in ``folder/<name>/seed-<s>``.

    ``task`` is a task (the same for all seeds), a function that makes the task of a seed, or a recipe: a file or its
    tables. ``algorithms`` are ``{name: algorithm}``, each a value (``fedavg(lr=0.05)``), the name of a method or a
    table (``{"name": "fedprox", "mu": 0.1}``); a recipe has them in ``[[compare]]``. ``settings`` are those of
    :func:`fedalloy.fit`. The folder (default ``runs/comparison``, or ``runs/<recipe>``) is the one that ``fedalloy
    compare`` would write: runs that are finished are kept, interrupted ones are resumed.

    With a ``grid`` (``{"solver.lr": [0.05, 0.1]}``, or by the name of an algorithm), each algorithm first tries every
    setting on the ``tuning_seeds`` (in ``folder/tuning``) and continues with the one whose target metric is best at the
    end, on average over these seeds. ``tune=20`` searches with 20 trials each instead (:func:`fedalloy.tune`).
    ``track`` names trackers for the reported runs (:mod:`fedalloy.results.track`).
    When all runs have ended and there are enough seeds for verdicts, this is recorded as a look at the comparison
    (:mod:`fedalloy.results.looks`).

    Recipes, and tasks that a recipe could make, run in several ``processes`` (default: one per core), which import the
    script: call this under ``if __name__ == "__main__":``. Other tasks are known to this process alone, and run in it.
    ``progress`` shows a bar (default: in notebooks); the stop button of a notebook returns the runs so far.
    """
    leave_if_starting()
    check_arguments(processes, watcher, track)
    asked = {"seeds": seeds, "rounds": rounds, "tuning_seeds": tuning_seeds, "grid": grid, "tune": tune, **settings}
    call = as_call(task, *algorithms_or_folder(task, algorithms, folder, "compare"), asked)
    if watcher is None and (in_notebook() if progress is None else progress):
        watcher = JobsBar(None if call.recipe.tune else count(call.recipe))
    try:
        return compared(call, processes, watcher or (lambda news: None), track)
    except KeyboardInterrupt as interrupt:
        return _so_far(call, interrupt)


def algorithms_or_folder(
    task: object, second: Algorithms | str | Path | None, folder: str | Path | None, called: str
) -> tuple[Algorithms | None, str | Path | None]:
    """The algorithms and the folder. Only after a recipe, as in ``compare(recipe, folder)``, is a text a folder."""
    if not isinstance(second, str | Path):
        return second, folder
    if folder is not None or not isinstance(task, Recipe | Mapping | str | Path):
        raise SpecError(
            f"{called}: algorithms must be {{name: algorithm, ...}}, or a list of published methods' names, got "
            f"{str(second)!r}: write [{str(second)!r}]"
        )
    return None, second


def _so_far(call: Call, interrupt: KeyboardInterrupt) -> Comparison:
    """What there is when a comparison is interrupted in a notebook, also of runs that have not begun; elsewhere the
    interrupt goes on."""
    if not in_notebook() or not find_runs(call.folder):
        raise interrupt
    entries = as_entries(call.recipe)
    places, metric = folders(entry_names(entries)), str(scored(entries).run.target_metric)
    runs = [
        _as_far(RunOutcome(name, seed, "interrupted", "it has not begun", metric=metric), call.folder / places[name])
        for name, seed in itertools.product(places, entries.run.seeds)
    ]
    return Comparison(call.folder, tuple(runs), (), tuple(read_looks(call.folder)))


def _as_far(planned: RunOutcome, place: Path) -> RunOutcome:
    """The outcome of a run that may not have begun."""
    folder = place / f"seed-{planned.seed}"
    return replace(read_outcome(folder), name=planned.name) if is_run(folder) else planned


def compared(call: Call, processes: int | None, watcher: Watcher, track: Sequence[str] = ()) -> Comparison:
    """All runs of a comparison that are missing, and what they show."""
    entries = single_threaded(as_entries(call.recipe))
    check_seeds(entries)
    where, places = call.folder, folders(entry_names(entries))
    recorded = read_looks(where)
    _check_entries(entries)
    tuning = {name: _tuning_jobs(entries, name, call) for name in entry_names(entries) if grid_of(entries, name)}
    check_untuned(where, places, entry_names(entries) if entries.tune else ())
    found = searches(with_entries(entries), where, partial(job_of, call=call), tuning)
    check_parts(call.task, found[0].recipe.run.tuning_seeds if found else ())
    check_spent(found)
    changing = {*tuning, *(one.name for one in found)}
    for name, one in with_entries(entries):  # and a folder that holds something else
        for seed in entries.run.seeds if name not in changing else ():
            is_done(job_of(one, name, seed, where / places[name], call))
    workers = 1 if call.task else processes or default_processes(entries)
    write_json(where / "comparison.json", {"order": entry_names(entries)})
    tuned, stuck = _all_tuned(tuning, found, workers, watcher)
    if tuned:
        set_aside(where, places, tuned, {**tuning, **{one.name: one.tries for one in found}})
        write_json(where / "tuning.json", [tuned_json(one) for one in tuned])
    chosen = {one.name: one.best for one in tuned}
    jobs = [
        job_of(_changed(one, chosen.get(name, {})), name, seed, where / places[name], call)
        for name, one in with_entries(entries)
        for seed in entries.run.seeds
    ]
    going = [replace(job, track=tuple(track)) for job in jobs if job.name not in stuck]
    broken = run_jobs(going, workers, watcher)
    outcomes = [stuck[job.name].of(job) if job.name in stuck else _outcome(job, broken) for job in jobs]
    return Comparison(where, tuple(outcomes), tuple(tuned), record_look(where, outcomes, recorded))


def select(recipe: Recipe, names: Sequence[str]) -> Recipe:
    """The recipe comparing these names: entries it has, or published methods."""
    known = {entry.name: entry for entry in recipe.compare}
    allowed = {*known, *registry.names("algorithm")}
    for name in names:
        if name not in allowed:
            raise SpecError(f"--algorithms: unknown '{name}': {nearest(name, allowed)}")
    return recipe.model_copy(update={"compare": [known.get(name, EntryTable(name=name)) for name in names]})


def count(recipe: Recipe) -> int:
    """The number of runs of a comparison, tuning included."""
    entries = as_entries(recipe)
    return len(entries.compare) * len(entries.run.seeds) + tuning_runs(entries)


def tuning_runs(recipe: Recipe) -> int:
    """The number of runs that try the grids."""
    grids = [grid_of(recipe, name) for name in entry_names(recipe)]
    return sum(math.prod(map(len, grid.values())) for grid in grids if grid) * len(recipe.run.tuning_seeds)


def check_seeds(recipe: Recipe) -> None:
    """Refuse tuning on the reported seeds, which would choose settings that fit these seeds by chance."""
    both = sorted(set(recipe.run.seeds) & set(recipe.run.tuning_seeds))
    if both:
        raise SpecError(
            f"run.tuning_seeds and run.seeds both have {', '.join(map(str, both))}: tune on other seeds than "
            "those that are reported"
        )
    if len(set(recipe.run.seeds)) < len(recipe.run.seeds):
        raise SpecError(f"run.seeds names a seed twice: {recipe.run.seeds}")
    if not recipe.run.tuning_seeds and any(grid_of(recipe, name) for name in entry_names(recipe)):
        raise SpecError(
            "a grid needs seeds to be tuned on, apart from run.seeds: give run.tuning_seeds = [1000, 1001] (in "
            "Python tuning_seeds=[1000, 1001])"
        )


def check_grids(recipe: Recipe) -> None:
    """Tuning needs one metric that is evaluated and has a direction."""
    entries = as_entries(recipe)
    for name in entry_names(entries):
        grid, entry = grid_of(entries, name), scored(with_entry(entries, name))
        if not grid:
            continue
        if "run.target_metric" in grid:
            raise SpecError("grid: settings are compared by run.target_metric; set it once, in [run]")
        _check_target(entry)
        check_direction(str(entry.run.target_metric), entry.evaluate.metrics or [], "tuned on")


def grid_of(recipe: Recipe, name: str) -> dict[str, list[Any]]:
    """The grid of an entry: the recipe's and its own."""
    own = next(entry.grid for entry in recipe.compare if entry.name == name)
    return {path: values for path, values in {**recipe.grid, **own}.items() if values}


def default_processes(recipe: Recipe) -> int:
    """One process per core on a CPU; a device is not shared."""
    return cores() if recipe.engine.device == "cpu" else 1


def _check_entries(recipe: Recipe) -> None:
    """Refuse a bad entry before the first round of any run."""
    for _, one in with_entries(recipe):
        resolve(one)
        _check_target(scored(one))
    check_grids(recipe)


def _check_target(recipe: Recipe) -> None:
    """Refuse a comparison by a metric that no run has."""
    metric, evaluated = str(recipe.run.target_metric), recipe.evaluate.metrics or []
    if metric not in evaluated:
        raise SpecError(f"target_metric '{metric}' is not evaluated: {nearest(metric, evaluated)}")


def as_entries(recipe: Recipe) -> Recipe:
    """A recipe without a comparison becomes a comparison of one entry."""
    names = entry_names(recipe)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SpecError(f"compare: two entries are named '{twice[0]}': give each its own name")
    if names:
        return recipe
    name = recipe.algorithm.name or "fedavg"
    alone = EntryTable(name=recipe.name or name, set={"algorithm.name": name})
    return recipe.model_copy(update={"compare": [alone]})


def with_entries(recipe: Recipe) -> list[tuple[str, Recipe]]:
    """Every entry's name, and the recipe with its changes."""
    return [(name, with_entry(recipe, name)) for name in entry_names(recipe)]


def single_threaded(recipe: Recipe) -> Recipe:
    """One thread unless the recipe says otherwise, so that results do not depend on the number of processes."""
    engine = recipe.engine.model_copy(update={"threads": recipe.engine.threads or 1})
    return recipe.model_copy(update={"engine": engine})


def _changed(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    return parse(merge(recipe.model_dump(exclude_none=True), settings), "grid") if settings else recipe


def job_of(recipe: Recipe, name: str, seed: int, folder: Path, call: Call) -> Job:
    """The run of a recipe with one seed."""
    task = None if call.task is None else partial(call.task, seed)
    return Job(name, seed, resolve(recipe, seed).resolved, folder / f"seed-{seed}", task=task)


def _tuning_jobs(recipe: Recipe, name: str, call: Call) -> Tries:
    """Every combination of an entry's grid, each with its runs."""
    grid, entry = grid_of(recipe, name), with_entry(recipe, name)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    tries = []
    for settings, place in zip(points, settings_folders(points), strict=True):
        changed, where = _changed(entry, settings), call.folder / "tuning" / safe(name) / place
        tries.append((settings, [job_of(changed, name, seed, where, call) for seed in recipe.run.tuning_seeds]))
    return tries


def _all_tuned(
    tuning: Mapping[str, Tries], found: Sequence[Search], processes: int, watcher: Watcher
) -> tuple[list[Tuned], dict[str, Stuck]]:
    """The results of all grids and all searches."""
    by_grid, by_search = _tune(tuning, processes, watcher), search_all(found, processes, watcher)
    return [*by_grid[0], *by_search[0]], {**by_grid[1], **by_search[1]}


def _tune(tuning: Mapping[str, Tries], processes: int, watcher: Watcher) -> tuple[list[Tuned], dict[str, Stuck]]:
    """Run the grids of all entries together; entries without a choice are reported and do not block the others."""
    broken = run_jobs([job for tries in tuning.values() for _, jobs in tries for job in jobs], processes, watcher)
    found, stuck = [], {}
    for name, tries in tuning.items():
        metric = str(tries[0][1][0].recipe["run"]["target_metric"])
        open_ones = [run for _, jobs in tries for run in (_outcome(job, broken) for job in jobs) if not run.ended]
        tried = [Tried(settings, _score(jobs, broken)) for settings, jobs in tries]
        choice = _best(name, tried, bool(higher_is_better(metric)))
        if open_ones:
            # A choice among only the finished settings could differ from the choice among all of them.
            stuck[name] = Stuck(
                "interrupted", f"its tuning is not complete: {open_ones[0].reason or open_ones[0].state}"
            )
        elif choice is None:
            stuck[name] = Stuck("failed", "every setting of its grid failed on the tuning seeds; try smaller steps")
        else:
            found.append(choice)
    return found, stuck


def _score(jobs: Sequence[Job], broken: Broken) -> float | None:
    """The mean over the tuning seeds; a setting with a failed run has none."""
    outcomes = [_outcome(job, broken) for job in jobs]
    found = spreads(outcomes, ("mean",))["mean"]
    return found.mean if found and found.count == len(jobs) and math.isfinite(found.mean) else None


def _best(name: str, tried: Sequence[Tried], higher: bool) -> Tuned | None:
    found = best(tried, lambda one: math.nan if one.score is None else one.score, higher)
    return None if found is None else Tuned(name, found.settings, tuple(tried))


def _outcome(job: Job, broken: Broken) -> RunOutcome:
    news = broken.get(job.folder)
    if news is not None and not is_run(job.folder):
        return RunOutcome(job.name, job.seed, news.state, news.text, folder=job.folder)
    found = replace(read_outcome(job.folder), name=job.name)
    return replace(found, state=news.state, reason=news.text) if news is not None else found


def write_json(file: Path, value: Any) -> None:
    """Write a file of the comparison's folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(file, json.dumps(value, indent=2) + "\n")
