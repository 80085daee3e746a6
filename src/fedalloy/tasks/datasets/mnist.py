"""MNIST: 60000 training and 10000 test images of 28x28 pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.core.types import Examples
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader
from fedalloy.tasks.datasets.reading import read_npz

Scale = Literal["unit", "standard", "symmetric"]
_CENTRE_AND_SPREAD: dict[str, tuple[float, float]] = {
    "unit": (0.0, 1.0),
    "standard": (0.1307, 0.3081),
    "symmetric": (0.5, 0.5),
}
_SIDE = 28


@register("dataset", "mnist")
@dataclass(frozen=True)
class Mnist(DatasetLoader):
    """MNIST with grey values in [0, 1] (``unit``), [-1, 1] (``symmetric``) or standardised (mean .1307, sd .3081).

    Another ``side`` than 28 resizes once, bilinearly and antialiased (32 in the experiments with synthetic data).
    """

    flat: bool = True
    scale: Scale = "unit"
    side: int = _SIDE

    summary: ClassVar[str] = "70000 handwritten digits of 28x28 pixels, 10 classes, with the usual 10000 for testing"
    files: ClassVar[dict[str, str]] = {
        "mnist_train.npz": "b243a76257a4fc7a4fe28aaf795b97a8161b8cbc16b856d88f03d03d905537d2",
        "mnist_test.npz": "fe03ede69adf7bb5408464916ac4f1d4cd475510fdfb08add4409b34f0a435ec",
    }
    hint: ClassVar[str] = (
        "get it with 'fedalloy data fetch mnist', or make mnist_train.npz and mnist_test.npz from the four IDX "
        "files of MNIST (arrays x: uint8 [N, 28, 28], y: int64 [N], order kept) and put them there"
    )
    prefix: ClassVar[str] = "mnist"

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise SpecError(f"mnist: unknown scale '{self.scale}': {nearest(self.scale, get_args(Scale))}")
        if self.side < 1:
            raise SpecError(f"mnist: side is {self.side}; allowed: 1 or more")

    def load(self, key: Key) -> Dataset:
        """The training images as examples, the 10000 others as global test set; nothing is drawn."""
        train, test = self._read(f"{self.prefix}_train.npz"), self._read(f"{self.prefix}_test.npz")
        centre, spread = _CENTRE_AND_SPREAD[self.scale]
        bounds = ((0 - centre) / spread, (1 - centre) / spread)
        return Dataset(train.x, train.y, classes=10, test=test, bounds=bounds)

    def _read(self, filename: str) -> Examples:
        arrays = read_npz(filename, ("x", "y"), self.hint)
        return Examples(self._scaled(torch.from_numpy(arrays["x"])), torch.from_numpy(arrays["y"]).to(torch.int64))

    def _scaled(self, pixels: Tensor) -> Tensor:
        centre, spread = _CENTRE_AND_SPREAD[self.scale]
        x = grey_images(pixels, self.side)
        x = (x - centre) / spread
        return x.reshape(len(x), -1) if self.flat else x


def grey_images(pixels: Tensor, side: int) -> Tensor:
    """Bytes ``[N, height, width]`` as values in [0, 1], ``[N, 1, side, side]``.

    >>> grey_images(torch.tensor([[[0, 255], [0, 255]]], dtype=torch.uint8), 2)
    tensor([[[[0., 1.],
              [0., 1.]]]])
    """
    x = (pixels.to(torch.float32) / 255).unsqueeze(1)
    if x.shape[-2:] == (side, side):
        return x
    return functional.interpolate(x, (side, side), mode="bilinear", antialias=True)
