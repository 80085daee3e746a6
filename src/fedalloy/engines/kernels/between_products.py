"""What happens between the products of a convolutional chain: bias, activation, pooling, patches; and back.

Plain torch, written so that a compiler makes one kernel of each function. Images are ``[C, B, height, width,
channels]``, products' results ``[C, B * height * width, channels]``, patches ``[C, B * patches, inputs]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from fedalloy.engines.kernels.conv_chain import Op, ProductStage, Shape


def enter(first: ProductStage, pool: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The patches of the examples ``rows`` (``[C, B]``) of the pool, whose images have their channels first."""
    assert first.reads is not None
    height, width, channels = first.reads
    x = pool.index_select(0, rows.flatten()).to(dtype)
    return patches(x.reshape(*rows.shape, channels, height, width).permute(0, 1, 3, 4, 2), first)


def onward(stage: ProductStage, after: ProductStage, out: Tensor, bias: Tensor | None) -> Tensor:
    """From one product's result to the next product's input."""
    value = _with_bias(stage, out, bias)
    for op in stage.ops:
        value = applied(op, value)
    if after.window is not None:
        return patches(value, after)
    return value.flatten(2)


def back(stage: ProductStage, after: ProductStage, out: Tensor, bias: Tensor | None, grad: Tensor) -> Tensor:
    """The gradient with respect to ``out``, from that with respect to what ``onward`` returned."""
    values = [_with_bias(stage, out, bias)]
    for op in stage.ops:
        values.append(applied(op, values[-1]))
    last = values[-1]
    image = (last.shape[2], last.shape[3], last.shape[4])
    grad = grad.reshape(last.shape) if after.window is None else unpatched(grad, after, last.shape[1], image)
    return undo_all(stage.ops, values, grad).reshape(out.shape).to(out.dtype)


def patches(image: Tensor, stage: ProductStage) -> Tensor:
    """The patches of all images that a convolution reads, each followed by the stage's extra zeros."""
    window = stage.window
    assert window is not None
    down, right = window.over((image.shape[2], image.shape[3], image.shape[4]))
    (top, left), (step_down, step_right) = window.padding, window.stride
    padded = functional.pad(image, (0, 0, left, left, top, top)) if top or left else image
    parts = [
        padded[:, :, i : i + step_down * (down - 1) + 1 : step_down, j : j + step_right * (right - 1) + 1 : step_right]
        for i in range(window.size[0])
        for j in range(window.size[1])
    ]
    found = torch.stack(parts, dim=4).reshape(image.shape[0], image.shape[1] * down * right, stage.inputs)
    return functional.pad(found, (0, stage.extra)) if stage.extra else found


def unpatched(grad: Tensor, stage: ProductStage, batch: int, image: Shape) -> Tensor:
    """The gradient of images from that of their patches: every pixel gets the sum over the patches it is in."""
    window, grad = stage.window, grad[:, :, : stage.inputs]
    assert window is not None
    (tall, wide), (top, left), (down, right) = window.size, window.padding, window.over(image)
    height, width, channels = image
    parts = grad.reshape(grad.shape[0], batch, down, right, tall * wide, channels)
    total: Tensor | None = None
    for place in range(tall * wide):
        i, j = divmod(place, wide)
        part = _spread(parts[:, :, :, :, place], window.stride)
        below, beside = height + 2 * top - i - part.shape[2], width + 2 * left - j - part.shape[3]
        part = functional.pad(part, (0, 0, j, beside, i, below))
        total = part if total is None else total + part
    assert total is not None
    return total[:, :, top : top + height, left : left + width]


def _spread(grad: Tensor, stride: tuple[int, int]) -> Tensor:
    """Zeros between neighbours, where patches are ``stride`` apart."""
    if stride == (1, 1):
        return grad
    clients, batch, height, width, channels = grad.shape
    apart = functional.pad(grad[:, :, :, None, :, None], (0, 0, 0, stride[1] - 1, 0, 0, 0, stride[0] - 1))
    whole = apart.reshape(clients, batch, height * stride[0], width * stride[1], channels)
    return whole[:, :, : (height - 1) * stride[0] + 1, : (width - 1) * stride[1] + 1]


def _with_bias(stage: ProductStage, out: Tensor, bias: Tensor | None) -> Tensor:
    height, width, channels = stage.shape
    if bias is not None:
        out = (out + bias.unsqueeze(1)).to(out.dtype)
    return out.reshape(out.shape[0], -1, height, width, channels)


def applied(op: Op, value: Tensor) -> Tensor:
    """What a layer makes of images."""
    if op.kind == "relu":
        return value.relu()
    if op.kind == "tanh":
        return value.tanh()
    if op.kind == "sigmoid":
        return value.sigmoid()
    return largest(op, value)[0] if op.kind == "maxpool" else _mean(op, value)


def _undo(op: Op, before: Tensor, value: Tensor, grad: Tensor) -> Tensor:
    """The gradient with respect to a layer's input ``before``, from that with respect to its result ``value``."""
    if op.kind == "relu":
        return torch.where(value <= 0, torch.zeros_like(grad), grad)
    if op.kind == "tanh":
        return grad * (1 - value * value)
    if op.kind == "sigmoid":
        return grad * (value * (1 - value))
    windows = grad[:, :, :, None, :, None]
    if op.kind == "maxpool":
        (tall, wide), chosen = op.size, largest(op, before)[1][:, :, :, None, :, None]
        place = torch.arange(tall * wide, dtype=torch.int32, device=grad.device).reshape(tall, 1, wide, 1)
        return _unpooled(op, torch.where(chosen == place, windows, torch.zeros_like(windows)), before)
    return _unpooled(op, (windows / prod(op.size)).expand(-1, -1, -1, op.size[0], -1, op.size[1], -1), before)


def undo_all(ops: Sequence[Op], values: Sequence[Tensor], grad: Tensor) -> Tensor:
    """The gradient with respect to ``values[0]``; ``values`` are what is before, between and after the layers."""
    for place in reversed(range(len(ops))):
        if ops[place].kind == "relu" and place + 1 < len(ops) and ops[place + 1].kind == "maxpool":
            continue  # done with the pooling after it
        if ops[place].kind == "maxpool" and place and ops[place - 1].kind == "relu":
            # Only the largest number of a window gets a gradient, so ReLU's can be taken of the pooled image.
            grad = _undo(ops[place - 1], values[place - 1], values[place + 1], grad)
        grad = _undo(ops[place], values[place], values[place + 1], grad)
    return grad


def largest(op: Op, value: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of every window, and which it is: like torch's, the first of several, and NaN if there is
    one."""
    first, *others = _windows(op, value)
    best, chosen = first, torch.zeros_like(first, dtype=torch.int8)
    for place, other in enumerate(others, start=1):
        better = (other > best) | other.isnan()
        best, chosen = torch.where(better, other, best), torch.where(better, place, chosen)
    return best, chosen


def _mean(op: Op, value: Tensor) -> Tensor:
    first, *others = _windows(op, value)
    for other in others:
        first = first + other
    return first / prod(op.size)


def _windows(op: Op, value: Tensor) -> list[Tensor]:
    """The numbers at each place of all windows; pixels that fill no window are left out."""
    (tall, wide), (height, width) = op.size, value.shape[2:4]
    down, right = height // tall, width // wide
    return [
        value[:, :, i : down * tall : tall, j : right * wide : wide] for i in range(tall) for j in range(wide)
    ]  # fmt: skip


def _unpooled(op: Op, windows: Tensor, before: Tensor) -> Tensor:
    """Images from their windows, ``[C, B, down, tall, right, wide, channels]``; 0 for pixels that fill no window."""
    (tall, wide), (height, width) = op.size, before.shape[2:4]
    clients, batch, down, _, right, _, channels = windows.shape
    image = windows.reshape(clients, batch, down * tall, right * wide, channels)
    return functional.pad(image, (0, 0, 0, width - right * wide, 0, height - down * tall))
