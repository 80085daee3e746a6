"""Plain SGD on any model of one client: autograd, updates in place. Not differentiable.

Rules are pure, so the loop makes a new model in every step. This kernel owns one model and overwrites it. If the model
has max pooling, it also converts images to channels-last layout, with which torch's pooling on a CPU is several times
faster. The ``workers`` engine uses it for all models trained with plain SGD.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedalloy.core import inputs
from fedalloy.core.client import batches_of_one, loss_sums
from fedalloy.core.objective import Objective
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.core.types import Tree
from fedalloy.engines.kinds import PlainSgd, plain_sgd_of

DIFFERENTIABLE = False


class InplaceModel:
    """One client's parameters, updated in place."""

    def __init__(self, received: Tree, sgd: PlainSgd) -> None:
        self.names, self.received = list(received), list(received.values())
        self.leaves = [leaf.clone().requires_grad_() for leaf in self.received]
        self.velocity = [torch.zeros_like(leaf) for leaf in self.received] if sgd.momentum else []
        self.sgd = sgd

    @property
    def tree(self) -> Tree:
        """The parameters by name."""
        return dict(zip(self.names, self.leaves, strict=True))

    def trained(self) -> Tree:
        """The parameters by name, detached from autograd."""
        return {name: leaf.detach() for name, leaf in self.tree.items()}

    def descend(self, loss: Tensor, lr: float) -> None:
        """Take one SGD step on this loss."""
        grads = list(torch.autograd.grad(loss, self.leaves, allow_unused=True, materialize_grads=True))
        how, leaves = self.sgd, [leaf.detach() for leaf in self.leaves]
        if how.weight_decay or how.pull:
            torch._foreach_add_(grads, leaves, alpha=how.weight_decay + how.pull)
            torch._foreach_sub_(grads, self.received, alpha=how.pull)
        if self.velocity:
            torch._foreach_mul_(self.velocity, how.momentum)
            torch._foreach_add_(self.velocity, grads)
            if how.nesterov:
                torch._foreach_add_(grads, self.velocity, alpha=how.momentum)
        torch._foreach_sub_(leaves, grads if how.nesterov or not self.velocity else self.velocity, alpha=lr)


def train(training: BlockTraining) -> TrainingResult:
    """Does what ``core.client.train`` does, for a solver that declares plain descent."""
    sgd, block, objective = plain_sgd_of(training.algorithm), training.block, training.objective
    assert sgd is not None
    carry, buffers = training.carry, training.buffers
    model, dropout, pools = InplaceModel(carry["params"], sgd), block.dropout_keys()[0], _pools(objective)
    losses: list[tuple[int, float]] = []
    counted = training.counted[:, 0].tolist()
    for step, ((x, y), count) in enumerate(zip(batches_of_one(block, objective.buckets), counted, strict=True)):
        training.at.name = f"step {step + 1} of {len(block.running)}"
        if not count:  # nothing in this batch counts
            continue
        with torch.enable_grad():
            x = inputs.each(_channels_last, x) if pools else x
            loss, buffers = objective.loss(model.tree, buffers, x, y, None, dropout[step])
            model.descend(loss, training.ctx.local_lr)
            losses.append((count, float(loss.detach())))
    settled = {name: leaf.detach() for name, leaf in buffers.items()}
    return TrainingResult({**carry, "params": model.trained()}, settled, loss_sums(losses))


def _pools(objective: Objective) -> bool:
    """Whether the model has max pooling."""
    structure = objective.structure
    return structure is not None and any(isinstance(part, nn.MaxPool2d) for part in structure.modules())


def _channels_last(x: Tensor) -> Tensor:
    """A copy in channels-last layout. With one channel both layouts are the same memory; ``contiguous`` would then
    return the tensor with its old strides, from which torch would not recognise the layout."""
    if x.dim() != 4 or x.device.type != "cpu":
        return x
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)
