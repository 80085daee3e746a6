"""The progress of a run on a federation, read from its folder: rounds, speed, who takes part, who is missing, why."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fedalloy.experiment.records.reading import newest_rows, read_run
from fedalloy.experiment.records.scalars import seconds_of
from fedalloy.flower.layout import PAUSED
from fedalloy.results.clients import client_name

_TROUBLES = 10
"""How many problems of the latest rounds are shown."""
_SEARCHED = 1000
"""The latest rounds in which they are looked for."""
_RECENT = 10
"""The rounds from which the speed is computed."""
_LATE = "no answer within"
WAITING = "waiting"
"""How the last line of a run's log begins while too few contribute."""
UNHEARD = "was not connected, or sent nothing"


@dataclass(frozen=True)
class Participation:
    """One client in the latest round: ``state`` is in, late, out or not asked; ``last`` is the last round that it
    contributed to, 0 if it never did, and None where it was not looked for."""

    name: str
    state: str
    reason: str = ""
    last: int | None = None


@dataclass(frozen=True)
class Trouble:
    """A client that was dropped from a round, and why."""

    round: int
    client: str
    reason: str


@dataclass(frozen=True)
class Progress:
    """The progress of a run. ``seconds`` is the time of a recent round, ``left`` the time to the last one, ``quiet``
    the time since anything was recorded; ``news`` is the last line of its log."""

    folder: Path
    state: str
    round: int
    rounds: int | None
    reason: str
    seconds: float | None = None
    left: float | None = None
    quiet: float | None = None
    news: str = ""
    clients: tuple[Participation, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    troubles: tuple[Trouble, ...] = ()

    @property
    def missing(self) -> tuple[Participation, ...]:
        """The clients that did not contribute to the latest round, though they were asked."""
        return tuple(one for one in self.clients if one.state in ("late", "out"))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "folder": str(self.folder)}


def progress(folder: Path, now: float | None = None) -> Progress:
    """The progress of a run and its problems, latest rounds last."""
    record = read_run(folder)
    manifest, status = record.manifest or {}, record.status
    seconds = _speed(folder)
    rounds = record.recipe.get("run", {}).get("rounds")
    left = seconds * (rounds - record.last_round) if seconds and rounds and status["state"] == "running" else None
    latest = next(newest_rows(folder / "rounds.jsonl", 1), {})
    return Progress(
        folder,
        "paused" if is_paused(folder, str(status["state"])) else str(status["state"]),
        record.last_round,
        rounds,
        str(status.get("reason", "")),
        seconds,
        left,
        _quiet(folder, time.time() if now is None else now),
        _last_line(folder / "federation.log"),
        _clients(folder, latest, manifest),
        dict(latest.get("refused", {})),
        _troubles(folder, manifest),
    )


def is_paused(folder: Path, state: str) -> bool:
    """Whether a run that was ended, after a round or in the middle of one, waits for ``resume``."""
    return state in ("stopped", "interrupted") and (folder / PAUSED).exists()


def _speed(folder: Path) -> float | None:
    """The median: the first round of a session, in which nodes read their data, and one that waited for nodes say
    nothing about the next."""
    spent = [seconds_of(row) for row in newest_rows(folder / "timings.jsonl", _RECENT)]
    return statistics.median(spent) if spent else None


def _quiet(folder: Path, now: float) -> float | None:
    """Seconds since a file of the run was written."""
    files = [folder / name for name in ("rounds.jsonl", "status.json", "federation.log")]
    times = [file.stat().st_mtime for file in files if file.exists()]
    return max(0.0, now - max(times)) if times else None


def _last_line(file: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        return file.read_text(encoding="utf-8", errors="replace").splitlines()[-1]
    return ""


def _clients(folder: Path, row: Mapping[str, Any], manifest: Mapping[str, Any]) -> tuple[Participation, ...]:
    """Every client of a round with its part in it; for those who are missing, their last contribution is looked up."""
    reasons = _reasons(row)
    known = {*row.get("ids", ()), *reasons, *range(len(manifest.get("names") or ()))}
    found = []
    for client in sorted(known):
        name, why = client_name(manifest, client), reasons.get(client, "")
        if client in row.get("ids", ()):
            found.append(Participation(name, "in", last=int(row["round"])))
        elif client in reasons:
            state = "late" if why.startswith(_LATE) else "out"
            found.append(Participation(name, state, why, _last_contribution(folder, client)))
        else:
            found.append(Participation(name, "not asked"))
    return tuple(found)


def _reasons(row: Mapping[str, Any]) -> dict[int, str]:
    """Why each missing client of a round is missing."""
    told = {int(client): str(why) for client, why in row.get("dropped", {}).items()}
    return {**dict.fromkeys(row.get("absent", ()), UNHEARD), **told}


def _last_contribution(folder: Path, client: int) -> int:
    rows = newest_rows(folder / "rounds.jsonl")
    return next((int(row["round"]) for row in rows if client in row.get("ids", ())), 0)


def _troubles(folder: Path, manifest: Mapping[str, Any]) -> tuple[Trouble, ...]:
    rows = newest_rows(folder / "rounds.jsonl", _SEARCHED)
    found = (
        Trouble(int(row["round"]), client_name(manifest, client), why)
        for row in rows
        for client, why in sorted(_reasons(row).items(), reverse=True)
    )
    return tuple(islice(found, _TROUBLES))[::-1]
