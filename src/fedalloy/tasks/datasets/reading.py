"""Reading a dataset's files, with errors that name the file."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO, cast

from numpy.typing import NDArray

from fedalloy.core.errors import DataError
from fedalloy.tasks import locate
from fedalloy.tasks.datasets.archive import read_arrays


def read_npz(filename: str, names: Iterable[str], hint: str = "") -> dict[str, NDArray[Any]]:
    """Some arrays of an ``.npz`` file."""
    path = locate.find(filename, hint)
    try:
        return read_arrays(path, names)
    except DataError as cause:
        raise DataError(f"{path} cannot be read ({cause}); compare it with `fedalloy data check`") from cause


def read_csv(filename: str, columns: Iterable[str], hint: str = "", header: bool = True) -> list[dict[str, str]]:
    """The rows of a ``.csv`` (or ``.csv.gz``) file by column; without ``header`` the columns are named in order."""
    path, wanted = locate.find(filename, hint), list(columns)
    try:
        with _text(path) as stream:
            rows = list(csv.DictReader(stream, None if header else wanted))
            return [{name: _cell(row, name) for name in wanted} for row in rows]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, csv.Error) as cause:
        raise DataError(f"{path} cannot be read ({cause}); compare it with `fedalloy data check`") from cause


def _text(path: Path) -> TextIO:
    """A file opened as text, decompressed if necessary."""
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8", newline=""))
    return path.open(encoding="utf-8", newline="")


def _cell(row: dict[str, Any], name: str) -> str:
    """A cell as text; raises for a row that is too short."""
    if not isinstance(row[name], str):
        raise ValueError(f"a row has no '{name}'")
    return str(row[name])
