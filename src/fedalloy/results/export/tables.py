"""The rows of exported tables, a few at a time, so that memory does not grow with the runs.

| table | one row per |
|---|---|
| ``results`` | run: how it ended and its clients' scores at the last evaluation |
| ``rounds`` | round: every number of :func:`fedalloy.experiment.records.scalars.scalars` |
| ``clients`` | evaluation, model and client: its score by every metric |
| ``weights`` | round and client whose contribution was used (and layer, where weights are finer) |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError, nearest
from fedalloy.experiment.records.reading import RunRecord, name_of, read_run, seed_of
from fedalloy.experiment.records.scalars import scalars
from fedalloy.results.export.columns import RowBlock, SameColumn, blocks_of
from fedalloy.results.export.evaluations import client_blocks
from fedalloy.results.outcome import outcome_of
from fedalloy.results.served import completed

Row = dict[str, Any]
AT_ONCE = 10_000
"""Rows of a block of the tables that are made of rows."""
_TOLD = ("state", "round", "rounds", "metric", "higher_is_better", "target", "reached")


def rows(table: str, runs: Sequence[Path]) -> Iterator[Row]:
    """The rows of a table."""
    for record, before in _records(table, runs):
        for row in TABLES[table](record):
            yield {**before, **row}


def blocks(table: str, runs: Sequence[Path]) -> Iterator[RowBlock]:
    """The same as columns, for files; clients and their scores are never made rows."""
    for record, before in _records(table, runs):
        found = client_blocks(record) if table == "clients" else blocks_of(TABLES[table](record), AT_ONCE)
        for block in found:
            shared = {name: SameColumn(value, block.count) for name, value in before.items()}
            yield RowBlock(block.count, {**shared, **block.columns})


def _records(table: str, runs: Sequence[Path]) -> Iterator[tuple[RunRecord, Row]]:
    if table not in TABLES:
        raise SpecError(f"unknown table '{table}': {nearest(table, TABLES)}")
    for run in runs:
        record = read_run(run)
        yield record, {"run": run.as_posix(), "name": name_of(record.recipe), "seed": seed_of(record.recipe)}


def _results(record: RunRecord) -> Iterator[Row]:
    found = outcome_of(record, record.rounds())
    told = {name: getattr(found, name) for name in _TOLD}
    yield {**told, **found.scores}


def _rounds(record: RunRecord) -> Iterator[Row]:
    for row in completed(record, record.rounds()):
        yield {"round": row["round"], **scalars(row)}


def _clients(record: RunRecord) -> Iterator[Row]:
    return client_rows(record.clients(), (record.manifest or {}).get("names"))


def client_rows(evaluations: Iterable[Mapping[str, Any]], names: Sequence[str] | None) -> Iterator[Row]:
    """One row per evaluation, model and client."""
    for row in evaluations:
        ids = row["ids"]
        scores = {name: one for name, one in row.items() if name != "ids" and _is_column(one, ids)}
        at = {"round": row["round"], "model": row.get("model", "global"), "mix": row.get("mix")}
        for place, client in enumerate(ids):
            called = {"client": client, "client_name": names[client] if names and client < len(names) else None}
            yield {**at, **called, **{name: column[place] for name, column in scores.items()}}


def _weights(record: RunRecord) -> Iterator[Row]:
    return weight_rows(record.rounds())


def weight_rows(rounds: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """One row per round and client whose contribution was used."""
    for row in rounds:
        weights = row.get("weights")
        layers: Mapping[str, Any] = weights if isinstance(weights, Mapping) else {"": weights}
        for layer, values in layers.items():
            if _is_column(values, row["ids"]):
                for client, weight in zip(row["ids"], values, strict=True):
                    yield {"round": row["round"], "layer": layer, "client": client, "weight": weight}


def _is_column(values: Any, ids: Sequence[int]) -> bool:
    return isinstance(values, list) and len(values) == len(ids)


TABLES: dict[str, Callable[[RunRecord], Iterator[Row]]] = {
    "results": _results,
    "rounds": _rounds,
    "clients": _clients,
    "weights": _weights,
}
