"""The tables of results and fairness, and the style of every algorithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedalloy.report.data.plain import digits
from fedalloy.report.palette import assign
from fedalloy.results.evidence import Evidence
from fedalloy.results.looks import Look
from fedalloy.results.runs import by_name
from fedalloy.results.statistics import Spread
from fedalloy.results.summaries import RunSummary
from fedalloy.results.table import spreads, summarise

OPEN = "not finished"
"""The outcome of evidence while runs are open."""
FAIRNESS = ("mean", "worst_served", "best_served", "parity_gap", "variance", "gini")


def styles(summaries: Sequence[RunSummary]) -> dict[str, Any]:
    """Colour and dashes by algorithm."""
    return {name: style.to_json() for name, style in assign(summary.name for summary in summaries).items()}


def result_rows(summaries: Sequence[RunSummary], looks: Sequence[Look] = ()) -> list[dict[str, Any]]:
    """One row per algorithm: mean and deviation over seeds, and the evidence of its difference to the first."""
    rows = summarise([summary.outcome for summary in summaries], looks)
    return [
        {
            "name": row.name,
            "mean": _spread(row.mean),
            "worst_served": _spread(row.worst_served),
            "gini": _spread(row.gini),
            "rounds_to_target": _spread(row.to_target),
            "reached": row.reached,
            "difference": _evidence(row.difference),
            "rounds_difference": _evidence(row.rounds_difference, 1),
            "seeds": len(row.seeds),
            "failed": len(row.failed),
            "unfinished": len(row.unfinished),
            "coverage": row.coverage,
        }
        for row in rows
    ]


def fairness_rows(summaries: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """The inequality between clients at the end, by algorithm: mean and deviation over finished seeds."""
    groups = by_name([summary.outcome for summary in summaries])
    return [
        {"name": name, **{key: _spread(one) for key, one in spreads(runs, FAIRNESS).items()}}
        for name, runs in groups.items()
    ]


def _spread(spread: Spread | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    # All digits: rounding a rounded number can give another result than rounding the number itself.
    apart = digits(spread.deviation if spread.deviation is not None else math.nan, 17)
    lost = {} if math.isfinite(spread.mean) else {"overflowed": True}
    return {"mean": digits(spread.mean, 17), "deviation": apart, "count": spread.count, **lost}


def _evidence(found: Evidence | None, places: int = 3) -> dict[str, Any] | None:
    if found is None:
        return None
    numbers = {"mean": found.estimate, "low": found.low, "high": found.high, "p": found.p}
    shown = {name: digits(value, 17) for name, value in numbers.items()}
    about = {name: getattr(found, name) for name in ("outcome", "exact", "family", "alpha")}
    return {**shown, **about, "verdict": verdict_text(found), "text": found.text(places), "count": found.pairs}


def verdict_text(found: Evidence) -> str:
    """The verdict in a word; while runs are open there is none."""
    return "no verdict yet" if found.outcome == OPEN else found.word
