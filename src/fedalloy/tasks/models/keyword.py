"""A small convolutional network for log-mel energies."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from fedalloy.core.registry import register
from fedalloy.tasks.models.convolutional import AsImage, image_shape

_GROUPS = 4


class OverTime(nn.Module):
    """The mean over time of every channel and frequency, because a word may be said early or late."""

    def forward(self, x: Tensor) -> Tensor:
        """``[N, channels, time, bands]`` to ``[N, channels * bands]``."""
        return x.mean(2).flatten(1)


@register("model", "keyword_cnn")
def keyword_cnn(
    input_shape: tuple[int, ...] = (1, 49, 40), classes: int = 12, widths: tuple[int, int, int] = (16, 32, 64)
) -> nn.Module:
    """Three strided convolutions with GroupNorm, the mean over time, and a linear ``head``.

    27 628 parameters for 12 words from 49 frames of 40 mel bands: 448 + 4 704 + 18 624 + 3 852, the first
    three including the scales and shifts of their GroupNorm.
    """
    channels, _, bands = image_shape(input_shape)
    layers: OrderedDict[str, nn.Module] = OrderedDict(image=AsImage(image_shape(input_shape)))
    for number, width in enumerate(widths, start=1):
        kernel = 5 if number == 1 else 3
        layers[f"conv{number}"] = nn.Conv2d(channels, width, kernel, stride=2, padding=kernel // 2)
        layers[f"norm{number}"] = nn.GroupNorm(_GROUPS, width)
        layers[f"relu{number}"] = nn.ReLU()
        channels, bands = width, (bands + 1) // 2
    layers.update(pool=OverTime(), head=nn.Linear(channels * bands, classes))
    return nn.Sequential(layers)
