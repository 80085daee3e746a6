"""Plain descent on the received model and, at the same time, on one of the client's own that is trained at a mixture of
both, in place, for a chain of linear layers. Not differentiable.

Both are the descent of :mod:`fused`; for the second one, gradients are those at the mixture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.core.types import Tree
from fedalloy.engines.batches import batches
from fedalloy.engines.kernels.fused import Dense, Memory, Passes, allocate, backward
from fedalloy.engines.kinds import PlainSgd, mixed_sgd_of

DIFFERENTIABLE = False


def train(layers: tuple[Dense, ...], training: BlockTraining) -> TrainingResult:
    """The kernel, for a model of these layers and a solver of the kind ``mixed_descent``."""
    mixed, params, block = mixed_sgd_of(training.algorithm), training.shared["params"], training.block
    assert mixed is not None
    sgd, lr = PlainSgd(mixed.momentum, mixed.nesterov, mixed.weight_decay), training.ctx.local_lr
    memory = allocate(params, len(block), momentum=sgd.momentum > 0)
    own, shares = _own(training.mine["personal"], memory), training.mine["alpha"]
    between = Memory(params, {name: torch.empty_like(leaf) for name, leaf in memory.model.items()}, {})
    passes, beside = (Passes(layers, training.objective.loss_name or "", block) for _ in range(2))
    for step, (x, y) in enumerate(batches(block)):
        training.at.name = f"step {step + 1} of {len(block.running)}"
        running = block.running[step]
        shared, mine, middle = (kept.first(running) for kept in (memory, own, between))
        _mix(shared.model, mine.model, shares[:running], middle.model)
        values, out_grad, scale = beside.forward(middle.model, step, x, y)
        out_grad = out_grad * shares[:running].view(-1, 1, 1)
        backward(layers, mine, sgd, values, out_grad, scale, lr, at=middle.model)
        values, out_grad, scale = passes.forward(shared.model, step, x, y)
        backward(layers, shared, sgd, values, out_grad, scale, lr)
    training.at.name = None
    return TrainingResult({"params": memory.model, "personal": own.model, "alpha": shares}, {}, passes.totals())


def _own(leaves: Tree, memory: Memory) -> Memory:
    """The clients' own models as buffers to write into, with velocities like those of the received one."""
    copied = {name: leaf.clone(memory_format=torch.contiguous_format) for name, leaf in leaves.items()}
    return Memory(memory.received, copied, {name: torch.zeros_like(leaf) for name, leaf in memory.velocity.items()})


def _mix(shared: Tree, own: Tree, shares: Tensor, into: Tree) -> None:
    """``(1 - share) shared + share own`` for every client."""
    for name, leaf in shared.items():
        torch.lerp(leaf, own[name], shares.view(-1, *[1] * (leaf.dim() - 1)), out=into[name])
