"""Everything the page shows of a run, as JSON: bounded in size, however long the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from fedalloy.records import toml
from fedalloy.records.index import Index, Table
from fedalloy.records.reading import read_json
from fedalloy.report.data.clients import MOST_DOTS, NAMED
from fedalloy.report.data.curves import LOWER_IS_BETTER
from fedalloy.report.data.plain import digits, many, pick
from fedalloy.serve.gathered import Participation, Weights
from fedalloy.serve.runs import RunStore

MOST_POINTS = 600
"""Points of a line: more than a screen has room for."""
MOST_NEW = 120
"""Points that one event adds to a line."""
PATIENCE = 0.7
"""Seconds that a page waits for an index which is not up to date; the rest arrives as events."""


def details(store: RunStore, run: str, index: Index) -> dict[str, Any]:
    """All there is to show about a run."""
    folder, complete = store.folder(run), catch_up(index)
    recipe, table = store.recipe(run), index.table()
    settings = recipe.get("run", {})
    return {
        **store.summary(run),
        "complete": complete,
        "target": settings.get("target"),
        "description": str(recipe.get("description", "")),
        "recipe": toml.dumps(recipe),
        "environment": read_json(folder / "environment.json") or {},
        "rows": len(table.rounds),
        "points": points(table, MOST_POINTS),
        **gathered(store, run, index),
        **log(index),
    }


def gathered(store: RunStore, run: str, index: Index) -> dict[str, Any]:
    """What is shown as pictures over clients."""
    weights, took_part = cast(Weights, index.gathered["weights"]), cast(Participation, index.gathered["participation"])
    spent = index.seconds()
    return {
        "weights": weights.to_json(),
        "participation": took_part.to_json(),
        "clients": clients(index.clients(), names_of(store.folder(run)), store.summary(run)["metric"]),
        "seconds": {"total": sum(spent), "mean": sum(spent) / len(spent) if spent else None},
    }


def names_of(folder: Path) -> list[str] | None:
    """What the clients are called, where they have names."""
    return (read_json(folder / "manifest.json") or {}).get("names")


def log(index: Index) -> dict[str, Any]:
    """Drops and warnings."""
    return {"events": index.events(), "reasons": index.reasons()}


def clients(row: Mapping[str, Any], names: list[str] | None, metric: str) -> dict[str, Any] | None:
    """A strip of the clients at an evaluation (:mod:`fedalloy.report.data`), worst served first; None without any."""
    known = [
        (value, client)
        for client, value in zip(row.get("ids", ()), row.get(metric, ()), strict=False)
        if value is not None
    ]
    if not known:
        return None
    known.sort(key=lambda pair: (-pair[0] if metric in LOWER_IS_BETTER else pair[0], pair[1]))
    chosen = sorted({*range(min(NAMED, len(known))), *pick(len(known), MOST_DOTS)})
    shown = [known[place] for place in chosen]
    labels = [names[client] if names and client < len(names) else f"client {client}" for _, client in shown]
    return {
        "round": row["round"], "model": row.get("model", "global"), "of": len(known), "labels": labels,
        "values": many(value for value, _ in shown), "named": min(NAMED, len(known)),
        "median": digits(median(value for value, _ in known)),
    }  # fmt: skip


def points(table: Table, most: int) -> dict[str, Any]:
    """Lines by name: ``{name: {"x": rounds, "y": values}}``, without gaps, each thinned out by itself."""
    lines: dict[str, Any] = {}
    for place, name in enumerate(table.names):
        column = table.values[:, place]
        known = np.flatnonzero(np.isfinite(column))
        chosen = known[pick(len(known), most)].tolist()
        if chosen:
            lines[name] = {"x": [table.rounds[row] for row in chosen], "y": many(column[row] for row in chosen)}
    return lines


def additions(index: Index, rows: int) -> dict[str, Any] | None:
    """What came after the first ``rows`` rows; None when the run has fewer by now, and must be read anew."""
    if len(index) < rows:
        return None
    table = index.table(after=rows)
    return {"rows": rows + len(table.rounds), "points": points(table, MOST_NEW)}


def catch_up(index: Index) -> bool:
    """Bring an index up to date, but let nobody wait for long; whether it is."""
    until = time.monotonic() + PATIENCE
    while index.update():
        if time.monotonic() > until:
            return False
    return True
