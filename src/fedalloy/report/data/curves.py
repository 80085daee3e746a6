"""Metrics over rounds, bytes or simulated time: the mean over seeds with the range they span."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fedalloy.report.data.plain import Chart, many, mean, pick
from fedalloy.results.stories import Story, by_name
from fedalloy.results.sums import number

AXES = {"round": "round", "megabytes": "megabytes sent and received so far", "seconds": "simulated seconds so far"}
STATISTICS = {
    "mean": "mean over clients",
    "worst_served": "worst-served 10 % of clients",
    "best_served": "best-served 10 % of clients",
    "shared": "global model, mean over clients",
    "pooled": "global model on the global test set",
}


def curves(stories: Sequence[Story]) -> Chart | None:
    """Everything that was evaluated: ``series[i].values[metric][statistic]`` has ``y``, ``low`` and ``high``."""
    metrics = list(dict.fromkeys(name for story in stories for name in story.metrics))
    if not metrics:
        return None
    series = [_series(name, runs, metrics) for name, runs in by_name(stories).items()]
    series = [one for one in series if one["round"]]
    known = {key for one in series for of in one["values"].values() for key in of}
    outcome = stories[0].outcome
    return {
        "id": "curves",
        "kind": "curves",
        "title": "How well clients are served",
        "metrics": metrics,
        "statistics": {key: said for key, said in STATISTICS.items() if key in known},
        "axes": {key: label for key, label in AXES.items() if any(any(one[key]) for one in series)},
        "series": series,
        "target": {"metric": outcome.metric, "value": outcome.target} if outcome.target is not None else None,
        "note": "",
    }


def losses(stories: Sequence[Story]) -> Chart | None:
    """The mean training loss of the clients that took part."""
    series = []
    for name, runs in by_name(stories).items():
        rounds = sorted({round for run in runs for round in run.history.rounds})
        rounds = [rounds[place] for place in pick(len(rounds))]
        of_run = [dict(zip(run.history.rounds, run.history.train_loss, strict=True)) for run in runs]
        values = [[one.get(round, math.nan) for one in of_run] for round in rounds]
        if any(math.isfinite(value) for some in values for value in some):
            series.append({"name": name, "x": rounds, **_band(values)})
    if not series:
        return None
    note = "Mean over the clients that took part in a round."
    return {"id": "train-loss", "kind": "line", "title": "Training loss", "x": "round", "y": "training loss",
            "series": series, "note": note}  # fmt: skip


def _series(name: str, runs: Sequence[Story], metrics: Sequence[str]) -> dict[str, Any]:
    """One algorithm, at every round that some seed evaluated (or a selection of them)."""
    of_run = [{one["round"]: one for one in run.history.evaluations} for run in runs]
    rounds = sorted({round for one in of_run for round in one})
    rounds = [rounds[place] for place in pick(len(rounds))]
    at = [[one[round] for one in of_run if round in one] for round in rounds]
    values = {metric: _statistics(metric, at) for metric in metrics}
    return {
        "name": name,
        "seeds": len(runs),
        "round": rounds,
        "megabytes": many(mean([one["bytes"] / 1e6 for one in some]) for some in at),
        "seconds": many(mean([one["seconds"] for one in some]) for some in at),
        "values": {metric: found for metric, found in values.items() if found},
    }


def _statistics(metric: str, at: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    found = {}
    for key in STATISTICS:
        read = _reader(metric, key)
        values = [[read(one) for one in some] for some in at]
        if any(math.isfinite(value) for some in values for value in some):
            found[key] = _band(values)
    return found


def _reader(metric: str, key: str) -> Callable[[dict[str, Any]], float]:
    """Where a statistic stands in a row."""
    if key == "pooled":
        return lambda one: number(one.get("global", {}).get(metric))
    if key == "shared":
        return lambda one: number(one.get("evaluation_global", {}).get(metric, {}).get("mean"))
    return lambda one: number(one["evaluation"].get(metric, {}).get(key))


def _band(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Mean over seeds and, where there are several, the range."""
    band: dict[str, Any] = {"y": many(mean(some) for some in values)}
    if any(len(some) > 1 for some in values):
        known = [[value for value in some if math.isfinite(value)] for some in values]
        band["low"] = many(min(some, default=math.nan) for some in known)
        band["high"] = many(max(some, default=math.nan) for some in known)
    return band
