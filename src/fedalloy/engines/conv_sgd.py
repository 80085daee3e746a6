"""Plain SGD on a convolutional chain, for many clients at once: hand-written backward, updates fused into products.

Convolutions and dense layers of all clients are batched products of patches (:mod:`fedalloy.engines.conv_chain`). The
gradient of a weight is added to the weight by the product that computes it, so it is never stored; what is between two
products is one function each (:mod:`fedalloy.engines.between_products`), compiled on a GPU. The step size is a factor
of the loss's gradient, so a captured graph serves all rounds of a schedule. Not differentiable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from fedalloy.core.blocks import Prepared
from fedalloy.core.factors import FactoredTree, LowRank
from fedalloy.core.types import Tree
from fedalloy.core.wide import widest
from fedalloy.engines.between_products import back, enter, onward
from fedalloy.engines.conv_chain import ProductStage, Stages, received, updates
from fedalloy.engines.cuda_graphs import Precision
from fedalloy.engines.fused import Memory, allocate, loss_totals, momentum_step, move_bias, move_weight, output_gradient
from fedalloy.engines.kinds import PlainSgd
from fedalloy.engines.tracing import Fuser

DIFFERENTIABLE = False


@dataclass(frozen=True)
class ConvSgd:
    """What is the same in all rounds. ``fusing`` calls what is between products; ``factored`` allows updates of dense
    layers to stay factors."""

    stages: Stages
    loss: str
    sgd: PlainSgd
    precision: Precision
    fusing: Fuser
    factored: bool = False

    @property
    def is_still(self) -> bool:
        """Whether an example that counts nothing moves nothing: no momentum, weight decay or proximal term. Finished
        clients may then be left in the products."""
        return self.sgd == PlainSgd(nesterov=self.sgd.nesterov)

    def cast(self, value: Tensor) -> Tensor:
        """A factor of a product in the precision of products."""
        return value.bfloat16() if self.precision == "bf16" else value


@dataclass(frozen=True)
class Batches:
    """The examples of all steps: ``rows`` of the pool, whether each counts (``mask``), ``[S, C, B]``; ``seen`` is the
    sum of the mask over B, and ``running`` are the numbers of clients that take each step, the first ones."""

    x: Tensor
    y: Tensor
    rows: Tensor
    mask: Tensor
    seen: Tensor
    running: tuple[int, ...]

    @staticmethod
    def of(block: Prepared, everybody: bool) -> Batches:
        """Those of a block; ``everybody`` leaves finished clients in, with examples that do not count."""
        running = (len(block),) * len(block.running) if everybody else tuple(block.running)
        return Batches(block.data.x, block.data.y, block.rows, block.mask, block.seen, running)


class FactoredLayer:
    """The weights of one dense layer of all clients: the received weight, which all share, minus the sum over steps of
    output gradients times inputs, which are kept instead of a private copy of the weight."""

    def __init__(self, weight: Tensor, clients: int, rank: int, dtype: torch.dtype) -> None:
        self.weight, self.count = weight, 0
        self.inputs = weight.new_zeros(clients, rank, weight.shape[1], dtype=dtype)
        self.grads = weight.new_zeros(clients, rank, weight.shape[0])

    def forward(self, kernel: ConvSgd, value: Tensor) -> Tensor:
        """The layer's results without its bias."""
        out = (value.flatten(0, 1) @ kernel.cast(self.weight).T).unflatten(0, value.shape[:2])
        inputs, grads = self.so_far(kernel)
        return out if not self.count else torch.baddbmm(out, value @ inputs.transpose(1, 2), grads, alpha=-1)

    def back(self, kernel: ConvSgd, out_grad: Tensor) -> Tensor:
        """The gradient with respect to the inputs; ``out_grad`` is ``[C, B, outputs]``."""
        grad = kernel.cast(out_grad)
        found = (grad.flatten(0, 1) @ kernel.cast(self.weight)).unflatten(0, grad.shape[:2])
        inputs, grads = self.so_far(kernel)
        return found if not self.count else torch.baddbmm(found, grad @ grads.transpose(1, 2), inputs, alpha=-1)

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
        return LowRank(-self.grads.transpose(1, 2), self.inputs, stage.to_model)


Factored = dict[str, FactoredLayer]


def factored_layers(kernel: ConvSgd, model: Tree, batches: Batches) -> Factored:
    """The dense layers whose updates are smaller as factors, by the names of their weights: an update's rank is at most
    the number of examples in all steps. The last layer, whose products are in full precision, is never among them."""
    steps, clients, batch = batches.rows.shape
    found: Factored = {}
    for stage in kernel.stages[:-1] if kernel.factored and kernel.is_still else ():
        outputs, inputs = model[stage.weight].shape
        if stage.window is None and 2 * steps * batch * (outputs + inputs) <= outputs * inputs:
            dtype = torch.bfloat16 if kernel.precision == "bf16" else model[stage.weight].dtype
            found[stage.weight] = FactoredLayer(model[stage.weight], clients, steps * batch, dtype)
    return found


def descend(kernel: ConvSgd, params: Tree, batches: Batches, lr: Tensor | float) -> tuple[Mapping[str, Tensor], Tensor]:
    """Take every step; returns the clients' updates and the sums of their losses (see ``summed_losses``). With weight
    decay or a proximal term the step size must be a number."""
    clients, start = batches.rows.shape[1], received(kernel.stages, params)
    factored = factored_layers(kernel, start, batches)
    private = {name: leaf for name, leaf in start.items() if name not in factored}
    memory = allocate(private, clients, momentum=kernel.sgd.momentum > 0)
    # Every example's factor in the gradient: its share of the batch, and the step size.
    dtype = next(iter(params.values())).dtype
    share = lr * batches.mask.to(dtype) / batches.seen.clamp(min=1).unsqueeze(2)
    sgd = kernel.sgd
    if sgd.weight_decay or sgd.pull:
        sgd = replace(sgd, weight_decay=float(lr) * sgd.weight_decay, pull=float(lr) * sgd.pull)
    summed = []
    for step, running in enumerate(batches.running):
        now, part = memory, kernel
        if running < clients:  # rare shapes are not worth a compiler call each
            now, part = memory.first(running), replace(kernel, fusing=Fuser(compiled=False))
        rows, mask = batches.rows[step, :running], batches.mask[step, :running]
        values, outs, logits = _forward(part, now.model, factored, batches.x, rows)
        y = batches.y.index_select(0, rows.flatten()).reshape(rows.shape)
        out_grad, losses = output_gradient(kernel.loss, logits, y.unsqueeze(1))
        out_grad *= share[step, :running].unsqueeze(1)
        _backward(part, now, factored, sgd, values, outs, out_grad)
        summed.append(losses.masked_fill_(~mask, 0.0).sum(1, dtype=widest(losses.device)))
    return _updates(kernel.stages, memory.model, factored, params), loss_totals(summed, batches.seen)


def _updates(stages: Stages, model: Tree, factored: Factored, params: Tree) -> Mapping[str, Tensor]:
    """What the clients send, in the order of the received leaves."""
    private = updates(stages, model, {name: leaf for name, leaf in params.items() if name not in factored})
    if not factored:
        return private
    kept = {stage.weight: factored[stage.weight].update(stage) for stage in stages if stage.weight in factored}
    return FactoredTree({name: kept[name] if name in kept else private[name] for name in params})


def _forward(
    kernel: ConvSgd, model: Tree, factored: Factored, pool: Tensor, rows: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The inputs of all products, the results of all but the last, and the model's outputs, ``[C, classes, B]``."""
    stages, fusing = kernel.stages, kernel.fusing
    dtype = torch.bfloat16 if kernel.precision == "bf16" else model[stages[0].weight].dtype
    values, outs = [fusing("enter", partial(enter, stages[0], dtype=dtype), pool, rows)], []
    for place, (stage, after) in enumerate(pairwise(stages)):
        if stage.weight in factored:
            outs.append(factored[stage.weight].forward(kernel, values[-1]))
        else:
            outs.append(torch.bmm(values[-1], kernel.cast(model[stage.weight]).transpose(1, 2)))
        values.append(fusing(("onward", place), partial(onward, stage, after), outs[-1], _bias(stage, model)))
    last, weight = stages[-1], model[stages[-1].weight]
    logits = torch.bmm(weight, values[-1].to(weight.dtype).transpose(1, 2))
    bias = _bias(last, model)
    return values, outs, logits if bias is None else logits.add_(bias.unsqueeze(2))


def _backward(
    kernel: ConvSgd,
    memory: Memory,
    factored: Factored,
    sgd: PlainSgd,
    values: list[Tensor],
    outs: list[Tensor],
    out_grad: Tensor,
) -> None:
    """From the last product to the first: the gradient for the product before, then the update. Gradients with respect
    to a product's result are ``[C, outputs, B * patches]``."""
    stages, model = kernel.stages, memory.model
    for place in reversed(range(len(stages))):
        stage, before, layer = stages[place], stages[place - 1], factored.get(stages[place].weight)
        if place and layer is not None:
            by_input = layer.back(kernel, out_grad.transpose(1, 2))
        elif place:
            by_input = torch.bmm(kernel.cast(out_grad).transpose(1, 2), kernel.cast(model[stage.weight]))
        if stage.bias is not None:
            move_bias(memory, stage.bias, sgd, out_grad, 1.0, 1.0)
        if layer is not None:
            layer.move(values[place], out_grad.transpose(1, 2))
        else:
            _move(kernel, memory, sgd, stage, out_grad, values[place])
        if place:
            function = partial(back, before, stage)
            given = outs[place - 1], _bias(before, model), by_input
            out_grad = kernel.fusing(("back", place), function, *given).transpose(1, 2)


def _move(kernel: ConvSgd, memory: Memory, sgd: PlainSgd, stage: ProductStage, out_grad: Tensor, value: Tensor) -> None:
    """Update the weight of a stage; the gradient already has the step size in it."""
    if kernel.precision != "bf16":
        move_weight(memory, stage.weight, sgd, out_grad, value, 1.0, 1.0)
        return
    weight = memory.model[stage.weight]
    grad = _wide_product(kernel.cast(out_grad), kernel.cast(value), weight.dtype)
    if sgd.momentum:
        momentum_step(memory, stage.weight, sgd, grad, 1.0)
        return
    if sgd.weight_decay or sgd.pull:
        grad.add_(weight, alpha=sgd.weight_decay + sgd.pull).sub_(memory.received[stage.weight], alpha=sgd.pull)
    weight.sub_(grad)


def _wide_product(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """A product of bf16 factors, summed and returned in ``dtype``."""
    if one.is_cuda:
        return torch.bmm(one, other, out_dtype=dtype)
    return torch.bmm(one.to(dtype), other.to(dtype))


def _bias(stage: ProductStage, model: Tree) -> Tensor | None:
    return None if stage.bias is None else model[stage.bias]
