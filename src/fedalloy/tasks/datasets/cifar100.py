"""CIFAR-100: small colour images of 100 kinds of things."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor

from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.datasets.cifar10 import BOUNDS, Cifar10, read_whole

_FILE = "cifar100.npz"


@register("dataset", "cifar100")
@dataclass(frozen=True)
class Cifar100(Cifar10):
    """A hundred kinds of things in colour, ``[3, side, side]``, with the options of ``cifar10``; all 60000 images."""

    summary: ClassVar[str] = "60000 colour images of 32x32 pixels, 100 classes, 10000 of them for testing"
    files: ClassVar[dict[str, str]] = {_FILE: ""}
    hint: ClassVar[str] = (
        "get it with 'fedalloy data fetch cifar100', or make it from CIFAR-100: x_train and x_test uint8 [N, 3, "
        "32, 32], y_train and y_test int64 (0-99, the fine labels), in their order"
    )

    def load(self, key: Key) -> Dataset:
        """The training images as examples, the others as global test set; nothing is drawn."""
        train, test = read_whole(_FILE, self.hint, self._scaled)
        return Dataset(train.x, cast(Tensor, train.y), 100, test=test, bounds=BOUNDS[self.scale])
