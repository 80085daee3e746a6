"""Plain SGD on a convolutional chain, for many clients at once: hand-written backward, updates fused into products.

Convolutions and dense layers of all clients are batched products of patches (:mod:`conv_chain`). The
gradient of a weight is added to the weight by the product that computes it, so it is never stored; what is between two
products is one function each (:mod:`between_products`), compiled on a GPU. The step size is a factor
of the loss's gradient, so a captured graph serves all rounds of a schedule. Not differentiable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedalloy.core.blocks import Prepared
from fedalloy.core.factors import FactoredTree
from fedalloy.core.types import Tree
from fedalloy.core.wide import widest
from fedalloy.engines.kernels import conv_implicit, conv_passes
from fedalloy.engines.kernels.conv_chain import Stages, received, updates
from fedalloy.engines.kernels.conv_kernel import ConvSgd, Factored, FactoredLayer
from fedalloy.engines.kernels.fused import allocate, loss_totals, output_gradient
from fedalloy.engines.kernels.tracing import Fuser

DIFFERENTIABLE = False


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
        data, running = block.data, (len(block),) * len(block.running) if everybody else tuple(block.running)
        seen = block.seen if block.trained is block.mask else block.trained.sum(2)
        return Batches(data.x, data.y, block.rows, block.trained, seen, running)


def factored_layers(kernel: ConvSgd, model: Tree, batches: Batches) -> Factored:
    """The dense layers whose updates are smaller as factors, by the names of their weights: an update's rank is at most
    the number of examples in all steps. The last layer, whose products are in full precision, is never among them."""
    steps, clients, batch = batches.rows.shape
    found: Factored = {}
    for stage in kernel.stages[:-1] if kernel.factored and kernel.is_still else ():
        outputs, inputs = model[stage.weight].shape
        if stage.window is None and 2 * steps * batch * (outputs + inputs) <= outputs * inputs:
            found[stage.weight] = FactoredLayer(kernel, model[stage.weight], clients, steps * batch)
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
        passes = conv_implicit if kernel.implicit else conv_passes
        kept, logits = passes.forward(part, now.model, factored, batches.x, rows)
        y = batches.y.index_select(0, rows.flatten()).reshape(rows.shape)
        out_grad, losses = output_gradient(kernel.loss, logits, y.unsqueeze(1))
        out_grad *= share[step, :running].unsqueeze(1)
        passes.backward(part, now, factored, sgd, kept, out_grad)
        summed.append(losses.masked_fill_(~mask, 0.0).sum(1, dtype=widest(losses.device)))
    return _updates(kernel.stages, memory.model, factored, params), loss_totals(summed, batches.seen)


def _updates(stages: Stages, model: Tree, factored: Factored, params: Tree) -> Mapping[str, Tensor]:
    """What the clients send, in the order of the received leaves."""
    private = updates(stages, model, {name: leaf for name, leaf in params.items() if name not in factored})
    if not factored:
        return private
    kept = {stage.weight: factored[stage.weight].update(stage) for stage in stages if stage.weight in factored}
    return FactoredTree({name: kept[name] if name in kept else private[name] for name in params})
