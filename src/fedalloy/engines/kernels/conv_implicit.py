"""Forward and backward pass of a convolutional chain whose patches are never stored (:mod:`client_conv`).

A convolution's kernel also adds its bias, applies the activation after it and pools over windows of 2 x 2, if these
come first; its gradient undoes the activation before it. Other layers are one function between two kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from fedalloy.core.types import Tree
from fedalloy.engines.kernels import client_conv
from fedalloy.engines.kernels.between_products import applied, back, onward, undo_all
from fedalloy.engines.kernels.client_conv import ACTIVATIONS, After, DrawnImages, nearest
from fedalloy.engines.kernels.conv_chain import Op, ProductStage
from fedalloy.engines.kernels.conv_kernel import (
    ConvSgd,
    Factored,
    bias_of,
    last_product,
    move_by,
    product,
    product_back,
    product_move,
)
from fedalloy.engines.kernels.fused import Memory
from fedalloy.engines.kinds import PlainSgd
from fedalloy.engines.precision import Precision


@dataclass
class KeptImages:
    """What the backward pass reads, by stage: inputs, what the kernel stored (a dense layer's results), and which
    number of every window was the largest."""

    inputs: list[Tensor | DrawnImages] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor | None] = field(default_factory=list)


def forward(kernel: ConvSgd, model: Tree, factored: Factored, pool: Tensor, rows: Tensor) -> tuple[KeptImages, Tensor]:
    """What the backward pass reads, and the model's outputs, ``[C, classes, B]``."""
    dtype = torch.bfloat16 if kernel.precision == "bf16" else model[kernel.stages[0].weight].dtype
    kept, value = KeptImages(), None
    for stage, after in pairwise(kernel.stages):
        given = DrawnImages(pool, rows, dtype) if value is None else value
        bias = bias_of(stage, model)
        if stage.window is None:
            assert isinstance(given, Tensor)
            stored, chosen = product(kernel, model, factored, stage, given), None
            value = kernel.fusing(partial(onward, stage, after), stored, bias)
        else:
            activation, pools, rest = split(stage)
            follows = After(bias, activation, pools)
            stored, chosen = client_conv.convolve(stage, given, model[stage.weight], follows, kernel.precision)
            value = kernel.fusing(partial(_rest, rest, kernel.precision), stored) if rest else stored
            value = value.flatten(2) if after.window is None else value
        kept.inputs.append(given)
        kept.values.append(stored)
        kept.chosen.append(chosen)
    assert value is not None
    kept.inputs.append(value)
    return kept, last_product(model, kernel.stages[-1], value)


def backward(
    kernel: ConvSgd, memory: Memory, factored: Factored, sgd: PlainSgd, kept: KeptImages, out_grad: Tensor
) -> None:
    """From the last product to the first; gradients with respect to a dense layer's result are ``[C, outputs, B]``,
    with respect to a convolution's ``[C, B * patches, outputs]``."""
    stages, model = kernel.stages, memory.model
    for place in reversed(range(len(stages))):
        stage, given = stages[place], kept.inputs[place]
        if stage.window is not None:
            by_input = _conv_back(kernel, model, kept, place, out_grad) if place else None
            _conv_move(kernel, memory, sgd, stage, given, out_grad)
        else:
            assert isinstance(given, Tensor)
            by_input = product_back(kernel, model, factored, stage, out_grad)
            product_move(kernel, memory, factored, sgd, stage, out_grad, given)
        if by_input is not None:
            out_grad = _through(kernel, model, kept, place, by_input)


def split(stage: ProductStage) -> tuple[str, bool, tuple[Op, ...]]:
    """The activation and whether windows of 2 x 2 are pooled, if these are the first layers after a convolution; and
    the other layers.

    >>> from fedalloy.engines.kernels.conv_chain import Window
    >>> shape = (4, 6, 8), (4, 6, 3), Window((1, 1), (1, 1), (0, 0)), None
    >>> split(ProductStage("w", None, *shape, (Op("relu"), Op("maxpool", (2, 2)), Op("tanh"))))
    ('relu', True, (Op(kind='tanh', size=(1, 1)),))
    """
    ops, activation = stage.ops, ""
    if ops and ops[0].kind in ACTIVATIONS:
        activation, ops = ops[0].kind, ops[1:]
    even = stage.shape[0] % 2 == 0 and stage.shape[1] % 2 == 0
    pools = bool(ops) and ops[0] == Op("maxpool", (2, 2)) and even
    return activation, pools, ops[1:] if pools else ops


def _undoes(stage: ProductStage) -> bool:
    """Whether nothing but an activation follows a convolution, which the next one's gradient undoes."""
    _, pools, rest = split(stage)
    return not (pools or rest)


def _conv_back(kernel: ConvSgd, model: Tree, kept: KeptImages, place: int, out_grad: Tensor) -> Tensor:
    """The gradient of a convolution's images, or of what was before the activation that made them."""
    stage, given = kernel.stages[place], kept.inputs[place]
    assert isinstance(given, Tensor)
    before = kernel.stages[place - 1]
    activation = split(before)[0] if _undoes(before) else ""
    return client_conv.by_input(
        stage,
        given.shape[1],
        out_grad,
        model[stage.weight],
        kernel.precision,
        given if activation else None,
        activation,
    )


def _conv_move(
    kernel: ConvSgd, memory: Memory, sgd: PlainSgd, stage: ProductStage, given: Tensor | DrawnImages, out_grad: Tensor
) -> None:
    """Update a convolution's leaves; plain SGD never writes the gradient."""
    if kernel.is_still:
        bias = bias_of(stage, memory.model)
        client_conv.into_weight(stage, given, out_grad, memory.model[stage.weight], bias, kernel.precision)
        return
    by_weight, by_bias = client_conv.by_weight(stage, given, out_grad, kernel.precision)
    move_by(memory, stage.weight, sgd, by_weight)
    if stage.bias is not None:
        move_by(memory, stage.bias, sgd, by_bias)


def _through(kernel: ConvSgd, model: Tree, kept: KeptImages, place: int, grad: Tensor) -> Tensor:
    """From the gradient of a stage's input to that of the product before it."""
    stage, before, value = kernel.stages[place], kernel.stages[place - 1], kept.values[place - 1]
    if before.window is None:
        given = value, bias_of(before, model), grad
        return kernel.fusing(partial(back, before, stage), *given).transpose(1, 2)
    activation, pools, rest = split(before)
    chosen, shape = kept.chosen[place - 1], (*grad.shape[:1], -1, before.shape[2])
    if stage.window is not None and _undoes(before):
        return grad.reshape(shape)
    if rest or not pools:
        undone = () if pools or not activation else (Op(activation),)
        grad = kernel.fusing(partial(_rest_back, undone, rest, kernel.precision), value, grad)
    if chosen is None:
        return grad.reshape(shape)
    return client_conv.unpool(before, grad.reshape(value.shape), value, chosen, activation, kernel.precision)


def _rest(ops: Sequence[Op], precision: Precision, value: Tensor) -> Tensor:
    """The layers between a convolution's kernel and the next, which expects rounded images in tf32."""
    for op in ops:
        value = applied(op, value)
    return nearest(value) if precision == "tf32" else value


def _rest_back(first: Sequence[Op], ops: Sequence[Op], precision: Precision, value: Tensor, grad: Tensor) -> Tensor:
    """The gradient before these layers, and before the activation ``first``, whose result is ``value``; rounded for the
    convolution before them."""
    values = [value]
    for op in ops:
        values.append(applied(op, values[-1]))
    grad = undo_all(ops, values, grad.reshape(values[-1].shape))
    grad = undo_all(first, [value] * (len(first) + 1), grad).contiguous()
    return nearest(grad) if precision == "tf32" else grad
