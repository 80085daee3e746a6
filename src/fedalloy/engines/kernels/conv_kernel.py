"""Plain SGD on a convolutional chain: its settings, layers kept as factors, and how leaves move."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedalloy.core.factors import LowRank
from fedalloy.core.types import Tree
from fedalloy.engines.kernels.client_conv import has_kernels, inner_products, nearly_exact, rounded, subtract_product
from fedalloy.engines.kernels.conv_chain import ProductStage, Stages
from fedalloy.engines.kernels.fused import Memory, momentum_step, move_bias, move_weight
from fedalloy.engines.kernels.tracing import Fuser
from fedalloy.engines.kinds import PlainSgd
from fedalloy.engines.precision import Precision, products_in

DIFFERENTIABLE = False


@dataclass(frozen=True)
class ConvSgd:
    """What is the same in all rounds. ``fusing`` calls what is between products; ``factored`` allows updates of dense
    layers to stay factors; ``implicit`` never stores patches (:mod:`conv_implicit`);
    ``exact_norms`` is the algorithm's."""

    stages: Stages
    loss: str
    sgd: PlainSgd
    precision: Precision
    fusing: Fuser
    factored: bool = False
    implicit: bool = False
    exact_norms: bool = False

    @property
    def is_still(self) -> bool:
        """Whether an example that counts nothing moves nothing: no momentum, weight decay or proximal term. Finished
        clients may then be left in the products."""
        return self.sgd == PlainSgd(nesterov=self.sgd.nesterov)

    def cast(self, value: Tensor) -> Tensor:
        """A factor of a product in the precision of products."""
        return value.bfloat16() if self.precision == "bf16" else value

    def nearest(self, value: Tensor) -> Tensor:
        """The same, rounded where matrix units would cut off what tf32 does not have."""
        on_units = value.is_cuda or has_kernels(value.device)
        return rounded(value, self.precision) if on_units and self.precision == "tf32" else self.cast(value)


class FactoredLayer:
    """The weights of one dense layer of all clients: the received weight, which all share, minus the sum over steps of
    output gradients times inputs, which are kept instead of a private copy of the weight.

    The products of the factors with each other are computed nearly exactly. They are few, and what they add up cancels:
    the inputs of all examples are alike (they are not negative after a ReLU), and their gradients have both signs. A
    rounded product would be an error of the whole sum before it cancels; rounded weights have independent errors.
    """

    def __init__(self, kernel: ConvSgd, weight: Tensor, clients: int, rank: int) -> None:
        self.weight, self.count = kernel.nearest(weight), 0
        self.inputs = weight.new_zeros(clients, rank, weight.shape[1], dtype=kernel.cast(weight).dtype)
        self.grads = weight.new_zeros(clients, rank, weight.shape[0])

    def forward(self, kernel: ConvSgd, value: Tensor) -> Tensor:
        """The layer's results without its bias."""
        out: Tensor = (value.flatten(0, 1) @ self.weight.T).unflatten(0, value.shape[:2])
        if not self.count:
            return out
        inputs, grads = self.inputs[:, : self.count], self.grads[:, : self.count]
        if kernel.implicit:
            # What inputs have in common with those of earlier steps is little, but computed from long rows.
            subtract_product(inner_products(value, inputs, kernel.precision), grads, out)
            return out
        with products_in("float32"):
            return torch.baddbmm(out, value @ inputs.transpose(1, 2), kernel.cast(grads), alpha=-1)

    def back(self, kernel: ConvSgd, out_grad: Tensor) -> Tensor:
        """The gradient with respect to the inputs; ``out_grad`` is ``[C, B, outputs]``."""
        grad = kernel.nearest(out_grad)
        found: Tensor = (grad.flatten(0, 1) @ self.weight).unflatten(0, grad.shape[:2])
        if not self.count:
            return found
        inputs, grads = self.inputs[:, : self.count], self.grads[:, : self.count]
        if kernel.implicit:
            given = out_grad.to(grads.dtype).contiguous()
            subtract_product(inner_products(given, grads, nearly_exact(grads)), inputs, found)
            return found
        with products_in("float32"):
            return torch.baddbmm(found, kernel.cast(out_grad) @ kernel.cast(grads).transpose(1, 2), inputs, alpha=-1)

    def move(self, value: Tensor, out_grad: Tensor) -> None:
        """Add a step."""
        now = slice(self.count, self.count + value.shape[1])
        self.inputs[:, now], self.grads[:, now] = value, out_grad
        self.count = now.stop

    def update(self, stage: ProductStage) -> LowRank:
        """What the clients send."""
        left = -self.grads.transpose(1, 2)
        precision = nearly_exact(self.grads)
        if precision == "float32" or not has_kernels(self.inputs.device):
            return LowRank(left, self.inputs, stage.to_model)
        return LowRank(left, self.inputs, stage.to_model, partial(inner_products, precision=precision))


Factored = dict[str, FactoredLayer]


def product(kernel: ConvSgd, model: Tree, factored: Factored, stage: ProductStage, value: Tensor) -> Tensor:
    """The results of a stage's product, without its bias."""
    if stage.weight in factored:
        return factored[stage.weight].forward(kernel, value)
    return torch.bmm(value, kernel.cast(model[stage.weight]).transpose(1, 2))


def last_product(model: Tree, stage: ProductStage, value: Tensor) -> Tensor:
    """The model's outputs, ``[C, classes, B]``, in full precision: products of the last layer are small, and an error
    of theirs is one of everything before."""
    weight, bias = model[stage.weight], bias_of(stage, model)
    with products_in("float32"):
        logits = torch.bmm(weight, value.to(weight.dtype).transpose(1, 2))
    return logits if bias is None else logits.add_(bias.unsqueeze(2))


def product_back(kernel: ConvSgd, model: Tree, factored: Factored, stage: ProductStage, out_grad: Tensor) -> Tensor:
    """The gradient with respect to the input of a stage's product; ``out_grad`` is ``[C, outputs, B * patches]``."""
    if stage.weight in factored:
        return factored[stage.weight].back(kernel, out_grad.transpose(1, 2))
    if stage is kernel.stages[-1]:
        with products_in("float32"):
            return kernel.cast(torch.bmm(out_grad.transpose(1, 2), model[stage.weight]))
    return torch.bmm(kernel.cast(out_grad).transpose(1, 2), kernel.cast(model[stage.weight]))


def product_move(
    kernel: ConvSgd,
    memory: Memory,
    factored: Factored,
    sgd: PlainSgd,
    stage: ProductStage,
    out_grad: Tensor,
    value: Tensor,
) -> None:
    """Update the leaves of a stage by the product of its input ``value`` with the gradient of its results."""
    if stage.bias is not None:
        move_bias(memory, stage.bias, sgd, out_grad, 1.0, 1.0)
    if stage.weight in factored:
        factored[stage.weight].move(value, out_grad.transpose(1, 2))
    elif stage is kernel.stages[-1]:
        with products_in("float32"):
            wide_value = value.to(memory.model[stage.weight].dtype)
            move_weight(memory, stage.weight, sgd, out_grad, wide_value, 1.0, 1.0)
    else:
        _move(kernel, memory, sgd, stage, out_grad, value)


def _move(kernel: ConvSgd, memory: Memory, sgd: PlainSgd, stage: ProductStage, out_grad: Tensor, value: Tensor) -> None:
    """Update the weight of a stage; the gradient already has the step size in it."""
    if kernel.precision != "bf16":
        move_weight(memory, stage.weight, sgd, out_grad, value, 1.0, 1.0)
        return
    dtype = memory.model[stage.weight].dtype
    move_by(memory, stage.weight, sgd, _wide_product(kernel.cast(out_grad), kernel.cast(value), dtype))


def move_by(memory: Memory, leaf: str, sgd: PlainSgd, grad: Tensor) -> None:
    """Update a leaf by its gradient, which is overwritten."""
    value = memory.model[leaf]
    if sgd.momentum:
        momentum_step(memory, leaf, sgd, grad, 1.0)
        return
    if sgd.weight_decay or sgd.pull:
        grad.add_(value, alpha=sgd.weight_decay + sgd.pull).sub_(memory.received[leaf], alpha=sgd.pull)
    value.sub_(grad)


def _wide_product(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """A product of bf16 factors, summed and returned in ``dtype``."""
    if one.is_cuda:
        return torch.bmm(one, other, out_dtype=dtype)
    return torch.bmm(one.to(dtype), other.to(dtype))


def bias_of(stage: ProductStage, model: Tree) -> Tensor | None:
    """The bias of a stage, if it has one."""
    return None if stage.bias is None else model[stage.bias]
