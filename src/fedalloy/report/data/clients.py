"""The clients: the distribution of their scores (each a dot, the worst served by name), and of their examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from fedalloy.report.data.plain import Chart, digits, many, pick, spans
from fedalloy.results.clients import Client, client_name, drawable, worst_first
from fedalloy.results.runs import by_name
from fedalloy.results.summaries import RunSummary
from fedalloy.tasks.metrics.direction import rank

MOST_DOTS = 400
NAMED = 3


def distribution(summaries: Sequence[RunSummary]) -> Chart | None:
    """One strip per algorithm: every client of its first seed, or as many as a strip can show."""
    shown = [one for one in _first_seeds(summaries) if _drawn(one)]
    if not shown:
        return None
    groups = [{"name": summary.name, **strip(_drawn(summary), summary.higher_is_better)} for summary in shown]
    note = "A dot is a client at the last evaluation, the line the median"
    note += "; the worst served are named." if any(group["named"] for group in groups) else "."
    lost = sum(math.isinf(client.score) for summary in shown for client in summary.clients)
    note += f" {lost} whose value is not finite cannot be drawn; they are the worst served." if lost else ""
    seeds = {summary.seed for summary in shown}
    which = f" Seed {min(seeds)}." if len(seeds) == 1 else " First seed of each."
    return {"id": "distribution", "kind": "strip", "title": f"{shown[0].metric} of every client",
            "x": shown[0].metric, "groups": groups, "note": note + which}  # fmt: skip


def worst_clients(summaries: Sequence[RunSummary], count: int = 5) -> list[dict[str, Any]]:
    """The worst served clients of every algorithm, over all seeds: their names and how often they took part. Empty
    for a metric without a direction."""
    found = []
    for name, runs in by_name(summaries).items():
        ranked = sorted(
            (
                (rank(client.score, run.higher_is_better), run, client)
                for run in runs
                if run.higher_is_better is not None
                for client in worst_first(run.clients, run.higher_is_better)
            ),
            key=lambda one: (one[0], one[1].seed, one[2].id),
        )
        found += [{"name": name, "seed": run.seed, **_describe(run, client)} for _, run, client in ranked[:count]]
    return found


def _first_seeds(summaries: Sequence[RunSummary]) -> list[RunSummary]:
    return [runs[0] for runs in by_name(summaries).values()]


def _drawn(summary: RunSummary) -> list[Client]:
    return drawable(worst_first(summary.clients, summary.higher_is_better))


def strip(drawn: Sequence[Client], higher: bool | None) -> dict[str, Any]:
    """Clients with a finite value as dots, worst served first: at most as many as a strip can show."""
    most = 0 if higher is None else NAMED
    kept = [drawn[place] for place in sorted({*range(min(most, len(drawn))), *pick(len(drawn), MOST_DOTS)})]
    return {
        "labels": [client.name for client in kept],
        "values": many(client.score for client in kept),
        "examples": [client.examples for client in kept],
        "median": digits(median(client.score for client in drawn)),
        "named": min(most, len(kept)),
        "clients": len(drawn),
    }


def _describe(summary: RunSummary, client: Client) -> dict[str, Any]:
    common = client.classes.index(max(client.classes)) if client.classes else None
    share = max(client.classes) / max(1, sum(client.classes)) if client.classes else None
    return {
        "client": client.name,
        "score": digits(client.score),
        "finite": math.isfinite(client.score),
        "examples": client.examples,
        "common_class": common,
        "common_share": digits(share, 3),
        "rounds": summary.running_sums.times(client.id),
    }


MOST_CLIENTS, MOST_CLASSES = 200, 100


def heterogeneity(summaries: Sequence[RunSummary]) -> Chart | None:
    """Counts by client and class of the first run that has one class per example: skewed labels show within a row,
    skewed amounts between rows."""
    summary = next((summary for summary in summaries if any(summary.manifest.get("class_counts") or ())), None)
    if summary is None:
        return None
    counts = np.array(summary.manifest["class_counts"], dtype=np.int64)
    tall, wide = (-(-size // most) for size, most in zip(counts.shape, (MOST_CLIENTS, MOST_CLASSES), strict=True))
    joined = np.add.reduceat(
        np.add.reduceat(counts, range(0, len(counts), tall), 0), range(0, counts.shape[1], wide), 1
    )
    clients = range(len(counts))
    names = [client_name(summary.manifest, client) for client in clients] if tall == 1 else None
    unused = summary.manifest.get("unused", 0)
    rest = f" {unused} examples unused." if unused else ""
    joining = "" if tall == wide == 1 else f" A cell adds up {tall} clients and {wide} classes."
    return {
        "id": "heterogeneity",
        "kind": "heat",
        "title": "Examples by client and class",
        "value": "examples",
        "root": True,
        "columns": {"title": "class", "labels": spans(counts.shape[1], wide)},
        "rows": {"title": "client", "labels": names or [f"clients {span}" for span in spans(len(counts), tall)]},
        "panels": [{"title": "", "values": joined.tolist()}],
        "note": f"Seed {summary.seed}; {int(counts.sum())} examples.{rest} Shades grow with the square root of "
        f"the count, so that small counts stay visible.{joining}",
    }
