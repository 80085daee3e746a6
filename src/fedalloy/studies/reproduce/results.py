"""Measurements as plain values in one JSON file, written here or by another program; does not load torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedalloy.core.errors import DataError
from fedalloy.experiment.records import atomic

FORM = 1


@dataclass(frozen=True)
class Measured:
    """One run: its case, method and seed, how it ended, and its scores by name (percent where they are shares).

    ``planned``, ``clients`` and ``cohort`` are what its recipe asked for; ``table`` names the learned table of weights
    that it used, if any. ``reused`` is the ratio of test to training examples where every seed of the case splits the
    same examples again, else 0. ``changed`` says how its settings differ from the declared ones, where that is not
    what the other runs have. A run that never reached its target has infinitely many ``rounds``.
    """

    case: str
    method: str
    seed: int
    state: str
    round: int
    scores: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    seconds: float | None = None
    planned: int | None = None
    clients: int | None = None
    cohort: int | None = None
    table: str = ""
    reused: float = 0.0
    changed: str = ""

    @property
    def finished(self) -> bool:
        """Whether its scores are results."""
        return self.state == "finished"


@dataclass(frozen=True)
class Results:
    """All runs of an experiment and how they were made."""

    experiment: str
    command: str
    runs: tuple[Measured, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    machine: str = ""

    def of(self, case: str, method: str) -> list[Measured]:
        """The runs of one cell of a table."""
        return [run for run in self.runs if run.case == case and run.method == method]

    def cases(self) -> list[str]:
        """The cases that were measured, in order."""
        return list(dict.fromkeys(run.case for run in self.runs))

    def methods(self, case: str) -> list[str]:
        """The methods that were measured in a case, in order."""
        return list(dict.fromkeys(run.method for run in self.runs if run.case == case))


def write_results(results: Results, file: Path) -> None:
    """One line per run, so that changes are readable in a diff."""
    head = {"form": FORM} | {name: value for name, value in vars(results).items() if name != "runs"}
    lines = [json.dumps(_plain(run), allow_nan=False) for run in results.runs]
    body = ",\n  ".join(lines)
    text = json.dumps(head, indent=1, allow_nan=False)[:-2] + f',\n "runs": [\n  {body}\n ]\n}}\n'
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(file, text)


def read_results(file: Path) -> Results:
    """The measurements in a file."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data.pop("form") != FORM:
            raise DataError(f"{file} has another format than this version reads ({FORM}); measure it again")
        runs = tuple(Measured(**_numbers(run)) for run in data.pop("runs"))
        return Results(runs=runs, **data)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DataError(f"{file} does not hold the results of an experiment: {error!r}; measure them again") from None


def merged(old: Results, new: Results) -> Results:
    """All new runs, and the old ones of other cells; each keeps the settings that it was made with. The commands of
    earlier runs are kept while any of these runs is left, also where a later command has read them again.

    A cell that was measured again keeps its place, because the first method of a case is the one to compare with.
    """
    cells = {(run.case, run.method) for run in new.runs}
    kept = [run for run in _with_changes(old) if (run.case, run.method) not in cells]
    found = [_plain(run) for run in new.runs]
    if not kept and not any(_plain(run) in found for run in old.runs):
        return new
    same = {path: value for path, value in new.settings.items() if old.settings.get(path) == value}
    commands = _commands([*old.command.splitlines(), *new.command.splitlines()])
    machines = "; ".join(dict.fromkeys([*old.machine.split("; "), *new.machine.split("; ")]))
    places = list(dict.fromkeys((run.case, run.method) for run in (*old.runs, *new.runs)))
    runs = sorted([*kept, *_with_changes(new)], key=lambda run: places.index((run.case, run.method)))
    return replace(new, runs=tuple(runs), settings=same, command="\n".join(commands), machine=machines)


def _commands(lines: Sequence[str]) -> list[str]:
    """Each command once, and none for a part of what another one runs.

    >>> _commands(["fedalloy reproduce a --case b", "fedalloy reproduce c", "fedalloy reproduce a"])
    ['fedalloy reproduce c', 'fedalloy reproduce a']
    >>> len(_commands(["fedalloy reproduce a --case b", "fedalloy reproduce a --case b --case c"]))
    2
    """
    once = list(dict.fromkeys(lines))
    parts = [f"{line} --methods " for line in once] + [f"{line} --case " for line in once if " --case " not in line]
    return [line for line in once if not line.startswith(tuple(parts))]


def _with_changes(results: Results) -> list[Measured]:
    """The runs, each of which says itself how its settings differ from the declared ones."""
    told = changes(results.settings)
    return [replace(run, changed=run.changed or told) for run in results.runs]


def changes(settings: dict[str, Any]) -> str:
    """The settings that make it another experiment, as text: all but the engine and the seeds. The number of rounds is
    left out because every run records it.

    >>> changes({"engine.device": "cuda", "run.rounds": 30, "partition.alpha": 0.1})
    'partition.alpha = 0.1'
    """
    same = ("engine.", "run.seeds", "run.rounds")
    return summary_of_settings({path: value for path, value in settings.items() if not path.startswith(same)})


def summary_of_settings(settings: dict[str, Any]) -> str:
    """The changes to the recipes, as text.

    >>> summary_of_settings({"run.rounds": 60})
    'run.rounds = 60'
    """
    return ", ".join(f"{path} = {json.dumps(value)}" for path, value in settings.items())


def _plain(run: Measured) -> dict[str, Any]:
    """Plain values with six digits, which is finer than the spread over seeds; null for rounds without end."""
    scores = {name: float(f"{value:.6g}") if math.isfinite(value) else None for name, value in run.scores.items()}
    kept = {
        name: value for name, value in vars(run).items() if value not in ("", None) and (name, value) != ("reused", 0.0)
    }
    seconds = {} if run.seconds is None else {"seconds": round(run.seconds, 2)}
    return kept | {"scores": scores} | seconds


def _numbers(run: dict[str, Any]) -> dict[str, Any]:
    missing = {name: math.inf if is_rounds(name) else math.nan for name in run.get("scores", {})}
    scores = {name: missing[name] if value is None else float(value) for name, value in run.get("scores", {}).items()}
    return {**run, "scores": scores}


def is_rounds(score: str) -> bool:
    """Whether a score is a number of rounds to a target, which some runs never reach.

    >>> is_rounds("rounds"), is_rounds("loss:rounds"), is_rounds("mean")
    (True, True, False)
    """
    return score.rpartition(":")[2] == "rounds"


def seeds_of(runs: Sequence[Measured]) -> list[int]:
    """The seeds of some runs, ascending, each once."""
    return sorted({run.seed for run in runs})
