"""Heart disease (UCI): from the four centres' ``processed.*.data`` files to both published ways of preparing them."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from fedalloy.core.errors import DataError
from fedalloy.tasks.datasets.heart import CENTRES
from fedalloy.tasks.unpacking import Originals, base_name

Arrays = dict[str, NDArray[Any]]
_COLUMNS = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
"""The features of both, in the order of the files; three more columns of theirs, mostly missing, are not used."""
_PLAIN = tuple(name for name in _COLUMNS if name not in ("cp", "restecg"))
_COUNT = 14
_DISEASE = 13
_LEVELS = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2)}
_WHOLE = ("cp", "restecg", "exang")
"""Columns whose filled values are cut to whole numbers, as in the published code."""


def convert_heart(originals: Originals) -> dict[str, Arrays]:
    """The files ``heart_aaggff.npz`` and ``heart_flamby.npz``."""
    centres = _centres(originals)
    return {"heart_aaggff.npz": _aaggff(centres), "heart_flamby.npz": _flamby(centres)}


def _centres(originals: Originals) -> list[NDArray[Any]]:
    """The tables of the centres, missing values as NaN."""
    wanted = {f"processed.{centre}.data": centre for centre in CENTRES}
    found: dict[str, bytes] = {}
    for path in originals.files.values():
        found |= {wanted[name]: content for name, content in _contents(originals, path, wanted).items()}
    missing = [name for name, centre in wanted.items() if centre not in found]
    if missing:
        raise DataError(f"heart: {', '.join(missing)} is missing; give the zip archive of UCI, or all four files")
    return [_table(found[centre], centre) for centre in CENTRES]


def _contents(originals: Originals, path: Path, wanted: Mapping[str, str]) -> dict[str, bytes]:
    if path.name in wanted:
        return {path.name: originals.content(path)}
    return {base_name(name): text for name, text in originals.archived(path, lambda name: base_name(name) in wanted)}


def _table(content: bytes, centre: str) -> NDArray[Any]:
    rows = [row for row in csv.reader(io.StringIO(content.decode("ascii"))) if row]
    if not rows or any(len(row) != _COUNT for row in rows):
        raise DataError(f"heart: processed.{centre}.data must have {_COUNT} columns in every line")
    return np.array([[np.nan if cell.strip() == "?" else float(cell) for cell in row] for row in rows])


def _aaggff(centres: list[NDArray[Any]]) -> Arrays:
    """All patients; missing values are the mean of the centre, categories have a column for each value."""
    rows = np.concatenate([_filled(table[:, : len(_COLUMNS)]) for table in centres])
    levels = {f"{name}_{level}": (name, level) for name, some in _LEVELS.items() for level in some}
    return _arrays(rows, centres, levels)


def _filled(rows: NDArray[Any]) -> NDArray[Any]:
    rows = np.where(np.isnan(rows), np.nanmean(rows, 0), rows)
    whole = [_COLUMNS.index(name) for name in _WHOLE]
    rows[:, whole] = np.trunc(rows[:, whole])
    return rows


def _flamby(centres: list[NDArray[Any]]) -> Arrays:
    """Patients without missing values, categories without a column for the first value, with FLamby's split."""
    kept = [table[~np.isnan(table[:, : len(_COLUMNS)]).any(1)] for table in centres]
    if not all(len(table) > 1 for table in kept):
        raise DataError("heart: a centre has fewer than two patients without missing values; is the file whole?")
    rows = np.concatenate([table[:, : len(_COLUMNS)] for table in kept])
    levels = {f"{name}_{level}.0": (name, level) for name, some in _LEVELS.items() for level in some[1:]}
    made = _arrays(rows, kept, levels)
    feature = made.pop("feature")
    is_train = np.concatenate([_is_train(table[:, _DISEASE] > 0) for table in kept])
    return {**made, "is_train": is_train, "feature": feature}


def _is_train(ill: NDArray[Any]) -> NDArray[Any]:
    """Two thirds of a centre, drawn as FLamby does: seed 43, the same share of ill patients where there are enough."""
    even = len({*ill.tolist()}) > 1 and all((ill == one).sum() > 2 for one in (False, True))
    train, _ = train_test_split(
        np.arange(len(ill)), test_size=1 - 0.66, train_size=0.66, random_state=43, stratify=ill if even else None
    )
    chosen = np.zeros(len(ill), dtype=bool)
    chosen[train] = True
    return chosen


def _arrays(rows: NDArray[Any], centres: list[NDArray[Any]], levels: Mapping[str, tuple[str, int]]) -> Arrays:
    plain = rows[:, [_COLUMNS.index(name) for name in _PLAIN]]
    flags = np.stack([rows[:, _COLUMNS.index(name)] == level for name, level in levels.values()], axis=1)
    return {
        # by columns, so that the file is byte for byte the one with which recipes were checked
        "x": np.asfortranarray(np.concatenate([plain, flags], axis=1), np.float32),
        "y": np.concatenate([table[:, _DISEASE] > 0 for table in centres]).astype(np.int64),
        "client": np.repeat(np.arange(len(centres)), [len(table) for table in centres]),
        "feature": np.array([*_PLAIN, *levels]),
    }
