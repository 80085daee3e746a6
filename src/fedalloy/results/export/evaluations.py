"""The evaluations of a run as columns: its lines as they are written, its files as they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedalloy.experiment.records import shape
from fedalloy.experiment.records.client_tables import ClientTables, is_line
from fedalloy.experiment.records.number_lists import NumberList, read_lists
from fedalloy.experiment.records.reading import RunRecord, read_lines
from fedalloy.experiment.records.shapes import MOST_CLIENTS
from fedalloy.results.export.columns import RowBlock, SameColumn, StoredColumn, TableColumn, ValueColumn, WrittenColumn


@dataclass(frozen=True)
class ScoredClients:
    """One evaluation of one model."""

    about: Mapping[str, Any]
    count: int
    ids: TableColumn
    scores: Mapping[str, TableColumn]


def client_blocks(record: RunRecord) -> Iterator[RowBlock]:
    """A block per evaluation and model with a row per client, as :func:`.tables.client_rows` has them."""
    names, known = (record.manifest or {}).get("names"), dict[str, TableColumn]()
    for one in evaluations(record.path):
        if known.get("client") is not one.ids and known.get("client") != one.ids:  # mostly the same clients as before
            known = {"client": one.ids, "client_name": _named(one, names)}
        about = {"round": one.about["round"], "model": one.about.get("model", "global"), "mix": one.about.get("mix")}
        shared = {name: SameColumn(value, one.count) for name, value in about.items()}
        yield RowBlock(one.count, {**shared, **known, **one.scores})


def evaluations(run: Path) -> Iterator[ScoredClients]:
    """All evaluations in their order; what is damaged is named as all readers name it."""
    path = run / "clients.jsonl"
    for number, line, row in read_lines(path):
        lists = read_lists(line)
        found = _written(*lists, f"{path}, row {number}") if lists else None
        yield found or _looked_at(run, row(), f"{path}, row {number}")


def _written(about: dict[str, Any], lists: dict[str, NumberList], where: str) -> ScoredClients | None:
    ids = _ids(lists.pop("ids"))
    if ids is None:
        return None
    shape.checked_clients({**about, "ids": []}, where)
    scores: dict[str, TableColumn] = {name: WrittenColumn(one) for name, one in lists.items()}
    return ScoredClients(about, len(ids.values), ids, scores)


@lru_cache(maxsize=1)
def _ids(numbers: NumberList) -> ValueColumn | None:
    known = numbers.whole and bool(((numbers.values >= 0) & (numbers.values < MOST_CLIENTS)).all())
    return ValueColumn(numbers.values.astype("int64").tolist()) if known else None


def _looked_at(run: Path, row: dict[str, Any], where: str) -> ScoredClients:
    """A line that names a file, or one that is not written as runs write them."""
    tables = ClientTables(run)
    if is_line(row):
        ids, columns = tables.columns(row)
        about = shape.checked_clients({**tables.about(row), "ids": []}, where)
        return ScoredClients(
            about, len(ids), StoredColumn(ids), {name: StoredColumn(one) for name, one in columns.items()}
        )
    shape.checked_clients(row, where)
    lists = {name: ValueColumn(one) for name, one in row.items() if name != "ids" and isinstance(one, list)}
    return ScoredClients(row, len(row["ids"]), ValueColumn(row["ids"]), lists)


def _named(one: ScoredClients, names: Sequence[str] | None) -> TableColumn:
    if not names:
        return SameColumn(None, one.count)
    ids = one.ids.values if isinstance(one.ids, ValueColumn) else one.ids.values.to_pylist()  # type: ignore[attr-defined]
    return ValueColumn([names[client] if client < len(names) else None for client in ids])
