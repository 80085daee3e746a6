"""Handwritten digits, 8x8 grey values, embedded in scikit-learn: needs no download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
        bunch = third_party("sklearn.datasets", "scikit-learn", "dataset 'digits'").load_digits()
        x = torch.from_numpy(bunch.data).to(torch.float32) / 16
        y = torch.from_numpy(bunch.target).to(torch.int64)
        return Dataset(x if self.flat else x.reshape(-1, 1, 8, 8), y, classes=10)
