"""Files of clients: which file or folder holds which client's which part, and how each is read.

A client is a file (``.npz`` with arrays x and y, ``.csv`` or ``.parquet`` tables, a ``.sql`` query of a database) or a
folder. A client's folder holds one such file, or ``x.npy`` and ``y.npy``, or one folder of images per class, or several
of these called train, valid, test.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedalloy.core.arguments import build
from fedalloy.core.errors import DataError
from fedalloy.tasks.datasets.archive import array_names, read_array, read_arrays
from fedalloy.tasks.datasets.base import third_party
from fedalloy.tasks.sources.columns import Column, Columns, Table
from fedalloy.tasks.sources.frames import arrow_table
from fedalloy.tasks.sources.hugging_face import pixels_of, stack_images
from fedalloy.tasks.sources.sql import CONNECTION, read_query

PARTS = ("train", "valid", "test")
_SPLITS = {*PARTS, "val", "validation"}
SCHEMA = "schema.toml"
_TABLES = (".csv", ".parquet", ".sql")
_FILES = (".npz", *_TABLES)
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
_SEARCHED = 1000


@dataclass(frozen=True)
class ClientFiles:
    """Where a client's data are: a path per part; the part ``""`` is everything."""

    name: str
    parts: Mapping[str, Path]


def list_clients(folder: Path) -> list[ClientFiles]:
    """The clients of a folder, by name."""
    if not folder.is_dir():
        raise DataError(f"dataset 'folder': {folder} is not a folder")
    found = [path for path in sorted(folder.iterdir()) if _is_client_file(path) or _is_client_folder(path)]
    if not found:
        raise DataError(
            f"dataset 'folder': {folder} holds no .npz, .csv, .parquet or .sql file and no folder of a client; put one "
            "per client there"
        )
    names = [path.name if path.is_dir() else path.stem for path in found]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise DataError(f"dataset 'folder': more than one file for client {', '.join(twice)} in {folder}")
    if "train" in names and {*names} <= _SPLITS:
        raise DataError(
            f"dataset 'folder': {folder} holds {' and '.join(names)}, which can mean clients of these names, or one "
            "set of examples that is split already. For clients give other names; for one set, put these into a "
            "client's folder, or load them in Python and say who has which rows: ids=... or partition=..."
        )
    return [ClientFiles(name, parts_of(path)) for name, path in zip(names, found, strict=True)]


def unread(folder: Path, clients: Sequence[ClientFiles]) -> tuple[str, ...]:
    """A notice about files in a folder that are not read, such as tables of another format."""
    read = {_top(folder, path) for client in clients for path in client.parts.values()}
    found = [one for one in sorted(folder.iterdir()) if one not in read and one.name not in (SCHEMA, CONNECTION)]
    for path in (path for client in clients for path in client.parts.values()):
        inside = path if path.is_dir() else path.parent
        found += [one for one in sorted(inside.iterdir()) if not _is_used(one)] if inside != folder else []
        if is_images(path):
            found += [one for place in _usable(path) for one in sorted(place.iterdir()) if not _is_image(one)]
    names = [str(one.relative_to(folder)) for one in dict.fromkeys(found) if not one.name.startswith(".")]
    told = () if not names else (f"not read, because they are no data of a client: {_some(names)}",)
    return (*told, *_further_arrays(folder, clients))


def _further_arrays(folder: Path, clients: Sequence[ClientFiles]) -> tuple[str, ...]:
    """A notice about arrays beside x and y, as far as the first clients have them: looking into a million files takes
    minutes."""
    paths = [path for client in clients[:_SEARCHED] for path in client.parts.values() if path.suffix.lower() == ".npz"]
    names = {path: array_names(path) for path in paths}
    found = {path: [one for one in has if one not in ("x", "y")] for path, has in names.items() if {"x", "y"} <= {*has}}
    told = [f"{', '.join(more[:3])} in {path.relative_to(folder)}" for path, more in found.items() if more]
    return (f"arrays beside x and y are not read: {_some(told)}",) if told else ()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _top(folder: Path, path: Path) -> Path:
    return folder / path.relative_to(folder).parts[0]


def _is_used(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() in _FILES or path.name in ("x.npy", "y.npy", SCHEMA, CONNECTION)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _IMAGES


def parts_of(path: Path) -> dict[str, Path]:
    """The parts of one client's file or folder."""
    if path.is_file():
        return {"": path}
    if (path / "x.npy").is_file() or (path / "y.npy").is_file():
        return {"": path}
    usable = _usable(path)
    inside = {one.stem if one.is_file() else one.name: one for one in usable}
    if len(inside) < len(usable):
        raise DataError(f"{path} holds {', '.join(one.name for one in usable)}: two of the same name; remove one")
    if "train" in inside and inside.keys() <= set(PARTS):
        return {part: _whole(inside[part]) for part in PARTS if part in inside}
    files = [one for one in inside.values() if one.is_file()]
    if len(files) == 1 and len(inside) == 1:
        return {"": files[0]}
    if inside and not files:
        return {"": path}
    raise DataError(
        f"{path} holds the files {', '.join(sorted(inside)) or 'none'}; allowed: one file, or train and any of "
        "valid, test, or x.npy and y.npy, or one folder of images per class"
    )


def _whole(part: Path) -> Path:
    """Where the data of a part are: the part itself, or the one file in its folder."""
    if part.is_file() or not _usable(part):
        return part
    inside = parts_of(part)
    if "" not in inside:
        raise DataError(f"{part} holds {', '.join(inside)} once more; a part has one file, or one folder per class")
    return inside[""]


def read_schema(folder: Path) -> Columns | None:
    """The roles of the columns in ``schema.toml``, if the folder has one."""
    path = folder / SCHEMA
    if not path.is_file():
        return None
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
        raise DataError(f"{path} cannot be read: {cause}") from cause
    made: Columns = build(Columns, told, str(path))
    return made


def is_table(path: Path) -> bool:
    """Whether a part is a table, whose columns have names."""
    return path.suffix.lower() in _TABLES and path.is_file()


def is_images(path: Path) -> bool:
    """Whether a part is a folder with one folder of images per class."""
    return path.is_dir() and not (path / "x.npy").is_file() and not (path / "y.npy").is_file()


def read_arrays_of(path: Path) -> tuple[Any, Any]:
    """The arrays x and y of an ``.npz`` file or of a folder with ``x.npy`` and ``y.npy``. A file without ``x`` has
    several inputs: all arrays but ``y``, by name."""
    if path.is_dir():
        return read_array(path / "x.npy"), read_array(path / "y.npy")
    names = array_names(path)
    if "x" in names or "y" not in names or len(names) < 2:
        arrays = read_arrays(path, ("x", "y"))
        return arrays["x"], arrays["y"]
    several = read_arrays(path)
    return {name: leaf for name, leaf in several.items() if name != "y"}, several["y"]


def read_table(path: Path) -> Table:
    """The columns of a ``.csv`` or ``.parquet`` file, or of the query in a ``.sql`` file, by name."""
    readers = {".csv": _read_csv, ".parquet": _read_parquet, ".sql": read_query}
    return readers[path.suffix.lower()](path)


def class_names(places: Iterable[Path]) -> tuple[str, ...]:
    """The names of all classes: those of the folders of images, sorted."""
    return tuple(sorted({one.name for place in places for one in place.iterdir() if one.is_dir()}))


def image_files(place: Path) -> list[tuple[str, Path]]:
    """The images of a folder with their class, by class and name."""
    folders = sorted(one for one in place.iterdir() if one.is_dir())
    return [(one.name, file) for one in folders for file in sorted(one.iterdir()) if _is_image(file)]


def read_images(place: Path, classes: Sequence[str]) -> tuple[Any, Any]:
    """The images of a folder as ``[N, C, H, W]`` in [0, 1], and the numbers of their classes."""
    found, number = image_files(place), {name: place for place, name in enumerate(classes)}
    if not found:
        return np.zeros((0, 0), np.float32), np.zeros(0, np.int64)
    strange = next((name for name, _ in found if name not in number), None)
    if strange is not None:
        raise DataError(f"{place} has a class '{strange}' that is not among {', '.join(classes)}")
    pictures = [read_picture(file) for _, file in found]
    return stack_images(pictures, str(place)), np.array([number[name] for name, _ in found], dtype=np.int64)


def read_picture(file: Path) -> NDArray[Any]:
    """The pixels of an image, grey or in colour."""
    library = third_party("PIL.Image", "pillow", "reading images")
    try:
        with library.open(file) as picture:
            return pixels_of(picture, str(file))
    except (OSError, ValueError, SyntaxError, library.DecompressionBombError) as cause:
        raise DataError(f"{file} is not a readable image: {cause}") from cause


def _read_csv(path: Path) -> Table:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.reader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as cause:
        raise DataError(f"{path} is not a readable .csv file in UTF-8: {cause}") from cause
    if not rows or len(set(rows[0])) < len(rows[0]):
        raise DataError(f"{path} needs a first line with the names of its columns, all different")
    wrong = next((number for number, row in enumerate(rows[1:], 2) if len(row) != len(rows[0])), None)
    if wrong is not None:
        raise DataError(f"{path}, line {wrong}: {len(rows[wrong - 1])} values for {len(rows[0])} columns")
    return {name: _typed([row[place] for row in rows[1:]]) for place, name in enumerate(rows[0])}


def _typed(cells: list[str]) -> Column:
    """A column of a text file: whole numbers, numbers with empty cells as gaps, or text."""
    texts = [cell.strip() for cell in cells]
    if any("_" in text for text in texts):  # Python reads 1_1 as 11
        return _as_text(texts)
    try:
        return Column(np.array([int(text) for text in texts], dtype=np.int64))
    except (ValueError, OverflowError):
        pass
    try:
        values = np.array([float(text) if text else np.nan for text in texts], dtype=np.float64)
    except ValueError:
        return _as_text(texts)
    return Column(values, whole=all(text.lstrip("+-").isdecimal() for text in texts if text))


def _as_text(texts: list[str]) -> Column:
    found = np.empty(len(texts), dtype=object)
    found[:] = [text or None for text in texts]
    return Column(found)


def _read_parquet(path: Path) -> Table:
    parquet = third_party("pyarrow.parquet", "pyarrow", "reading .parquet files")
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as cause:
        raise DataError(f"{path} is not a readable .parquet file: {cause}") from cause
    return arrow_table(table, str(path))


def _is_client_file(path: Path) -> bool:
    return path.suffix.lower() in _FILES and not path.name.startswith(".")


def _is_client_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".") and any(True for _ in _usable(path))


def _usable(folder: Path) -> list[Path]:
    """Files that hold examples, and folders; everything else (notes, hidden files) is passed over."""
    return [
        one
        for one in sorted(folder.iterdir())
        if not one.name.startswith(".")
        and (one.suffix.lower() in _FILES or one.is_dir() or one.name in ("x.npy", "y.npy"))
    ]
