"""Raw rows that were in no task, as the model of a task gets them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedalloy.core.errors import DataError, nearest
from fedalloy.core.inputs import Inputs
from fedalloy.tasks.datasets.base import as_pair
from fedalloy.tasks.precision import reading_as
from fedalloy.tasks.preparing import FrameColumns, Preparation
from fedalloy.tasks.sources.columns import UNKNOWN, Table, features_of, text_of
from fedalloy.tasks.sources.frames import is_frame, table_of


def prepare(x: Any, preparation: Preparation, client: int | None = None) -> Inputs:
    """Raw rows, those of ``client`` if it is given, as the model gets them: a frame's columns as numbers, gaps filled,
    features standardised, each if the task does it. Arrays are numbers already, in the order of the features."""
    if is_frame(x) and preparation.columns is not None:
        with reading_as(preparation.precision):
            rows = torch.from_numpy(_encoded(table_of(x), preparation.columns))
        return preparation.apply(rows, client)
    return preparation.apply(tensors_of(x), client)


def tensors_of(x: Any) -> Inputs:
    """Arrays, or mappings or tuples of arrays, as tensors; their numbers are not changed."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Mapping):
        return {name: tensors_of(one) for name, one in x.items()}
    if isinstance(x, tuple) and x and all(isinstance(one, Tensor | np.ndarray) and one.ndim for one in x):
        return tuple(tensors_of(one) for one in x)
    made = np.asarray(x)
    as_pair(made, np.zeros(len(made) if made.ndim else 0), "x")  # refuses text, gaps of masked arrays, complex numbers
    return torch.from_numpy(made.copy())


def _encoded(table: Table, columns: FrameColumns) -> Any:
    where = "the frame"
    for name in columns.features:
        if name not in table:
            raise DataError(f"{where} has no column '{name}', a feature of the task: {nearest(name, table)}")
    for name, known in columns.values.items():
        _check_values(table, name, known)
    return features_of(table, columns, where)


def _check_values(table: Table, name: str, known: tuple[str, ...]) -> None:
    """Refuse values of a category that the task does not know."""
    column = table[name]
    strange = sorted({text_of(value) for value in column.values[~column.gaps]} - {*known})
    if strange:
        raise DataError(f"the frame: column '{name}' has the value '{strange[0]}', the task knows {', '.join(known)}")
    if column.gaps.any() and UNKNOWN not in known:
        raise DataError(f"the frame: values are missing in '{name}', and none were in the task; fill them")
