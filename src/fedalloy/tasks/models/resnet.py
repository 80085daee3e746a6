"""Residual networks for small images: ResNet-20 and ResNet-32 (He et al. 2016, arXiv 1512.03385)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.registry import register
from fedalloy.tasks.models.convolutional import AsImage, image_shape

Norm = Literal["batch", "group"]
_WIDTHS = (16, 32, 64)
_GROUPS = 8


class ResidualBlock(nn.Module):
    """``relu(f(x) + shortcut(x))`` with two 3x3 convolutions in f.

    The shortcut has no parameters (option A): where the block halves the image, it takes every second pixel and
    fills the new channels with zeros.
    """

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, stride)
        self.norm1 = _norm(width, norm)
        self.conv2 = _conv(width, width)
        self.norm2 = _norm(width, norm)
        self.stride, self.new = stride, width - inputs

    def forward(self, x: Tensor) -> Tensor:
        """``[N, inputs, H, W]`` to ``[N, width, H / stride, W / stride]``."""
        inner = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        kept = x[:, :, :: self.stride, :: self.stride]
        shortcut = functional.pad(kept, (0, 0, 0, 0, self.new // 2, self.new - self.new // 2))
        return functional.relu(inner + shortcut)


@register("model", "resnet20")
def resnet20(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, norm: Norm = "batch") -> nn.Module:
    """ResNet-20 with option-A shortcuts: 269 722 parameters for 10 classes of colour images, 275 572 for 100.

    The last layer is ``head``: ``trainable = ["head.*"]`` freezes the rest. ``norm = "group"`` (8 groups) has the
    same number of parameters, no running statistics, and runs with padded batches on every engine.
    """
    return _resnet(3, input_shape, classes, norm)


@register("model", "resnet32")
def resnet32(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, norm: Norm = "batch") -> nn.Module:
    """ResNet-32 with option-A shortcuts: 464 154 parameters for 10 classes of colour images, 470 004 for 100."""
    return _resnet(5, input_shape, classes, norm)


def _resnet(blocks: int, input_shape: tuple[int, ...], classes: int, norm: Norm) -> nn.Module:
    """Three stages of ``blocks`` blocks each: ``6 * blocks + 2`` layers."""
    if norm not in get_args(Norm):
        raise SpecError(f"a residual network with norm '{norm}': {nearest(str(norm), get_args(Norm))}")
    shape = image_shape(input_shape)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        image=AsImage(shape), conv=_conv(shape[0], _WIDTHS[0]), norm=_norm(_WIDTHS[0], norm), relu=nn.ReLU()
    )
    before = _WIDTHS[0]
    for number, width in enumerate(_WIDTHS, start=1):
        first = ResidualBlock(before, width, 1 if number == 1 else 2, norm)
        layers[f"stage{number}"] = nn.Sequential(
            first, *(ResidualBlock(width, width, 1, norm) for _ in range(blocks - 1))
        )
        before = width
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), head=nn.Linear(before, classes))
    return nn.Sequential(layers)


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _norm(width: int, norm: Norm) -> nn.Module:
    return nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(_GROUPS, width)
