"""The pilot: methods are tuned with equal budgets in stages, after each of which the better half goes on.

Every decision (rounds, methods and trials of a stage, seeds that are reported) is written down before it is carried
out, so that an interrupted pilot continues with the same ones.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedalloy.core.errors import CheckpointError, FedalloyError
from fedalloy.experiment.recipe.resolving import scored
from fedalloy.experiment.recipe.tables import EntryTable, Recipe
from fedalloy.experiment.records.reading import read_run
from fedalloy.experiment.records.scalars import seconds_of
from fedalloy.studies.advise.budget import (
    Speed,
    affordable,
    first_trials,
    further_trials,
    kept_after,
    reported_seeds,
    rounds_within,
    survivors,
)
from fedalloy.studies.advise.facts import REFERENCE
from fedalloy.studies.advise.shortlist import MethodChoice
from fedalloy.studies.compare.calling import Call
from fedalloy.studies.compare.comparing import job_of, with_entries, write_json
from fedalloy.studies.compare.jobs import Watcher, work
from fedalloy.studies.compare.tuned import Tuned, tuned_json
from fedalloy.studies.tune.searching import Search
from fedalloy.studies.tune.spaces import changed, without_ranges
from fedalloy.studies.tune.tuning import check_parts, search_all, searches
from fedalloy.tasks.metrics.direction import higher_is_better

FILE = "advise.json"
_PROBED = 3
"""Rounds of the run by which the speed is measured."""
Record = dict[str, Any]


@dataclass
class Pilot:
    """A pilot in a folder: ``record`` is what is written down, ``tuned`` what every method's search has found."""

    call: Call
    recipe: Recipe
    choices: Sequence[MethodChoice]
    seconds: float
    processes: int
    watcher: Watcher
    record: Record
    tuned: dict[str, Tuned] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    _found: dict[str, Search] = field(default_factory=dict)
    _begun: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """All stages, and the choice of what is reported."""
        try:
            self._length()
            for number in (1, 2, 3):
                if not self._stage(number):
                    break
            self._choose()
        finally:
            self.note()

    def note(self) -> None:
        """Write down what was decided and how long it took so far."""
        now = time.monotonic()
        self.record["seconds"] = self.record.get("seconds", 0.0) + now - self._begun
        self._begun = now
        write_json(self.call.folder / FILE, self.record)

    @property
    def candidates(self) -> list[MethodChoice]:
        """The methods to be tried."""
        return [one for one in self.choices if not one.refused]

    @property
    def left(self) -> float:
        """Seconds that all processes together have left."""
        spent = float(self.record.get("seconds", 0.0)) + time.monotonic() - self._begun
        return max(0.0, self.seconds - spent) * self.processes

    @property
    def _whole(self) -> float:
        return self.seconds * self.processes

    @property
    def shortened(self) -> Recipe:
        """The recipe with as many rounds as there is time for."""
        settings = {"run.rounds": self.record["rounds"], "evaluate.every": self.record["every"]}
        return changed(self.recipe, settings)

    @property
    def order(self) -> list[str]:
        """The methods but FedAvg by the score of their best trial, best first."""
        higher = bool(higher_is_better(str(scored(self.recipe).run.target_metric)))
        best = {name: _best(one, higher) for name, one in self.tuned.items() if name != REFERENCE}
        return sorted(best, key=lambda name: -best[name] if higher else best[name])

    def _length(self) -> None:
        if "rounds" in self.record:
            return
        speed = self._probe()
        works = [one.work for one in self.candidates]
        run = self.recipe.run
        seeds, often = len(run.tuning_seeds), self.recipe.evaluate.every
        rounds, every = rounds_within(speed, run.rounds, often, works, self.left, seeds)
        self.record |= {"speed": vars(speed), "rounds": rounds, "every": every}
        self.note()

    def _probe(self) -> Speed:
        """A short run of FedAvg, on validation parts and a tuning seed, in this process."""
        short = {"run.rounds": _PROBED, "evaluate.every": _PROBED}
        (found,) = self._searches([REFERENCE], 1, changed(self.recipe, short), self.call.folder / "tuning" / "probe")
        begun, job = time.monotonic(), found.next_job()
        assert job is not None, "a search has a first trial"
        news = work(job, lambda news: None)
        if news.kind == "broken":
            raise FedalloyError(f"FedAvg does not run with this recipe: {news.text}")
        whole, rows = time.monotonic() - begun, list(read_run(job.folder).timings())
        rounds = [seconds_of(row) - row.get("evaluate", 0.0) for row in rows]
        scoring = max(row.get("evaluate", 0.0) for row in rows)
        return Speed(max(0.0, whole - sum(rounds) - scoring), statistics.median(rounds[-2:]), scoring)

    def _stage(self, number: int) -> bool:
        """One stage; False if there is no time for it, or nothing to choose from."""
        stages: list[Record] = self.record.setdefault("stages", [])
        if len(stages) < number:
            planned = self._planned(number)
            if planned is None:
                return False
            stages.append(planned)
            self.note()
        stage = stages[number - 1]
        self._search(stage["methods"], stage["trials"], late=lambda: self.left < kept_after(number) * self._whole)
        if not stage.get("ended"):  # a later session finds the trials of later stages too
            stage |= {"trials": max(len(one.tried) for one in self._found.values()), "ended": True}
        self.note()
        return True

    def _planned(self, number: int) -> Record | None:
        if number == 1:
            speed, names = Speed(**self.record["speed"]), [one.name for one in self.candidates]
            rounds, every = self.record["rounds"], self.record["every"]
            seeds = len(self.recipe.run.tuning_seeds)
            cost = {one.name: seeds * speed.run(rounds, every, one.work) for one in self.candidates}
            names = affordable({name: cost[name] for name in names}, self.left)
            return {"methods": names, "trials": first_trials({name: cost[name] for name in names}, self.left)}
        if "report" in self.record:
            return None
        before, names = self.record["stages"][-1], [REFERENCE, *survivors(self.order, number - 1)]
        cost = {name: self._found[name].seconds / max(1, len(self._found[name].tried)) for name in names}
        finalists = [self._run_seconds(name) for name in names[:3]]
        trials = further_trials(before["trials"], cost, finalists, self.left, last=number == 3)
        return None if trials is None else {"methods": names, "trials": trials}

    def _search(self, names: Sequence[str], trials: int, late: Callable[[], bool]) -> None:
        """Tune methods with so many trials each, those of earlier stages included; with fewer when it is late."""
        found = self._searches([name for name in names if name not in self.failed], trials, self.shortened, None)
        check_parts(self.call.task, found[0].recipe.run.tuning_seeds)
        tuned, stuck = search_all(found, self.processes, self.watcher, late)
        if open_ones := [f"{name}: {one.reason}" for name, one in stuck.items() if one.state == "interrupted"]:
            raise CheckpointError(f"{open_ones[0]}; the same command continues")
        self._found = {one.name: one for one in found}
        self.failed |= {name: one.reason for name, one in stuck.items()}
        self.tuned = {one.name: one for one in tuned}
        if REFERENCE in self.failed:
            raise FedalloyError(f"FedAvg does not run with this recipe: {self.failed[REFERENCE]}")
        self.record["tuned"] = {**self.record.get("tuned", {}), **{one.name: tuned_json(one) for one in tuned}}

    def _searches(self, names: Sequence[str], trials: int, recipe: Recipe, folder: Path | None) -> list[Search]:
        assert recipe.tune is not None, "the recipe of an advice has a search"
        table = recipe.tune.model_copy(update={"trials": trials})
        entries = [EntryTable(name=name, set={"algorithm.name": name}) for name in names]
        made = recipe.model_copy(update={"compare": entries, "tune": table})
        own = [(name, without_ranges(one, table.space)) for name, one in with_entries(made)]
        return searches(own, folder or self.call.folder, partial(job_of, call=self.call), {})

    def _run_seconds(self, name: str) -> float:
        """The seconds of a whole run, from the trials of a method that ran to their end."""
        one = self._found[name]
        rounds = sum(tried.rounds or 0 for tried in one.tried)
        return float(self.record["rounds"]) * one.seconds / max(1, rounds)

    def _choose(self) -> None:
        """FedAvg and the two best others, with their best settings, on seeds that no trial has seen."""
        if "report" in self.record:
            return
        names = [REFERENCE, *survivors(self.order, 3)]
        count = reported_seeds(sum(map(self._run_seconds, names)), 0.95 * self.left)
        self.record["report"] = {"methods": names, "seeds": self._seeds(count)}

    def _seeds(self, count: int) -> list[int]:
        """The recipe's seeds and, if these are too few, the numbers after them; none of those of trials."""
        own, tuning = list(self.recipe.run.seeds), self.recipe.run.tuning_seeds
        following = (seed for seed in range(max(own) + 1, max(own) + count + len(tuning) + 1) if seed not in tuning)
        return (own + list(following))[:count]


def reported(record: Mapping[str, Any], recipe: Recipe) -> Recipe:
    """The comparison that decides: the finalists with the settings that were found, scored on test parts."""
    names, tuned = record["report"]["methods"], record["tuned"]
    entries = [EntryTable(name=name, set={"algorithm.name": name, **tuned[name]["best"]}) for name in names]
    length = {"run.rounds": record["rounds"], "evaluate.every": record["every"]}
    made = changed(recipe, {**length, "run.seeds": record["report"]["seeds"]})
    return made.model_copy(update={"compare": entries, "tune": None})


def read_record(folder: Path, asked: Mapping[str, Any]) -> Record:
    """What was decided in a folder so far; a folder with another question is refused."""
    file = folder / FILE
    if not file.is_file():
        return {"asked": dict(asked)}
    record: Record = json.loads(file.read_text(encoding="utf-8"))
    if different := [name for name in asked if record["asked"].get(name) != asked[name]]:
        raise CheckpointError(
            f"{folder} holds the answer to another question (its {' and its '.join(different)} differ): choose another "
            "folder, or delete this one"
        )
    return record


def _best(one: Tuned, higher: bool) -> float:
    scores = [tried.score for tried in one.tried if tried.score is not None]
    return (max if higher else min)(scores) if scores else (-math.inf if higher else math.inf)
