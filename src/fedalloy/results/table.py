"""One line per algorithm: mean and spread over seeds, and the evidence of its difference to the first algorithm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedalloy.results.against_first import AgainstFirst, evidence_of
from fedalloy.results.evidence import Evidence
from fedalloy.results.looks import Look
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.runs import by_name
from fedalloy.results.statistics import Spread

_SCORES = ("mean", "worst", "best", "worst_served", "best_served", "gini", "variance")


@dataclass(frozen=True, repr=False)
class ResultRow:
    """One algorithm over its seeds; only finished runs are used, the others are named.

    ``worst`` and ``best`` are the lowest and the highest tenth of the clients; which clients are served worst and best
    depends on ``higher_is_better``, the direction of the metric; without a direction there are none. ``difference``
    and ``rounds_difference`` are to the first algorithm, paired by seed, in the mean and in the rounds to the target;
    the two of all algorithms are one family. The first algorithm has none, and neither has one without a common seed.
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
    difference: Evidence | None
    rounds_difference: Evidence | None
    failed: tuple[RunOutcome, ...]
    unfinished: tuple[RunOutcome, ...]
    higher_is_better: bool | None

    def __repr__(self) -> str:
        return f"<{self.name}: {self.mean.text() if self.mean else 'no result'}; seeds {self.coverage}>"

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
            name: vars(value) if isinstance(value, Spread | Evidence) else value
            for name, value in vars(self).items()
            if name not in ("failed", "unfinished")
        }
        failed = [{"seed": run.seed, "round": run.round, "reason": run.reason} for run in self.failed]
        unfinished = [run.seed for run in self.unfinished]
        return plain | {"failed": failed, "unfinished": unfinished, "asked": self.asked, "coverage": self.coverage}


def summarise(outcomes: Sequence[RunOutcome], recorded: Sequence[Look] = ()) -> list[ResultRow]:
    """One row per name, in order of appearance; differences are paired by seed with the first name.

    ``recorded`` are the looks at the comparison so far (:func:`fedalloy.results.looks.read_looks`).
    """
    found = evidence_of(outcomes, recorded)
    return [_row(name, runs, found.get(name, AgainstFirst())) for name, runs in by_name(outcomes).items()]


def leaders(rows: Sequence[ResultRow]) -> list[str]:
    """The names to set in bold: those that are decided to be better than the first, or the first where all others are
    decided to be worse."""
    outcomes = [row.difference.outcome if row.difference else None for row in rows[1:]]
    if outcomes and all(outcome == "worse" for outcome in outcomes):
        return [rows[0].name]
    return [row.name for row, outcome in zip(rows[1:], outcomes, strict=True) if outcome == "better"]


def spreads(runs: Sequence[RunOutcome], scores: Sequence[str]) -> dict[str, Spread | None]:
    """Every score over the finished runs."""
    return {key: Spread.of(run.scores.get(key, math.nan) for run in runs if run.finished) for key in scores}


def _row(name: str, runs: Sequence[RunOutcome], found: AgainstFirst) -> ResultRow:
    done = [run for run in runs if run.finished]
    reached = [float(run.reached) for run in done if run.reached is not None]
    return ResultRow(
        name,
        tuple(run.seed for run in done),
        **spreads(runs, _SCORES),
        target=runs[0].target,
        to_target=Spread.of(reached),
        reached=len(reached),
        difference=found.mean,
        rounds_difference=found.rounds,
        failed=tuple(run for run in runs if run.state == "failed"),
        unfinished=tuple(run for run in runs if not run.ended),
        higher_is_better=runs[0].higher_is_better,
    )
