"""The result of tuning, and what happens to runs with an earlier choice when a grid has grown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedalloy.core.errors import CheckpointError, RunLocked
from fedalloy.experiment.records.lock import holder
from fedalloy.experiment.records.reading import is_run
from fedalloy.results.outcome import RunOutcome
from fedalloy.studies.compare.jobs import Job
from fedalloy.studies.compare.naming import safe, settings_folders

Settings = dict[str, Any]
Tries = list[tuple[Settings, list[Job]]]


@dataclass(frozen=True)
class Tried:
    """One setting of a grid or a search: its mean score over the tuning seeds, None where a run failed or was stopped
    early; the rounds that its runs took, where they are counted; and its score at the first comparison, on the first
    seed, where trials are compared before their end."""

    settings: Settings
    score: float | None
    state: str = ""
    rounds: int | None = None
    early: float | None = None


@dataclass(frozen=True)
class Tuned:
    """The result of one entry's grid or search; ``how`` says how it was searched, ``importance`` how much of the
    variation of scores each setting explains, ``thirds`` the best score in every third of its range
    (:mod:`fedalloy.studies.tune.importance`). ``statistic`` is what trials are compared by."""

    name: str
    best: Settings
    tried: tuple[Tried, ...]
    how: str = ""
    importance: Mapping[str, float] = field(default_factory=dict)
    thirds: Mapping[str, Mapping[str, tuple[float | None, int]]] = field(default_factory=dict)
    statistic: str = "mean"


@dataclass(frozen=True)
class Stuck:
    """Why an entry has no setting to run with."""

    state: str
    reason: str

    def of(self, job: Job) -> RunOutcome:
        """The outcome of a run that was not started."""
        return RunOutcome(job.name, job.seed, self.state, self.reason)


def tuned_json(tuned: Tuned) -> dict[str, Any]:
    """Plain values for ``tuning.json``."""
    tried = [{name: value for name, value in asdict(one).items() if value not in ("", None)} for one in tuned.tried]
    tried = [{"score": None, **one} for one in tried]
    more: dict[str, Any] = {"how": tuned.how, "importance": dict(tuned.importance)}
    more["thirds"] = {path: {name: list(one) for name, one in found.items()} for path, found in tuned.thirds.items()}
    more["statistic"] = tuned.statistic if tuned.statistic != "mean" else ""
    return {"name": tuned.name, "best": tuned.best, "tried": tried, **{key: one for key, one in more.items() if one}}


def check_untuned(where: Path, places: Mapping[str, str], names: Sequence[str]) -> None:
    """Refuse, before a search begins, folders with reported runs that no search chose: it could only end with settings
    that these runs do not have."""
    chosen = _chosen_before(where)
    for name in names:
        runs = [run for run in (where / places[name]).glob("seed-*") if is_run(run)]
        if runs and name not in chosen:
            raise CheckpointError(
                f"{where / places[name]} holds runs that were not tuned: choose another folder, or delete them"
            )


def set_aside(where: Path, places: Mapping[str, str], tuned: Sequence[Tuned], tuning: Mapping[str, Tries]) -> None:
    """Move the reported runs of an earlier choice to their setting below ``tuning``, and those of the new one back.

    No run is lost, and an entry's folder only holds runs with the reported setting.
    """
    for one in tuned:
        before = _chosen_before(where).get(one.name)
        if before is None or before == one.best:
            continue
        mine = where / places[one.name]
        _move(mine, _place(where, one.name, before, tuning[one.name]))
        seeds = {job.folder.name for _, jobs in tuning[one.name] for job in jobs}
        _move(_place(where, one.name, one.best, tuning[one.name]), mine, but=seeds)


def _chosen_before(where: Path) -> dict[str, Settings]:
    file = where / "tuning.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return {entry["name"]: entry["best"] for entry in known}


def _place(where: Path, name: str, settings: Settings, tries: Tries) -> Path:
    """The folder of a setting; if it is no longer in the grid, the folder it would have alone."""
    known = [jobs[0].folder.parent for tried, jobs in tries if tried == settings]
    return known[0] if known else where / "tuning" / safe(name) / settings_folders([settings])[0]


def _move(here: Path, there: Path, but: set[str] | None = None) -> None:
    runs = [run for run in here.glob("seed-*") if is_run(run) and run.name not in (but or ())]
    for run in runs:
        if holder(run / "lock") is not None:
            raise RunLocked(f"{run} is being written by another process; wait until it ends, or stop it")
        if (there / run.name).exists():
            raise CheckpointError(f"{run} cannot be moved, because {there / run.name} exists: remove one of them")
    for run in runs:
        there.mkdir(parents=True, exist_ok=True)
        run.rename(there / run.name)
