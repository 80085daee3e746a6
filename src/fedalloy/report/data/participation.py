"""Participation: contributions, absences and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from fedalloy.report.data.plain import Chart, digits, many, pick
from fedalloy.results.clients import client_name
from fedalloy.results.runs import by_name
from fedalloy.results.statistics import mean
from fedalloy.results.summaries import RunSummary

MOST_DOTS = 400


def participation(summaries: Sequence[RunSummary]) -> list[Chart]:
    """How often each client contributed, and how many contributed in each round."""
    firsts = [runs[0] for runs in by_name(summaries).values() if runs[0].history.rounds]
    if not firsts:
        return []
    groups = _merged([_often(summary) for summary in firsts], "values")
    often = {"id": "participation-clients", "kind": "strip", "title": "How often each client contributed",
             "x": "rounds in which a client contributed", "groups": groups,
             "note": "A dot is a client; first seed of each algorithm."}  # fmt: skip
    return [often, _over_rounds(summaries)]


def participation_rows(summaries: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """One row per run."""
    return [_row(summary) for summary in summaries]


def _often(summary: RunSummary) -> dict[str, Any]:
    counts = sorted((count, client) for client, count in enumerate(summary.contributed))
    kept = [counts[place] for place in pick(len(counts), MOST_DOTS)]
    return {
        "name": summary.name,
        "labels": [client_name(summary.manifest, client) for _, client in kept],
        "values": [count for count, _ in kept],
        "median": median(summary.contributed) if counts else 0,
        "named": 0,
        "clients": len(counts),
    }


def _over_rounds(summaries: Sequence[RunSummary]) -> Chart:
    series = []
    for name, runs in by_name(summaries).items():
        rounds = max((run.history.rounds for run in runs), key=len)
        if not rounds:  # every run failed in its first round
            continue
        bins = pick(len(rounds), 120)
        # Means over bins instead of samples, so that no bad round is skipped.
        edges = list(zip(bins, [*bins[1:], len(rounds)], strict=True))
        values = [mean([count for run in runs for count in run.history.columns["counted"][a:b]]) for a, b in edges]
        series.append({"name": name, "x": [rounds[a] for a, _ in edges], "y": many(values)})
    return {"id": "participation-rounds", "kind": "line", "title": "Contributions used in a round",
            "x": "round", "y": "contributions", "zero": True, "series": _merged(series, "y"),
            "note": "Mean over seeds."}  # fmt: skip


def _merged(groups: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """One group instead of several equal ones: sampling and failing links depend only on the seed."""
    if len(groups) > 1 and all(group[key] == groups[0][key] for group in groups):
        return [groups[0] | {"name": "all algorithms"}]
    return groups


def _row(summary: RunSummary) -> dict[str, Any]:
    sums, counts = summary.running_sums, summary.contributed
    return {
        "name": summary.name,
        "seed": summary.seed,
        "contributions": sums.contributions,
        "per_client": digits(mean([float(count) for count in counts]), 3),
        "fewest": min(counts, default=0),
        "most": max(counts, default=0),
        "never": sum(count == 0 for count in counts),
        "absent": sums.absent,
        "late": sums.late,
        "refused": sums.dropped.total(),
        "empty_rounds": sums.barren,
        "reasons": [{"why": why, "count": count} for why, count in sums.dropped.most_common(5)],
        "state": summary.outcome.state,
        "reason": summary.outcome.reason,
        "round": summary.outcome.round,
    }
