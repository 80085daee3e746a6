"""Convolutions of many clients on a GPU: as one matrix product or as one grouped convolution, whichever is faster.

``vmap`` of a convolution over clients is a grouped convolution. For some shapes (few input channels, more outputs than
inputs, backward with a stride) its kernels run one client after another, and a batched product of unfolded columns is
faster. ``Convolve`` works on a stack of clients and defines its own ``vmap``. It does not use
``torch.nn.functional.unfold``, which launches one kernel per image: that takes longer than everything else together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedalloy.engines.kernels import conv_ops

Pair = tuple[int, int]
FEW_CHANNELS = 8
"""With fewer input channels (colour images) grouped kernels are slow both forward and backward."""


class ConvolutionsAsProducts(TorchFunctionMode):
    """While active, 2-d convolutions of any module without groups or dilation run through ``Convolve``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace the convolutions that ``Convolve`` supports and call everything else unchanged."""
        if func is torch.conv2d and not kwargs and _known(*args):
            return convolve(*args[:5])
        return func(*args, **(kwargs or {}))


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0) -> Tensor:
    """``conv2d`` without groups or dilation.

    >>> x, w = torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3)
    >>> bool((convolve(x, w) == torch.conv2d(x, w)).all())
    True
    """
    out: Tensor = Convolve.apply(x, weight, _pair(stride), _pair(padding))  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias.reshape(-1, 1, 1)


class Convolve(torch.autograd.Function):
    """``[B, in, H, W]`` and ``[out, in, h, w]`` to ``[B, out, H', W']``; under vmap for all clients at once."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        """One client: a stack of one."""
        return _forward(x.unsqueeze(0), weight.unsqueeze(0), stride, padding).squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save images, not their columns, which are nine times larger with 3x3 kernels: backward makes them again."""
        x, weight, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """The gradients with respect to the images and the weights, each only if it is needed."""
        x, weight = ctx.saved_tensors
        by_weight = by_input = None
        if ctx.needs_input_grad[1]:  # not in Langevin steps, which need only the gradient of the images
            by_weight = ByWeight.apply(out_grad, x, weight.shape[-2:], ctx.stride, ctx.padding)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[0]:
            by_input = ByInput.apply(out_grad, weight, x.shape[-2:], ctx.stride, ctx.padding)  # type: ignore[no-untyped-call]
        return by_input, by_weight, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, int]:
        """All clients at once; with weights that they share, as one batch."""
        if dims[1] is None:
            return _shared_forward(x.movedim(dims[0], 0), weight, *rest), 0
        return _forward(_front(x, dims[0], info), _front(weight, dims[1], info), *rest), 0


class ByWeight(torch.autograd.Function):
    """The gradient of a convolution with respect to its weights."""

    @staticmethod
    def forward(out_grad: Tensor, x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
        """One client: a stack of one."""
        return _by_weight(out_grad.unsqueeze(0), x.unsqueeze(0), kernel, stride, padding).squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing: second derivatives are not supported."""

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], out_grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        """All clients at once."""
        return _by_weight(_front(out_grad, dims[0], info), _front(x, dims[1], info), *rest), 0


class ByInput(torch.autograd.Function):
    """The gradient of a convolution with respect to its input."""

    @staticmethod
    def forward(out_grad: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        """One client: a stack of one."""
        return _by_input(out_grad.unsqueeze(0), weight.unsqueeze(0), size, stride, padding).squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing: second derivatives are not supported."""

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], out_grad: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, int]:
        """All clients at once; with weights that they share, as one batch."""
        if dims[1] is None:
            return _shared_by_input(out_grad.movedim(dims[0], 0), weight, *rest), 0
        return _by_input(_front(out_grad, dims[0], info), _front(weight, dims[1], info), *rest), 0


def _shared_forward(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """A frozen layer: one ordinary convolution of all clients' images."""
    out = functional.conv2d(x.flatten(0, 1), weight, None, stride, padding)
    return out.reshape(*x.shape[:2], *out.shape[1:])


def _shared_by_input(out_grad: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    images = out_grad.new_empty(out_grad.shape[:2].numel(), weight.shape[1], *size)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        out_grad.flatten(0, 1), images, weight.to(out_grad.dtype),
        None, stride, padding, (1, 1), False, (0, 0), 1, (True, False, False),
    )  # fmt: skip
    return grads[0].reshape(*out_grad.shape[:2], *grads[0].shape[1:])


def _forward(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    clients, batch, inputs, outputs = x.shape[0], x.shape[1], x.shape[2], weight.shape[1]
    if conv_ops.suit(x):
        return conv_ops.forward(x, weight, stride, padding)
    if x.is_cuda and inputs >= FEW_CHANNELS and (outputs <= inputs or stride != (1, 1)):
        grouped = functional.conv2d(_grouped(x), weight.flatten(0, 1), None, stride, padding, 1, clients)
        return grouped.reshape(batch, clients, outputs, *grouped.shape[2:]).transpose(0, 1)
    columns, size = _columns(x, (weight.shape[-2], weight.shape[-1]), stride, padding)
    out = torch.bmm(weight.flatten(2), columns)
    return out.reshape(clients, outputs, batch, *size).transpose(1, 2).contiguous()


def _by_weight(out_grad: Tensor, x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    clients, inputs = x.shape[0], x.shape[2]
    if conv_ops.suit(x):
        return conv_ops.by_weight(out_grad, x, kernel, stride, padding)
    if x.is_cuda and inputs >= FEW_CHANNELS and stride == (1, 1):
        weight = x.new_empty(clients * out_grad.shape[2], inputs, *kernel)
        grad = _grouped_backward(out_grad, x, weight, stride, padding, by_weight=True)
        return grad.reshape(clients, -1, inputs, *kernel)
    columns, _ = _columns(x, kernel, stride, padding)
    product = torch.bmm(_rows(out_grad), columns.transpose(1, 2))
    return product.reshape(clients, out_grad.shape[2], inputs, *kernel)


def _by_input(out_grad: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    clients, batch, _, height, width = out_grad.shape
    inputs, kernel = weight.shape[2], weight.shape[-2:]
    if conv_ops.suit(out_grad):
        return conv_ops.by_input(out_grad, weight, size, stride, padding)
    if out_grad.is_cuda and inputs >= FEW_CHANNELS and stride == (1, 1):
        x = out_grad.new_empty(clients, batch, inputs, *size)
        image = _grouped_backward(out_grad, x, weight.flatten(0, 1), stride, padding, by_weight=False)
        return image.reshape(batch, clients, inputs, *size).transpose(0, 1)
    columns = torch.bmm(weight.flatten(2).transpose(1, 2), _rows(out_grad))
    columns = columns.reshape(clients, inputs, *kernel, batch, height, width)
    return _scatter(columns, size, stride, padding).transpose(1, 2)


def _scatter(columns: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Sum columns back into images, with one addition per position of the kernel."""
    clients, inputs, tall, wide, batch, height, width = columns.shape
    (down, right), (top, left) = stride, padding
    image = columns.new_zeros(clients, inputs, batch, size[0] + 2 * top, size[1] + 2 * left)
    for i in range(tall):
        for j in range(wide):
            window = image[..., i : i + down * height : down, j : j + right * width : right]
            window[..., :height, :width] += columns[:, :, i, j]
    return image[..., top : top + size[0], left : left + size[1]]


def _grouped_backward(
    out_grad: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, *, by_weight: bool
) -> Tensor:
    """Torch's backward with one group per client, with respect to the weights or to the images. The tensor
    whose gradient is computed is used only for its shape. Under autocast ``out_grad`` has a lower precision than the
    others, which are converted to it."""
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        _grouped(out_grad), _grouped(x.to(out_grad.dtype)), weight.to(out_grad.dtype),
        None, stride, padding, (1, 1), False, (0, 0), x.shape[0], (not by_weight, by_weight, False),
    )  # fmt: skip
    return (grads[1] if by_weight else grads[0]).to(x.dtype)


def _grouped(x: Tensor) -> Tensor:
    """``[C, B, in, H, W]`` as ``[B, C in, H, W]``: the clients become groups of channels."""
    return x.transpose(0, 1).flatten(1, 2).contiguous()


def _columns(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> tuple[Tensor, Pair]:
    """The columns ``[C, in h w, B H' W']`` and ``(H', W')``; one copy, in the order in which the product reads it."""
    top, left = padding
    padded = functional.pad(x, (left, left, top, top)) if top or left else x
    windows = padded.unfold(3, kernel[0], stride[0]).unfold(4, kernel[1], stride[1])
    clients, batch, inputs, height, width = windows.shape[:5]
    columns = windows.permute(0, 2, 5, 6, 1, 3, 4)
    return columns.reshape(clients, inputs * kernel[0] * kernel[1], batch * height * width), (height, width)


def _rows(out_grad: Tensor) -> Tensor:
    """``[C, B, out, H', W']`` as ``[C, out, B H' W']``."""
    return out_grad.transpose(1, 2).flatten(2)


def _front(value: Tensor, dim: int | None, info: Any) -> Tensor:
    """The value with the client axis first; a value that all clients share is expanded without a copy."""
    return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)


def _known(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    return x.dim() == 4 and groups == 1 and _pair(dilation) == (1, 1) and not isinstance(padding, str)


def _pair(value: int | Sequence[int]) -> Pair:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))
