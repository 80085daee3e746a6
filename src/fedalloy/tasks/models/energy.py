"""Classifiers for use as energy models: smooth activations, no batch statistics, a last layer of spectral norm 1."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedalloy.core.registry import register
from fedalloy.tasks.models.convolutional import AsImage, image_shape

_WIDTHS = (64, 128, 256, 512)
_SQUARINGS = 10


class SpectralLinear(nn.Linear):
    """A linear layer whose weight is divided by its largest singular value: a pure function of the weight, so it has no
    buffers and works under ``vmap`` and in CUDA graphs."""

    def forward(self, x: Tensor) -> Tensor:
        """``x W' / s(W) + b``."""
        return functional.linear(x, self.weight / spectral_norm(self.weight), self.bias)


def spectral_norm(weight: Tensor) -> Tensor:
    """The largest singular value of a matrix: the root of ``tr(G^(n+1)) / tr(G^n)`` with ``G = W W'`` (or ``W' W``).

    Ten squarings give n = 1024, so the second singular value has a relative weight of only ``(s2 / s1)^2048``.

    >>> round(float(spectral_norm(torch.diag(torch.tensor([3.0, 2.0, 1.0])))), 4)
    3.0
    """
    gram = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
    tiny = torch.finfo(weight.dtype).tiny
    size = gram.diagonal().sum() + tiny
    unit = gram / size
    power = unit
    for _ in range(_SQUARINGS):
        power = power @ power
        power = power / (power.diagonal().sum() + tiny)
    return ((power * unit.T).sum() * size).clamp(min=tiny).sqrt()


class SmoothBlock(nn.Module):
    """``silu(f(x) + shortcut(x))`` with two 3x3 convolutions and group norms in f."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, width, 3, stride), _norm(width)
        self.conv2, self.norm2 = _conv(width, width, 3, 1), _norm(width)
        changes = stride != 1 or inputs != width
        self.shortcut = nn.Sequential(_conv(inputs, width, 1, stride), _norm(width)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """``[N, inputs, H, W]`` to ``[N, width, H / stride, W / stride]``."""
        inner = self.norm2(self.conv2(functional.silu(self.norm1(self.conv1(x)))))
        kept: Tensor = self.shortcut(x)
        return functional.silu(inner + kept)


@register("model", "resnet10")
def resnet10(input_shape: tuple[int, ...] = (1, 32, 32), classes: int = 10, spectral: bool = True) -> nn.Module:
    """ResNet-10 with GroupNorm and SiLU, no pooling before the last layer, and a spectrally normalised last layer.

    4 979 914 parameters for 10 classes of grey images of 25 to 32 pixels, 4 981 066 for colour.
    """
    shape = image_shape(input_shape)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        image=AsImage(shape), conv=_conv(shape[0], _WIDTHS[0], 3, 1), norm=_norm(_WIDTHS[0]), silu=nn.SiLU()
    )
    before, height, breadth = _WIDTHS[0], *shape[1:]
    for number, width in enumerate(_WIDTHS, start=1):
        stride = 1 if number == 1 else 2
        layers[f"block{number}"] = SmoothBlock(before, width, stride)
        before, height, breadth = width, -(-height // stride), -(-breadth // stride)
    layers.update(last_norm=_norm(before), last_silu=nn.SiLU(), flatten=nn.Flatten())
    layers["head"] = _head(before * height * breadth, classes, spectral)
    return nn.Sequential(layers)


@register("model", "energy_cnn")
def energy_cnn(
    input_shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, width: int = 16, spectral: bool = True
) -> nn.Module:
    """Two 3x3 convolutions with GroupNorm and SiLU (the second halves the image), a spectrally normalised last layer.

    For small images; flat inputs are read as square images.
    """
    shape = image_shape(input_shape)
    left = 2 * width * -(-shape[1] // 2) * -(-shape[2] // 2)
    return nn.Sequential(
        OrderedDict(
            image=AsImage(shape),
            conv1=_conv(shape[0], width, 3, 1),
            norm1=_norm(width),
            silu1=nn.SiLU(),
            conv2=_conv(width, 2 * width, 3, 2),
            norm2=_norm(2 * width),
            silu2=nn.SiLU(),
            flatten=nn.Flatten(),
            head=_head(left, classes, spectral),
        )
    )


@register("model", "energy_mlp")
def energy_mlp(
    inputs: int = 64, classes: int = 10, hidden: tuple[int, ...] = (64, 64), spectral: bool = True
) -> nn.Module:
    """Linear layers with SiLU, the last one spectrally normalised: for rows of a table."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for number, width in enumerate(hidden, start=1):
        layers[f"hidden{number}"], layers[f"silu{number}"] = nn.Linear(inputs, width), nn.SiLU()
        inputs = width
    layers["head"] = _head(inputs, classes, spectral)
    return nn.Sequential(layers)


def _head(inputs: int, classes: int, spectral: bool) -> nn.Module:
    return SpectralLinear(inputs, classes) if spectral else nn.Linear(inputs, classes)


def _conv(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(width // 2, width)
