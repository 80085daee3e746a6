"""What the pages show of a run, read once from its folder; does not load torch, except for old folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedalloy.core import renamed
from fedalloy.core.errors import SpecError, nearest
from fedalloy.experiment.records.reading import RunRecord, last_clients, read_run
from fedalloy.results.clients import Client, clients_at
from fedalloy.results.lines import statistic_of
from fedalloy.results.outcome import RunOutcome, outcome_of
from fedalloy.results.runs import order_of, place_in, runs_in, told_apart
from fedalloy.results.served import client_values, completed, direction, noted_direction, scored
from fedalloy.results.sums import Clock, History, RunningSums


@dataclass(frozen=True)
class RunSummary:
    """One run: how it ended, its curves, and its clients' scores.

    ``curve`` holds ``(round, mean, worst_served)`` of the metric that is ``shown`` (by default the run's target
    metric), ``clients`` the last scores by it; ``last`` the rows of the last evaluation, one per model. What is
    missing is NaN, a loss that overflowed infinity.
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
        """The target metric of the run."""
        return self.outcome.metric

    @property
    def higher_is_better(self) -> bool | None:
        """The direction of the metric that is shown; None where it has none."""
        return self.direction(self.shown or self.metric)

    def direction(self, metric: str) -> bool | None:
        """Whether more of a metric is better."""
        return noted_direction(self.environment, metric)

    @property
    def running_sums(self) -> RunningSums:
        """Participation and cost, over all rounds."""
        return self.history.running_sums

    @property
    def population(self) -> int:
        """The number of clients, as far as the records show it."""
        return int(self.manifest.get("clients") or max(len(self.clients), len(self.running_sums.counts)))

    @property
    def contributed(self) -> list[int]:
        """In how many rounds each client's contribution was used."""
        found: list[int] = self.running_sums.contributed(self.population).tolist()
        return found

    @property
    def metrics(self) -> list[str]:
        """All evaluated metrics, the target metric first."""
        names = dict.fromkeys(name for one in self.history.evaluations[-1:] for name in one["evaluation"])
        return sorted(names, key=lambda name: name != self.metric)

    @property
    def personal(self) -> bool:
        """Whether the clients have their own models."""
        return any(row.get("model") == "personal" for row in self.last)


@dataclass
class Gatherer:
    """Reads a run row by row, so that following a running one reads every row once."""

    record: RunRecord
    history: History = field(default_factory=History)
    clock: Clock = field(default_factory=Clock)

    def read(self) -> Gatherer:
        """Read all rows."""
        for row in completed(self.record, self.record.rounds()):
            self.history.add(row)
        for row in self.record.timings():
            self.clock.add(row)
        return self

    def run_summary(self, metric: str | None = None) -> RunSummary:
        """The summary of the rows read so far."""
        record, history = self.record, self.history
        outcome = outcome_of(record, history.evaluations)
        last = tuple(last_clients(record.path))
        manifest = record.manifest or {}
        shown = metric or outcome.metric
        higher = direction(record, shown)
        summary = history.evaluations[-1]["evaluation"].get(shown) if history.evaluations else None
        row = scored(last)
        clients = clients_at(row, client_values(row, shown, higher, summary), manifest)
        curve = _curve(history, shown, higher)
        return RunSummary(
            outcome, record.recipe, record.environment, manifest, curve, tuple(clients), history, self.clock, last,
            shown,
        )  # fmt: skip


def gather(places: Sequence[Path], metric: str | None = None) -> list[RunSummary]:
    """The runs in some folders and below, in the order of their comparison; tuning runs are left out.

    ``metric`` is shown in curves and clients instead of the run's target metric.
    """
    summaries = [tell(folder, metric) for folder in runs_in(places)]
    names = told_apart([run_summary.outcome for run_summary in summaries])
    summaries = [replace(run_summary, outcome=outcome) for run_summary, outcome in zip(summaries, names, strict=True)]
    if metric is not None and not any(run_summary.curve or run_summary.clients for run_summary in summaries):
        known = {name for run_summary in summaries for name in _scored_by(run_summary.recipe)}
        raise SpecError(
            f"none of the runs was scored by '{metric}': {nearest(metric, known)}; add it to evaluate.metrics"
        )
    order = order_of(places)
    return sorted(summaries, key=lambda run_summary: place_in(order, run_summary.outcome))


def _scored_by(recipe: Mapping[str, Any]) -> Sequence[str]:
    """The metrics of a run, as a recipe or as ``fit`` stores them."""
    return recipe.get("evaluate", {}).get("metrics") or recipe.get("run", {}).get("metrics") or ()


def tunings(places: Sequence[Path]) -> list[dict[str, Any]]:
    """What tuning tried and chose, for the comparisons among the folders."""
    return [entry for found in _stored(places, "tuning.json") for entry in found]


def advices(places: Sequence[Path]) -> list[dict[str, Any]]:
    """The answers of the advices among the folders."""
    return _stored(places, "advice.json")


def _stored(places: Sequence[Path], name: str) -> list[Any]:
    files = [place / name for place in places]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]


def tell(folder: Path, metric: str | None = None) -> RunSummary:
    """Read one run."""
    return Gatherer(read_run(folder)).read().run_summary(metric)


def _curve(history: History, metric: str, higher: bool | None) -> tuple[tuple[int, float, float], ...]:
    def point(row: dict[str, Any]) -> tuple[int, float, float]:
        mean, worst = (statistic_of(row, metric, name, higher) for name in ("mean", "worst_served"))
        return int(row["round"]), mean, worst

    return tuple(point(row) for row in history.evaluations if row["evaluation"].get(metric))


if not TYPE_CHECKING:  # for one version: what has been renamed here
    __getattr__ = renamed.old_names(__name__, {"Story": "RunSummary"})
