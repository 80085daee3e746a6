"""Forward and backward pass of a convolutional chain as products of stored patches."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from fedalloy.core.types import Tree
from fedalloy.engines.kernels.between_products import back, enter, onward
from fedalloy.engines.kernels.conv_kernel import (
    ConvSgd,
    Factored,
    bias_of,
    last_product,
    product,
    product_back,
    product_move,
)
from fedalloy.engines.kernels.fused import Memory
from fedalloy.engines.kinds import PlainSgd

Kept = tuple[list[Tensor], list[Tensor]]
"""The inputs of all products, and the results of all but the last."""


def forward(kernel: ConvSgd, model: Tree, factored: Factored, pool: Tensor, rows: Tensor) -> tuple[Kept, Tensor]:
    """What the backward pass reads, and the model's outputs, ``[C, classes, B]``."""
    stages, fusing = kernel.stages, kernel.fusing
    dtype = torch.bfloat16 if kernel.precision == "bf16" else model[stages[0].weight].dtype
    values, outs = [fusing(partial(enter, stages[0], dtype=dtype), pool, rows)], []
    for stage, after in pairwise(stages):
        outs.append(product(kernel, model, factored, stage, values[-1]))
        values.append(fusing(partial(onward, stage, after), outs[-1], bias_of(stage, model)))
    return (values, outs), last_product(model, stages[-1], values[-1])


def backward(kernel: ConvSgd, memory: Memory, factored: Factored, sgd: PlainSgd, kept: Kept, out_grad: Tensor) -> None:
    """From the last product to the first: the gradient for the product before, then the update. Gradients with respect
    to a product's result are ``[C, outputs, B * patches]``."""
    (values, outs), stages, model = kept, kernel.stages, memory.model
    for place in reversed(range(len(stages))):
        stage, before = stages[place], stages[place - 1]
        by_input = product_back(kernel, model, factored, stage, out_grad) if place else out_grad
        product_move(kernel, memory, factored, sgd, stage, out_grad, values[place])
        if place:
            given = outs[place - 1], bias_of(before, model), by_input
            out_grad = kernel.fusing(partial(back, before, stage), *given).transpose(1, 2)
