"""Frames of pandas and Polars as columns; neither library is imported unless the user has one of its frames."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import numpy as np

from fedalloy.core.errors import DataError
from fedalloy.tasks.sources.columns import Column, Table, is_gap, text_of

_PANDAS_INDEX = "__index_level_"


def library_of(value: Any) -> str:
    """The top package of a value's class or its bases that fedalloy knows: pandas, polars, datasets, flwr_datasets."""
    known = ("pandas", "polars", "datasets", "flwr_datasets", "pyarrow")
    packages = [kind.__module__.split(".")[0] for kind in type(value).__mro__]
    return next((package for package in packages if package in known), "")


def is_frame(value: Any) -> bool:
    """Whether a value is a table of pandas, Polars or pyarrow."""
    names = {kind.__name__ for kind in type(value).__mro__}
    return library_of(value) in ("pandas", "polars", "pyarrow") and bool(names & {"DataFrame", "LazyFrame", "Table"})


def table_of(frame: Any) -> Table:
    """The columns of a frame by name."""
    library = library_of(frame)
    if library == "polars":
        frame = frame.collect() if hasattr(frame, "collect") else frame
        return {name: _from_polars(frame[name]) for name in frame.columns}
    if library == "pyarrow":
        return arrow_table(frame, "the frame")
    check_names(frame.columns, "the frame")
    return {str(name): _from_pandas(frame[name]) for name in frame.columns}


def arrow_table(table: Any, where: str) -> Table:
    """The columns of a pyarrow table by name, without the index that pandas writes."""
    check_names(table.column_names, where)
    names = [name for name in table.column_names if not name.startswith(_PANDAS_INDEX)]
    return {name: from_arrow(table.column(name)) for name in names}


def check_names(names: Iterable[Any], where: str) -> None:
    """Refuse two columns of one name, of which one would be lost."""
    told = [str(name) for name in names]
    twice = next((name for place, name in enumerate(told) if name in told[:place]), None)
    if twice is not None:
        raise DataError(f"{where} has two columns of the same name, '{twice}' (1 and '1' are the same); rename one")


def from_arrow(column: Any) -> Column:
    """A column of pyarrow; a dictionary column declares its categories."""
    kind = str(column.type)
    if kind.startswith("dictionary"):
        pieces = [piece.dictionary.to_pylist() for piece in column.chunks]
        categories = tuple(dict.fromkeys(text_of(value) for piece in pieces for value in piece))
        return Column(_objects(column.to_pylist()), categories)
    if kind in ("string", "large_string", "binary", "null"):
        return Column(_objects(column.to_pylist()))
    if kind.startswith("decimal"):
        return Column(_floats(column.to_pylist()))
    if kind == "bool" and column.null_count:
        return Column(_floats(column.to_pylist()))
    return Column(column.to_numpy(), whole="int" in kind and bool(column.null_count))


def _from_pandas(series: Any) -> Column:
    if hasattr(series, "cat"):
        values = series.astype(object).where(series.notna(), None)
        return Column(_objects(values.tolist()), tuple(map(text_of, series.cat.categories)))
    if series.dtype.kind in "biuf":
        if not series.isna().any():
            return Column(series.to_numpy())
        return Column(series.to_numpy(np.float64, na_value=np.nan), whole=series.dtype.kind in "iu")
    if series.dtype.kind in "mM":
        return Column(series.to_numpy())
    return column_of([None if is_gap(value) else value for value in series.astype(object).tolist()])


def _from_polars(series: Any) -> Column:
    kind = str(series.dtype)
    if kind.startswith(("Categorical", "Enum")):
        values = series.to_list()
        declared = list(series.dtype.categories) if kind.startswith("Enum") else sorted(set(values) - {None})
        return Column(_objects(values), tuple(map(str, declared)))
    if kind.startswith("Decimal") or (kind == "Boolean" and series.null_count()):
        return Column(_floats(series.to_list()))
    if series.dtype.is_numeric() or kind == "Boolean" or series.dtype.is_temporal():
        return Column(series.to_numpy(), whole=series.dtype.is_integer() and bool(series.null_count()))
    return column_of(series.to_list())


def column_of(values: list[Any]) -> Column:
    """A column of plain values: numbers if all are, otherwise as it is."""
    if all(value is None or isinstance(value, bool | int | float | np.number | Decimal) for value in values):
        whole = all(isinstance(value, int | np.integer) for value in values if value is not None)
        gaps = any(value is None for value in values)
        return Column(np.array(values, dtype=np.int64) if whole and not gaps else _floats(values), whole=whole and gaps)
    return Column(_objects(values))


def _floats(values: list[Any]) -> Any:
    return np.array([np.nan if value is None else float(value) for value in values], dtype=np.float64)


def _objects(values: list[Any]) -> Any:
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made
