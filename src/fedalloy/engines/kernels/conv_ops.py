"""Convolutions of many clients as operations of torch's own kind, so that traced and compiled steps contain them.

Images are ``[C, B, height, width, channels]`` and contiguous, weights ``[C, outputs, tall, wide, channels]``, for the
gradient of images ``[C, tall, wide, channels, outputs]``. The
functions below take and return the layout of ``torch.conv2d``; what changes the layout is in the graph, where a
compiler joins it to the layers around.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from fedalloy.engines.kernels import client_conv
from fedalloy.engines.kernels.client_conv import After, has_kernels
from fedalloy.engines.kernels.conv_chain import ProductStage, Window
from fedalloy.engines.precision import Precision

Pair = tuple[int, int]


def precision_of(x: Tensor) -> Precision:
    """That of products as torch is set at the moment."""
    if torch.is_autocast_enabled(x.device.type):
        return "bf16"
    return "tf32" if x.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "float32"


def suit(x: Tensor) -> bool:
    """Whether these operations are faster than torch's: on a GPU, except in float32. In float64 they are compared."""
    return has_kernels(x.device) and (x.dtype == torch.float64 or precision_of(x) != "float32")


def forward(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """``[C, B, in, H, W]`` and ``[C, out, in, h, w]`` to ``[C, B, out, H', W']``."""
    precision = precision_of(x)
    images, weights = _ready(x, precision), _ready(weight, precision)
    return _channels_first(_convolve(images, weights, stride, padding, precision))


def by_weight(grad: Tensor, x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The gradient of the weights."""
    precision = precision_of(x)
    found = _by_weight(_ready(x, precision), _ready(grad, precision), kernel, stride, padding, precision)
    return _channels_first(found).to(x.dtype)


def by_input(grad: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The gradient of the images."""
    precision = precision_of(grad)
    turned = _as_factor(weight.permute(0, 3, 4, 2, 1), precision)
    found = _by_input(_ready(grad, precision), turned, size, stride, padding, precision)
    return _channels_first(found)


def _ready(value: Tensor, precision: Precision) -> Tensor:
    """As a factor of a product, with channels last."""
    return _as_factor(value.permute(0, 1, 3, 4, 2), precision)


def _as_factor(value: Tensor, precision: Precision) -> Tensor:
    """Contiguous, and in bf16 if products are; kernels round to tf32 themselves."""
    return (value.to(torch.bfloat16) if precision == "bf16" else value).contiguous()


def _channels_first(images: Tensor) -> Tensor:
    return images.permute(0, 1, 4, 2, 3)


@torch.library.custom_op("fedalloy::client_convolve", mutates_args=())
def _convolve(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], precision: str) -> Tensor:
    stage = _stage(x.shape[2:], weight.shape[1], weight.shape[2:4], stride, padding)
    out, _ = client_conv.convolve(stage, x, _rows(weight, stage), After(), cast(Precision, precision), loads=True)
    return out


@_convolve.register_fake
def _(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], precision: str) -> Tensor:
    stage = _stage(x.shape[2:], weight.shape[1], weight.shape[2:4], stride, padding)
    return x.new_empty(*x.shape[:2], *stage.shape)


@torch.library.custom_op("fedalloy::client_by_weight", mutates_args=())
def _by_weight(
    x: Tensor, grad: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], precision: str
) -> Tensor:
    stage = _stage(x.shape[2:], grad.shape[4], kernel, stride, padding)
    found, _ = client_conv.by_weight(stage, x, grad.flatten(1, 3).contiguous(), cast(Precision, precision), loads=True)
    return found[:, :, : stage.inputs].reshape(len(x), grad.shape[4], *kernel, x.shape[4]).contiguous()


@_by_weight.register_fake
def _(
    x: Tensor, grad: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], precision: str
) -> Tensor:
    return x.new_empty(len(x), grad.shape[4], *kernel, x.shape[4], dtype=client_conv.wide(x))


@torch.library.custom_op("fedalloy::client_by_input", mutates_args=())
def _by_input(
    grad: Tensor, turned: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], precision: str
) -> Tensor:
    stage = _stage([*size, turned.shape[3]], turned.shape[4], turned.shape[1:3], stride, padding)
    given = grad.shape[1], grad.flatten(1, 3).contiguous(), turned.flatten(1, 2).contiguous()
    return client_conv.by_turned(stage, *given, cast(Precision, precision))


@_by_input.register_fake
def _(
    grad: Tensor, turned: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], precision: str
) -> Tensor:
    return grad.new_empty(*grad.shape[:2], *size, turned.shape[3])


def _stage(
    reads: Sequence[int], outputs: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> ProductStage:
    down, right, *_ = stride
    window = Window((kernel[0], kernel[1]), (down, right), (padding[0], padding[1]))
    image = reads[0], reads[1], reads[2]
    return ProductStage("", None, (*window.over(image), outputs), image, window, None)


def _rows(weight: Tensor, stage: ProductStage) -> Tensor:
    """The weights as the rows of products, with the zeros at the end that stored patches have."""
    rows = weight.flatten(2)
    return functional.pad(rows, (0, stage.extra)) if stage.extra else rows.contiguous()
