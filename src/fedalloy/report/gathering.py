"""Everything a page needs to know about a run, read once from its folder; loads no torch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedalloy.compare.outcome import Outcome, read_outcome
from fedalloy.core.errors import CheckpointError
from fedalloy.records.reading import find_runs, last_row, read_run

TUNING = "tuning"


@dataclass(frozen=True)
class Client:
    """One client at the end of a run."""

    id: int
    name: str
    score: float
    examples: int | None
    classes: tuple[int, ...]


@dataclass
class Tally:
    """Who took part, over all rounds."""

    counted: Counter[int] = field(default_factory=Counter)
    absent: int = 0
    late: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    barren: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0

    def add(self, row: dict[str, Any]) -> None:
        """Count one round."""
        self.counted.update(row["ids"])
        self.late += len(row.get("late", ()))
        self.absent += len(row.get("absent", ()))
        self.dropped.update(row["dropped"].values())
        self.barren += not row["ids"]
        self.bytes_up += row["bytes_up"]
        self.bytes_down += row["bytes_down"]
        self.seconds += row["simulated_seconds"]


@dataclass(frozen=True)
class Story:
    """One run: how it ended, how it went, who was served how."""

    outcome: Outcome
    recipe: dict[str, Any]
    environment: dict[str, Any]
    manifest: dict[str, Any]
    curve: tuple[tuple[int, float, float], ...]
    clients: tuple[Client, ...]
    tally: Tally

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return self.outcome.name


def gather(places: Sequence[Path], metric: str | None = None) -> list[Story]:
    """The runs in some folders and below, in the order of the comparison they belong to; tuning runs are left out.

    ``metric`` is what curves and clients show instead of the run's own.
    """
    folders = [folder for place in places for folder in _runs(place)]
    if not folders:
        raise CheckpointError(f"no run in {', '.join(map(str, places))}; name run folders, or a folder that holds some")
    stories = [tell(folder, metric) for folder in dict.fromkeys(folders)]
    order = {name: position for position, name in enumerate(_order(places))}
    return sorted(stories, key=lambda story: (order.get(story.name, len(order)), story.name, story.outcome.seed))


def tunings(places: Sequence[Path]) -> list[dict[str, Any]]:
    """What tuning tried and chose, for the comparisons among the folders."""
    files = [place / "tuning.json" for place in places]
    return [entry for file in files if file.is_file() for entry in json.loads(file.read_text(encoding="utf-8"))]


def tell(folder: Path, metric: str | None = None) -> Story:
    """Read one run."""
    record, outcome, tally = read_run(folder), read_outcome(folder), Tally()
    metric = metric or outcome.metric
    curve = []
    for row in record.rounds():
        tally.add(row)
        found = row.get("evaluation", {}).get(metric)
        if found:
            curve.append((int(row["round"]), _number(found.get("mean")), _number(found.get("worst"))))
    manifest = record.manifest or {}
    clients = tuple(_clients(last_row(folder / "clients.jsonl") or {}, metric, manifest))
    return Story(outcome, record.recipe, record.environment, manifest, tuple(curve), clients, tally)


def _clients(row: dict[str, Any], metric: str, manifest: dict[str, Any]) -> list[Client]:
    names, sizes = manifest.get("names"), manifest.get("sizes")
    counts = manifest.get("class_counts")
    return [
        Client(
            client,
            names[client] if names else f"client {client}",
            _number(score),
            sizes[client] if sizes else None,
            tuple(counts[client]) if counts else (),
        )
        for client, score in zip(row.get("ids", ()), row.get(metric, ()), strict=False)
    ]


def _runs(place: Path) -> list[Path]:
    return [run for run in find_runs(place) if TUNING not in run.relative_to(place).parts]


def _order(places: Sequence[Path]) -> list[str]:
    files = [place / "comparison.json" for place in places]
    return [name for file in files if file.is_file() for name in json.loads(file.read_text(encoding="utf-8"))["order"]]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
