"""Evaluations of many clients: a Parquet file each in ``evaluations/``, which a line of ``clients.jsonl`` names.

The line has everything but the lists: ``round``, ``split``, ``model``, ``mix`` where there is one, how many ``clients``
and the name of the file (``parquet``). The file has one row per client with the same columns, ``id`` and a column per
metric, so that other programs can read the folder as one table. The same row gives the same bytes (with the same
version of pyarrow). A file is complete before its line is written; what no line names is deleted on resuming.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.records import atomic
from fedalloy.experiment.records.shapes import number
from fedalloy.experiment.records.stream import decode

FOLDER = "evaluations"
DEFAULT_LEAST = 100_000
"""Clients from which on an evaluation becomes a file, unless the run says otherwise."""
INSTALL = "pip install pyarrow, or the extra 'parquet' of fedalloy"
_FILE, _COUNT = "parquet", "clients"
_MARK, _HEAD = b'"parquet":"', 300
_ABOUT = ("round", "split", "model", "mix")
_NAME = re.compile(r"round-(\d+)-[a-z]+(-[0-9.e-]+)?\.parquet")
_MOST_NUMBERS = 100_000_000
"""A larger table was not written by a run: a damaged file must not take all memory."""
Row = Mapping[str, Any]


@cache
def available() -> bool:
    """Whether pyarrow is installed."""
    try:
        return find_spec("pyarrow") is not None
    except ValueError:  # it was hidden from imports
        return False


def least_clients(wanted: int | None, scored: int) -> tuple[int | None, str | None]:
    """From how many clients on a new run writes files, and what to tell its user; ``wanted`` None is the default, which
    needs nothing installed, 0 is never."""
    if wanted == 0:
        return None, None
    if available():
        return wanted or DEFAULT_LEAST, None
    if wanted is not None and scored >= wanted:
        raise SpecError(
            f"evaluate.parquet_from = {wanted}: writing Parquet needs pyarrow ({INSTALL}); or set it to 0, and scores "
            "are lines of JSON"
        )
    if wanted is not None or scored < DEFAULT_LEAST:
        return wanted, None
    return None, f"the scores of {scored} clients are written as lines of JSON: Parquet needs pyarrow ({INSTALL})"


def check_able(run: Path, least: int | None, scored: int) -> None:
    """Refuse to continue a run with such files where none can be written."""
    if least is not None and scored >= least and not available():
        raise CheckpointError(f"{run} keeps the scores of its clients as Parquet, which needs pyarrow: {INSTALL}")


def is_line(row: Row) -> bool:
    """Whether a row of ``clients.jsonl`` stands for a file.

    >>> is_line({"round": 1, "model": "global", "ids": [0], "accuracy": [1.0]})
    False
    """
    return isinstance(row.get(_FILE), str)


def file_rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The lines of ``clients.jsonl`` that stand for files, as rows; long lines are not parsed."""
    rows = (decode(line) for line in lines if _MARK in line[:_HEAD])
    return (row for row in rows if row is not None and is_line(row) and isinstance(row.get("round"), int))


@dataclass(frozen=True)
class ClientTables:
    """The files of a run; ``least`` is the number of clients from which on an evaluation becomes one, None never."""

    run: Path
    least: int | None = None

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self.run / FOLDER

    def line(self, row: Row) -> Row:
        """What ``clients.jsonl`` holds for a row; nothing is written.

        >>> made = {"round": 3, "split": "test", "model": "global", "ids": [4, 7], "loss": [0.5, None]}
        >>> ClientTables(Path("run"), least=2).line(made)["parquet"]
        'round-000003-global.parquet'
        """
        if self.least is None or not _is_table(row) or len(row["ids"]) < self.least:
            return row
        name = _name(row)
        about = {key: row[key] for key in row if key in _ABOUT}
        return {**about, _COUNT: len(row["ids"]), _FILE: name} if _NAME.fullmatch(name) else row

    def write(self, row: Row) -> Row:
        """Write the file of a row if it is to have one; returns what ``clients.jsonl`` holds."""
        line = self.line(row)
        if line is not row:
            if not self.folder.is_dir():
                atomic.make_folder(self.folder)
            atomic.write_atomically(self.folder / line[_FILE], lambda place: _write(place, row))
        return line

    def check(self, rows: Iterable[Row]) -> None:
        """Refuse lines whose file is missing or cut."""
        for row in rows:
            if not _is_whole(self._file(row)):
                raise CheckpointError(
                    f"{self._file(row)} is missing or incomplete, and the records of round {row['round']} are in it. "
                    "Restore it, or start a new run in another folder"
                )

    def forget(self, after: int, but: Iterable[Row] = ()) -> None:
        """Delete the files of rounds after this one, but for those of some lines."""
        kept = {row[_FILE] for row in but}
        for file in self.folder.iterdir() if self.folder.is_dir() else ():
            found = _NAME.fullmatch(file.name)
            if found and int(found[1]) > after and file.name not in kept:
                file.unlink()

    def leftovers(self) -> Iterable[Path]:
        """Drafts of a writer that was killed."""
        return atomic.leftovers(self.folder)

    def whole(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row that a line of ``clients.jsonl`` stands for: itself, or with its lists from the file."""
        if not is_line(row):
            return row
        ids, scores = self.columns(row)
        lists = {name: column.to_pylist() for name, column in scores.items()}
        return {**self.about(row), "ids": ids.to_pylist(), **lists}

    def about(self, row: Row) -> dict[str, Any]:
        """The short entries of a row."""
        return {name: value for name, value in row.items() if name not in (_FILE, _COUNT)}

    def columns(self, row: Row) -> tuple[Any, dict[str, Any]]:
        """The ids and the scores in the file of a line, as columns of pyarrow."""
        file, count = self._file(row), row.get(_COUNT, 0)
        try:
            return _read(file, count)
        except ImportError:
            raise CheckpointError(f"{file} cannot be read: this needs pyarrow ({INSTALL})") from None
        except (OSError, ValueError, LookupError) as error:  # pyarrow's errors are among them
            raise CheckpointError(f"{file} is damaged: {error}; restore it, or run again elsewhere") from None

    def _file(self, row: Row) -> Path:
        name: str = row[_FILE]
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"{self.run / 'clients.jsonl'} names {name[:40]!r}, which no run writes")
        return self.folder / name


def _name(row: Row) -> str:
    mix = f"-{row['mix']}" if "mix" in row else ""
    return f"round-{row['round']:06d}-{row.get('model', '')}{mix}.parquet"


def _is_table(row: Row) -> bool:
    """Whether every entry is one of those that describe a row, or a list with a number for every client."""
    ids, lists = row.get("ids"), [name for name in row if name not in _ABOUT]
    texts = isinstance(row.get("model"), str) and isinstance(row.get("split", ""), str)
    if not isinstance(ids, list) or not texts or "id" in lists or not isinstance(row.get("mix", 0.0), int | float):
        return False
    return all(isinstance(row[name], list) and len(row[name]) == len(ids) for name in lists)


def _write(place: Path, row: Row) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = len(row["ids"])
    kinds = dict(zip(_ABOUT, (pa.int64(), pa.string(), pa.string(), pa.float64()), strict=True))
    about = {name: pa.repeat(pa.scalar(row.get(name), kind), count) for name, kind in kinds.items()}
    lists = {name: _array(pa, row[name]) for name in row if name not in (*_ABOUT, "ids")}
    table = pa.table({**about, "id": pa.array(row["ids"], pa.int64()), **lists})
    pq.write_table(
        table, place, compression="zstd", use_dictionary=[name for name in table.column_names if name != "id"],
        column_encoding={"id": "DELTA_BINARY_PACKED"}, write_page_checksum=True, store_schema=False,
    )  # fmt: skip


def _array(pa: Any, values: list[Any]) -> Any:
    """A column as JSON would keep it: whole numbers stay whole, what is not finite is missing."""
    import pyarrow.compute as pc

    if set(map(type, values)) <= {int, type(None)} and any(value is not None for value in values):
        return pa.array(values, pa.int64())
    found = pa.array(values, pa.float64())
    finite: Callable[[Any], Any] = pc.is_finite
    return pc.if_else(finite(found), found, pa.scalar(None, pa.float64()))


def _read(file: Path, count: int) -> tuple[Any, dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.ParquetFile(pa.BufferReader(_content(file)), page_checksum_verification=True)
    names = [name for name in table.schema_arrow.names if name not in _ABOUT]
    if table.metadata.num_rows != count or len(names) * count > _MOST_NUMBERS:
        raise ValueError(f"it has {table.metadata.num_rows} rows of {len(names)} columns, {count} clients are expected")
    found = {name: column.combine_chunks() for name, column in zip(names, table.read(names).columns, strict=True)}
    if any(column.type not in (pa.int64(), pa.float64()) for column in found.values()):
        raise ValueError("its columns are not numbers")
    if any(not _is_within(column) for column in found.values()):
        raise ValueError("it holds numbers that no run writes")
    return found.pop("id"), found


def _is_within(column: Any) -> bool:
    """Whether all numbers are finite and within the range of all readers."""
    import pyarrow.compute as pc

    ends = pc.min_max(column).as_py()
    return ends["min"] is None or (number(ends["min"]) and number(ends["max"]))


def _content(file: Path) -> bytes:
    """A file of the run, not what a link in its place leads to."""
    if file.parent.is_symlink() or not stat.S_ISREG(os.lstat(file).st_mode):
        raise ValueError("it is not a regular file")
    return file.read_bytes()


def _is_whole(file: Path) -> bool:
    """Whether a file is there to its last byte; Parquet ends with its name."""
    try:
        with file.open("rb") as content:
            content.seek(-4, os.SEEK_END)
            return content.read() == b"PAR1"
    except OSError:
        return False
