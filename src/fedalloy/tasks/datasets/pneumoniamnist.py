"""PneumoniaMNIST (MedMNIST, Yang et al. 2023): chest X-rays of children, normal or pneumonia."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from numpy.typing import NDArray

from fedalloy.core.errors import DataError, SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.core.types import Examples
from fedalloy.tasks.datasets.base import Dataset, DatasetDefaults, DatasetLoader
from fedalloy.tasks.datasets.mnist import grey_images
from fedalloy.tasks.datasets.reading import read_npz

Scale = Literal["unit", "symmetric"]
_FILE = "pneumoniamnist.npz"
_OURS = ("x_train", "y_train", "x_test", "y_test")
_PUBLISHED = ("train_images", "train_labels", "test_images", "test_labels")


@register("dataset", "pneumoniamnist")
@dataclass(frozen=True)
class PneumoniaMnist(DatasetLoader):
    """Grey X-rays ``[1, side, side]`` in [0, 1] (``unit``) or [-1, 1] (``symmetric``): 0 normal, 1 pneumonia.

    Reads the arrays under the names that MedMNIST publishes (``train_images``, ``train_labels``, ...) or as
    ``x_train``, ``y_train``, ...; the 524 images of the published validation part are not used. Three quarters of the
    training images show pneumonia.
    """

    flat: bool = False
    scale: Scale = "unit"
    side: int = 28

    summary: ClassVar[str] = "5332 chest X-rays of 28x28 pixels, 2 classes, 624 of them for testing"
    files: ClassVar[dict[str, str]] = {_FILE: "0918f8a625ad731cea91b0994bfe4d0b997c9f162a31e158dfcd9b07049a7771"}
    hint: ClassVar[str] = (
        "put MedMNIST's pneumoniamnist.npz there: `pip install medmnist`, then "
        "`python -m medmnist download --flag=pneumoniamnist`, or take the file of that name from MedMNIST's Zenodo "
        "record (a checksum other than ours only means that the arrays are in another order)"
    )
    defaults: ClassVar[DatasetDefaults] = DatasetDefaults(metrics=("accuracy", "auroc", "loss"))

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise SpecError(f"pneumoniamnist: unknown scale '{self.scale}': {nearest(self.scale, get_args(Scale))}")
        if self.side < 1:
            raise SpecError(f"pneumoniamnist: side is {self.side}; allowed: 1 or more")

    def load(self, key: Key) -> Dataset:
        """The training images as examples, the 624 for testing as global test set; nothing is drawn."""
        x_train, y_train, x_test, y_test = _arrays(self.hint)
        train, test = self._examples(x_train, y_train), self._examples(x_test, y_test)
        bounds = (0.0, 1.0) if self.scale == "unit" else (-1.0, 1.0)
        return Dataset(train.x, train.y, classes=2, test=test, bounds=bounds)

    def _examples(self, pixels: NDArray[Any], labels: NDArray[Any]) -> Examples:
        x = grey_images(torch.from_numpy(pixels), self.side)
        x = x if self.scale == "unit" else 2 * x - 1
        y = torch.from_numpy(labels).to(torch.int64).reshape(-1)
        return Examples(x.reshape(len(x), -1) if self.flat else x, y)


def _arrays(hint: str) -> list[NDArray[Any]]:
    """Training and test arrays, by either naming scheme."""
    try:
        arrays = read_npz(_FILE, _OURS, hint)
    except DataError:
        arrays = read_npz(_FILE, _PUBLISHED, hint)
    return list(arrays.values())
