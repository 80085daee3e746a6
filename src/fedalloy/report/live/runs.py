"""The runs of a folder, with one line about each that is read again only when its files have changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records.lock import holder
from fedalloy.experiment.records.reading import name_of, newest_rows, read_recipe, read_status, seed_of
from fedalloy.experiment.records.scalars import seconds_of
from fedalloy.results.outcome import watched, watched_by

FILES = ("recipe.toml", "environment.json", "status.json", "manifest.json", "lock")
STREAMS = ("rounds.jsonl", "clients.jsonl", "timings.jsonl")
Summary = dict[str, Any]
_LOOKED_BACK = 200
"""Rounds that are searched for the newest evaluation."""
_PACE = 20
"""Rounds whose mean duration gives the estimate of the remaining time."""


@dataclass
class RunStore:
    """The runs below a folder by id, which is their relative path.

    An id is only looked up in the list made here, never turned into a path. Symlinks are not followed, and a run whose
    files are not regular files is left out: nothing outside the folder can be read.
    """

    root: Path
    folders: dict[str, Path] = field(default_factory=dict)
    _summaries: dict[str, tuple[tuple[Any, ...], Summary]] = field(default_factory=dict)
    _recipes: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = Path(os.path.realpath(self.root))

    def scan(self) -> bool:
        """Search for runs; returns whether some were added or removed."""
        before = set(self.folders)
        # A new dict, because other threads may be iterating over the old one.
        self.folders = {self._id(folder): folder for folder in sorted(_find(str(self.root)))}
        for gone in before - set(self.folders):
            self._summaries.pop(gone, None)
            self._recipes.pop(gone, None)
        return before != set(self.folders)

    def folder(self, run: str) -> Path:
        """The folder of a run; a LookupError for an unknown or deleted one."""
        folder = self.folders[run]
        if os.path.realpath(folder) != str(folder) or not is_plain(folder):
            raise LookupError(run)
        return folder

    def refresh(self, run: str) -> bool:
        """Read the line about a run again if its files have changed; returns whether they have."""
        stamp = _stamp(str(self.folders[run]))
        known = self._summaries.get(run)
        if known and known[0] == stamp:
            return False
        folder = self.folder(run)
        self._summaries[run] = (stamp, self._describe(run, folder))
        return True

    def is_going(self, run: str) -> bool:
        """Whether a run was being written when its line was read."""
        return run not in self._summaries or self._summaries[run][1]["state"] == "running"

    def summary(self, run: str) -> Summary:
        """One line about a run."""
        if run not in self._summaries:
            self.refresh(run)
        return self._summaries[run][1]

    def recipe(self, run: str) -> dict[str, Any]:
        """The recipe of a run; cached by modification time, since another run may replace it."""
        file = self.folder(run) / "recipe.toml"
        changed = file.stat().st_mtime_ns
        known = self._recipes.get(run)
        if known is None or known[0] != changed:
            known = changed, read_recipe(file)
            self._recipes[run] = known
        return known[1]

    def _id(self, folder: Path) -> str:
        return folder.relative_to(self.root).as_posix()

    def _describe(self, run: str, folder: Path) -> Summary:
        try:
            recipe, status = self.recipe(run), read_status(folder)
            metric, on_global = watched_by(recipe)
            last, scores = _newest(folder, metric, on_global)
        except (OSError, ValueError, CheckpointError) as error:
            return {"id": run, "name": run, "seed": 0, "state": "unreadable", "reason": str(error), "round": 0,
                    "rounds": 0, "metric": "", "score": None, "left": None}  # fmt: skip
        settings = recipe.get("run", {})
        state = str(status["state"])
        round, rounds = int(last.get("round", 0)), int(settings.get("rounds", 0))
        return {
            "id": run, "name": name_of(recipe), "seed": seed_of(recipe), "state": state,
            "reason": str(status.get("reason", "")), "round": round, "rounds": rounds, "metric": metric,
            "score": scores.get("mean"),
            "left": _left(folder, rounds - round) if state == "running" else None,
        }  # fmt: skip


def is_plain(folder: Path) -> bool:
    """Whether a run's files are regular files: no links, no pipes."""
    for name in (*FILES, *STREAMS):
        try:
            if not stat.S_ISREG(os.lstat(folder / name).st_mode):
                return False
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


def _find(place: str) -> Iterator[Path]:
    """Every run below; run folders and hidden folders are not searched, and links are not followed.

    ``scandir`` returns the type of every entry, so that a thousand runs cost a thousand system calls and not ten
    thousand.
    """
    try:
        with os.scandir(place) as listed:
            entries = {entry.name: entry for entry in listed}
    except OSError:
        return
    if "recipe.toml" in entries and "environment.json" in entries:
        known = [entries[name] for name in (*FILES, *STREAMS) if name in entries]
        if all(entry.is_file(follow_symlinks=False) for entry in known):
            yield Path(place)
        return
    for name, entry in entries.items():
        if not name.startswith(".") and entry.is_dir(follow_symlinks=False):
            yield from _find(entry.path)


def _stamp(folder: str) -> tuple[Any, ...]:
    """Changes whenever the line about a run may have changed; the last entry is whether it is being written."""
    stamps: list[Any] = []
    for name in ("status.json", "rounds.jsonl"):
        try:
            found = os.lstat(f"{folder}/{name}")
            stamps.append((found.st_mtime_ns, found.st_size))
        except OSError:
            stamps.append(None)
    return (*stamps, holder(Path(folder) / "lock") is not None)


def _newest(folder: Path, metric: str, on_global: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The last round, and the newest summary of the target metric."""
    last: Mapping[str, Any] = {}
    for row in newest_rows(folder / "rounds.jsonl", _LOOKED_BACK):
        last = last or row
        scores = watched(row, metric, on_global)
        if scores is not None:
            return last, scores
    return last, {}


def _left(folder: Path, rounds: int) -> float | None:
    """Estimated seconds for the remaining rounds, from the duration of the last few."""
    spent = [seconds_of(row) for row in newest_rows(folder / "timings.jsonl", _PACE)]
    return sum(spent) / len(spent) * max(0, rounds) if spent else None
