"""Run an experiment as comparisons, and read the results."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalloy.core.errors import FedalloyError, SpecError, nearest
from fedalloy.experiment.recipe import Recipe
from fedalloy.experiment.recipe.changes import assign, leaves
from fedalloy.experiment.records.reading import find_runs, is_run, name_of, read_run, seed_of
from fedalloy.results.redrawn import drawn_by, redrawn
from fedalloy.studies.compare.comparing import Comparison, compare
from fedalloy.studies.compare.jobs import Watcher
from fedalloy.studies.compare.naming import folders as folders_of
from fedalloy.studies.compare.naming import safe
from fedalloy.studies.reproduce.declaring import Case, PaperExperiment, methods_of, recipe_of
from fedalloy.studies.reproduce.results import Results
from fedalloy.studies.reproduce.scoring import measure_run


@dataclass(frozen=True)
class Wish:
    """What to run of an experiment: everything, some cases or methods, with other values, or shortened."""

    changes: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    quick: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The changed values by path."""
        return dict(leaves(assign({}, list(self.changes))))

    def folder(self, experiment: PaperExperiment, runs: Path) -> Path:
        """The folder of the runs: with other values it is another one than that of the unchanged recipes."""
        return runs / safe("_".join([experiment.name, *(["quick"] if self.quick else []), *self.changes]))

    def command(self, name: str) -> str:
        """The equivalent command line."""
        words = ["fedalloy", "reproduce", name, *(["--quick"] if self.quick else [])]
        words += [word for change in self.changes for word in ("--set", change)]
        words += [word for case in self.cases for word in ("--case", case)]
        words += ["--methods", ",".join(self.methods)] if self.methods else []
        return shlex.join(words)


Watch = Callable[[str, int], AbstractContextManager[Watcher]]
"""From the name of a case and its number of runs to a watcher of them."""


def chosen(experiment: PaperExperiment, wish: Wish, near: Path | None = None) -> list[tuple[Case, Recipe]]:
    """The cases that are wanted, each with its recipe."""
    if not experiment.cases:
        how = experiment.command or "another program"
        raise SpecError(f"{experiment.name} has no recipes: it is measured by {how}")
    folders_of([case.name for case in experiment.cases], f"{experiment.name}: cases")
    wanted = [experiment.case(name) for name in wish.cases] or experiment.cases
    found = [(case, recipe_of(experiment, case, list(wish.changes), wish.quick, near)) for case in wanted]
    everyone = {name for _, recipe in found for name in methods_of(recipe)}
    for name in wish.methods:
        if name not in everyone:
            raise SpecError(f"{experiment.name} has no method '{name}': {nearest(name, everyone)}")
    narrowed = [(case, _only(recipe, wish.methods)) for case, recipe in found]
    return [(case, recipe) for case, recipe in narrowed if not wish.methods or recipe.compare]


def count_runs(recipe: Recipe) -> int:
    """Methods times seeds."""
    return len(methods_of(recipe)) * len(recipe.run.seeds)


def measure(
    experiment: PaperExperiment,
    wish: Wish,
    runs: Path,
    watch: Watch,
    *,
    processes: int | None = None,
    near: Path | None = None,
) -> Results:
    """Do the missing runs and read all results; the same call continues after an interruption."""
    folder = wish.folder(experiment, runs)
    open_ones = []
    for case, recipe in chosen(experiment, wish, near):
        with watch(case.name, count_runs(recipe)) as watcher:
            done = compare(recipe, folder / safe(case.name), processes=processes, watcher=watcher)
        _check(done, case)
        left = [run for run in done.outcomes if not run.ended]
        open_ones += [f"{case.name}, {run.name}, seed {run.seed}: {run.reason}" for run in left]
    if open_ones:
        raise FedalloyError(
            f"{len(open_ones)} runs did not finish ({open_ones[0]}); the same command continues them, and writes "
            "the page when all are finished"
        )
    return collect(experiment, wish, runs, near)


def collect(experiment: PaperExperiment, wish: Wish, runs: Path, near: Path | None = None) -> Results:
    """The results in the folders of an experiment: all runs that ended, also those of other calls."""
    folder = wish.folder(experiment, runs)
    found = []
    machine = ""
    for case in experiment.cases:
        place = folder / safe(case.name)
        recipe = recipe_of(experiment, case, list(wish.changes), wish.quick, near)
        ended = {method: _ended(sorted(find_runs(place / safe(method)), key=_seed)) for method in methods_of(recipe)}
        reused = _reused([run for runs in ended.values() for run in runs])
        for method, folders in ended.items():
            for run in folders:
                found.append(measure_run(run, case.name, method, experiment.scores, reused))
                machine = machine or _machine(run)
    return Results(experiment.name, wish.command(experiment.name), tuple(found), wish.settings, wish.quick, machine)


def gather(experiment: PaperExperiment, folders: Mapping[str, Path]) -> Results:
    """The results of other commands: all runs that ended below each case's folder, under their own names."""
    found, machine = [], ""
    for case, folder in folders.items():
        if not find_runs(folder):
            raise SpecError(f"--gather {case}={folder}: there are no runs")
        runs = _ended(find_runs(folder))
        reused = _reused(runs)
        for run in runs:
            found.append(measure_run(run, case, name_of(read_run(run).recipe), experiment.scores, reused))
            machine = machine or _machine(run)
    found.sort(key=lambda run: list(folders).index(run.case))
    words = [word for case, folder in folders.items() for word in ("--gather", f"{case}={folder}")]
    command = shlex.join(["fedalloy", "reproduce", experiment.name, *words])
    quick = any(
        read_run(run).recipe.get("run", {}).get("quick") for folder in folders.values() for run in find_runs(folder)
    )
    return Results(experiment.name, experiment.command or command, tuple(found), quick=quick, machine=machine)


def _check(done: Comparison, case: Case) -> None:
    """Refuse runs that could not begin: their recipe is wrong, whereas divergence is a result."""
    for run in done.outcomes:
        if run.state == "failed" and run.folder is not None and not is_run(run.folder):
            raise SpecError(f"case '{case.name}', {run.name}, seed {run.seed} could not begin: {run.reason}")


def _only(recipe: Recipe, methods: Sequence[str]) -> Recipe:
    kept = [entry for entry in recipe.compare if entry.name in methods]
    return recipe.model_copy(update={"compare": kept}) if methods else recipe


def _ended(runs: Sequence[Path]) -> list[Path]:
    return [run for run in runs if read_run(run).status.get("state") in ("finished", "failed")]


def _reused(runs: Sequence[Path]) -> float:
    """The test examples per training example where the seeds of a case split the same examples again, else 0."""
    records = [read_run(run) for run in runs]
    found = redrawn(drawn_by(one.recipe, one.manifest or {}, on_global=False) for one in records)
    return found.reused if found else 0.0


def _seed(run: Path) -> int:
    return seed_of(read_run(run).recipe)


def _machine(run: Path) -> str:
    """The machine of a measurement, as text."""
    known = read_run(run).environment
    return f"{known.get('device_name', '')}, {known.get('machine', '')}, torch {known.get('torch', '')}"
