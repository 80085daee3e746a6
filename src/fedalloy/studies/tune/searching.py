"""The search for one algorithm's settings: what is tried next, which trials go on, and what they have cost.

The sampler and the pruner are Optuna's; the study is a file in the folder of the comparison, and every trial's runs
are run folders, named by their settings. An interrupted search continues with the trials that were running, whose runs
are resumed.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedalloy.core.errors import SpecError
from fedalloy.core.search import Choice, Range
from fedalloy.experiment.recipe.resolving import scored
from fedalloy.experiment.recipe.tables import Recipe, TuneTable
from fedalloy.experiment.records.reading import is_run, read_run
from fedalloy.experiment.records.scalars import seconds_of
from fedalloy.results.outcome import RunOutcome, read_outcome, watched
from fedalloy.results.statistics import number
from fedalloy.studies.compare.jobs import Job, JobNews
from fedalloy.studies.compare.naming import settings_folders
from fedalloy.studies.compare.tuned import Settings, Tried, Tries, Tuned
from fedalloy.studies.tune.importance import importance, thirds
from fedalloy.studies.tune.spaces import Space, changed, present, space_of
from fedalloy.studies.tune.storage import optuna_library, stops_again, storage_in
from fedalloy.tasks.metrics.direction import best, higher_is_better

if TYPE_CHECKING:
    import optuna

_FACTOR = 3
"""Of the trials that reach a rung, about one in so many goes on."""
_HOPELESS = 5
"""After so many trials without a single round the method cannot run at all: a budget in rounds would never be spent."""
DEFAULT_TRIALS = 20
MakeJob = Callable[[Recipe, str, int, Path], Job]


@dataclass
class OpenTrial:
    """Settings that are being tried: their runs, one per tuning seed, and how far these are."""

    handle: optuna.Trial
    settings: Settings
    jobs: list[Job]
    done: list[RunOutcome] = field(default_factory=list)
    rung: int = 0
    early: float | None = None
    reported: frozenset[int] = frozenset()
    begun: float = 0.0
    seconds: float = 0.0


@dataclass
class Search:
    """The search for one entry. Ask it for jobs with :meth:`next_job`, and tell it of ended ones with :meth:`ended`."""

    name: str
    recipe: Recipe
    folder: Path
    make: MakeJob
    table: TuneTable
    space: Space = field(init=False)
    running: dict[Path, OpenTrial] = field(default_factory=dict, init=False)
    tried: list[Tried] = field(default_factory=list, init=False)
    waiting: list[OpenTrial] = field(default_factory=list, init=False)
    seconds: float = field(default=0.0, init=False)
    broken: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.space = space_of(self.recipe)
        self.recipe = _scored_apart(self.recipe, self.table)
        self.metric = str(scored(self.recipe).run.target_metric)
        self.higher = bool(higher_is_better(self.metric))
        self.rungs = rungs(self.recipe.run.rounds, self.recipe.evaluate.every) if self.table.pruner != "none" else []
        self.study = self._open()
        self._recall()

    def next_job(self) -> Job | None:
        """The next run, or part of a run, of a trial that is waiting or of a new one; None if there is none now."""
        while True:
            if not self.waiting and not self.broken and self._affords_another():
                self.waiting.append(self._ask())
            if not self.waiting:
                return None
            trial = self.waiting.pop(0)
            if (job := self._job(trial)) is not None:
                if job.folder in self.running:  # the same settings were drawn again: wait for their runs
                    self.waiting.insert(0, trial)
                    return None
                self.running[job.folder] = trial
                trial.begun = time.monotonic()
                return job

    def ended(self, news: JobNews) -> None:
        """A job of this search has ended: continue its trial, or close it."""
        trial = self.running.pop(news.job.folder)
        trial.seconds += time.monotonic() - trial.begun
        if news.kind == "broken" and news.state == "interrupted":
            self.broken = news.text
            return
        run = read_outcome(news.job.folder) if news.kind != "broken" else _failed(news)
        if run.state == "failed":
            self._close(trial, None, f"failed: {run.reason}", run)
        elif news.job.until is not None and run.state == "stopped" and run.round >= news.job.until:
            self.waiting.insert(0, trial)
        elif not run.ended:
            self.broken = run.reason or run.state
        else:
            self._next_seed(trial, run)

    @property
    def result(self) -> Tuned | None:
        """What was found; None if every trial failed."""
        found = best(self.tried, lambda one: math.nan if one.score is None else one.score, self.higher)
        if found is None:
            return None
        matters = importance(self.tried, self.space)
        parts = {
            path: thirds(self.tried, path, where, self.higher)
            for path, where in self.space.items() if isinstance(where, Range)
        }  # fmt: skip
        return Tuned(self.name, found.settings, tuple(self.tried), self.how, matters, parts, self.table.score)

    @property
    def how(self) -> str:
        """How it was searched, in words."""
        stopped = sum(one.state == "stopped early" for one in self.tried)
        early = f", {stopped} of them stopped early" if stopped else ""
        return f"{len(self.tried)} trials ({self.table.sampler}{early}; {self.spent} rounds)"

    @property
    def spent(self) -> int:
        """Rounds of all trials so far."""
        return sum(one.rounds or 0 for one in self.tried)

    @property
    def begun(self) -> int:
        """How many trials were begun, those that have ended included."""
        return len(self.tried) + len(self.running) + len(self.waiting)

    def limit(self, trials: int) -> None:
        """Begin no more than so many trials altogether."""
        known = self.table.trials or DEFAULT_TRIALS
        self.table = self.table.model_copy(update={"trials": min(known, max(1, trials))})

    @property
    def tries(self) -> Tries:
        """The settings that were tried, each with its runs."""
        return [(one.settings, self._jobs(one.settings)) for one in self.tried]

    @property
    def total(self) -> int | None:
        """How many trials there will be; None if the budget is in rounds or seconds."""
        return None if self.table.rounds or self.table.seconds else self.table.trials or DEFAULT_TRIALS

    def _affords_another(self) -> bool:
        """Whether the budget allows another trial, should it and those that run take all their rounds."""
        if len(self.tried) >= _HOPELESS and not any(one.rounds for one in self.tried):
            return False
        if self.table.rounds is not None:
            whole = self.recipe.run.rounds * len(self.recipe.run.tuning_seeds)
            return self.spent + whole * (len(self.running) + 1) <= self.table.rounds
        if self.table.seconds is not None:
            return self.seconds < self.table.seconds
        return self.begun < (self.table.trials or DEFAULT_TRIALS)

    def _open(self) -> optuna.Study:
        library = optuna_library()
        study: optuna.Study = library.create_study(
            storage=storage_in(self.folder), study_name=self.name, load_if_exists=True, pruner=self._pruner(library),
            direction="maximize" if self.higher else "minimize",
        )  # fmt: skip
        asked = self._asked()
        known = study.user_attrs.get("asked", asked)
        if different := [name for name in asked if known.get(name) != asked[name]]:
            raise SpecError(
                f"{self.folder} holds another search (its {' and its '.join(different)} differ), with scores that "
                "cannot be compared with new ones: choose another folder, or delete this one"
            )
        if "asked" not in study.user_attrs:
            study.set_user_attr("federation", _federation(self.recipe))
        study.set_user_attr("asked", asked)
        return study

    def _asked(self) -> dict[str, str]:
        """What must be the same for trials to be comparable; the budget and the reported seeds may change."""
        tables = self.recipe.model_dump(exclude_none=True, exclude={"compare", "grid", "tune", "name", "description"})
        tables["run"].pop("seeds")
        table = self.table.model_dump(exclude={"trials", "rounds", "seconds", "space"})
        space = {path: repr(one) for path, one in self.space.items()}
        told = {"space": space, "metric": self.metric, "recipe": tables, "way of searching": table}
        return {name: json.dumps(value, sort_keys=True, default=repr) for name, value in told.items()}

    def _pruner(self, optuna: Any) -> Any:
        first = self.rungs[0] if self.rungs else 1
        if not self.rungs:
            return optuna.pruners.NopPruner()
        if self.table.pruner == "hyperband":
            return optuna.pruners.HyperbandPruner(first, self.recipe.run.rounds, _FACTOR)
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=_FACTOR)

    def _recall(self) -> None:
        """Take over the trials of an earlier session; those that were running go on."""
        states = optuna_library().trial.TrialState
        known = self.study.get_trials(deepcopy=False)
        if not known:
            own = present(self.recipe, self.space)
            if own:
                self.study.enqueue_trial(own)  # the recipe's own settings are tried first
        for one in known:
            if one.state == states.RUNNING and len(one.params) < len(self.space):  # killed before it was drawn
                self._draw_again(one)
            elif one.state == states.RUNNING:
                self.waiting.append(self._again(one))
            elif one.state in (states.COMPLETE, states.PRUNED):
                self.tried.append(Tried(**one.user_attrs["tried"]))
                self.seconds += one.user_attrs.get("seconds", 0.0)

    def _draw_again(self, found: optuna.trial.FrozenTrial) -> None:
        """Take back a trial whose settings are not known: the next one is drawn as it would have been."""
        self.study.tell(found.number, state=optuna_library().trial.TrialState.FAIL)
        if (own := found.system_attrs.get("fixed_params")) is not None:
            self.study.enqueue_trial(own)

    def _ask(self) -> OpenTrial:
        """The next settings, drawn from the seed, the federation, the method and the number of trials so far: with the
        same draws everywhere, a method that is unlucky on one federation would be so on all."""
        optuna = optuna_library()
        number = sum(one.state != optuna.trial.TrialState.FAIL for one in self.study.get_trials(deepcopy=False))
        told = [str(self.table.seed), self.name, str(number)]
        if (federation := self.study.user_attrs.get("federation")) is not None:  # None: begun by an earlier version
            told.append(federation)
        seed = int.from_bytes(hashlib.sha256(" ".join(told).encode()).digest()[:4])
        self.study.sampler = (
            optuna.samplers.RandomSampler(seed)
            if self.table.sampler == "random"
            else optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        )
        handle = self.study.ask()
        return self._trial(handle)

    def _again(self, found: optuna.trial.FrozenTrial) -> OpenTrial:
        """A trial that an earlier session did not close: its settings are drawn, and some rungs may be behind it."""
        trial = self._trial(optuna_library().trial.Trial(self.study, found._trial_id))
        trial.reported = frozenset(found.intermediate_values)
        # The last comparison may have been cut short: it is made again.
        trial.rung = int(found.user_attrs.get("passed", max(0, len(trial.reported) - 1)))
        trial.early = found.intermediate_values.get(self.rungs[0]) if self.rungs else None
        trial.seconds = sum(_seconds(job.folder) for job in trial.jobs)
        return trial

    def _trial(self, handle: optuna.Trial) -> OpenTrial:
        settings = {path: _suggest(handle, path, where) for path, where in self.space.items()}
        return OpenTrial(handle, settings, self._jobs(settings))

    def _jobs(self, settings: Settings) -> list[Job]:
        place, one = self.folder / settings_folders([settings])[0], changed(self.recipe, settings)
        return [self.make(one, self.name, seed, place) for seed in self.recipe.run.tuning_seeds]

    def _job(self, trial: OpenTrial) -> Job | None:
        """The current run of a trial: that of the first seed up to the next rung, the others to the end. None if the
        trial ends here, because it is not among the best that came to a rung."""
        job = trial.jobs[len(trial.done)]
        if trial.done:
            return job
        scores = _scores(job.folder, self.metric, self.table.score)
        while trial.rung < len(self.rungs) and self.rungs[trial.rung] in scores:
            if state := self._at_rung(trial, scores[self.rungs[trial.rung]]):
                self._close(trial, None, state, read_outcome(job.folder))
                return None
        return replace(job, until=self.rungs[trial.rung] if trial.rung < len(self.rungs) else None)

    def _at_rung(self, trial: OpenTrial, score: float) -> str:
        """Compare a trial with those that came to its rung; returns why it ends here, or nothing."""
        if not math.isfinite(score):
            return "failed: no finite score"
        known = self.rungs[trial.rung] in trial.reported
        if not known:
            trial.handle.report(score, self.rungs[trial.rung])
        trial.early = score if trial.early is None else trial.early
        if stops_again(self.study, trial.handle) if known else trial.handle.should_prune():
            return "stopped early"
        trial.rung += 1
        trial.handle.set_user_attr("passed", trial.rung)
        return ""

    def _next_seed(self, trial: OpenTrial, run: RunOutcome) -> None:
        trial.done.append(run)
        if len(trial.done) < len(trial.jobs):
            self.waiting.insert(0, trial)
            return
        scores = [one.scores.get(self.table.score, math.nan) for one in trial.done]
        mean = sum(scores) / len(scores)
        if math.isfinite(mean):
            self._close(trial, mean, "finished", run)
        else:
            self._close(trial, None, "failed: no finite score", run)

    def _close(self, trial: OpenTrial, score: float | None, state: str, last: RunOutcome) -> None:
        """Store the trial; one without a score counts as a bad one for what is tried next."""
        rounds = sum(run.round for run in trial.done) + (0 if last in trial.done else last.round)
        tried = Tried(trial.settings, score, state, rounds, trial.early)
        trial.handle.set_user_attr("tried", vars(tried))
        trial.handle.set_user_attr("seconds", trial.seconds)
        self.seconds += trial.seconds
        if score is None:
            self.study.tell(trial.handle, state=optuna_library().trial.TrialState.PRUNED)
        else:
            self.study.tell(trial.handle, score)
        self.tried.append(tried)


def rungs(rounds: int, every: int) -> list[int]:
    """The rounds after which trials are compared: about a ninth and a third of all, where there are scores.

    >>> rungs(40, 2), rungs(100, 1), rungs(3, 1), rungs(10, 50)
    ([4, 12, 36], [11, 33, 99], [], [])
    """
    first = max(1, round(rounds / _FACTOR**2 / every)) * every
    found = [first * _FACTOR**step for step in range(3)]
    return [one for one in found if one < rounds] if found[1] < rounds else []


def tuning_seeds(recipe: Recipe) -> list[int]:
    """The seeds of trials: those of the recipe, or 1000 and 1001."""
    return recipe.run.tuning_seeds or [1000, 1001]


def _scored_apart(recipe: Recipe, table: TuneTable) -> Recipe:
    """The recipe as it is tried: scored on validation parts and run to the end, so that test parts stay unseen."""
    recipe = changed(recipe, {"run.tuning_seeds": tuning_seeds(recipe)})
    settings: dict[str, Any] = {"evaluate.part": "valid", "run.stop_at_target": False, "run.target_on": "clients"}
    if recipe.task.valid_fraction == 0:
        settings["task.valid_fraction"] = table.valid_fraction
    made = changed(recipe, settings)
    return made.model_copy(update={"run": made.run.model_copy(update={"target": None, "patience": None})})


def _federation(recipe: Recipe) -> str:
    """What tells one federation from others: the recipe's tables of data, model and split, less what is default."""
    tables = recipe.model_dump(include={"task", "partition"}, exclude_none=True, exclude_defaults=True)
    return json.dumps(tables, sort_keys=True, default=repr)


def _suggest(handle: optuna.Trial, path: str, where: Any) -> Any:
    if isinstance(where, Choice):
        return where.values[handle.suggest_categorical(path, range(len(where.values)))]
    if where.whole:
        return where.value(handle.suggest_int(path, where.low, where.high, log=where.log))
    return where.value(handle.suggest_float(path, where.low, where.high, log=where.log))


def _scores(folder: Path, metric: str, score: str) -> dict[int, float]:
    """The scores of a run so far, by round."""
    rows = read_run(folder).rounds() if is_run(folder) else ()
    found = {int(row["round"]): watched(row, metric, on_global=False) for row in rows}
    return {round: number(one.get(score)) for round, one in found.items() if one}


def _seconds(folder: Path) -> float:
    """What the rounds of a run have taken so far."""
    return sum(seconds_of(row) for row in read_run(folder).timings()) if is_run(folder) else 0.0


def _failed(news: JobNews) -> RunOutcome:
    """A run that broke, with the rounds that it ran."""
    if is_run(news.job.folder):
        return replace(read_outcome(news.job.folder), name=news.job.name, state="failed", reason=news.text)
    return RunOutcome(news.job.name, news.job.seed, "failed", news.text, folder=news.job.folder)
