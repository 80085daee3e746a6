"""Handwritten digits, 8x8 grey values, included in scikit-learn: needs no download."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader, third_party


@register("dataset", "digits")
@dataclass(frozen=True)
class Digits(DatasetLoader):
    """1797 digits scaled to [0, 1], as 64 numbers or as an image (1, 8, 8)."""

    flat: bool = True

    summary: ClassVar[str] = "1797 handwritten digits of 8x8 pixels, 10 classes, embedded"
    hint: ClassVar[str] = "comes with scikit-learn: pip install scikit-learn"

    def load(self, key: Key) -> Dataset:
        """The digits; nothing is drawn."""
        table = torch.from_numpy(_table())
        x, y = table[:, :-1].to(torch.float32) / 16, table[:, -1].to(torch.int64)
        return Dataset(x if self.flat else x.reshape(-1, 1, 8, 8), y, classes=10, bounds=(0.0, 1.0))


def _table() -> Any:
    """64 grey values and the digit, read directly from scikit-learn's file, because importing the package takes a
    second, longer than training on the data. If the file is elsewhere, the package is imported."""
    found = find_spec("sklearn")
    file = Path(found.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if found else None
    if file is not None and file.is_file():
        with gzip.open(file, "rt") as lines:
            return np.loadtxt(lines, delimiter=",")
    bunch = third_party("sklearn.datasets", "scikit-learn", "dataset 'digits'").load_digits()
    return np.column_stack([bunch.data, bunch.target])
