"""Plain descent on any model of one client: plain autograd, updates in place. Not differentiable.

Rules are pure, so the loop makes a new model in every step. This kernel owns one and overwrites it, and lays images
out with their channels last where a model takes maxima of them: there torch's pooling on a CPU is several times
faster. Used by processes, for models that no fused kernel knows.
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
    """One client's parameters, moved in place by their gradients."""

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
        """The parameters by name, without their history."""
        return {name: leaf.detach() for name, leaf in self.tree.items()}

    def descend(self, loss: Tensor, lr: float) -> None:
        """One step down this loss."""
        grads = list(torch.autograd.grad(loss, self.leaves))
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
    """What ``core.client.train`` does, for a solver that says it is plain descent."""
    sgd, block, objective = plain_sgd_of(training.algorithm), training.block, training.objective
    assert sgd is not None
    carry, buffers = training.carry, training.buffers
    model, dropout, pools = InplaceModel(carry["params"], sgd), block.dropout_keys()[0], _pools(objective)
    losses: list[tuple[int, float]] = []
    for step, (x, y, count) in enumerate(batches_of_one(block)):
        training.at.name = f"step {step + 1} of {len(block.running)}"
        with torch.enable_grad():
            x = inputs.each(_channels_last, x) if pools else x
            loss, buffers = objective.loss(model.tree, buffers, x, y, None, dropout[step])
            model.descend(loss, training.ctx.local_lr)
            losses.append((count, float(loss.detach())))
    settled = {name: leaf.detach() for name, leaf in buffers.items()}
    return TrainingResult({**carry, "params": model.trained()}, settled, loss_sums(losses))


def _pools(objective: Objective) -> bool:
    """Whether the model takes maxima of images."""
    structure = objective.structure
    return structure is not None and any(isinstance(part, nn.MaxPool2d) for part in structure.modules())


def _channels_last(x: Tensor) -> Tensor:
    """A copy with this layout. With one channel both layouts are the same memory, and ``contiguous`` would leave the
    strides that tell torch which one is meant."""
    if x.dim() != 4 or x.device.type != "cpu":
        return x
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)
