"""Convolutional networks without biases, as used in the personalisation experiments.

Each has a ``features`` block and a ``classifier`` block of two or three linear layers, which FedPer and similar methods
keep local or share. Initial weights are Xavier normal (Glorot and Bengio 2010).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.registry import register
from fedalloy.tasks.models.convolutional import AsImage, image_shape

Norm = Literal["batch", "group"]
Layers = OrderedDict[str, nn.Module]
_GROUPS = 8


@register("model", "twocnn")
def twocnn(input_shape: tuple[int, ...] = (3, 28, 28), classes: int = 10, width: int = 200) -> nn.Module:
    """Two 5x5 convolutions (32 and 64 maps) with max-pooling, all padded by 1, and three linear layers.

    722 800 parameters for 28 x 28 colour images (``cifar10`` with ``side = 28``): 2 400 + 51 200 + 627 200 + 40 000 +
    2 000.
    """
    shape = image_shape(input_shape)
    features: Layers = OrderedDict(image=AsImage(shape))
    for number, (before, after) in enumerate(pairwise((shape[0], 32, 64)), start=1):
        features[f"conv{number}"] = _conv(before, after, 5, padding=1)
        features[f"relu{number}"] = nn.ReLU()
        features[f"pool{number}"] = nn.MaxPool2d(2, padding=1)
    height, breadth = (_after(extent, 2, lambda side: (side - 2) // 2 + 1, "twocnn", shape) for extent in shape[1:])
    features["flatten"] = nn.Flatten()
    return _network(features, OrderedDict(), (64 * height * breadth, width, width, classes))


@register("model", "vgg9")
def vgg9(input_shape: tuple[int, ...] = (1, 28, 28), classes: int = 62) -> nn.Module:
    """Six 3x3 convolutions (16 to 512 maps, doubled each time), four max-poolings, two linear layers.

    1 718 416 parameters for 62 classes of 28 x 28 grey images: 1 571 472 + 131 072 + 15 872.
    """
    shape = image_shape(input_shape)
    features: Layers = OrderedDict(image=AsImage(shape))
    for number, (before, after) in enumerate(pairwise((shape[0], 16, 32, 64, 128, 256, 512)), start=1):
        features[f"conv{number}"] = _conv(before, after, 3, padding=1)
        features[f"relu{number}"] = nn.ReLU()
        if number in (1, 2, 4, 6):
            features[f"pool{number}"] = nn.MaxPool2d(2)
    height, breadth = (_after(extent, 4, lambda side: side // 2, "vgg9", shape) for extent in shape[1:])
    features["flatten"] = nn.Flatten()
    return _network(features, OrderedDict(), (512 * height * breadth, 256, classes))


class ProjectedBlock(nn.Module):
    """``relu(f(x) + shortcut(x))`` with two 3x3 convolutions in f; the shortcut is a 1x1 convolution if the shape
    changes, else the identity."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, width, 3, stride, padding=1), _norm(width, norm)
        self.conv2, self.norm2 = _conv(width, width, 3, padding=1), _norm(width, norm)
        same = stride == 1 and inputs == width
        project = OrderedDict[str, nn.Module](conv=_conv(inputs, width, 1, stride), norm=_norm(width, norm))
        self.shortcut = nn.Identity() if same else nn.Sequential(project)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, inputs, H, W]`` to ``[N, width, H / stride, W / stride]``."""
        inner = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(inner + self.shortcut(x))


@register("model", "resnet9")
def resnet9(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 100, norm: Norm = "batch") -> nn.Module:
    """A strided convolution, max-pooling, four residual blocks (64 to 512 maps) and two linear layers.

    5 054 784 parameters for 100 classes of colour images, 5 031 744 for 10. ``norm = "batch"`` is BatchNorm without
    running statistics: a client is scored with the statistics of its own test part. ``"group"`` (8 groups) normalises
    each example by itself and has the same number of parameters. The first block has a shortcut, which the public code
    omits.
    """
    _check_norm("resnet9", norm)
    shape = image_shape(input_shape)
    features = _entry(shape, 64, norm)
    features["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    for number, (before, after, stride) in enumerate(
        ((64, 64, 1), (64, 128, 1), (128, 256, 2), (256, 512, 2)), start=1
    ):
        features[f"block{number}"] = ProjectedBlock(before, after, stride, norm)
    return _network(features, _pooled(), (512, 256, classes))


@register("model", "mobilenet")
def mobilenet(input_shape: tuple[int, ...] = (3, 64, 64), classes: int = 200, norm: Norm = "batch") -> nn.Module:
    """A strided convolution, four depthwise separable convolutions and two linear layers.

    364 480 parameters for 200 classes of colour images. The depthwise convolutions are not padded, so images must
    be at least 33 x 33. ``norm`` as in ``resnet9``.
    """
    _check_norm("mobilenet", norm)
    shape = image_shape(input_shape)
    if min(shape[1:]) < 33:
        raise SpecError(f"model 'mobilenet' needs images of at least 33 x 33, the data has {shape}: use 'resnet9'")
    features = _entry(shape, 32, norm)
    for number, (before, after, stride) in enumerate(
        ((32, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 1)), start=1
    ):
        inner: Layers = OrderedDict(
            depthwise=_conv(before, before, 3, stride, groups=before), norm1=_norm(before, norm), relu1=nn.ReLU()
        )
        inner.update(pointwise=_conv(before, after, 1), norm2=_norm(after, norm), relu2=nn.ReLU())
        features[f"block{number}"] = nn.Sequential(inner)
    return _network(features, _pooled(), (512, 256, classes))


def _after(extent: int, poolings: int, once: Callable[[int], int], model: str, shape: tuple[int, int, int]) -> int:
    """The length of a side after all poolings (and the convolutions before them)."""
    for _ in range(poolings):
        extent = once(extent)
    if extent < 1:
        raise SpecError(f"model '{model}' cannot take images of shape {shape}: they are too small; use 'mlp'")
    return extent


def _entry(shape: tuple[int, int, int], width: int, norm: Norm) -> Layers:
    """The first convolution, which halves the image."""
    conv = _conv(shape[0], width, 3, stride=2, padding=1)
    return OrderedDict(image=AsImage(shape), conv=conv, norm=_norm(width, norm), relu=nn.ReLU())


def _pooled() -> Layers:
    return OrderedDict(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())


def _network(features: Layers, before: Layers, widths: tuple[int, ...]) -> nn.Module:
    """The two blocks; the classifier is a chain of linear layers of these widths."""
    classifier: Layers = OrderedDict(before)
    for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        last = number == len(widths) - 1
        linear = nn.Linear(inputs, outputs, bias=False)
        nn.init.xavier_normal_(linear.weight)
        classifier["output" if last else f"hidden{number}"] = linear
        if not last:
            classifier[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(OrderedDict(features=nn.Sequential(features), classifier=nn.Sequential(classifier)))


def _conv(inputs: int, outputs: int, side: int, stride: int = 1, padding: int = 0, groups: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, side, stride=stride, padding=padding, groups=groups, bias=False)
    nn.init.xavier_normal_(conv.weight)
    return conv


def _norm(width: int, norm: Norm) -> nn.Module:
    if norm == "group":
        return nn.GroupNorm(_GROUPS, width)
    return nn.BatchNorm2d(width, track_running_stats=False)


def _check_norm(model: str, norm: str) -> None:
    if norm not in get_args(Norm):
        raise SpecError(f"model '{model}' with norm '{norm}': {nearest(str(norm), get_args(Norm))}")
