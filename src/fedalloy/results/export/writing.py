"""Tables into files. Columns are added while blocks are read; if a later block has more of them or other types, all
blocks are looked at and the file is begun again, so that every row has all columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records import atomic
from fedalloy.results.export.columns import Kinds, RowBlock, SameColumn, cell, lines_of

Blocks = Callable[[], Iterator[RowBlock]]
"""Every call returns an iterator over all blocks."""
AT_ONCE = 50_000
"""The least rows of a Parquet row group, which is built in memory."""


@dataclass
class KnownColumns:
    """The columns found so far, with the types of their values if these matter."""

    types: bool
    kinds: dict[str, Kinds] = field(default_factory=dict)

    def learn(self, block: RowBlock) -> bool:
        """Take in the columns of a block; whether something was new."""
        found = {name: column.kinds if self.types else frozenset() for name, column in block.columns.items()}
        new = {name for name, kinds in found.items() if name not in self.kinds or not kinds <= self.kinds[name]}
        self.kinds |= {name: self.kinds.get(name, frozenset()) | found[name] for name in found if name in new}
        return bool(new)


def write_csv(path: Path, blocks: Blocks) -> int:
    """RFC 4180 with a header; missing values and those that are not finite are empty. Returns the number of rows."""
    return _write(path, blocks, _CsvFile, KnownColumns(types=False))


def write_parquet(path: Path, blocks: Blocks) -> int:
    """One row group after another; needs pyarrow."""
    try:
        import pyarrow as pa  # noqa: F401 (asked for before anything is read)
    except ImportError:
        raise SpecError("Parquet needs pyarrow: pip install pyarrow (CSV needs nothing)") from None
    return _write(path, blocks, _ParquetFile, KnownColumns(types=True))


WRITERS = {"csv": write_csv, "parquet": write_parquet}


def _write(path: Path, blocks: Blocks, form: type[_CsvFile] | type[_ParquetFile], known: KnownColumns) -> int:
    count: int | None = None

    def fill(place: Path) -> None:
        nonlocal count
        while (count := _filled(place, blocks, form, known)) is None:
            for block in blocks():
                known.learn(block)

    atomic.write_atomically(path, fill)
    return count or 0


def _filled(place: Path, blocks: Blocks, form: type[_CsvFile] | type[_ParquetFile], known: KnownColumns) -> int | None:
    """Write all blocks; None if one of them has what the columns that the file began with cannot hold."""
    count, file = 0, None
    try:
        for block in blocks():
            if known.learn(block) and file is not None:
                return None
            file = file or form(place, known.kinds)
            file.add(block)
            count += block.count
        file = file or form(place, known.kinds)
    finally:
        if file is not None:
            file.close()
    return count


class _CsvFile:
    def __init__(self, place: Path, kinds: Mapping[str, Kinds]) -> None:
        self.file, self.names = place.open("wb"), list(kinds)
        self.file.write(b",".join(map(cell, self.names)) + b"\r\n")

    def add(self, block: RowBlock) -> None:
        self.file.write(lines_of(block, self.names))

    def close(self) -> None:
        self.file.close()


class _ParquetFile:
    def __init__(self, place: Path, kinds: Mapping[str, Kinds]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.pa: Any = pa
        self.schema = pa.schema([(name, _type(pa, some)) for name, some in kinds.items()])
        self.writer, self.waiting, self.rows = pq.ParquetWriter(place, self.schema), list[Any](), 0

    def add(self, block: RowBlock) -> None:
        columns = [block.columns.get(name, SameColumn(None, block.count)) for name in self.schema.names]
        arrays = [column.array(self.pa, one.type) for column, one in zip(columns, self.schema, strict=True)]
        self.waiting.append(self.pa.Table.from_arrays(arrays, schema=self.schema))
        self.rows += block.count
        if self.rows >= AT_ONCE:
            self._flush()

    def close(self) -> None:
        self._flush()
        self.writer.close()

    def _flush(self) -> None:
        if self.rows:
            self.writer.write_table(self.pa.concat_tables(self.waiting))
        self.waiting, self.rows = [], 0


def _type(pa: Any, kinds: Kinds) -> Any:
    if kinds and kinds <= {int}:
        return pa.int64()
    return pa.float64() if not kinds or kinds <= {int, float} else pa.string()
