"""Local steps of a large model in little memory: the plain kernel of ``core.client``, which forgets what it has used.

With the plain kernel a step holds four models: the received one, the one before the step, the gradient and the one
after it. Here a leaf of the gradient, and of the model before the step, is forgotten once its new leaf is there, and
a leaf of the trained model once its change is. The numbers are the same to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core import aspects
from fedalloy.core.client import batches_of_one, loss_sums
from fedalloy.core.client import train as plain
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.core.types import Tree
from fedalloy.methods.solvers.sgd import Sgd


def train(training: BlockTraining) -> TrainingResult:
    """The kernel of a node, for a block of one client."""
    if not _is_plain_descent(training):
        return plain(training)
    received = training.shared["params"]
    params, buffers, losses = _stepped(training)
    change = {name: _taken(params, name, params is received) - leaf for name, leaf in received.items()}
    sent = {"delta": change, **({"buffers": buffers} if training.shared["buffers"] else {})}
    return TrainingResult({}, buffers, losses, sent=sent)


def _is_plain_descent(training: BlockTraining) -> bool:
    """Whether a step is ``w - lr g`` and nothing else, and the change is all that is needed of the trained model."""
    algorithm, solver = training.algorithm, training.algorithm.solver
    if type(solver) is not Sgd or solver.fusing is None or solver.momentum or solver.weight_decay:
        return False
    more = algorithm.is_generative or aspects.local_leaves(solver) or "accuracy_after" in algorithm.requires
    return not more and isinstance(training.ctx.local_lr, float)


def _stepped(training: BlockTraining) -> tuple[Tree, Tree, Tensor]:
    """The model after all steps, its buffers, and the sums of training losses."""
    block, objective, received = training.block, training.objective, training.shared["params"]
    params, buffers, losses = received, training.buffers, []
    dropout, counted = block.dropout_keys()[0], training.counted[:, 0].tolist()
    for step, ((x, y), count) in enumerate(zip(batches_of_one(block, objective.buckets), counted, strict=True)):
        training.at.name = f"step {step + 1} of {len(block.running)}"
        if not count:  # nothing in this batch counts
            continue
        grad_at = objective.gradient(objective, x, y, None, buffers, dropout[step])
        params = _moved(params, dict(grad_at(params)), training.ctx.local_lr, keep=params is received)
        buffers = grad_at.buffers
        losses.append((count, 0.0 if grad_at.loss is None else float(grad_at.loss)))
    return params, buffers, loss_sums(losses)


def _moved(params: Tree, grads: Tree, lr: float, keep: bool) -> Tree:
    """The model after a step; the gradient, and unless they are to be kept the parameters, are used up."""
    return {name: torch.add(_taken(params, name, keep), grads.pop(name), alpha=-lr) for name in list(params)}


def _taken(leaves: Tree, name: str, keep: bool) -> Tensor:
    return leaves[name] if keep else leaves.pop(name)
