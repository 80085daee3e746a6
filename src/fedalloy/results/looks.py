"""How often somebody has looked for a verdict at a comparison: more seeds after a look are a second chance.

Every look that gives verdicts is recorded in ``looks.json`` in the folder of the comparison. The first look has 4 of
the 5 % that all looks together may err by, each further one a fifth of the one before: their sum stays below 5 %, and
every look uses all seeds there are. The same runs looked at again are the same look; other runs with the same seeds,
such as those of a setting that was tuned again, are another one.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records import atomic
from fedalloy.results.evidence import FEWEST_PAIRS
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.statistics import ALPHA

FILE = "looks.json"
_FIRST, _NEXT = 0.8, 0.2
_TYPES: dict[str, tuple[type, ...]] = {
    "seeds": (list,), "entries": (list,), "rounds": (int,), "metric": (str,), "target": (int, float, type(None)),
    "values": (str,),
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """What somebody looked at: the seeds, the entries (the first, then the others by name), after how many rounds, by
    which metric and target; ``values`` is a hash of the scores."""

    seeds: tuple[int, ...]
    entries: tuple[str, ...]
    rounds: int
    metric: str
    target: float | None
    values: str = ""

    def holds(self, run: RunOutcome) -> bool:
        """Whether a run was part of it."""
        return run.seed in self.seeds and run.name in self.entries

    def is_part_of(self, other: Look, runs: Sequence[RunOutcome]) -> bool:
        """Whether it asked the same about some of the runs of the other look, which are still those it saw."""
        mine = [run for run in runs if self.holds(run)]
        return self.entries[:1] == other.entries[:1] and bool(mine) and look_at(mine) == self


def alpha_of(look: int) -> float:
    """The share of errors of a look; the first is number 1.

    >>> [alpha_of(look) for look in (1, 2, 3)]
    [0.04, 0.008, 0.0016]
    """
    return ALPHA * _FIRST * _NEXT ** (look - 1)


def look_at(runs: Sequence[RunOutcome]) -> Look:
    """The look at these runs. What did not finish has no part in it: some of it leaves no folder to be read again."""
    seen = [run for run in runs if run.finished] or runs
    first, seeds = seen[0], sorted({run.seed for run in seen})
    entries = in_order([run.name for run in seen])
    return Look(tuple(seeds), entries, max(run.rounds for run in seen), first.metric, first.target, _hash(seen))


def _hash(runs: Sequence[RunOutcome]) -> str:
    seen = sorted((run.name, run.seed, repr(run.scores.get("mean")), repr(run.reached)) for run in runs)
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]


def in_order(names: Sequence[str]) -> tuple[str, ...]:
    """The first name, then the others by name: their order does not make another look.

    >>> in_order(["fedavg", "scaffold", "fednova", "scaffold"])
    ('fedavg', 'fednova', 'scaffold')
    """
    return names[0], *sorted({*names[1:]} - {names[0]})


def looks_until(runs: Sequence[RunOutcome], recorded: Sequence[Look]) -> list[Look]:
    """The recorded looks up to the one at these runs; it is the last of them, whether recorded or new."""
    now = look_at(runs)
    before = list(recorded[: recorded.index(now)]) if now in recorded else list(recorded)
    return [*before, now]


def read_looks(folder: Path) -> list[Look]:
    """The looks at the comparison in a folder; none where none is recorded."""
    file = folder / FILE
    if not file.is_file():
        return []
    try:
        return [_look(one) for one in json.loads(file.read_text(encoding="utf-8"))["looks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} is damaged ({error}): restore it, or delete it and forget that these seeds were looked at"
        ) from None


def looks_in(places: Sequence[Path]) -> list[Look]:
    """The looks at the comparison that some folders are or belong to; none where these are several, which nobody
    looked at together."""
    files = {file for place in places if (file := _file_of(place))}
    return read_looks(files.pop().parent) if len(files) == 1 else []


def _file_of(place: Path) -> Path | None:
    """The record of the comparison in a folder, or of the one that the folder of an entry or a run belongs to."""
    whole = place.absolute()
    return next((folder / FILE for folder in (whole, *whole.parents[:2]) if (folder / FILE).is_file()), None)


def record_look(folder: Path, runs: Sequence[RunOutcome], recorded: Sequence[Look]) -> tuple[Look, ...]:
    """Record the look at these runs, unless it is recorded or gives no verdict; returns all looks.

    Unfinished and shortened runs give none, and neither do too few seeds.
    """
    now = look_at(runs)
    known = {run.name for run in runs if run.finished}
    counts = Counter(run.name for run in runs if run.name in known)
    enough = counts[now.entries[0]] >= FEWEST_PAIRS and sum(each >= FEWEST_PAIRS for each in counts.values()) > 1
    if now in recorded or not enough or not all(run.ended and not run.quick for run in runs):
        return tuple(recorded)
    looks = (*recorded, now)
    atomic.write_text(folder / FILE, json.dumps({"looks": [asdict(one) for one in looks]}, indent=2) + "\n")
    return looks


def _look(written: Mapping[str, Any]) -> Look:
    found = {"values": "", **written}  # records of an earlier version have none: the same seeds are another look there
    if set(found) != set(_TYPES):
        raise ValueError(f"a look has {', '.join(_TYPES)}, not {', '.join(found)}")
    for name, types in _TYPES.items():
        if not isinstance(found[name], types) or isinstance(found[name], bool):
            raise ValueError(f"'{name}' cannot be {found[name]!r}")
    if not all(type(seed) is int for seed in found["seeds"]) or not all(type(one) is str for one in found["entries"]):
        raise ValueError("seeds are whole numbers, entries are names")
    return Look(**{**found, "seeds": tuple(found["seeds"]), "entries": tuple(found["entries"])})
