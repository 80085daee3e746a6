"""Tables into files. Columns are found in a first pass over the rows, so that every row has all of them."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records import atomic
from fedalloy.results.export.tables import Row

Rows = Callable[[], Iterator[Row]]
"""Every call returns an iterator over all rows."""
AT_ONCE = 50_000
"""Rows of a Parquet row group, which is built in memory."""


def write_csv(path: Path, rows: Rows) -> int:
    """RFC 4180 with a header; missing values and those that are not finite are empty. Returns the number of rows."""
    columns, count = _columns(rows()), 0

    def fill(place: Path) -> None:
        nonlocal count
        with place.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            for row in rows():
                writer.writerow([_cell(row.get(name)) for name in columns])
                count += 1

    atomic.write_atomically(path, fill)
    return count


def write_parquet(path: Path, rows: Rows) -> int:
    """One row group after another; needs pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise SpecError("Parquet needs pyarrow: pip install pyarrow (CSV needs nothing)") from None
    schema, count = pa.schema([(name, _type(pa, kinds)) for name, kinds in _kinds(rows()).items()]), 0

    def fill(place: Path) -> None:
        nonlocal count
        with pq.ParquetWriter(place, schema) as writer:
            for some in _batches(rows(), AT_ONCE):
                bind = [
                    {name: _cast(row.get(name), schema.field(name).type, pa) for name in schema.names} for row in some
                ]
                writer.write_table(pa.Table.from_pylist(bind, schema=schema))
                count += len(some)

    atomic.write_atomically(path, fill)
    return count


WRITERS = {"csv": write_csv, "parquet": write_parquet}


def _columns(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _kinds(rows: Iterable[Row]) -> dict[str, set[type]]:
    kinds: dict[str, set[type]] = {}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, set()).update(() if value is None else (type(value),))
    return kinds


def _type(pa: Any, kinds: set[type]) -> Any:
    if kinds and kinds <= {int}:
        return pa.int64()
    return pa.float64() if not kinds or kinds <= {int, float} else pa.string()


def _cast(value: Any, kind: Any, pa: Any) -> Any:
    return str(value) if value is not None and kind == pa.string() else value


def _cell(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _batches(rows: Iterator[Row], most: int) -> Iterator[list[Row]]:
    while some := list(islice(rows, most)):
        yield some
