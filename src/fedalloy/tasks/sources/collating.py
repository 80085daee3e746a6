"""Rows of different lengths, padded by the user's function: it is called once with all rows, so that all get one
length, the longest of the data set or the one that the function itself fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.own_code import own_code
from fedalloy.core.types import Examples
from fedalloy.tasks.datasets.base import Dataset, as_pair, counted_classes
from fedalloy.tasks.sources.client_data import is_torch_dataset
from fedalloy.tasks.sources.columns import numbered
from fedalloy.tasks.sources.frames import library_of
from fedalloy.tasks.sources.options import Collate, SourceOptions, refuse

TARGETS = ("labels", "label", "y")


def collated(source: Any, collate: Collate, options: SourceOptions) -> Dataset:
    """The rows of a source as a dataset. A torch or Hugging Face ``Dataset`` holds rows, with ``ids`` for their
    clients; a list or mapping the rows of every client; a mapping with ``train`` and ``test`` rows and a common test
    set."""
    refuse(options, "rows that collate reads", "tokenise", "columns")
    if options.lazy:
        raise SpecError(
            "collate gets all rows at once, so that they get one length; for rows read on demand (lazy=True) pad them "
            "to one length in the Dataset itself"
        )
    if options.dealt and isinstance(source, list):
        raise SpecError("a list gives every client its rows, so it takes no partition")
    ids, classes = options.ids, options.classes
    if isinstance(source, Mapping) and "train" in source and set(source) <= {"train", "test"}:
        return _with_test(_rows(source["train"]), _rows(source.get("test", [])), collate, ids, classes)
    if is_torch_dataset(source) or library_of(source) == "datasets":
        return _with_test(_rows(source), [], collate, ids, classes)
    if not isinstance(source, list | Mapping):
        raise SpecError(
            f"collate makes batches of rows, and a {type(source).__name__} has none: give a torch or Hugging Face "
            "Dataset with ids or partition, or a list or mapping with the rows of every client"
        )
    if ids is not None:
        raise SpecError(f"a {type(source).__name__} gives every client its rows, so it takes no ids")
    return _by_client(source, collate, classes)


def _by_client(source: Any, collate: Collate, classes: int | None) -> Dataset:
    names = tuple(map(str, source)) if isinstance(source, Mapping) else None
    rows = [_rows(one) for one in (source.values() if isinstance(source, Mapping) else source)]
    if not all(rows):
        raise DataError(f"client {[bool(one) for one in rows].index(False)} has no rows: leave it out")
    x, y = batch_of([row for some in rows for row in some], collate)
    owner = torch.repeat_interleave(torch.tensor([len(some) for some in rows]))
    return Dataset(x, y, _classes(y, classes), owner, names=names)


def _with_test(rows: list[Any], held: list[Any], collate: Collate, ids: Any, classes: int | None) -> Dataset:
    x, y = batch_of([*rows, *held], collate)
    count, owner, names = len(rows), None, None
    if ids is not None:
        owner, names = numbered(_ids(ids, rows), "ids")
        if len(owner) != count:
            raise DataError(f"ids has {len(owner)} client ids for {count} rows; give one per row")
    known = _classes(y, classes)
    test = Examples(inputs.take(x, slice(count, None)), y[count:]) if held else None
    return Dataset(inputs.take(x, slice(count)), y[:count], known, owner, names=names, test=test)


def batch_of(rows: list[Any], collate: Collate) -> tuple[Any, Tensor]:
    """What the function makes of all rows, as tensors."""
    called = f"collate {getattr(collate, '__name__', type(collate).__name__)}"
    if not rows:
        raise DataError(f"{called} has no rows to work on")
    with own_code(called, DataError):
        made = collate(rows)
    x, y = as_pair(*_parts(made, called), called)
    if len(y) != len(rows):
        raise DataError(f"{called} made {len(y)} examples of {len(rows)} rows: it must keep every row, in its order")
    return x, y


def _parts(made: Any, called: str) -> tuple[Any, Any]:
    if isinstance(made, tuple | list) and len(made) == 2:
        return made[0], made[1]
    if isinstance(made, Mapping):
        target = next((name for name in TARGETS if name in made), None)
        if target is not None:
            others = {name: leaf for name, leaf in made.items() if name != target}
            return (others["x"] if set(others) == {"x"} else others), made[target]
        raise DataError(f"{called} returned {', '.join(map(str, made))}: one of {', '.join(TARGETS)} must be there")
    raise DataError(f"{called} returned a {type(made).__name__}: it must return (x, y), or arrays by name with labels")


def _rows(source: Any) -> list[Any]:
    if is_torch_dataset(source) or library_of(source) == "datasets":
        return [source[row] for row in range(len(source))]
    if isinstance(source, Sequence) and not isinstance(source, str | tuple):
        return list(source)
    raise DataError(f"collate needs rows, a list or a Dataset of them, and got a {type(source).__name__}")


def _ids(ids: Any, rows: list[Any]) -> Any:
    if isinstance(ids, str):
        if not all(isinstance(row, Mapping) and ids in row for row in rows):
            raise DataError(f"ids names the column '{ids}', and not every row has it")
        return [row[ids] for row in rows]
    return [ids(row) for row in rows] if callable(ids) else ids


def _classes(y: Tensor, classes: int | None) -> int:
    if classes is not None:
        return classes
    return 0 if y.is_floating_point() else counted_classes(y)
