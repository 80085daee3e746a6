"""Metrics over rounds, bytes or simulated time: the mean over seeds with the range they span."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedalloy.report.data.plain import Chart, many, pick
from fedalloy.results.lines import STATISTICS, by_round, statistic_of
from fedalloy.results.runs import by_name
from fedalloy.results.statistics import Band, mean
from fedalloy.results.summaries import RunSummary

AXES = {"round": "round", "megabytes": "megabytes sent and received so far", "seconds": "simulated seconds so far"}


def curves(summaries: Sequence[RunSummary]) -> Chart | None:
    """All evaluated metrics: ``series[i].values[metric][statistic]`` has ``y``, ``low`` and ``high``."""
    metrics = list(dict.fromkeys(name for summary in summaries for name in summary.metrics))
    if not metrics:
        return None
    series = [_series(name, runs, metrics) for name, runs in by_name(summaries).items()]
    series = [one for one in series if one["round"]]
    known = {key for one in series for of in one["values"].values() for key in of}
    outcome = summaries[0].outcome
    return {
        "id": "curves",
        "kind": "curves",
        "title": "Scores of the clients",
        "metrics": metrics,
        "statistics": {key: said for key, said in STATISTICS.items() if key in known},
        "axes": {key: label for key, label in AXES.items() if any(any(one[key]) for one in series)},
        "series": series,
        "target": {"metric": outcome.metric, "value": outcome.target} if outcome.target is not None else None,
        "note": "",
    }


def losses(summaries: Sequence[RunSummary]) -> Chart | None:
    """The mean training loss of the clients that took part."""
    series = []
    for name, runs in by_name(summaries).items():
        found = by_round(dict(zip(run.history.rounds, run.history.train_loss, strict=True)) for run in runs)
        rounds = [list(found)[place] for place in pick(len(found))]
        values = [found[round] for round in rounds]
        if any(math.isfinite(value) for some in values for value in some):
            series.append({"name": name, "x": rounds, **_band(values)})
    if not series:
        return None
    note = "Mean over the clients that took part in a round."
    return {"id": "train-loss", "kind": "line", "title": "Training loss", "x": "round", "y": "training loss",
            "series": series, "note": note}  # fmt: skip


def _series(name: str, runs: Sequence[RunSummary], metrics: Sequence[str]) -> dict[str, Any]:
    """One algorithm, at every round that some seed evaluated (or at evenly spaced ones)."""
    found = by_round({one["round"]: one for one in run.history.evaluations} for run in runs)
    rounds = [list(found)[place] for place in pick(len(found))]
    at = [found[round] for round in rounds]
    values = {metric: _statistics(metric, at, runs[0].direction(metric)) for metric in metrics}
    return {
        "name": name,
        "seeds": len(runs),
        "round": rounds,
        "megabytes": many(mean([one["bytes"] / 1e6 for one in some]) for some in at),
        "seconds": many(mean([one["seconds"] for one in some]) for some in at),
        "values": {metric: found for metric, found in values.items() if found},
    }


def _statistics(metric: str, at: Sequence[Sequence[dict[str, Any]]], higher: bool | None) -> dict[str, Any]:
    found = {}
    for key in STATISTICS:
        values = [[statistic_of(one, metric, key, higher) for one in some] for some in at]
        if any(math.isfinite(value) for some in values for value in some):
            found[key] = _band(values)
    return found


def _band(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Mean over seeds and, where there are several, the range."""
    bands = [Band.of(some) for some in values]
    made: dict[str, Any] = {"y": many(one.mean for one in bands)}
    if any(len(some) > 1 for some in values):
        made |= {"low": many(one.low for one in bands), "high": many(one.high for one in bands)}
    return made
