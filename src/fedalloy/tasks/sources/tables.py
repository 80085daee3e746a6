"""Tables of several clients: joined into one, or read one by one with numbers that mean the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.types import Examples
from fedalloy.tasks.datasets.base import Dataset, left_out
from fedalloy.tasks.preparing import FrameColumns
from fedalloy.tasks.sources import files
from fedalloy.tasks.sources.columns import Column, Columns, Roles, Table, category_values, encode, roles_of, whole_rows


def join_tables(tables: Sequence[Table], columns: Columns, paths: Sequence[Path]) -> Table:
    """One table below the other; all must have the columns of the first, in any order."""
    first = roles_of(tables[0], columns, str(paths[0]))
    for table, path in zip(tables, paths, strict=True):
        check_columns(roles_of(table, columns, str(path)), first, path)
    _check_labels([table[first.label] for table in tables], paths)
    names = [name for name in (first.label, *first.features, first.client, first.split) if name is not None]
    return {name: _below([table[name] for table in tables]) for name in names}


def _check_labels(columns: Sequence[Column], paths: Sequence[Path]) -> None:
    """Refuse labels that are whole numbers in one table and decimals in another: all would be quantities."""
    kinds: dict[str, Path] = {}
    for column, path in zip(columns, paths, strict=True):
        if not column.gaps.all() and column.kind == "number":
            kinds.setdefault("decimals" if column.values.dtype.kind == "f" and not column.whole else "whole", path)
    if len(kinds) > 1:
        raise DataError(
            f"labels are whole numbers in {kinds['whole']} and decimals in {kinds['decimals']}; write them alike: "
            "whole numbers for classes, decimals for quantities"
        )


def check_columns(found: Roles, first: Roles, path: Path) -> None:
    """Refuse a table with other features than the first one."""
    lacks, has = {*first.features} - {*found.features}, {*found.features} - {*first.features}
    if lacks or has:
        raise DataError(
            f"{path} has other feature columns than the first client (missing: {', '.join(sorted(lacks)) or 'none'}; "
            f"additional: {', '.join(sorted(has)) or 'none'}); all clients must have the same features"
        )


def without_empty(data: Dataset) -> Dataset:
    """The same clients without those that have no row, which a notice names."""
    assert data.owner is not None
    assert data.names is not None
    sizes = torch.bincount(data.owner, minlength=len(data.names))
    empty = [name for name, size in zip(data.names, sizes.tolist(), strict=True) if not size]
    if not empty:
        return data
    number = (sizes > 0).cumsum(0) - 1
    names = tuple(name for name, size in zip(data.names, sizes.tolist(), strict=True) if size)
    return replace(data, owner=number[data.owner], names=names, notices=(*data.notices, *left_out(empty)))


def rows_of(table: Table) -> int:
    """The number of rows of a table."""
    return len(next(iter(table.values())).values)


@dataclass(frozen=True)
class TableReader:
    """Reads one client's tables in the form of the first file."""

    given: Columns
    columns: Columns
    first: Roles
    classes: int | None
    encoding: Mapping[str, tuple[str, ...]] | None
    notices: tuple[str, ...]
    form: FrameColumns

    @staticmethod
    def of(path: Path, columns: Columns) -> TableReader:
        """The form of the first table; categories must be declared, because other files are not looked at."""
        return TableReader.of_table(files.read_table(path), columns, str(path), files.SCHEMA)

    @staticmethod
    def of_table(table: Table, columns: Columns, where: str, schema: str) -> TableReader:
        """The form of the first table, which is called ``where``; ``schema`` is where categories are declared."""
        for name in ("client", "split"):
            if getattr(columns, name) is not None:
                raise SpecError(f"columns.{name} needs all rows at once, and these are read on demand: set lazy=False")
        chosen = roles_of(table, columns, where)
        values = category_values(table, columns, chosen, where)
        known = {*columns.declared, *([chosen.label] if columns.classes else [])}
        guessed = [name for name in values if name not in known]
        if guessed:
            how = "classes = [...]" if guessed[0] == chosen.label else "categorical = { ... = [...] }"
            raise DataError(
                f"{where}: clients are read on demand, so the values of column '{guessed[0]}' must be declared in "
                f"{schema}: {how}"
            )
        fixed = replace(columns, label=chosen.label, features=chosen.features)
        given = len(columns.classes) if columns.classes else None
        label = table[chosen.label]
        quantity = 0 if label.values.dtype.kind == "f" and not label.whole else None
        told = (chosen.in_words(table), *_gaps_told(columns))
        coded = {name: values[name] for name in chosen.features if name in values}
        form = FrameColumns(chosen.features, coded, columns.encoding)
        return TableReader(columns, fixed, chosen, given or quantity, values or None, told, form)

    def read(self, parts: Mapping[str, Path]) -> dict[str, Examples]:
        """One client's examples by part."""
        return {part: self._read(path) for part, path in parts.items()}

    def _read(self, path: Path) -> Examples:
        return self.encoded(files.read_table(path), path)

    def encoded(self, table: Table, path: Path) -> Examples:
        """A table as examples; ``path`` names it in errors."""
        empty = Examples(torch.zeros(0, 0), torch.zeros(0, dtype=torch.int64))
        if not rows_of(table):
            return empty
        chosen = roles_of(table, self.given, str(path))
        check_columns(chosen, self.first, path)
        if self.columns.missing == "drop" and not whole_rows(table, chosen).any():
            return empty  # as in memory, where such a client is left out
        made = encode(table, self.columns, str(path))
        return Examples(made.x, made.y)


def _gaps_told(columns: Columns) -> tuple[str, ...]:
    """What happens to missing values, of which no file but the first has been looked at."""
    if columns.missing == "refuse":
        return ()
    how = "dropped" if columns.missing == "drop" else f"filled with each client's {columns.missing}"
    return (f"missing values are not counted, because files are read on demand; {how} where they are found",)


def _below(columns: Sequence[Column]) -> Column:
    categories = None
    if any(column.categories is not None for column in columns):
        categories = tuple(dict.fromkeys(value for column in columns for value in column.categories or ()))
    kinds = {column.values.dtype.kind for column in columns}
    if "O" in kinds and len(kinds) > 1:  # a column of text that is empty, or only numbers, in some files
        columns = [Column(column.values.astype(object)) for column in columns]
    values = np.concatenate([column.values for column in columns])
    whole = values.dtype.kind == "f" and all(column.whole or column.values.dtype.kind in "iu" for column in columns)
    return Column(values, categories, whole)
