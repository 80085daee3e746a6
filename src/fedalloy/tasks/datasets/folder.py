"""Your own data: a folder with one file per client.

``client.npz`` holds arrays ``x`` and ``y``; ``client.parquet`` has one column per feature and a column ``y``
or ``label``. Clients are numbered in the order of their file names and named after them.
"""

from __future__ import annotations

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
        return from_clients([read_client(file) for file in files], [file.stem for file in files])


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


def read_client(file: Path) -> Pair:
    """The arrays of one client."""
    return _read_npz(file) if file.suffix == ".npz" else _read_parquet(file)


def _read_npz(file: Path) -> Pair:
    arrays = read_arrays(file, ("x", "y"))
    return arrays["x"], arrays["y"]


def _read_parquet(file: Path) -> Pair:
    columns = _parquet_columns(file)
    labels = [name for name in ("y", "label") if name in columns]
    if len(labels) != 1 or len(columns) < 2:
        raise DataError(f"{file} needs feature columns and one column 'y' or 'label'; it has {', '.join(columns)}")
    y = columns.pop(labels[0])
    try:
        return np.stack([column.astype(np.float32) for column in columns.values()], axis=1), y
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
