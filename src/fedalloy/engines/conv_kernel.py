"""Plain SGD on a convolutional chain: its settings, layers kept as factors, and how leaves move."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedalloy.core.factors import LowRank
from fedalloy.core.types import Tree
from fedalloy.engines.client_conv import has_kernels, inner_products, subtract_product
from fedalloy.engines.conv_chain import ProductStage, Stages
from fedalloy.engines.fused import Memory, momentum_step, move_bias, move_weight
from fedalloy.engines.kinds import PlainSgd
from fedalloy.engines.precision import Precision
from fedalloy.engines.tracing import Fuser

DIFFERENTIABLE = False


@dataclass(frozen=True)
class ConvSgd:
    """What is the same in all rounds. ``fusing`` calls what is between products; ``factored`` allows updates of dense
    layers to stay factors; ``implicit`` never stores patches (:mod:`fedalloy.engines.conv_implicit`);
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


class FactoredLayer:
    """The weights of one dense layer of all clients: the received weight, which all share, minus the sum over steps of
    output gradients times inputs, which are kept instead of a private copy of the weight."""

    def __init__(self, weight: Tensor, clients: int, rank: int, dtype: torch.dtype) -> None:
        self.weight, self.count = weight, 0
        self.inputs = weight.new_zeros(clients, rank, weight.shape[1], dtype=dtype)
        self.grads = weight.new_zeros(clients, rank, weight.shape[0])

    def forward(self, kernel: ConvSgd, value: Tensor) -> Tensor:
        """The layer's results without its bias."""
        out: Tensor = (value.flatten(0, 1) @ kernel.cast(self.weight).T).unflatten(0, value.shape[:2])
        if not self.count:
            return out
        inputs, grads = self.so_far(kernel)
        if not kernel.implicit:
            return torch.baddbmm(out, value @ inputs.transpose(1, 2), grads, alpha=-1)
        # What inputs have in common with those of earlier steps is little, but computed from long rows.
        common = inner_products(value, inputs, kernel.precision)
        subtract_product(common, grads, out, kernel.precision)
        return out

    def back(self, kernel: ConvSgd, out_grad: Tensor) -> Tensor:
        """The gradient with respect to the inputs; ``out_grad`` is ``[C, B, outputs]``."""
        grad = kernel.cast(out_grad)
        found: Tensor = (grad.flatten(0, 1) @ kernel.cast(self.weight)).unflatten(0, grad.shape[:2])
        if not self.count:
            return found
        inputs, grads = self.so_far(kernel)
        common = grad @ grads.transpose(1, 2)
        if not kernel.implicit:
            return torch.baddbmm(found, common, inputs, alpha=-1)
        subtract_product(common, inputs, found, kernel.precision)
        return found

    def so_far(self, kernel: ConvSgd) -> tuple[Tensor, Tensor]:
        """The factors of the steps so far, in the precision of products."""
        return self.inputs[:, : self.count], kernel.cast(self.grads[:, : self.count])

    def move(self, value: Tensor, out_grad: Tensor) -> None:
        """Add a step."""
        now = slice(self.count, self.count + value.shape[1])
        self.inputs[:, now], self.grads[:, now] = value, out_grad
        self.count = now.stop

    def update(self, stage: ProductStage) -> LowRank:
        """What the clients send."""
        left = -self.grads.transpose(1, 2)
        fast = has_kernels(self.inputs.device) and self.grads.dtype == torch.float32
        if not fast:
            return LowRank(left, self.inputs, stage.to_model)
        return LowRank(left, self.inputs, stage.to_model, partial(inner_products, precision="tf32x3"))


Factored = dict[str, FactoredLayer]


def product(kernel: ConvSgd, model: Tree, factored: Factored, stage: ProductStage, value: Tensor) -> Tensor:
    """The results of a stage's product, without its bias."""
    if stage.weight in factored:
        return factored[stage.weight].forward(kernel, value)
    return torch.bmm(value, kernel.cast(model[stage.weight]).transpose(1, 2))


def last_product(model: Tree, stage: ProductStage, value: Tensor) -> Tensor:
    """The model's outputs, ``[C, classes, B]``, in full precision."""
    weight, bias = model[stage.weight], bias_of(stage, model)
    logits = torch.bmm(weight, value.to(weight.dtype).transpose(1, 2))
    return logits if bias is None else logits.add_(bias.unsqueeze(2))


def product_back(kernel: ConvSgd, model: Tree, factored: Factored, stage: ProductStage, out_grad: Tensor) -> Tensor:
    """The gradient with respect to the input of a stage's product; ``out_grad`` is ``[C, outputs, B * patches]``."""
    if stage.weight in factored:
        return factored[stage.weight].back(kernel, out_grad.transpose(1, 2))
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
