"""Exported tables as columns: blocks of rows in which millions of numbers are never one object each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, repeat
from typing import Any, Protocol

import numpy as np

from fedalloy.experiment.records.client_tables import available
from fedalloy.experiment.records.number_lists import NumberList

Kinds = frozenset[type]
"""The types of a column's values, those of missing ones left out."""
_PLAIN_LEAST, _PLAIN_MOST = 1e-4, 1e9
"""Between these Python and Arrow write the same digits for every number that is not whole."""


_LEAST_JOINED = 50_000
"""Rows of a block from which on Arrow puts lines together: four times as fast, but it takes a moment to load."""


class TableColumn(Protocol):
    """A value for every row of a block."""

    @property
    def kinds(self) -> Kinds:
        """The types of its values."""

    def cells(self) -> Iterable[bytes]:
        """Every value as it stands in a CSV file; nothing for missing values and those that are not finite."""

    def texts(self, pa: Any) -> Any:
        """The same as a column of pyarrow, or a single value for all rows."""

    def array(self, pa: Any, kind: Any) -> Any:
        """All values as a column of pyarrow."""


@dataclass(frozen=True)
class SameColumn:
    """One value in all rows."""

    value: Any
    count: int

    @property
    def kinds(self) -> Kinds:
        return frozenset() if self.value is None else frozenset((type(self.value),))

    def cells(self) -> Iterable[bytes]:
        return repeat(cell(self.value), self.count)

    def texts(self, pa: Any) -> Any:
        return pa.scalar(cell(self.value), pa.large_binary())

    def array(self, pa: Any, kind: Any) -> Any:
        value = str(self.value) if kind == pa.string() and self.value is not None else self.value
        return pa.repeat(pa.scalar(value, kind), self.count)


@dataclass(frozen=True)
class ValueColumn:
    """Any values."""

    values: Sequence[Any]

    @property
    def kinds(self) -> Kinds:
        return frozenset(map(type, self.values)) - {type(None)}

    def cells(self) -> Iterable[bytes]:
        return self._cells

    @cached_property
    def _cells(self) -> list[bytes]:
        return list(map(cell, self.values))

    def texts(self, pa: Any) -> Any:
        return pa.array(self._cells, pa.large_binary())

    def array(self, pa: Any, kind: Any) -> Any:
        values = self.values
        if kind == pa.string():
            values = [None if value is None else str(value) for value in values]
        return pa.array(values, kind)


@dataclass(frozen=True)
class WrittenColumn:
    """Numbers as they stand in a line of JSON."""

    numbers: NumberList

    @property
    def kinds(self) -> Kinds:
        return frozenset() if self.numbers.missing else frozenset((int if self.numbers.whole else float,))

    def cells(self) -> Iterable[bytes]:
        return self.numbers.cells

    def texts(self, pa: Any) -> Any:
        text = np.frombuffer(self.numbers.text.replace(b"null", b""), np.uint8)
        commas = text == ord(",")
        ends = np.append(np.flatnonzero(commas), len(text))
        count = len(ends)
        starts = np.concatenate([[0], ends - np.arange(count)]).astype(np.int64)
        buffers = [None, pa.py_buffer(starts), pa.py_buffer(text[~commas])]
        return pa.Array.from_buffers(pa.large_binary(), count, buffers)

    def array(self, pa: Any, kind: Any) -> Any:
        if kind == pa.string():
            return pa.array([text.decode() or None for text in self.cells()], kind)
        return pa.array(self.numbers.values, pa.float64(), from_pandas=True).cast(kind)


@dataclass(frozen=True)
class StoredColumn:
    """Numbers in a column of pyarrow."""

    values: Any

    @property
    def kinds(self) -> Kinds:
        import pyarrow as pa

        if self.values.null_count == len(self.values):
            return frozenset()
        return frozenset((int if self.values.type == pa.int64() else float,))

    def cells(self) -> Iterable[bytes]:
        import pyarrow as pa

        found: list[bytes] = self.texts(pa).to_pylist()
        return found

    def texts(self, pa: Any) -> Any:
        texts = self.values.cast(pa.string()) if self.values.type == pa.int64() else _shortest(self.values)
        return texts.fill_null("").cast(pa.large_binary())

    def array(self, pa: Any, kind: Any) -> Any:
        return pa.array(list(self.cells()), pa.binary()).cast(kind) if kind == pa.string() else self.values.cast(kind)


@dataclass(frozen=True)
class RowBlock:
    """Some rows of a table; every column has ``count`` values."""

    count: int
    columns: Mapping[str, TableColumn]


def blocks_of(rows: Iterable[Mapping[str, Any]], most: int) -> Iterator[RowBlock]:
    """Rows as blocks of at most ``most``."""
    left = iter(rows)
    while some := list(islice(left, most)):
        names = dict.fromkeys(name for row in some for name in row)
        yield RowBlock(len(some), {name: ValueColumn([row.get(name) for row in some]) for name in names})


def lines_of(block: RowBlock, names: Sequence[str]) -> bytes:
    """The lines of a CSV file (RFC 4180) for a block."""
    columns = [block.columns.get(name, SameColumn(None, block.count)) for name in names]
    leading = next((place for place, one in enumerate(columns) if not isinstance(one, SameColumn)), len(columns) - 1)
    before = b"".join(cell(one.value) + b"," for one in columns[:leading] if isinstance(one, SameColumn))
    numbers = any(isinstance(one, StoredColumn | WrittenColumn) for one in columns)
    if numbers and block.count >= _LEAST_JOINED and available():
        return _joined(before, columns[leading:])
    rest = map(b",".join, zip(*(one.cells() for one in columns[leading:]), strict=True))
    return before + (b"\r\n" + before).join(rest) + b"\r\n"


def _joined(before: bytes, columns: Sequence[TableColumn]) -> bytes:
    """The lines as one piece of Arrow's memory: a line after another, each with the end of the one before."""
    import pyarrow as pa
    import pyarrow.compute as calls

    compute: Any = calls
    first, comma, nothing = (pa.scalar(one, pa.large_binary()) for one in (b"\r\n" + before, b",", b""))
    begun = compute.binary_join_element_wise(first, columns[0].texts(pa), nothing)
    lines = compute.binary_join_element_wise(begun, *(one.texts(pa) for one in columns[1:]), comma)
    size = int(np.frombuffer(lines.buffers()[1], np.int64)[len(lines)])
    return bytes(memoryview(lines.buffers()[2])[2:size]) + b"\r\n"


def cell(value: Any) -> bytes:
    """A value in a CSV file.

    >>> cell(0.1), cell(None), cell(float("inf")), cell('a "b", c')
    (b'0.1', b'', b'', b'"a ""b"", c"')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return b""
    text = repr(value) if isinstance(value, float) else str(value)
    quoted = any(sign in text for sign in ',"\r\n')
    return ('"' + text.replace('"', '""') + '"' if quoted else text).encode("utf-8")


def _shortest(values: Any) -> Any:
    """Real numbers as Python writes them. Arrow finds the same digits in a tenth of the time, but writes whole numbers
    and very large and small ones in another way."""
    import pyarrow as pa
    import pyarrow.compute as calls

    compute: Any = calls
    size = compute.abs(values)
    plain = compute.and_(compute.greater_equal(size, _PLAIN_LEAST), compute.less(size, _PLAIN_MOST))
    plain = compute.and_(plain, compute.not_equal(compute.floor(values), values)).fill_null(True)
    texts, odd = compute.cast(values, pa.string()), compute.invert(plain)
    known: Callable[[float], str] = _remembered()
    other = [known(one) for one in compute.filter(values, odd).to_pylist()]
    return compute.replace_with_mask(texts, odd, pa.array(other, pa.string())) if other else texts


def _remembered() -> Callable[[float], str]:
    """``repr``, which looks a number up that it had before: scores such as an accuracy have few values."""
    seen: dict[float, str] = {}

    def text(value: float) -> str:
        found = seen.get(value)
        if found is None or not value:  # zero equals minus zero
            found = seen[value] = repr(value)
        return found

    return text
