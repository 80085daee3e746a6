"""The kernel for any solver and any module: the plain kernel's step under ``torch.func.vmap``. Differentiable."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedalloy.core import inputs
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.blocks import Prepared, summed_losses
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.core.protocols import Carry, Objective
from fedalloy.core.types import Context, Tree
from fedalloy.core.wide import widest
from fedalloy.engines.batches import batches, dropout_keys

DIFFERENTIABLE = True


def train(training: BlockTraining) -> TrainingResult:
    """Take every step of a block, each for the clients that have not finished."""
    block, objective, device = training.block, training.objective, training.device
    carry, buffers = training.carry, training.buffers
    dropout, mask_of = dropout_keys(block).to(device), block.mask.to(device)
    loss_sum = torch.zeros(len(block), 2, dtype=widest(device), device=device)
    draws = {name: leaf.to(device) for name, leaf in block.draws.items()}
    phase = block.plan.phase.to(device)
    one_step = step_of(training.algorithm, objective, training.ctx)
    groups, counted = _groups(objective, block), training.counted.to(device)
    for step, (x, y) in enumerate(batches(block)):
        x, y = inputs.to(x, device), inputs.to(y, device)
        count = block.running[step]
        drawn = {name: leaf[:count, step] for name, leaf in draws.items()}
        for rows, width, length in groups[step]:
            take = _taker(rows, count)
            x_now, y_now = (inputs.each(lambda leaf, width=width: leaf[:, :width], take(part)) for part in (x, y))
            if length is not None and objective.buckets is not None:
                x_now, y_now = objective.buckets.cut(x_now, y_now, length, axis=2)
            mask = None if block.full[step] or objective.needs_full_batches else take(mask_of[step])
            new, fresh, loss = vmap(one_step, in_dims=(0, 0, 0, 0, None if mask is None else 0, 0, 0, 0))(
                take(carry), take(buffers), x_now, y_now, mask,
                take(dropout[:, step]), take(drawn), take(phase[:, step]),
            )  # fmt: skip
            seen = take(counted[step])
            carry, buffers = _put(carry, new, rows, count), _put(buffers, fresh, rows, count)
            loss_sum = _put(loss_sum, take(loss_sum) + summed_losses(loss, seen), rows, count)
    return TrainingResult(carry, buffers, loss_sum)


def step_of(algorithm: Algorithm, objective: Objective, ctx: Context) -> Any:
    """The body of one step of one client, as a function to vmap."""

    def one_step(
        carry: Carry,
        buffers: Tree,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        draw: Tensor,
        drawn: Tree,
        phase: Tensor,
    ) -> tuple[Carry, Tree, Tensor]:
        grad_at = objective.gradient(objective, x, y, mask, buffers, draw)
        moved = algorithm.solver.step(carry, grad_at, drawn, phase, ctx)
        loss = grad_at.loss if grad_at.loss is not None else torch.zeros((), device=inputs.device_of(x))
        counted = grad_at.counted()
        if counted is None:
            return moved, grad_at.buffers, loss
        # A batch in which nothing counts is no step: momentum, decay and batch statistics must not move either.
        kept, fresh = tree_map(partial(torch.where, counted), (moved, grad_at.buffers), (carry, buffers))
        return kept, fresh, loss * counted

    return one_step


Group = tuple[Tensor | None, int, int | None]
"""Clients that share a call (None: all that are running), the size of their batches, and the length to which these are
cut (None: not at all)."""


def _groups(objective: Objective, block: Prepared) -> list[list[Group]]:
    """The running clients of every step in groups that can share a call: one group if padding does no harm; grouped by
    batch size if an example's result depends on the others (BatchNorm), and by length if batches are cut."""
    width, steps = block.mask.shape[2], range(len(block.running))
    by_size = [objective.needs_full_batches and not block.full[step] for step in steps]
    if objective.buckets is None and not any(by_size):
        return [[(None, width, None)] for _ in steps]
    whole = torch.full(block.mask.shape[:2], -1)
    lengths = whole if objective.buckets is None else objective.buckets.of_batches(block)
    sizes = block.mask.sum(2).cpu()
    return [
        _alike(sizes[step] if by_size[step] else torch.full_like(sizes[step], width), lengths[step], block, step)
        for step in steps
    ]


def _alike(sizes: Tensor, lengths: Tensor, block: Prepared, step: int) -> list[Group]:
    """The clients of a step by size and length of their batches."""
    both = torch.stack([sizes, lengths], 1)[: block.running[step]]
    device = block.mask.device
    return [
        ((both == kind).all(1).nonzero().flatten().to(device), int(kind[0]), None if int(kind[1]) < 0 else int(kind[1]))
        for kind in both.unique(dim=0)
    ]


def _taker(rows: Tensor | None, count: int) -> Any:
    """A function that selects the clients of a call from values whose first axis is the client."""
    if rows is None:
        return lambda value: tree_map(lambda leaf: leaf[:count], value)
    return lambda value: tree_map(lambda leaf: leaf[:count].index_select(0, rows), value)


def _put(old: Any, new: Any, rows: Tensor | None, count: int) -> Any:
    """The old values with the rows of the call's clients replaced; not in place, so that it is differentiable."""

    def merge(before: Tensor, after: Tensor) -> Tensor:
        if rows is not None:
            return before.index_copy(0, rows, after.to(before.dtype))
        return after if count == before.shape[0] else torch.cat([after.to(before.dtype), before[count:]])

    return tree_map(merge, old, new)
