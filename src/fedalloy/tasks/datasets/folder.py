"""Your own data: a folder with one file per client.

``client.npz`` holds arrays ``x`` and ``y``; ``client.parquet`` has one column per feature and a column ``y``
or ``label``. Columns are matched by name, in the order of the first file. Clients are numbered in the order of their
file names and named after them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedalloy.core.errors import DataError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.archive import read_arrays
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader, from_clients, third_party

Pair = tuple[Any, Any]
_LABELS = ("y", "label")
_INDEX = re.compile(r"__index_level_\d+__")


@register("dataset", "folder")
@dataclass(frozen=True)
class Folder(DatasetLoader):
    """One ``.npz`` (x, y) or ``.parquet`` (features and y or label) file per client, in the folder ``path``."""

    path: str

    summary: ClassVar[str] = "your own data: one .npz (x, y) or .parquet file per client"
    hint: ClassVar[str] = "put one file per client into the folder"

    def load(self, key: Key) -> Dataset:
        """The files as natural clients; nothing is drawn."""
        files = client_files(Path(self.path).expanduser())
        return from_clients(read_clients(files), [file.stem for file in files])


def client_files(folder: Path) -> list[Path]:
    """The client files of a folder, by name."""
    if not folder.is_dir():
        raise DataError(f"dataset 'folder': {folder} is not a folder")
    files = sorted(file for file in folder.iterdir() if file.suffix in (".npz", ".parquet"))
    if not files:
        raise DataError(f"dataset 'folder': {folder} holds no .npz and no .parquet file; put one per client there")
    stems = [file.stem for file in files]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise DataError(f"dataset 'folder': more than one file for client {', '.join(twice)} in {folder}")
    return files


def read_clients(files: Sequence[Path]) -> list[Pair]:
    """The arrays of several clients; all tables must have the columns of the first one and are read in its order."""
    first = next((file for file in files if file.suffix == ".parquet"), None)
    order = list(_features(first)) if first is not None and len(files) > 1 else None
    return [read_client(file, order) for file in files]


def read_client(file: Path, order: Sequence[str] | None = None) -> Pair:
    """The arrays of one client; ``order`` gives the feature columns of a table by name."""
    return _read_npz(file) if file.suffix == ".npz" else _read_parquet(file, order)


def _read_npz(file: Path) -> Pair:
    arrays = read_arrays(file, ("x", "y"))
    return arrays["x"], arrays["y"]


def _read_parquet(file: Path, order: Sequence[str] | None) -> Pair:
    columns = _parquet_columns(file)
    features = _features(file, columns)
    order = features if order is None else order
    if set(features) != set(order):
        lacks, has = ", ".join(sorted({*order} - {*features})), ", ".join(sorted({*features} - {*order}))
        raise DataError(
            f"{file} has other feature columns than the first file (missing: {lacks or 'none'}; additional: "
            f"{has or 'none'}); all clients must have the same features"
        )
    y = next(columns[name] for name in _LABELS if name in columns)
    return np.stack([_numbers(columns[name], name, file) for name in order], axis=1), y


def _features(file: Path, columns: Mapping[str, Any] | None = None) -> list[str]:
    """The names of the feature columns: all but the label and the row numbers that pandas may have written."""
    names = [name for name in (_parquet_columns(file) if columns is None else columns) if not _INDEX.fullmatch(name)]
    features = [name for name in names if name not in _LABELS]
    if len(names) - len(features) != 1 or not features:
        raise DataError(f"{file} needs feature columns and one column 'y' or 'label'; it has {', '.join(names)}")
    return features


def _numbers(column: Any, name: str, file: Path) -> Any:
    """A column as numbers; dates and text that looks like numbers are refused."""
    text = column.dtype.kind == "O" and any(isinstance(one, str | bytes) for one in column)
    try:
        if text or column.dtype.kind not in "biufO":
            raise ValueError(f"'{name}' holds {'text' if text else column.dtype}")
        return column.astype(np.float32)
    except (TypeError, ValueError) as cause:
        raise DataError(f"{file}: every feature column must hold numbers ({cause})") from cause


def _parquet_columns(file: Path) -> dict[str, Any]:
    """The columns by name, read with pyarrow."""
    parquet = third_party("pyarrow.parquet", "pyarrow", "reading .parquet files")
    try:
        table = parquet.read_table(file)
    except (OSError, ValueError) as cause:
        raise DataError(f"{file} is not a readable .parquet file: {cause}") from cause
    return {name: table.column(name).to_numpy() for name in table.column_names}
