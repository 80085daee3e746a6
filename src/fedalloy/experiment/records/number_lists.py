"""Lists of numbers in a line of JSON as they stand there, for readers that want columns and not millions of objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from fedalloy.experiment.records.client_tables import available
from fedalloy.experiment.records.stream import decode

_NUMBERS, _NULL = b"0123456789+-.e,", b"nul"
_EXACT, _LARGEST = float(1 << 53), 1e300
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class NumberList:
    """A list whose every entry is a number or null; ``text`` is what stands between its brackets."""

    text: bytes
    values: Floats = field(compare=False)
    whole: bool
    """Whether all its numbers are whole."""

    @staticmethod
    def read(text: bytes) -> NumberList | None:
        """The list, or None if it has to be looked at entry by entry: it is empty, or holds anything but numbers.

        >>> NumberList.read(b"0.5,null,1e-07").values
        array([5.e-01,    nan, 1.e-07])
        >>> NumberList.read(b'0.5,"x"'), NumberList.read(b"1.2.3"), NumberList.read(b"1,,2")
        (None, None, None)
        """
        if text.translate(None, _NUMBERS + _NULL) or not text:
            return None
        whole = not text.translate(None, b"0123456789-," + _NULL)
        values = _parsed(text)
        if values is None or not _within(values, _EXACT if whole else _LARGEST):
            return None
        return NumberList(text, values, whole)

    @property
    def cells(self) -> list[bytes]:
        """Every number as it was written, nothing for null."""
        return self.text.replace(b"null", b"").split(b",")

    @property
    def missing(self) -> bool:
        """Whether it holds nothing but null."""
        return not self.text.translate(None, _NULL + b",")


def read_lists(line: bytes) -> tuple[dict[str, Any], dict[str, NumberList]] | None:
    """The short entries of a line and its lists, if it is written as runs write it: short entries first, then lists of
    equal length; None for any other line.

    >>> told, lists = read_lists(b'{"round":3,"model":"global","ids":[4,9],"loss":[0.5,null]}\\n')
    >>> told, lists["ids"].values.tolist(), lists["loss"].cells
    ({'round': 3, 'model': 'global'}, [4.0, 9.0], [b'0.5', b''])
    """
    begin = line.find(b',"ids":[')
    told = decode(line[:begin] + b"}\n") if begin > 0 else None
    lists: dict[str, NumberList] = {}
    while told is not None and line[begin : begin + 2] == b',"':
        written, middle, _ = line[begin + 2 : begin + 200].partition(b'":[')
        first, name = begin + 2 + len(written) + len(middle), written.decode("ascii", "replace")
        last = line.find(b"]", first)
        plain = middle and last > 0 and name.isprintable() and "\\" not in name and name not in (*told, *lists)
        read = _read_ids if name == "ids" else NumberList.read
        found = read(line[first:last]) if plain else None
        if found is None:
            return None
        lists[name], begin = found, last + 1
    equal = len({len(one.values) for one in lists.values()}) == 1
    return (told, lists) if told is not None and line[begin:] == b"}\n" and equal else None


@lru_cache(maxsize=1)
def _read_ids(text: bytes) -> NumberList | None:
    """Mostly the same clients are scored again and again."""
    return NumberList.read(text)


def _parsed(text: bytes) -> Floats | None:
    """All numbers, NaN for null; None where something is no number. pyarrow is four times as fast, where it is."""
    try:
        values = _parsed_fast(text) if available() else np.array(list(map(float, _entries(text))))
    except ValueError:  # pyarrow's errors are among them
        return None
    whole = len(values) == text.count(b",") + 1
    return values if whole and np.isnan(values).sum() == text.count(b"null") else None


def _entries(text: bytes) -> list[bytes]:
    return text.replace(b"null", b"nan").split(b",")


def _parsed_fast(text: bytes) -> Floats:
    import pyarrow as pa
    from pyarrow import csv

    read = csv.ReadOptions(use_threads=False, block_size=len(text) + 2, column_names=["value"])
    convert = csv.ConvertOptions(column_types={"value": pa.float64()}, null_values=["null"])
    table = csv.read_csv(pa.BufferReader(text.replace(b",", b"\n")), read, convert_options=convert)
    values: Floats = table["value"].combine_chunks().to_numpy(zero_copy_only=False)
    return values


def _within(values: Floats, most: float) -> bool:
    known = values[~np.isnan(values)]
    return not len(known) or bool(np.abs(known).max() < most)
