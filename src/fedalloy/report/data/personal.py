"""Runs whose clients have their own models: mixtures of the federated and the local model, and calibration."""

from __future__ import annotations

from collections.abc import Sequence

from fedalloy.core.errors import FedalloyError
from fedalloy.report.data.plain import Chart, digits, many
from fedalloy.results.runs import by_name
from fedalloy.results.served import client_values
from fedalloy.results.statistics import moments
from fedalloy.results.summaries import RunSummary


def mixture(summaries: Sequence[RunSummary]) -> Chart | None:
    """The metric against lambda, the share of the local model: the mean over clients, a band of one deviation."""
    series = []
    for name, runs in by_name(summaries).items():
        rows = [row for row in runs[0].last if row.get("model") == "mixed" and runs[0].metric in row]
        if rows:
            scores = [client_values(row, runs[0].metric, runs[0].higher_is_better) for row in rows]
            means, spreads = zip(*map(moments, scores), strict=True)
            low = many(mean - apart for mean, apart in zip(means, spreads, strict=True))
            high = many(mean + apart for mean, apart in zip(means, spreads, strict=True))
            at = many(row["mix"] for row in rows)
            series.append({"name": name, "x": at, "y": many(means), "low": low, "high": high, "dots": True})
    if not series:
        return None
    metric = summaries[0].metric
    return {"id": "lambda", "kind": "line", "title": f"{metric} between the federated and the local model",
            "x": "λ (0: federated model, 1: local model)", "y": metric, "series": series,
            "note": "Mean over clients ± one standard deviation over clients; first seed of each. Do not choose λ "
                    "from this chart: its scores are of the test parts."}  # fmt: skip


def reliability(summary: RunSummary) -> Chart | None:
    """Accuracy against confidence over all clients' test examples; loads the task and the models."""
    if summary.outcome.folder is None:
        return None
    from fedalloy.experiment.recipe import reopen
    from fedalloy.report.plots.reliability import BINS, bins, confidences

    said, right, inside = bins(*confidences(reopen(summary.outcome.folder)))
    gap = ((said - right).abs().nan_to_num(0.0) * inside).sum() / inside.sum()
    return {
        "id": f"reliability-{summary.name}",
        "kind": "calibration",
        "title": f"{summary.name}, seed {summary.seed}",
        "name": summary.name,
        "bins": BINS,
        "confidence": many(said.tolist()),
        "accuracy": many(right.tolist()),
        "count": [int(count) for count in inside.tolist()],
        "ece": digits(float(gap), 3),
        "note": f"All clients' test examples by the model that each client uses; expected calibration error "
        f"{float(gap):.3f}. On the diagonal, accuracy equals confidence.",
    }


def reliabilities(summaries: Sequence[RunSummary]) -> tuple[list[Chart], list[str]]:
    """The diagrams of the first seed of every personal algorithm, and why some are missing."""
    charts, missing = [], []
    for name, runs in by_name(summaries).items():
        if not runs[0].personal:
            continue
        try:
            chart = reliability(runs[0])
        except (FedalloyError, OSError, ValueError, RuntimeError) as error:
            missing.append(f"{name}: {error}")
            continue
        charts += [chart] if chart else []
    return charts, missing
