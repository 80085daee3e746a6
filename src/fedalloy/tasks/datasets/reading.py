"""Reading a dataset's files: found, opened, and named when they are not what was meant."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedalloy.core.errors import DataError
from fedalloy.tasks import locate


def read_npz(filename: str, names: Iterable[str], hint: str = "") -> dict[str, NDArray[Any]]:
    """Some arrays of an ``.npz`` file."""
    path = locate.find(filename, hint)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except (OSError, ValueError, KeyError) as cause:
        raise DataError(f"{path} cannot be read ({cause}); compare it with `fedalloy data check`") from cause


def read_csv(filename: str, columns: Iterable[str], hint: str = "", header: bool = True) -> list[dict[str, str]]:
    """The rows of a ``.csv`` file by column; without a ``header`` the columns are named here, in order."""
    path, wanted = locate.find(filename, hint), list(columns)
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream, None if header else wanted))
            return [{name: _cell(row, name) for name in wanted} for row in rows]
    except (OSError, ValueError, KeyError, csv.Error) as cause:
        raise DataError(f"{path} cannot be read ({cause}); compare it with `fedalloy data check`") from cause


def _cell(row: dict[str, Any], name: str) -> str:
    """A cell as text; a row that is too short has none."""
    if not isinstance(row[name], str):
        raise ValueError(f"a row has no '{name}'")
    return str(row[name])
