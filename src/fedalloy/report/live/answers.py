"""Everything the page shows of a run, as JSON; its size does not grow with the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedalloy.experiment.records import toml
from fedalloy.experiment.records.index import Index, Table
from fedalloy.experiment.records.reading import read_json
from fedalloy.report.data.clients import strip as strip_of
from fedalloy.report.data.plain import digits, many, pick
from fedalloy.report.live.gathered import Weights, participation
from fedalloy.report.live.runs import RunStore
from fedalloy.results.clients import Client, clients_at, drawable, worst_first
from fedalloy.results.served import client_values, noted_direction, tails
from fedalloy.results.sums import RunningSums

MOST_POINTS = 600
"""Points of a line: more than a screen can show."""
MOST_NEW = 120
"""Points that one event adds to a line."""
PATIENCE = 0.7
"""Seconds that a page waits for an outdated index; the rest arrives as events."""


def details(store: RunStore, run: str, index: Index) -> dict[str, Any]:
    """Everything about a run."""
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
        "points": points(table, MOST_POINTS) | tail_lines(index, table, MOST_POINTS),
        **gathered(store, run, index),
        **log(index),
    }


def gathered(store: RunStore, run: str, index: Index) -> dict[str, Any]:
    """The pictures over clients."""
    weights, running_sums = cast(Weights, index.gathered["weights"]), cast(RunningSums, index.gathered["tally"])
    spent, population = index.seconds(), manifest_of(store.folder(run)).get("clients") or 0
    return {
        "weights": weights.to_json(),
        "participation": participation(running_sums, population),
        "clients": clients(store, run, index),
        "seconds": {"total": sum(spent), "mean": sum(spent) / len(spent) if spent else None},
    }


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of the clients: their number, names and examples."""
    return read_json(folder / "manifest.json") or {}


def log(index: Index) -> dict[str, Any]:
    """Drops and warnings."""
    return {"events": index.events(), "reasons": index.reasons()}


def clients(store: RunStore, run: str, index: Index, round: int | None = None) -> dict[str, Any] | None:
    """The clients of a run at an evaluation, by its target metric."""
    folder, metric = store.folder(run), store.summary(run)["metric"]
    higher = noted_direction(read_json(folder / "environment.json") or {}, metric)
    row = index.clients(round)
    values = client_values(row, metric, higher, _skipped(index, row, metric))
    return strip(row, clients_at(row, values, {"names": manifest_of(folder).get("names")}), higher)


def strip(row: Mapping[str, Any], scored: Sequence[Client], higher: bool | None) -> dict[str, Any] | None:
    """A strip of the clients at an evaluation (:mod:`fedalloy.report.data`), worst served first; None without any.

    ``overflowed`` of them cannot be drawn; they are the worst served.
    """
    ranked = worst_first(scored, higher)
    drawn = drawable(ranked)
    if not drawn:
        return None
    made = strip_of(drawn, higher)
    shown = {name: made[name] for name in ("labels", "values", "named", "median")}
    about = {"round": row["round"], "model": row.get("model", "global")}
    return {**about, **shown, "of": len(drawn), "overflowed": len(ranked) - len(drawn)}


def points(table: Table, most: int) -> dict[str, Any]:
    """Lines by name: ``{name: {"x": rounds, "y": values}}``, without gaps, each thinned separately."""
    lines: dict[str, Any] = {}
    for place, name in enumerate(table.names):
        column = table.values[:, place]
        known = np.flatnonzero(np.isfinite(column))
        chosen = known[pick(len(known), most)].tolist()
        if chosen:
            lines[name] = {"x": [table.rounds[row] for row in chosen], "y": many(column[row] for row in chosen)}
    return lines


def tail_lines(index: Index, table: Table, most: int) -> dict[str, Any]:
    """The lines of the worst and best served in rounds whose records lack them, computed from the clients' values."""
    lacking = _lacking(table)
    environment = read_json(index.folder / "environment.json") or {} if lacking else {}
    directions = {metric: noted_direction(environment, metric) for metric in lacking}
    rounds = sorted({round for metric, some in lacking.items() if directions[metric] is not None for round in some})
    found: dict[str, dict[int, float]] = {}
    for round in (rounds[place] for place in pick(len(rounds), most)):
        row = index.clients(round)
        for metric, higher in directions.items() if row.get("round") == round else ():
            for name, value in tails(row, metric, higher, _skipped(index, row, metric)).items():
                found.setdefault(f"evaluation/{metric}/{name}", {})[round] = value
    known = points(table, most) if found else {}
    return {name: _merged(known.get(name), values) for name, values in found.items()}


def _skipped(index: Index, row: Mapping[str, Any], metric: str) -> dict[str, float]:
    """How many clients had no value at an evaluation, from its summary."""
    name = f"evaluation/{metric}/skipped"
    found = index.numbers(int(row["round"])) if None in row.get(metric, ()) else {}
    return {"skipped": found[name]} if name in found else {}


def _lacking(table: Table) -> dict[str, list[int]]:
    """Metrics and the rounds in which they were evaluated and have a mean, but no tails."""
    columns = {name: table.values[:, place] for place, name in enumerate(table.names)}
    found: dict[str, list[int]] = {}
    for name in columns:
        if name.startswith("evaluation/") and name.endswith("/mean"):
            base = name.removesuffix("/mean")
            missing = np.isfinite(columns[name])
            if f"{base}/best_served" in columns:
                missing &= ~np.isfinite(columns[f"{base}/best_served"])
            rounds = [table.rounds[row] for row in np.flatnonzero(missing)]
            found |= {base.removeprefix("evaluation/"): rounds} if rounds else {}
    return found


def _merged(line: Mapping[str, Any] | None, values: Mapping[int, float]) -> dict[str, Any]:
    both = dict(zip(line["x"], line["y"], strict=True)) if line else {}
    both |= {round: digits(value) for round, value in values.items() if math.isfinite(value)}
    return {"x": sorted(both), "y": [both[round] for round in sorted(both)]}


def additions(index: Index, rows: int) -> dict[str, Any] | None:
    """What was added after the first ``rows`` rows; None if the run now has fewer and must be read again."""
    if len(index) < rows:
        return None
    table = index.table(after=rows)
    lines = points(table, MOST_NEW) | tail_lines(index, table, MOST_NEW)
    return {"rows": rows + len(table.rounds), "points": lines}


def catch_up(index: Index) -> bool:
    """Update an index for a limited time; returns whether it is up to date."""
    until = time.monotonic() + PATIENCE
    while index.update():
        if time.monotonic() > until:
            return False
    return True
