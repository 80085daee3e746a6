"""Convolutions of many clients, each with its own weights: as Triton kernels where these can run, else in plain torch.

Images are ``[C, B, height, width, channels]``, or examples of a pool whose channels come first; gradients of results
``[C, B * patches, outputs]``; weights ``[C, outputs, inputs]``, with the zeros of :class:`ProductStage` at the end.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from fedalloy.engines.kernels.between_products import applied, enter, largest, patches, undo_all, unpatched
from fedalloy.engines.kernels.conv_chain import Op, ProductStage
from fedalloy.engines.precision import Precision

ACTIVATIONS = ("relu", "tanh", "sigmoid")


@dataclass(frozen=True)
class DrawnImages:
    """The examples ``rows`` (``[C, B]``) of a pool; ``dtype`` is that of products."""

    pool: Tensor
    rows: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class After:
    """What a kernel does with the results before it stores them: bias, activation, pooling over windows of 2 x 2."""

    bias: Tensor | None = None
    activation: str = ""
    pools: bool = False


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on this device: a GPU, or Triton's interpreter."""
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and find_spec("triton") is not None


def wide(value: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def rounded(value: Tensor, precision: Precision) -> Tensor:
    """The nearest numbers with the ten bits of tf32, which matrix units would cut off; see ``conv_triton._rounded``.
    Another precision changes nothing.

    >>> rounded(torch.tensor([1 + 2**-11 + 2**-20, -1 - 2**-12, float("nan")]), "tf32").tolist()
    [1.0009765625, -1.0, nan]
    """
    if precision != "tf32" or value.dtype != torch.float32:
        return value
    if has_kernels(value.device):
        from fedalloy.engines.kernels.on_gpu import conv_launch

        return conv_launch.rounded(value, precision)
    return nearest(value)


def nearest(value: Tensor) -> Tensor:
    """``rounded`` to tf32 in plain torch, which a compiler joins to what is around; other dtypes are left."""
    if value.dtype != torch.float32:
        return value
    bits = (value.view(torch.int32) + 0x1000) & -0x2000
    return torch.where(value == value, bits.view(torch.float32), value)


def convolve(
    stage: ProductStage,
    images: Tensor | DrawnImages,
    weight: Tensor,
    after: After,
    precision: Precision,
    *,
    loads: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The results as images, and with pooling which number of every window is the largest. In tf32 images are expected
    to be rounded, as those that kernels make are, unless ``loads`` rounds what is read."""
    if not has_kernels(weight.device):
        return _plain_convolve(stage, images, weight, after)
    weight = weight if loads else rounded(weight, precision)
    from fedalloy.engines.kernels.on_gpu import conv_launch

    return conv_launch.convolve(stage, images, weight, after, precision, loads=loads)


def by_input(
    stage: ProductStage,
    batch: int,
    grad: Tensor,
    weight: Tensor,
    precision: Precision,
    before: Tensor | None,
    activation: str,
) -> Tensor:
    """The gradient of the images; with an activation ``activation`` that of its input, ``before`` being its result."""
    if has_kernels(weight.device):
        given = stage, batch, grad, rounded(turned(stage, weight), precision)
        from fedalloy.engines.kernels.on_gpu import conv_launch

        return conv_launch.by_input(*given, precision, before, activation, loads=False)
    assert stage.reads is not None
    found = unpatched(torch.bmm(grad, weight.to(grad.dtype)), stage, batch, stage.reads)
    if not activation:
        return found.contiguous()
    assert before is not None
    return undo_all([Op(activation)], [before, before.reshape(found.shape)], found).contiguous()


def turned(stage: ProductStage, weight: Tensor) -> Tensor:
    """The weights as ``[C, taps, inputs, outputs]``: what is added up for the gradient of images are neighbours."""
    assert stage.reads is not None
    taps: Tensor = weight[:, :, : stage.inputs].unflatten(2, (-1, stage.reads[2]))
    return taps.permute(0, 2, 3, 1).contiguous()


def by_turned(stage: ProductStage, batch: int, grad: Tensor, weight: Tensor, precision: Precision) -> Tensor:
    """``by_input`` for weights that are turned; what is read is rounded."""
    if has_kernels(weight.device):
        from fedalloy.engines.kernels.on_gpu import conv_launch

        return conv_launch.by_input(stage, batch, grad, weight, precision, None, "", loads=True)
    rows = functional.pad(weight.permute(0, 3, 1, 2).flatten(2), (0, stage.extra))
    return by_input(stage, batch, grad, rows, precision, None, "")


def by_weight(
    stage: ProductStage, images: Tensor | DrawnImages, grad: Tensor, precision: Precision, *, loads: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of weights and biases, in the precision of weights."""
    weight = grad.new_zeros(len(grad), grad.shape[2], stage.inputs + stage.extra, dtype=wide(grad))
    bias = grad.new_zeros(len(grad), grad.shape[2], dtype=wide(grad))
    if has_kernels(grad.device):
        from fedalloy.engines.kernels.on_gpu import conv_launch

        conv_launch.by_weight(stage, images, grad, weight, bias, precision, into=False, loads=loads)
        return weight, bias
    cut = _patches(stage, images).to(wide(grad))
    return torch.bmm(grad.to(wide(grad)).transpose(1, 2), cut), grad.sum(1, dtype=wide(grad))


def into_weight(
    stage: ProductStage,
    images: Tensor | DrawnImages,
    grad: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    precision: Precision,
) -> None:
    """Subtract the gradients from weights and biases."""
    if has_kernels(weight.device):
        from fedalloy.engines.kernels.on_gpu import conv_launch

        conv_launch.by_weight(stage, images, grad, weight, bias, precision, into=True, loads=False)
        return
    weight.baddbmm_(grad.to(weight.dtype).transpose(1, 2), _patches(stage, images).to(weight.dtype), alpha=-1)
    if bias is not None:
        bias.sub_(grad.sum(1, dtype=bias.dtype))


def unpool(
    stage: ProductStage, grad: Tensor, pooled: Tensor, chosen: Tensor, activation: str, precision: Precision
) -> Tensor:
    """The gradient of a convolution's results from that of its pooled activations."""
    clients, batch = grad.shape[:2]
    height, width, channels = stage.shape
    if has_kernels(grad.device):
        from fedalloy.engines.kernels.on_gpu import conv_launch

        return conv_launch.unpool(stage, grad, pooled, chosen, activation, precision)
    windows = undo_all([Op(activation)] if activation else [], [pooled, pooled], grad)[:, :, :, None, :, None]
    place = torch.arange(4, dtype=torch.int8, device=grad.device).reshape(2, 1, 2, 1)
    spread = torch.where(chosen[:, :, :, None, :, None] == place, windows, torch.zeros_like(windows))
    return spread.reshape(clients, batch * height * width, channels)


def nearly_exact(value: Tensor) -> str:
    """The precision of products that are nearly those of float32 on matrix units; float64 keeps its own."""
    return "tf32x3" if value.dtype == torch.float32 else "float32"


def inner_products(one: Tensor, other: Tensor, precision: str) -> Tensor:
    """Those of all rows of two matrices of every client, ``[C, i, n]`` and ``[C, j, n]``, where n is large."""
    if has_kernels(one.device):
        from fedalloy.engines.kernels.on_gpu import conv_launch

        return conv_launch.inner_products(one, other, precision)
    return torch.bmm(one, other.transpose(1, 2)).to(wide(one))


def subtract_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``out -= left @ right`` for every client, nearly exactly, where ``out`` has long rows."""
    if has_kernels(out.device):
        from fedalloy.engines.kernels.on_gpu import conv_launch

        conv_launch.subtract_product(left, right, out)
    else:
        out.sub_(torch.bmm(left, right.to(left.dtype)))


def _plain_convolve(
    stage: ProductStage, images: Tensor | DrawnImages, weight: Tensor, after: After
) -> tuple[Tensor, Tensor | None]:
    cut = _patches(stage, images)
    out = torch.bmm(cut, weight.to(cut.dtype).transpose(1, 2))
    if after.bias is not None:
        out = (out + after.bias.unsqueeze(1)).to(out.dtype)
    value = out.reshape(len(out), -1, *stage.shape)
    if after.activation:
        value = applied(Op(after.activation), value)
    return largest(Op("maxpool", (2, 2)), value) if after.pools else (value, None)


def _patches(stage: ProductStage, images: Tensor | DrawnImages) -> Tensor:
    if isinstance(images, DrawnImages):
        return enter(stage, images.pool, images.rows, images.dtype)
    return patches(images, stage)
