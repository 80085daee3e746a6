"""The data of a single client, as a node of a federation has them: a file, a folder, or what a function returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.arguments import build
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.own_code import own_code
from fedalloy.core.types import Examples
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.datasets.callable import required_arguments, resolve
from fedalloy.tasks.imputing import Impute
from fedalloy.tasks.sources import files
from fedalloy.tasks.sources.client_data import PARTS, ClientParts, Pair, is_torch_dataset, read_client
from fedalloy.tasks.sources.client_frames import check_split, frames_of
from fedalloy.tasks.sources.columns import Columns, Table, category_values, encode, roles_of
from fedalloy.tasks.sources.frames import library_of, table_of
from fedalloy.tasks.sources.hugging_face import from_hub
from fedalloy.tasks.sources.opening import open_source
from fedalloy.tasks.sources.options import SourceOptions


@dataclass(frozen=True)
class ClientSource:
    """A client's pairs by part (``""``: to be split), and how its missing values are filled when they are split."""

    parts: ClientParts
    impute: Impute = "none"


def read_path(path: Path) -> ClientSource:
    """The parts of one client's file or folder; columns have the roles that ``schema.toml`` beside or in it says."""
    if not path.exists():
        raise DataError(f"{path} is not a folder or file; it should hold this client's data")
    parts = files.parts_of(path)
    columns = files.read_schema(path if path.is_dir() else path.parent) or Columns()
    tables = any(files.is_table(one) for one in parts.values())
    return ClientSource(
        {part: _read(one, columns) for part, one in parts.items()}, columns.impute if tables else "none"
    )


def read_function(path: str, client: int) -> ClientSource:
    """What a function returns; it is called with the client's number if it needs an argument."""
    function: Callable[..., Any] = resolve(path)
    needed = required_arguments(function)
    if len(needed) > 1:
        raise SpecError(f"{path} takes {', '.join(needed)}: it must take nothing, or a client's number")
    with own_code(path, DataError):
        made = function(client) if needed else function()
    return read_value(made, path)


def read_value(made: Any, who: str) -> ClientSource:
    """One client's data in any form; frames or a dataset may come with the roles of their columns: ``(frame,
    columns)``."""
    columns = Columns()
    if isinstance(made, tuple) and len(made) == 2 and _is_columnar(made[0]) and isinstance(made[1], Mapping | Columns):
        columns = made[1] if isinstance(made[1], Columns) else build(Columns, made[1], f"{who}: columns")
        made = made[0]
    frames = frames_of(made)
    if frames is not None:
        return ClientSource(_framed(frames, columns, who), columns.impute)
    if library_of(made) == "datasets":
        return ClientSource(_parts(from_hub(made, columns).in_memory()))
    if is_torch_dataset(made):
        made = open_source(made, SourceOptions(lazy=False), Key.of(0))
    if isinstance(made, Dataset):
        return ClientSource(_parts(made), made.impute)
    return ClientSource(read_client(made, who))


def _framed(frames: Mapping[str, Any], columns: Columns, who: str) -> ClientParts:
    """The frames of a client: one, to be split here or by a column, or one for each part."""
    check_split(frames, columns)
    found = {part: _encoded(table_of(frame), columns, f"{who} [{part}]" if part else who)
             for part, frame in frames.items()}  # fmt: skip
    return _parts(found[""]) if "" in found else {part: (one.x, one.y) for part, one in found.items()}


def _read(path: Path, columns: Columns) -> Pair:
    if files.is_table(path):
        made = _encoded(files.read_table(path), columns, str(path))
        return made.x, made.y
    if files.is_images(path):
        if not columns.classes:
            raise DataError(
                f"{path} holds images: name all classes of the federation in {files.SCHEMA}: classes = [...]"
            )
        return files.read_images(path, tuple(map(str, columns.classes)))
    return files.read_arrays_of(path)


def _encoded(table: Table, columns: Columns, who: str) -> Dataset:
    """A table whose categories are declared, because other nodes must number them alike."""
    chosen = roles_of(table, columns, who)
    known = dict(columns.declared)
    for name in category_values(table, columns, chosen, who):
        declared = columns.classes if name == chosen.label else columns.declared.get(name)
        if declared:
            continue
        if table[name].categories is None:
            raise DataError(
                f"{who}: the values of column '{name}' must be declared, alike on all nodes, in {files.SCHEMA}: "
                f"{'classes = [...]' if name == chosen.label else 'categorical = { ' + name + ' = [...] }'}"
            )
        if name != chosen.label:  # then a missing value has its column on every node, whoever misses one
            known[name] = table[name].categories or ()
    return encode(table, replace(columns, categorical=known) if known else columns, who)


def _parts(data: Dataset) -> ClientParts:
    if data.owner is not None and len(data.owner.unique()) > 1:
        raise DataError(f"a node has one client's data, and these are of {len(data.owner.unique())} clients")
    if data.part is None:
        found: ClientParts = {"": (data.x, data.y)}
        test = data.test
        return found if test is None else {"train": found[""], "test": (test.x, test.y)}
    chosen = {name: data.part == number for number, name in enumerate(PARTS)}
    return {name: _rows(Examples(data.x, data.y), rows) for name, rows in chosen.items() if bool(rows.any())}


def _rows(examples: Examples, rows: Tensor) -> Pair:
    return inputs.take(examples.x, rows), inputs.take(examples.y, rows)


def _is_columnar(value: Any) -> bool:
    return frames_of(value) is not None or library_of(value) == "datasets"
