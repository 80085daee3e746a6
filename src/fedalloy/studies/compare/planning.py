"""What a comparison takes before it runs: how many runs, and how many seeds a verdict needs. Trains nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedalloy.experiment.recipe.resolving import Experiment, entry_names, resolve, scored, with_entry
from fedalloy.experiment.recipe.tables import Recipe
from fedalloy.experiment.records.reading import find_runs
from fedalloy.results.conclusion import more_seeds
from fedalloy.results.evidence import FEWEST_EXACT, FEWEST_PAIRS, fewest_by_ranks
from fedalloy.results.looks import Look, alpha_of, in_order, read_looks
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.redrawn import Drawn, Redrawn, drawn_by, redrawn
from fedalloy.results.runs import read_outcomes
from fedalloy.results.table import summarise
from fedalloy.studies.compare.comparing import as_entries, check_seeds, tuning_runs, with_entries
from fedalloy.studies.tune.searching import DEFAULT_TRIALS, rungs, tuning_seeds
from fedalloy.studies.tune.spaces import space_of, with_own_ranges
from fedalloy.studies.tune.tuning import check_search


@dataclass(frozen=True)
class ComparisonPlan:
    """The numbers of runs and seeds. ``redrawn`` is what the recipe's seeds redraw; ``more`` says how many seeds would
    decide what has run; ``search`` is the budget of a search, whose runs are not among ``runs``."""

    algorithms: int
    seeds: int
    tuning_runs: int
    rounds: int
    target: float | None
    comparisons: int
    look: int
    finished: int
    redrawn: Redrawn | None
    more: str
    search: str = ""

    @property
    def runs(self) -> int:
        """The number of runs, tuning included."""
        return self.algorithms * self.seeds + self.tuning_runs

    @property
    def by_ranks(self) -> int | None:
        """How many seeds a verdict about runs that never reach the target needs; None without a target."""
        if self.target is None or not self.comparisons:
            return None
        return fewest_by_ranks(self.comparisons, alpha_of(self.look))

    def lines(self) -> list[str]:
        """The plan in words."""
        tuning = f", {self.tuning_runs} of them to tune" if self.tuning_runs else ""
        there = f"; {self.finished} have finished" if self.finished else ""
        what = f"{_count(self.algorithms, 'algorithm')}, {_count(self.seeds, 'seed')}"
        said = [self.search] if self.search else []
        said.append(f"{_count(self.runs, 'run')} of {_count(self.rounds, 'round')}{tuning}: {what}{there}.")
        if not self.comparisons:
            return [*said, "One algorithm has nothing to be compared with: there will be no verdict."]
        said.append(
            f"{_count(self.comparisons, 'comparison')}, look {self.look}. A verdict by Student's t needs "
            f"{FEWEST_PAIRS} seeds; from {FEWEST_EXACT} on the exact test stands beside it.{self._short(FEWEST_PAIRS)}"
        )
        said += [self._ranks(self.by_ranks)] if self.by_ranks is not None else []
        return [*said, *([self.redrawn.text] if self.redrawn else []), *([self.more] if self.more else [])]

    def to_json(self) -> dict[str, Any]:
        """Plain values for machines."""
        shared = {"redrawn": vars(self.redrawn) if self.redrawn else None}
        return {**vars(self), **shared, "runs": self.runs, "fewest": FEWEST_PAIRS, "by_ranks": self.by_ranks}

    def _ranks(self, needed: int) -> str:
        said = f"Where a run never reaches {self.target:g}, ranks decide, from {needed} seeds on"
        if self.redrawn and self.redrawn.reused:
            return f"{said}; but not here, because the seeds' splits share their examples."
        return f"{said}.{self._short(needed)}"

    def _short(self, needed: int) -> str:
        return f" The recipe has {self.seeds}: too few." if self.seeds < needed else ""


def plan(recipe: Recipe, folder: Path) -> ComparisonPlan:
    """The plan of a comparison. The data are made for two seeds, to see what a seed redraws; nothing is trained."""
    entries = as_entries(recipe)
    check_seeds(entries)
    names, run, recorded = entry_names(entries), scored(entries).run, read_looks(folder)
    asked = Look(tuple(sorted(run.seeds)), in_order(names), run.rounds, str(run.target_metric), run.target)
    seen = [replace(one, values="") for one in recorded]
    look = seen.index(asked) if asked in seen else len(seen)
    ran = [one for one in _outcomes(folder) if one.name in names and one.seed in run.seeds]
    questions = 1 if run.target is None else 2
    return ComparisonPlan(
        algorithms=len(names),
        seeds=len(run.seeds),
        tuning_runs=tuning_runs(entries),
        rounds=run.rounds,
        target=run.target,
        comparisons=(len(names) - 1) * questions,
        look=look + 1,
        finished=sum(one.finished for one in ran),
        redrawn=_redrawn(entries),
        more=more_seeds(summarise(ran, recorded), look + (asked in seen), asked.metric),  # the next look to be recorded
        search=_search(entries),
    )


def _search(recipe: Recipe) -> str:
    """What the search before the comparison costs at most, and where it looks; empty where there is none. Nothing is
    written."""
    table = recipe.tune
    if table is None:
        return ""
    entries = with_own_ranges(with_entries(recipe))
    for _, one in entries:
        check_search(one, table)
    seeds = tuning_seeds(entries[0][1])
    where = "; ".join(f"{name}: {', '.join(space_of(one))}" for name, one in entries)
    said = f"First a search on seeds {', '.join(map(str, seeds))}, for every algorithm {_budget(recipe, len(seeds))}."
    return f"{said}{_never_stopped(entries[0][1])} Searched are {where}."


def _never_stopped(recipe: Recipe) -> str:
    """That no trial can be stopped early, where scores come too rarely for it."""
    assert recipe.tune is not None
    if recipe.tune.pruner == "none" or rungs(recipe.run.rounds, recipe.evaluate.every):
        return ""
    often = f"there are scores every {recipe.evaluate.every} of {recipe.run.rounds} rounds"
    return f" No trial can be stopped early, because {often}: give a smaller evaluate.every."


def _budget(recipe: Recipe, seeds: int) -> str:
    table, whole = recipe.tune, recipe.run.rounds * seeds
    assert table is not None
    if table.seconds is not None:
        return f"{table.seconds:g} seconds of runs"
    if table.rounds is not None:
        return f"{_count(table.rounds, 'round')}, {table.rounds // whole} trials if none is stopped early"
    trials = table.trials or DEFAULT_TRIALS
    return f"{_count(trials, 'trial')}, at most {_count(trials * whole, 'round')}"


def _outcomes(folder: Path) -> list[RunOutcome]:
    return read_outcomes([folder]) if find_runs(folder) else []


def _redrawn(recipe: Recipe) -> Redrawn | None:
    """What the seeds of the first entry redraw, from its data for two of them."""
    first = with_entry(recipe, entry_names(recipe)[0])
    return redrawn(_drawn(resolve(first, seed)) for seed in recipe.run.seeds[:2])


def _drawn(made: Experiment) -> Drawn:
    manifest = made.task().manifest
    return drawn_by(made.resolved, manifest.to_json() if manifest else {}, made.config.target_on == "global")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
