"""Small convolutional networks."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import ClassVar

from torch import Tensor, nn

from fedalloy.core.errors import SpecError
from fedalloy.core.registry import register


class AsImage(nn.Module):
    """Reshape every example to an image."""

    reads_as_image: ClassVar[bool] = True
    """For engines with kernels for convolutional chains: this is all that the module does."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """``[N, ...]`` to ``[N, channels, height, width]``."""
        return x.reshape(x.shape[0], *self.shape)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"shape={self.shape}"


@register("model", "cnn")
def cnn(input_shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, width: int = 512) -> nn.Module:
    """Two 5x5 convolutions (32 and 64 channels, no padding) with max-pooling and two linear layers.

    582 026 parameters on MNIST: 832 + 51 264 + 524 800 + 5 130. Flat inputs are read as square images.
    """
    shape = image_shape(input_shape)
    height, breadth = (_after_pooling(extent, input_shape) for extent in shape[1:])
    return nn.Sequential(
        OrderedDict(
            image=AsImage(shape),
            conv1=nn.Conv2d(shape[0], 32, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * height * breadth, width),
            relu3=nn.ReLU(),
            output=nn.Linear(width, classes),
        )
    )


def image_shape(input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width of an example that may be flat or lack its channel axis.

    >>> image_shape((784,)), image_shape((8, 8)), image_shape((3, 32, 32))
    ((1, 28, 28), (1, 8, 8), (3, 32, 32))
    """
    if len(input_shape) == 1:
        side = math.isqrt(input_shape[0])
        if side * side == input_shape[0]:
            return 1, side, side
    if len(input_shape) == 2:
        return 1, input_shape[0], input_shape[1]
    if len(input_shape) == 3:
        return input_shape[0], input_shape[1], input_shape[2]
    raise SpecError(
        f"an example of shape {tuple(input_shape)} is no image: allowed are (channels, height, width), "
        "(height, width) or a flat square; use model 'mlp' for other data"
    )


def _after_pooling(extent: int, input_shape: tuple[int, ...]) -> int:
    """The length of a side after convolution, pooling, convolution, pooling."""
    left = ((extent - 4) // 2 - 4) // 2
    if left < 1:
        raise SpecError(
            f"model 'cnn' needs images of at least 16 x 16, the data has {tuple(input_shape)}: use 'mlp' or 'logistic'"
        )
    return left
