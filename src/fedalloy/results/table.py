"""One line per algorithm: mean and spread over seeds, and the paired difference to the first algorithm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedalloy.results.outcome import RunOutcome
from fedalloy.results.runs import by_name
from fedalloy.results.statistics import Spread, paired

_SCORES = ("mean", "worst", "best", "worst_served", "best_served", "gini", "variance")


@dataclass(frozen=True)
class ResultRow:
    """One algorithm over its seeds; only finished runs are used, the others are named.

    ``worst`` and ``best`` are the lowest and the highest tenth of the clients; which clients are served worst and best
    depends on ``higher_is_better``, the direction of the metric; without a direction there are none.
    """

    name: str
    seeds: tuple[int, ...]
    mean: Spread | None
    worst: Spread | None
    best: Spread | None
    worst_served: Spread | None
    best_served: Spread | None
    gini: Spread | None
    variance: Spread | None
    target: float | None
    to_target: Spread | None
    reached: int
    difference: Spread | None
    failed: tuple[RunOutcome, ...]
    unfinished: tuple[RunOutcome, ...]
    higher_is_better: bool | None

    @property
    def target_text(self) -> str:
        """Rounds to the target; how many seeds reached it, unless all did."""
        if self.to_target is None:
            return "not reached" if self.seeds and self.target is not None else ""
        missing = f" ({self.reached}/{len(self.seeds)})" if self.reached < len(self.seeds) else ""
        return self.to_target.text(1) + missing

    @property
    def asked(self) -> int:
        """The number of requested runs."""
        return len(self.seeds) + len(self.failed) + len(self.unfinished)

    @property
    def coverage(self) -> str:
        """How many of the seeds are used, and the states of the others; only the number where all are used.

        A finished run without a value is not used either.
        """
        counted = self.mean.count if self.mean else 0
        if counted == self.asked:
            return str(counted)
        states = Counter(run.state for run in (*self.failed, *self.unfinished))
        states["without a value"] += len(self.seeds) - counted
        told = ", ".join(f"{count} {state}" for state, count in states.items() if count)
        return f"{counted} of {self.asked} ({told})"

    @property
    def trouble(self) -> str:
        """The runs that are not used, by seed."""
        said = [f"seed {run.seed} failed in round {run.round}" for run in self.failed]
        return "; ".join(said + [f"seed {run.seed} {run.state} in round {run.round}" for run in self.unfinished])

    def to_json(self) -> dict[str, Any]:
        """Plain values for machines."""
        plain = {
            name: vars(value) if isinstance(value, Spread) else value
            for name, value in vars(self).items()
            if name not in ("failed", "unfinished")
        }
        failed = [{"seed": run.seed, "round": run.round, "reason": run.reason} for run in self.failed]
        unfinished = [run.seed for run in self.unfinished]
        return plain | {"failed": failed, "unfinished": unfinished, "asked": self.asked, "coverage": self.coverage}


def summarise(outcomes: Sequence[RunOutcome]) -> list[ResultRow]:
    """One row per name, in order of appearance; differences are paired by seed with the first name."""
    groups = by_name(outcomes)
    first = values_by_seed(next(iter(groups.values()), []))
    return [_row(name, runs, first, is_first=i == 0) for i, (name, runs) in enumerate(groups.items())]


def spreads(runs: Sequence[RunOutcome], scores: Sequence[str]) -> dict[str, Spread | None]:
    """Every score over the finished runs."""
    return {key: Spread.of(run.scores.get(key, math.nan) for run in runs if run.finished) for key in scores}


def values_by_seed(runs: Sequence[RunOutcome]) -> dict[int, float]:
    """The mean over clients of every finished run that has one."""
    return {run.seed: run.scores["mean"] for run in runs if run.finished and "mean" in run.scores}


def _row(name: str, runs: Sequence[RunOutcome], first: dict[int, float], is_first: bool) -> ResultRow:
    done = [run for run in runs if run.finished]
    reached = [float(run.reached) for run in done if run.reached is not None]
    return ResultRow(
        name,
        tuple(run.seed for run in done),
        **spreads(runs, _SCORES),
        target=runs[0].target,
        to_target=Spread.of(reached),
        reached=len(reached),
        difference=None if is_first else Spread.of(paired(values_by_seed(runs).items(), first)),
        failed=tuple(run for run in runs if run.state == "failed"),
        unfinished=tuple(run for run in runs if not run.ended),
        higher_is_better=runs[0].higher_is_better,
    )
