"""Everything a page needs to know about a run, read once from its folder; loads no torch, unless that is an old one."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedalloy.core.errors import CheckpointError, SpecError, nearest
from fedalloy.records.reading import RunRecord, find_runs, last_rows, read_run
from fedalloy.results.outcome import RunOutcome, outcome_of
from fedalloy.results.served import client_values, completed, direction, noted_direction
from fedalloy.results.sums import Clock, History, Tally, number

TUNING = "tuning"


@dataclass(frozen=True)
class Client:
    """One client at the end of a run."""

    id: int
    name: str
    score: float
    examples: int | None
    classes: tuple[int, ...]


@dataclass(frozen=True)
class Story:
    """One run: how it ended, how it went, who was served how.

    ``curve`` holds ``(round, mean, worst_served)`` of the metric that is ``shown`` (the run's own unless somebody asked
    for another), ``clients`` the last scores by it; ``last`` the rows of the last evaluation, one per model. A client
    without a score has NaN, one whose loss overflowed infinity.
    """

    outcome: RunOutcome
    recipe: dict[str, Any]
    environment: dict[str, Any]
    manifest: dict[str, Any]
    curve: tuple[tuple[int, float, float], ...]
    clients: tuple[Client, ...]
    history: History = field(default_factory=History)
    clock: Clock = field(default_factory=Clock)
    last: tuple[dict[str, Any], ...] = ()
    shown: str = ""

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return self.outcome.name

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.outcome.seed

    @property
    def metric(self) -> str:
        """What the run is judged by."""
        return self.outcome.metric

    @property
    def higher_is_better(self) -> bool | None:
        """The direction of what is shown; None where it has none."""
        return self.direction(self.shown or self.metric)

    def direction(self, metric: str) -> bool | None:
        """Whether more of a metric is better."""
        return noted_direction(self.environment, metric)

    @property
    def tally(self) -> Tally:
        """Who took part, over all rounds."""
        return self.history.tally

    @property
    def population(self) -> int:
        """How many clients there are, as far as the records tell."""
        most = max(self.tally.counted, default=-1) + 1
        return int(self.manifest.get("clients") or max(len(self.clients), most))

    @property
    def metrics(self) -> list[str]:
        """Everything that was evaluated, the run's own metric first."""
        names = dict.fromkeys(name for one in self.history.evaluations[-1:] for name in one["evaluation"])
        return sorted(names, key=lambda name: name != self.metric)

    @property
    def personal(self) -> bool:
        """Whether the clients have models of their own."""
        return any(row.get("model") == "personal" for row in self.last)


@dataclass
class Gatherer:
    """Reads a run row by row, so that whoever follows a run that is still going reads every row once."""

    record: RunRecord
    history: History = field(default_factory=History)
    clock: Clock = field(default_factory=Clock)

    def read(self) -> Gatherer:
        """Everything that is there."""
        for row in completed(self.record, self.record.rounds()):
            self.history.add(row)
        for row in self.record.timings():
            self.clock.add(row)
        return self

    def story(self, metric: str | None = None) -> Story:
        """What is known by now."""
        record, history = self.record, self.history
        outcome = outcome_of(record, history.evaluations)
        last = tuple(last_rows(record.path / "clients.jsonl"))
        manifest = record.manifest or {}
        shown = metric or outcome.metric
        summary = history.evaluations[-1]["evaluation"].get(shown) if history.evaluations else None
        scores = client_values(last[-1], shown, direction(record, shown), summary) if last else []
        clients = tuple(_clients(last[-1] if last else {}, scores, manifest))
        curve = _curve(history, shown)
        return Story(
            outcome, record.recipe, record.environment, manifest, curve, clients, history, self.clock, last, shown
        )  # fmt: skip


def gather(places: Sequence[Path], metric: str | None = None) -> list[Story]:
    """The runs in some folders and below, in the order of the comparison they belong to; tuning runs are left out.

    ``metric`` is what curves and clients show instead of the run's own.
    """
    folders = [folder for place in places for folder in _runs(place)]
    if not folders:
        raise CheckpointError(f"no run in {', '.join(map(str, places))}; name run folders, or a folder that holds some")
    stories = told_apart([tell(folder, metric) for folder in dict.fromkeys(folders)])
    if metric is not None and not any(story.curve or story.clients for story in stories):
        known = {name for story in stories for name in _scored_by(story.recipe)}
        raise SpecError(
            f"no run here was scored by '{metric}': {nearest(metric, known)}; evaluate it first (evaluate.metrics)"
        )
    order = {name: position for position, name in enumerate(_order(places))}
    return sorted(stories, key=lambda story: (order.get(story.name, len(order)), story.name, story.seed))


def _scored_by(recipe: Mapping[str, Any]) -> Sequence[str]:
    """The metrics of a run, as a recipe or as ``fit`` stores them."""
    return recipe.get("evaluate", {}).get("metrics") or recipe.get("run", {}).get("metrics") or ()


def told_apart(stories: Sequence[Story]) -> list[Story]:
    """Two runs of one name and seed are two experiments, not two samples of one: the folder is added to their names."""
    twice = {key[0] for key, count in Counter((story.name, story.seed) for story in stories).items() if count > 1}
    folders = [story.outcome.folder for story in stories if story.name in twice and story.outcome.folder]
    if len(folders) < 2:
        return list(stories)
    common = Path(os.path.commonpath(folders))
    return [_with_place(story, common) if story.name in twice else story for story in stories]


def _with_place(story: Story, common: Path) -> Story:
    folder = story.outcome.folder or common
    # The last folder of a comparison's run is its seed, the one before it its name: neither tells anything new.
    parts = [part for part in folder.relative_to(common).parts if part not in (story.name, f"seed-{story.seed}")]
    place = f" ({'/'.join(parts)})" if parts else ""
    return replace(story, outcome=replace(story.outcome, name=story.name + place))


def tunings(places: Sequence[Path]) -> list[dict[str, Any]]:
    """What tuning tried and chose, for the comparisons among the folders."""
    files = [place / "tuning.json" for place in places]
    return [entry for file in files if file.is_file() for entry in json.loads(file.read_text(encoding="utf-8"))]


def tell(folder: Path, metric: str | None = None) -> Story:
    """Read one run."""
    return Gatherer(read_run(folder)).read().story(metric)


def by_name(stories: Sequence[Story]) -> dict[str, list[Story]]:
    """The runs of every algorithm, in their order."""
    groups: dict[str, list[Story]] = {}
    for story in stories:
        groups.setdefault(story.name, []).append(story)
    return groups


def client_name(manifest: Mapping[str, Any], client: int) -> str:
    """How a client is called."""
    names = manifest.get("names")
    return str(names[client]) if names and client < len(names) else f"client {client}"


def _curve(history: History, metric: str) -> tuple[tuple[int, float, float], ...]:
    found = [(one["round"], one["evaluation"].get(metric)) for one in history.evaluations]
    return tuple((int(round), number(of.get("mean")), number(of.get("worst_served"))) for round, of in found if of)


def _clients(row: Mapping[str, Any], scores: Sequence[float], manifest: Mapping[str, Any]) -> list[Client]:
    sizes, counts = manifest.get("sizes"), manifest.get("class_counts")
    return [
        Client(
            client,
            client_name(manifest, client),
            score,
            sizes[client] if sizes and client < len(sizes) else None,
            tuple(counts[client]) if counts and client < len(counts) else (),
        )
        for client, score in zip(row.get("ids", ()), scores, strict=False)
    ]


def _runs(place: Path) -> list[Path]:
    return [run for run in find_runs(place) if TUNING not in run.relative_to(place).parts]


def _order(places: Sequence[Path]) -> list[str]:
    files = [place / "comparison.json" for place in places]
    return [name for file in files if file.is_file() for name in json.loads(file.read_text(encoding="utf-8"))["order"]]
