"""What is packed about a federation, and what it says: differences to FedAvg, rounds, the regret of a choice."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedalloy.results.against_first import means_apart
from fedalloy.results.evidence import Evidence, PairedDifferences, compare_together
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.statistics import Spread
from fedalloy.tasks.metrics.direction import reaches

PERSONAL = (
    "fedavg fine-tuned", "ditto", "apfl", "fedper", "fedrep", "lgfedavg", "pfedme", "superfed_mm", "superfed_lm",
    "local_only",
)  # fmt: skip
"""The methods that leave something at the client; the others share one model."""


@dataclass(frozen=True)
class Entry:
    """One method on one federation, with the settings that its search found."""

    name: str
    settings: dict[str, Any]
    trials: int
    tuning_rounds: int
    runs: list[dict[str, Any]]

    @property
    def finished(self) -> list[dict[str, Any]]:
        """The runs with scores."""
        return [run for run in self.runs if run["state"] == "finished"]

    def spread(self, score: str) -> Spread | None:
        """Mean and deviation of a score over the seeds."""
        return Spread.of(_number(run["scores"].get(score)) for run in self.finished)

    def bytes(self) -> float:
        """What a client sends and receives in a round that it takes part in."""
        return statistics.fmean(run["bytes"] for run in self.finished) if self.finished else math.nan


@dataclass(frozen=True)
class Federation:
    """The comparison on one federation; the first entry is FedAvg."""

    name: str
    description: str
    metric: str
    higher_is_better: bool
    rounds: int
    clients: int
    reused: float
    torch: str
    entries: tuple[Entry, ...]

    def entry(self, name: str) -> Entry | None:
        """The entry of a method."""
        return next((one for one in self.entries if one.name == name), None)

    @cached_property
    def against_fedavg(self) -> dict[str, dict[str, Evidence]]:
        """For every other method the evidence of its difference to FedAvg, in the mean over clients and in the worst
        tenth; both questions about all methods are one family."""
        first, *others = self.entries
        asked = {
            (one.name, score): self._apart(one, first, score) for one in others for score in ("mean", "worst_served")
        }
        asked = {key: one for key, one in asked.items() if one.values}
        found = dict(zip(asked, compare_together(list(asked.values())), strict=True))
        return {
            one.name: {score: found[key] for key in found if key[0] == one.name for score in key[1:]} for one in others
        }

    def _apart(self, mine: Entry, first: Entry, score: str) -> PairedDifferences:
        return means_apart(self._outcomes(mine, score), self._outcomes(first, score), self.reused)

    def _outcomes(self, entry: Entry, score: str) -> list[RunOutcome]:
        """The runs as the project's own statistics want them, with one score as their mean."""
        return [
            RunOutcome(
                entry.name, run["seed"], run["state"], run.get("reason", ""), higher_is_better=self.higher_is_better,
                scores={"mean": _number(run["scores"].get(score))} if run["state"] == "finished" else {},
            )
            for run in entry.runs
        ]  # fmt: skip

    def rounds_to_fedavg(self, entry: Entry) -> tuple[float, int]:
        """The median round in which a method's mean is as good as FedAvg's last of the same seed, over the runs that
        get there, and how many do."""
        levels = {run["seed"]: run["scores"]["mean"] for run in self.entries[0].finished}
        first = [self._first(run, levels[run["seed"]]) for run in entry.finished if run["seed"] in levels]
        known = [at for at in first if at is not None]
        return (statistics.median(known) if known else math.nan), len(known)

    def _first(self, run: dict[str, Any], level: float) -> int | None:
        """The first round of a run whose mean is as good as a level."""
        curve = run["curve"].items()
        return next((int(at) for at, mean in curve if reaches(_number(mean), level, self.higher_is_better)), None)

    def level(self, entry: Entry) -> float:
        """The mean over seeds and clients, so signed that more is better; a method that failed is worse than all."""
        found = entry.spread("mean")
        if found is None or len(entry.finished) < len(entry.runs):
            return -math.inf
        return found.mean if self.higher_is_better else -found.mean

    def regret(self, name: str) -> float:
        """How much better the best method of the table is, in points."""
        best = max(self.level(one) for one in self.entries)
        mine = self.entry(name)
        return 100 * (best - self.level(mine)) if mine else math.nan

    def rank(self, name: str) -> int:
        """The place of a method in the table, 1 for the best."""
        mine = self.entry(name)
        assert mine is not None
        return 1 + sum(self.level(one) > self.level(mine) for one in self.entries)


def read(folder: Path) -> list[Federation]:
    """The packed federations, by name."""
    return [_federation(json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("*.json"))]


def regret_of_random(federations: Sequence[Federation]) -> list[float]:
    """The regret that a method drawn at random has on average, per federation; failed methods are left out."""
    return [
        statistics.fmean(value for one in each.entries if math.isfinite(value := each.regret(one.name)))
        for each in federations
    ]


def _federation(packed: dict[str, Any]) -> Federation:
    entries = tuple(
        Entry(one["name"], one["settings"], one["trials"], one["tuning_rounds"], one["runs"])
        for one in packed["entries"]
    )
    return Federation(
        packed["federation"],
        packed["description"],
        packed["metric"],
        packed["higher_is_better"],
        packed["rounds"],
        packed["clients"],
        packed["reused"],
        packed["torch"],
        entries,
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
