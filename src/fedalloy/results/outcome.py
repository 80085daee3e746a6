"""The outcome of a run, read from its folder; does not load torch, except for old folders (:mod:`.served`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedalloy.experiment.records.reading import RunRecord, name_of, read_run, seed_of
from fedalloy.results import served
from fedalloy.results.redrawn import Drawn, drawn_by
from fedalloy.results.statistics import number
from fedalloy.tasks.metrics.direction import reaches


@dataclass(frozen=True, repr=False)
class RunOutcome:
    """How a run ended, and its clients' scores at the last evaluation.

    ``scores`` summarises the target metric over clients (mean, worst_served, best_served, gini, ...); ``reached`` is
    the first round whose mean is as good as ``target``. Where the run uses the global test set, ``mean`` is the
    value there. ``higher_is_better`` is the direction of the metric, None where it has none.
    ``quick`` marks a run that was shortened to see whether it runs. ``drawn`` is what it drew, for runs with records.
    ``ends_at_target`` is a run that ends when it reaches the target, so that its scores are those of that round.
    """

    name: str
    seed: int
    state: str
    reason: str = ""
    round: int = 0
    rounds: int = 0
    metric: str = "accuracy"
    target: float | None = None
    reached: int | None = None
    scores: dict[str, float] = field(default_factory=dict)
    folder: Path | None = None
    quick: bool = False
    higher_is_better: bool | None = True
    drawn: Drawn | None = None
    ends_at_target: bool = False

    def __repr__(self) -> str:
        scored = f", {self.metric} {self.scores['mean']:.3f}" if self.scores.get("mean") is not None else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"<{self.name}, seed {self.seed}: {self.state} in round {self.round}{scored}{reason}>"

    @property
    def finished(self) -> bool:
        """Whether the run finished; a failed run has scores too, but they are not results."""
        return self.state == "finished"

    @property
    def ended(self) -> bool:
        """Whether the run is finished or failed; one that was stopped or interrupted can continue."""
        return self.state in ("finished", "failed")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = {name: value for name, value in vars(self).items() if name not in ("folder", "drawn")}
        return values | {"folder": str(self.folder) if self.folder else None}


def read_outcome(folder: str | Path) -> RunOutcome:
    """The outcome of the run in a folder."""
    record = read_run(folder)
    return outcome_of(record, record.rounds())


def outcome_of(record: RunRecord, rows: Iterable[Mapping[str, Any]]) -> RunOutcome:
    """The outcome of a run from its rows of ``rounds.jsonl``; those without an evaluation may be missing."""
    settings, status = record.recipe.get("run", {}), record.status
    metric, on_global = watched_by(record.recipe)
    target, higher = settings.get("target"), served.direction(record, metric)
    last: Mapping[str, Any] = {}
    round, reached = 0, None
    for row in rows:
        found = watched(row, metric, on_global)
        if found is None:
            continue
        last, round = found, int(row["round"])
        if target is not None and reached is None and reaches(number(last.get("mean")), target, higher):
            reached = round
    tails = {} if on_global or not last else served.last_tails(record, round, metric, last)
    return RunOutcome(
        name_of(record.recipe),
        seed_of(record.recipe),
        status.get("state", "running"),
        status.get("reason", ""),
        record.last_round,
        int(settings.get("rounds", 0)),
        metric,
        target,
        reached,
        served.scores({**last, **tails}, higher),
        record.path,
        bool(settings.get("quick")),
        higher,
        replace(drawn_by(record.recipe, record.manifest or {}, on_global), start=record.start),
        target is not None and bool(settings.get("stop_at_target")),
    )


def watched_by(recipe: Mapping[str, Any]) -> tuple[str, bool]:
    """The target metric of a run, and whether it is measured on the global test set."""
    settings = recipe.get("run", {})
    return settings.get("target_metric", "accuracy"), settings.get("target_on") == "global"


def watched(row: Mapping[str, Any], metric: str, on_global: bool) -> Mapping[str, Any] | None:
    """The summary of a round's evaluation; the global test set has a value and no spread over clients."""
    if on_global:
        value = row.get("global", {}).get(metric)
        return None if value is None else {"mean": value}
    found: Mapping[str, Any] | None = row.get("evaluation", {}).get(metric)
    return found
