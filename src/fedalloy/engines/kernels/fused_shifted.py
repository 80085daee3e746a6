"""Descent on the received model where each client adds a tree of its own to every gradient (SCAFFOLD), in place, for a
chain of linear layers. Not differentiable.

It is the descent of :mod:`fused`, and for one linear layer the compiled kernel of :mod:`fused_logistic`.
"""

from __future__ import annotations

from fedalloy.core import tree
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.engines.kernels import fused_logistic
from fedalloy.engines.kernels.fused import Dense, Memory, allocate, walk
from fedalloy.engines.kinds import PlainSgd, shifted_sgd_of

DIFFERENTIABLE = False


def train(layers: tuple[Dense, ...], training: BlockTraining) -> TrainingResult:
    """The kernel, for a model of these layers and a solver of the kind ``shifted_descent``."""
    shifted, params, block = shifted_sgd_of(training.algorithm), training.shared["params"], training.block
    assert shifted is not None
    sgd, shift = PlainSgd(shifted.momentum, weight_decay=shifted.weight_decay), training.carry["shift"]
    loss = training.objective.loss_name or ""
    if len(layers) == 1 and loss == "cross_entropy":
        layer = layers[0]
        found = fused_logistic.train(layer.weight, layer.bias, sgd, params, block, training.ctx, shift)
        if found is not None and found.sent is not None:
            return TrainingResult({"params": tree.add(found.sent["delta"], params)}, {}, found.loss_sum)
    memory = allocate(params, len(block), momentum=sgd.momentum > 0)
    memory = Memory(params, memory.model, memory.velocity, shift)
    losses = walk(layers, loss, sgd, memory, block, training.ctx)
    return TrainingResult({"params": memory.model}, {}, losses)
