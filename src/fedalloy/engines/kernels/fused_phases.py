"""Plain descent on the received model, then on a model of the client's own that is pulled towards the received one, in
place, for a chain of linear layers. Not differentiable.

Clients reach the second phase at different steps, so a block is prepared again for each phase: then the clients that
have steps of this phase left are its first rows, and every phase is the descent of :mod:`fused`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core.blocks import Prepared, prepare
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.core.types import Plan, Tree
from fedalloy.engines.kernels.fused import Dense, Memory, allocate, walk
from fedalloy.engines.kinds import PlainSgd, two_phase_sgd_of

DIFFERENTIABLE = False


def train(layers: tuple[Dense, ...], training: BlockTraining) -> TrainingResult:
    """The kernel, for a model of these layers and a solver of the kind ``two_phase_descent``."""
    phased, params, block = two_phase_sgd_of(training.algorithm), training.shared["params"], training.block
    assert phased is not None
    alike = PlainSgd(phased.momentum, phased.nesterov, phased.weight_decay)
    pulled = PlainSgd(phased.momentum, phased.nesterov, phased.weight_decay, phased.pull)
    models, losses = [], torch.zeros(())
    for place, sgd in enumerate((alike, pulled)):
        training.at.name = f"phase {place}"
        now, order = _in_phase(training, place)
        memory = allocate(params, len(block), momentum=sgd.momentum > 0)
        if place:
            own = training.mine["personal"]
            memory = Memory(params, _copied(own, order), memory.velocity)
        found = walk(layers, training.objective.loss_name or "", sgd, memory, now, training.ctx)
        models.append(_back(memory.model, order))
        losses = losses + (found if order is None else found[_inverse(order).to(found.device)])
    training.at.name = None
    return TrainingResult({"params": models[0], "personal": {"params": models[1]}}, {}, losses)


def _in_phase(training: BlockTraining, which: int) -> tuple[Prepared, Tensor | None]:
    """The block with the steps of one phase only, and the rows of the whole block that its clients are (None: the same
    ones)."""
    block = training.block
    plan = _of_phase(block.plan, which)
    now = prepare(training.algorithm, block.work, block.data, training.shared, training.ctx, block.keys, plan)
    if now.work is block.work:
        return now, None
    by_id = block.work.ids.argsort()
    return now, by_id[now.work.ids.argsort().argsort()]


def _of_phase(plan: Plan, which: int) -> Plan:
    """The steps of one phase, from the first place on. A client's phases follow each other.

    >>> steps = torch.arange(6).reshape(2, 3, 1)
    >>> both = Plan(steps, steps >= 0, torch.tensor([[0, 0, 1], [0, 1, 1]]))
    >>> _of_phase(both, 1).index[..., 0].tolist(), _of_phase(both, 1).mask[..., 0].tolist()
    ([[2, 2], [4, 5]], [[True, False], [True, True]])
    """
    inside = plan.phase == which
    before = (plan.phase < which).sum(1, keepdim=True)
    step = before + torch.arange(max(1, int(inside.sum(1).max())))
    place = step.clamp(max=plan.phase.shape[1] - 1)
    kept = (step == place) & inside.gather(1, place)
    wide = place.unsqueeze(2).expand(-1, -1, plan.index.shape[2])
    return Plan(plan.index.gather(1, wide), plan.mask.gather(1, wide) & kept.unsqueeze(2), torch.zeros_like(place))


def _copied(leaves: Tree, order: Tensor | None) -> Tree:
    """The clients' own models in the order of a phase, as buffers to write into."""
    if order is None:
        return {name: leaf.clone(memory_format=torch.contiguous_format) for name, leaf in leaves.items()}
    return {name: leaf[order.to(leaf.device)] for name, leaf in leaves.items()}


def _back(model: Tree, order: Tensor | None) -> Tree:
    """The models of a phase in the order of the whole block."""
    return model if order is None else _copied(model, _inverse(order))


def _inverse(order: Tensor) -> Tensor:
    return order.argsort()
