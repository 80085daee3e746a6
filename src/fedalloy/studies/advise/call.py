"""``fedalloy.advise``: which method to use for a task, from a pilot within a time budget."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.config import check_direction
from fedalloy.experiment.recipe.changes import leaves
from fedalloy.experiment.recipe.reading import load
from fedalloy.experiment.recipe.resolving import algorithm_of, resolve, scored
from fedalloy.experiment.recipe.tables import AlgorithmTable, Recipe, TuneTable
from fedalloy.experiment.records import atomic
from fedalloy.experiment.records.toml import dumps
from fedalloy.experiment.settings import AdviceSettings
from fedalloy.methods.solvers.training import LocalTraining
from fedalloy.studies.advise.answer import Effect, chosen, counted, effects, first_line, further_lines
from fedalloy.studies.advise.facts import REFERENCE, known_facts
from fedalloy.studies.advise.measuring import Measures, measure
from fedalloy.studies.advise.pilot import Pilot, Record, read_record, reported
from fedalloy.studies.advise.shortlist import Aim, MethodChoice, check_named, refusal_of, shortlist
from fedalloy.studies.compare.calling import Call, RecipeLike, TaskLike, as_call
from fedalloy.studies.compare.comparing import (
    Comparison,
    check_seeds,
    compared,
    default_processes,
    job_of,
    single_threaded,
    write_json,
)
from fedalloy.studies.compare.jobs import Watcher, leave_if_starting
from fedalloy.studies.tune.searching import tuning_seeds
from fedalloy.studies.tune.spaces import changed, has_argument
from fedalloy.studies.tune.storage import searching_alone
from fedalloy.studies.tune.tuning import check_parts, check_tuning_seeds
from fedalloy.tasks.metrics.direction import higher_is_better

METHODS = 6
"""How many methods are tried, unless the user says otherwise."""
_OWN_PARTS = ("solver", "weighting", "server")


@dataclass(frozen=True, repr=False)
class Advice:
    """The answer (``first``, then ``lines``), what it rests on, and the recipe to run next (``file``).

    ``method`` is the advised one, ``effects`` are its evidence and that of the other finalist:

    >>> from fedalloy.results.evidence import PairedDifferences, compare_together
    >>> compare_together([PairedDifferences((0.02, 0.03, 0.04))])[0].outcome
    'better'
    """

    folder: Path
    file: Path
    method: str
    first: str
    lines: tuple[str, ...]
    measures: Measures
    candidates: tuple[MethodChoice, ...]
    effects: tuple[Effect, ...]
    comparison: Comparison
    record: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<{self.first} Recipe {self.file}>"

    @property
    def algorithm(self) -> Algorithm:
        """The advised method with the settings that were found: ``fedalloy.fit(advice.algorithm, task)``."""
        return algorithm_of(load(self.file))

    @property
    def tried(self) -> list[MethodChoice]:
        """The methods of the pilot."""
        return [one for one in self.candidates if not one.refused]

    def to_json(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "folder": str(self.folder), "recipe": str(self.file), "method": self.method, "first": self.first,
            "lines": list(self.lines), "measures": self.measures.to_json(),
            "candidates": [one.to_json() for one in self.candidates],
            "effects": [one.to_json() for one in self.effects], "pilot": dict(self.record),
            "comparison": self.comparison.to_json(),
        }  # fmt: skip


def advise(
    task: RecipeLike | TaskLike,
    folder: str | Path | None = None,
    *,
    minutes: float = 10.0,
    aim: Aim = "mean",
    one_model: bool = False,
    methods: Sequence[str] = (),
    most: int = METHODS,
    without: Sequence[str] = (),
    processes: int | None = None,
    watcher: Watcher | None = None,
    **settings: Unpack[AdviceSettings],
) -> Advice:
    """Which method to use: describe the federation, try the most promising methods, compare the best ones with FedAvg.

    ``task`` and ``settings`` are those of :func:`fedalloy.compare`. FedAvg with tuned steps and FedAvg fine-tuned at
    every client are always tried. Within about so many ``minutes`` all methods are tuned with equal budgets on
    validation parts and tuning seeds, the better half after every stage; the two best and FedAvg then run on other
    seeds, with fewer rounds where the recipe's do not fit. If none is better on test parts, the answer is FedAvg.

    ``aim``: what counts, the ``mean`` over clients or the ``worst``-served tenth. ``one_model`` leaves out methods that
    give every client its own model. ``methods`` are tried instead of a choice of ``most``; ``without`` names
    federations whose published results must not be used for it. The folder (default ``runs/advice``, or
    ``runs/<recipe>-advice``) is that of a comparison; the same call continues after an interrupt.

    >>> import tempfile
    >>> task = {"partition": {"clients": 3}, "run": {"rounds": 2}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = advise(task, folder, minutes=0.001, methods=["fedprox"], processes=1)
    >>> found.method in ("fedavg", "fedprox") and len(found.effects)
    2
    """
    leave_if_starting()
    call = as_call(task, None, folder or _folder(task), settings)
    _check(call, minutes, aim, most, without)
    check_named(methods, one_model)
    recipe = _prepared(call.recipe, aim)
    question = {"aim": aim, "one_model": one_model, "methods": list(methods), "most": most, "without": sorted(without)}
    with searching_alone([call.folder]):
        record = read_record(call.folder, {"recipe": _plain(recipe), "minutes": minutes, **question})
        call, workers = Call(recipe, call.task, call.folder), 1 if call.task else processes or default_processes(recipe)
        found, candidates = _looked_at(call, record, aim, one_model, methods, most, without)
        pilot = Pilot(call, recipe, candidates, 60 * minutes, workers, watcher or (lambda news: None), record)
        return _answer(call, _piloted(pilot), aim, found, candidates, pilot)


def _piloted(pilot: Pilot) -> Comparison:
    """The pilot, and the comparison of its finalists."""
    pilot.run()
    call, record = pilot.call, pilot.record
    write_json(call.folder / "tuning.json", list(record["tuned"].values()))
    try:
        done = compared(Call(reported(record, pilot.recipe), call.task, call.folder), pilot.processes, pilot.watcher)
    finally:
        pilot.note()
    if open_ones := [
        f"{run.name}, seed {run.seed}: {run.reason or run.state}" for run in done.outcomes if not run.ended
    ]:
        raise CheckpointError(f"the runs that decide are not complete ({open_ones[0]}); the same command continues")
    return done


def _plain(recipe: Recipe) -> Any:
    """The recipe as JSON would give it back."""
    return json.loads(json.dumps(recipe.model_dump(exclude_none=True), default=repr))


def _folder(task: object) -> Path:
    return Path("runs") / (f"{Path(task).stem}-advice" if isinstance(task, str | Path) else "advice")


def _check(call: Call, minutes: float, aim: str, most: int, without: Sequence[str]) -> None:
    """Refuse before anything is measured what could not be answered."""
    recipe = call.recipe
    known_facts(without)  # refuses a misspelt federation
    if not 0 < minutes < math.inf:
        raise SpecError(f"minutes is {minutes}: give the time that the pilot may take, for example 10")
    if aim not in ("mean", "worst"):
        raise SpecError(f"aim is '{aim}': allowed are 'mean' (over clients) and 'worst' (the worst-served tenth)")
    if most < 2:
        raise SpecError(f"most is {most}: FedAvg and at least one other method are tried, so 2 or more")
    own = [name for name in _OWN_PARTS if getattr(recipe, name) is not None]
    if own:
        raise SpecError(f"the recipe has [{own[0]}], which would replace that part of every method: take it out")
    _check_ranges(recipe)
    check_seeds(recipe.model_copy(update={"compare": [], "grid": {}}))
    check_tuning_seeds(recipe)
    found = scored(recipe)
    check_direction(str(found.run.target_metric), found.evaluate.metrics or [], "advised on")
    check_parts(call.task, tuning_seeds(recipe))


def _check_ranges(recipe: Recipe) -> None:
    """Refuse a range that no method has an argument for; the searches leave out those of other methods."""
    for path in recipe.tune.space if recipe.tune else ():
        methods = (changed(recipe, {"algorithm": {"name": name}}) for name in registry.names("algorithm"))
        if not any(has_argument(one, path) for one in methods):
            raise SpecError(f"tune.space.{path}: no method has this argument")


def _prepared(recipe: Recipe, aim: Aim) -> Recipe:
    """The recipe without its entries, grids and targets, with FedAvg and the settings of local training that it gives;
    the search keeps the recipe's ranges."""
    local = {one.name for one in fields(LocalTraining)}
    given = {name: value for name, value in recipe.algorithm.arguments.items() if name in local}
    table = recipe.tune.model_dump(exclude={"trials", "rounds", "seconds"}) if recipe.tune else {}
    table["score"] = "mean" if aim == "mean" else "worst_served"
    on_failure = {"on_failure": recipe.algorithm.on_failure} if recipe.algorithm.on_failure else {}
    run = {"target": None, "patience": None, "stop_at_target": False, "target_on": "clients", "quick": None}
    changes = {
        "compare": [], "grid": {}, "algorithm": AlgorithmTable(name=REFERENCE, **on_failure, **given),
        "tune": TuneTable(**table), "evaluate": recipe.evaluate.model_copy(update={"part": "test"}),
        "run": recipe.run.model_copy(update={**run, "tuning_seeds": tuning_seeds(recipe)}),
    }  # fmt: skip
    return single_threaded(recipe.model_copy(update=changes))


def _looked_at(
    call: Call, record: Record, aim: Aim, one_model: bool, methods: Sequence[str], most: int, without: Sequence[str]
) -> tuple[Measures, list[MethodChoice]]:
    """The measures of the federation and the methods, as they were when the folder was begun."""
    if "measures" not in record:
        first = job_of(call.recipe, REFERENCE, call.recipe.run.tuning_seeds[0], call.folder, call)
        found = measure(first.experiment)
        refusal = refusal_of(partial(_build, call.recipe, found.clients))
        listed = shortlist(found, known_facts(without), aim, most, refusal, one_model, methods)
        record |= {"measures": found.to_json(), "candidates": [one.to_json() for one in listed]}
        write_json(call.folder / "advise.json", record)
    found = Measures(**{**record["measures"], "missing": tuple(record["measures"]["missing"])})
    return found, [MethodChoice(**{**one, "facts": tuple(one["facts"])}) for one in record["candidates"]]


def _build(recipe: Recipe, population: int, name: str) -> None:
    """Refuse a method that cannot be built with the recipe, or not run with its cohorts."""
    made = resolve(changed(recipe, {"algorithm.name": name}))
    made.algorithm.check_cohort(made.config.sampling.size(population), population)


def _answer(
    call: Call, done: Comparison, aim: Aim, found: Measures, candidates: Sequence[MethodChoice], pilot: Pilot
) -> Advice:
    recipe, metric = call.recipe, done.outcomes[0].metric
    higher, shown = bool(higher_is_better(metric)), effects(done.outcomes, done.looks)
    winner = chosen(shown, aim, higher)
    name = winner.name if winner else REFERENCE
    lines = [*_length(recipe, pilot.record), *_untuned(pilot.record), *further_lines(shown, aim, metric, higher)]
    lines += _untried(candidates, pilot)
    lines += [done.notes[-1]] if done.notes else []
    first = first_line(shown, aim, metric, higher)
    file = _write(call.folder, recipe, name, pilot.record["tuned"][name]["best"], first)
    made = Advice(
        call.folder, file, name, first, tuple(lines), found, tuple(candidates), tuple(shown), done, pilot.record
    )
    write_json(call.folder / "advice.json", {key: one for key, one in made.to_json().items() if key != "comparison"})
    return made


def _length(recipe: Recipe, record: Mapping[str, Any]) -> list[str]:
    rounds = record["rounds"]
    if rounds == recipe.run.rounds:
        return []
    what = f"After {rounds} of the recipe's {recipe.run.rounds} rounds"
    return [f"{what}, which did not fit into the time: longer runs may end otherwise."]


def _untuned(record: Mapping[str, Any]) -> list[str]:
    """That FedAvg had its first settings alone: then a method that takes longer steps can beat it by that."""
    if len(record["tuned"][REFERENCE]["tried"]) > 1:
        return []
    return [
        "No method was tuned, because there was time for one trial of each: FedAvg with other steps may do better. "
        "Give more --minutes."
    ]


def _untried(candidates: Sequence[MethodChoice], pilot: Pilot) -> list[str]:
    """What was tried with which budgets, what failed, and how many methods were not tried."""
    stages = " then ".join(
        f"{counted(len(one['methods']), 'method')} with {counted(one['trials'], 'trial')}"
        for one in pilot.record["stages"]
    )
    tried = pilot.record["stages"][0]["methods"]
    said = [f"Tried: {', '.join(tried)} ({stages})."]
    late = [one.name for one in candidates if not one.refused and one.name not in tried]
    said += [f"There was no time to try {', '.join(late)}: give more --minutes."] if late else []
    said += [f"{name} failed in the pilot: {reason}." for name, reason in pilot.failed.items()]
    rest = [one.name for one in candidates if one.refused]
    return [*said, f"Not tried: {counted(len(rest), 'other method')} ({', '.join(rest)})."]


def _write(folder: Path, recipe: Recipe, name: str, best: Mapping[str, Any], why: str) -> Path:
    """The recipe to run next, with all rounds."""
    made = recipe.model_dump(exclude_none=True, exclude_defaults=True)
    made.pop("tune", None)
    made["description"] = f"Written by fedalloy advise. {why}"
    own = {**made.get("algorithm", {}), "name": name}
    made["algorithm"] = {**own, **{path.partition(".")[2]: value for path, value in leaves(dict(best))}}
    file = folder / "advice.toml"
    atomic.write_text(file, dumps(made))
    return file
