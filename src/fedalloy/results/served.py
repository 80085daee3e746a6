"""The worst-served and best-served clients of a run, from its records.

An evaluation holds ``worst_served`` and ``best_served`` of every metric that has a direction. Folders from before that
hold only ``worst`` and ``best``, which are the lowest and the highest values: the two tails are then
computed from the clients' own values. Torch is loaded for such folders only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from fedalloy.experiment.records.reading import RunRecord, last_clients
from fedalloy.tasks.metrics.direction import higher_is_better

Row = dict[str, Any]
_NEVER = 1 << 60
_NOT_METRICS = ("ids", "round", "split", "model", "mix")


def direction(record: RunRecord, metric: str) -> bool | None:
    """Whether more of a metric is better: as recorded by the run, or as the metric is registered here."""
    return noted_direction(record.environment, metric)


def noted_direction(environment: Mapping[str, Any], metric: str) -> bool | None:
    """The same from what ``environment.json`` holds."""
    noted = environment.get("higher_is_better") if isinstance(environment, Mapping) else None
    if not isinstance(noted, Mapping) or metric not in noted:
        return higher_is_better(metric)
    said = noted[metric]
    return said if isinstance(said, bool) else None


def completed(record: RunRecord, rows: Iterable[Row]) -> Iterator[Row]:
    """Rows of ``rounds.jsonl`` in order, each with both tails; ``clients.jsonl`` is read if some lack them."""
    directions: dict[str, bool | None] = {}
    clients = groupby(record.clients(), key=lambda row: int(row["round"]))
    round, at = 0, list[Row]()
    for row in rows:
        for name in (row.get("evaluation") or {}).keys() - directions.keys():
            directions[name] = direction(record, name)
        if lacks_tails(row, directions):
            while round < row["round"]:
                round, at = next(((found, list(some)) for found, some in clients), (_NEVER, []))
            row = with_tails(row, at if round == row["round"] else [], directions)
        yield row


def lacks_tails(row: Mapping[str, Any], directions: Mapping[str, bool | None]) -> bool:
    """Whether an evaluation has a metric with a direction and without its tails."""
    summaries = row.get("evaluation") or {}
    return any("worst_served" not in of and directions.get(name) is not None for name, of in summaries.items())


def with_tails(row: Row, clients: Sequence[Row], directions: Mapping[str, bool | None]) -> Row:
    """A row of ``rounds.jsonl`` with tails from the rows of ``clients.jsonl`` of the same round."""
    plain = [one for one in clients if one.get("mix") is None]
    shared = [one for one in plain if one.get("model") != "personal"]
    made = dict(row)
    for name, scored in (("evaluation", plain), ("evaluation_global", shared)):
        if row.get(name) and scored:
            made[name] = {
                metric: of if "worst_served" in of else {**of, **tails(scored[-1], metric, directions.get(metric), of)}
                for metric, of in row[name].items()
            }
    return made


def last_tails(record: RunRecord, round: int, metric: str, summary: Mapping[str, Any]) -> dict[str, float]:
    """The tails of a run's last evaluation, where its summary has none."""
    higher = direction(record, metric)
    if higher is None or "worst_served" in summary:
        return {}
    row = scored(last_clients(record.path))
    return tails(row, metric, higher, summary) if row.get("round") == round else {}


def scored(rows: Sequence[Row]) -> Row:
    """The reported row of an evaluation: of the models that clients use, not of mixtures; empty if there is none."""
    return next((row for row in reversed(rows) if row.get("mix") is None), {})


def tails(
    row: Mapping[str, Any], metric: str, higher: bool | None, summary: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """``worst_served`` and ``best_served`` of a row of ``clients.jsonl``; nothing without a direction or values."""
    if higher is None or not isinstance(row.get(metric), list):
        return {}
    import torch

    from fedalloy.tasks.metrics.summary import served

    return served(torch.tensor(client_values(row, metric, higher, summary), dtype=torch.float64), higher)


def client_values(
    row: Mapping[str, Any], metric: str, higher: bool | None, summary: Mapping[str, Any] | None = None
) -> list[float]:
    """The clients' values in a row of ``clients.jsonl``: NaN without one, infinity for a loss that overflowed.

    Records write both as null. A client with a value of another metric was scored, so its loss overflowed; where no
    other metric was evaluated, the summary shows whether some client had no value.

    >>> client_values({"ids": [0, 1, 2], "loss": [0.5, None, None], "accuracy": [1.0, 0.2, None]}, "loss", False)
    [0.5, inf, nan]
    """
    column = row.get(metric)
    values: Sequence[float | None] = column if isinstance(column, list) else ()
    others = [
        column for name, column in row.items()
        if name not in (*_NOT_METRICS, metric) and isinstance(column, list) and len(column) == len(values)
    ]  # fmt: skip
    everyone = not others and (summary or {}).get("skipped") == 0

    def value(place: int, found: float | None) -> float:
        if isinstance(found, int | float):
            return float(found)
        scored = everyone or any(column[place] is not None for column in others)
        return math.inf if higher is False and scored else math.nan

    return [value(place, found) for place, found in enumerate(values)]


def scores(summary: Mapping[str, Any], higher: bool | None) -> dict[str, float]:
    """A summary as numbers: NaN where there is none, infinity for the mean and the tail of losses that overflowed."""
    found = {name: math.nan if value is None else float(value) for name, value in summary.items()}
    # If no client had a value, the other tail would be missing too.
    if higher is False and not math.isnan(found.get("best_served", math.nan)):
        found |= {name: math.inf for name in ("mean", "worst_served") if math.isnan(found.get(name, 0.0))}
    return found
