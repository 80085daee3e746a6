"""Frames by client: one for each, or one for each of its parts; all are encoded alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.errors import DataError, nearest
from fedalloy.core.types import Examples
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.imputing import count_gaps
from fedalloy.tasks.lazy import LazyClients
from fedalloy.tasks.sources.client_data import PARTS
from fedalloy.tasks.sources.columns import Columns, Table, encode, numbered
from fedalloy.tasks.sources.frames import is_frame, table_of
from fedalloy.tasks.sources.tables import TableReader, join_tables, rows_of, without_empty


def frames_of(value: Any) -> dict[str, Any] | None:
    """A client's frames by part (``""``: one frame, to be split); None for anything else.

    Two frames are those for training and testing, three those for training, validation and testing. Two frames that
    have no column in common are features and targets, as two arrays are.
    """
    if is_frame(value):
        return {"": value}
    if isinstance(value, tuple | list) and len(value) in (2, 3) and all(map(is_frame, value)):
        if len(value) == 2 and not {*_columns(value[0])} & {*_columns(value[1])}:
            return None
        return dict(zip(PARTS if len(value) == 3 else ("train", "test"), value, strict=True))
    if isinstance(value, Mapping) and "train" in value and {*value} <= {*PARTS} and all(map(is_frame, value.values())):
        return {part: value[part] for part in PARTS if part in value}
    return None


def pooled_frames(
    clients: Sequence[Mapping[str, Any]], names: Sequence[str] | None, columns: Columns, classes: int | None
) -> Dataset:
    """All clients in memory, encoded together so that categories mean the same."""
    check_clients(columns)
    called = tuple(names or [f"client {number}" for number in range(len(clients))])
    whole = ["" in frames for frames in clients]
    if any(whole) and not all(whole):
        raise DataError(
            f"{called[whole.index(True)]} has one frame and {called[whole.index(False)]} has frames for training and "
            "testing; give all clients in the same form"
        )
    check_split(clients[0], columns)
    pieces = [(k, part, table_of(frame)) for k, frames in enumerate(clients) for part, frame in frames.items()]
    joined = join_tables([table for *_, table in pieces], columns, [_path(called[k], part) for k, part, _ in pieces])
    size = torch.tensor([rows_of(table) for *_, table in pieces])
    owner = torch.tensor([k for k, *_ in pieces]).repeat_interleave(size)
    part = None if whole[0] else torch.tensor([PARTS.index(part) for _, part, _ in pieces]).repeat_interleave(size)
    kept = replace(columns, ignore=())  # ignored columns were left behind when the frames were joined
    made = without_empty(encode(joined, kept, "the frames", owner, part, called))
    return made if classes is None else replace(made, classes=classes)


def frame_with_test(
    train: Any, test: Any, columns: Columns, owner: Tensor | None, names: tuple[str, ...] | None
) -> Dataset:
    """The rows of one frame with their clients, and another frame, encoded alike, as the common test set."""
    check_split({"train": train}, columns)
    tables = [table_of(frame) for frame in (train, test) if frame is not None]
    if not all(rows_of(table) for table in tables):
        raise DataError("the frames need rows: 'train' or 'test' has none")
    client = None
    if columns.client is not None:  # the common test set belongs to nobody
        client, columns = columns.client, replace(columns, client=None)
        owner, names = _clients_in(tables[0], client)
        tables = [{name: one for name, one in table.items() if name != client} for table in tables]
    joined = join_tables(tables, columns, [Path(f"the frame '{part}'") for part in ("train", "test")][: len(tables)])
    size = [rows_of(table) for table in tables]
    part = torch.repeat_interleave(torch.arange(len(size)), torch.tensor(size))
    if owner is not None:
        owner = torch.cat([owner, torch.full((sum(size) - size[0],), -1)])
    kept = replace(columns, ignore=())  # ignored columns were left behind when the frames were joined
    return _test_apart(encode(joined, kept, "the frames", owner, part, names), len(tables) > 1)


def _clients_in(table: Table, column: str) -> tuple[Tensor, tuple[str, ...]]:
    if column not in table:
        raise DataError(f"the frame 'train' has no column '{column}': {nearest(column, table)}")
    return numbered(table[column].values, f"column '{column}'")


def _test_apart(made: Dataset, tested: bool) -> Dataset:
    """The same examples, with those of part 1 as the common test set."""
    assert made.part is not None
    here = made.part == 0
    owner = None if made.owner is None else made.owner[here]
    if not tested:
        return replace(made, part=None)
    test = Examples(made.x[~here], made.y[~here])
    if not len(test) or not bool(here.any()):
        raise DataError("all rows of a frame, 'train' or 'test', have missing values and were dropped")
    if count_gaps(test.x):
        raise DataError(
            "the frame 'test' has missing values, and it is no client's, so that nobody's mean or median can fill "
            "them: fill them first, set missing = 'drop', or give every client test rows of its own (columns.split)"
        )
    made = replace(made, x=made.x[here], y=made.y[here], owner=owner, part=None, test=test)
    return made if owner is None or made.names is None else without_empty(made)


def lazy_frames(
    read: Callable[[int], Any], made: LazyClients, columns: Columns, who: Callable[[int], str]
) -> LazyClients:
    """Clients whose frames are made when they are needed, in the form of the first client's."""
    check_clients(columns)
    first = _frames(read(0), who(0))
    reader = TableReader.of_table(table_of(next(iter(first.values()))), columns, who(0), "columns")

    def client(number: int) -> Mapping[str, Examples]:
        frames = _frames(read(number), who(number))
        return {part: reader.encoded(table_of(frame), _path(who(number), part)) for part, frame in frames.items()}

    return replace(
        made, read=client, classes=made.classes or reader.classes or 0, notices=(*made.notices, *reader.notices),
        impute=columns.impute, encoding=reader.encoding, columns=reader.form,
    )  # fmt: skip


def _columns(frame: Any) -> list[str]:
    return list(frame.column_names if hasattr(frame, "column_names") else frame.columns)


def _frames(value: Any, who: str) -> dict[str, Any]:
    found = frames_of(value)
    if found is None:
        raise DataError(f"{who}: got {type(value).__name__}, and the first client has a frame; give all the same form")
    return found


def check_clients(columns: Columns) -> None:
    """Refuse a column of clients in frames that are one client's each: it would take their place."""
    if columns.client is not None:
        raise DataError(
            f"every client has a frame of its own, and columns.client = '{columns.client}' names clients too; leave "
            "the column out (ignore), or give one frame: pandas.concat(frames)"
        )


def check_split(frames: Mapping[str, Any], columns: Columns) -> None:
    """Refuse frames by part beside a column of parts: the two could contradict each other."""
    if columns.split is not None and "" not in frames:
        raise DataError(f"the frames are given by part, and columns.split = '{columns.split}' says parts too; give one")


def _path(name: str, part: str) -> Path:
    return Path(f"{name} [{part}]" if part else name)
