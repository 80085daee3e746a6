"""Any solver and any module over a whole block: the loop's own body under ``torch.func.vmap``. Differentiable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.client import BatchGradient
from fedalloy.core.protocols import Carry, Objective, Shared
from fedalloy.core.types import Context, Payload, State, Tree
from fedalloy.engines.blocks import Prepared, dropout_keys, tally

DIFFERENTIABLE = True


@dataclass(frozen=True)
class Trained:
    """What a kernel leaves behind: the carry, the buffers and every client's sums of training losses (``tally``)."""

    carry: Carry
    buffers: Tree
    loss_sum: Tensor


def train(
    algorithm: Algorithm, objective: Objective, shared: Shared, mine: State, block: Prepared, ctx: Context
) -> Trained:
    """Every step of a block; only the clients that still run take part in it."""
    device = device_of(shared)
    carry = begin(algorithm, shared, mine, len(block), ctx)
    buffers = first_buffers(algorithm, shared, mine, len(block))
    dropout, mask_of = dropout_keys(block).to(device), block.mask.to(device)
    loss_sum = torch.zeros(len(block), 2, dtype=torch.float64, device=device)
    draws = {name: leaf.to(device) for name, leaf in block.draws.items()}
    phase = block.plan.phase.to(device)
    one_step = step_of(algorithm, objective, ctx)
    for step, (x, y) in enumerate(block.batches()):
        x, y = x.to(device), y.to(device)
        count = block.running[step]
        inputs = {name: leaf[:count, step] for name, leaf in draws.items()}
        for rows, width in _even(objective, block, step):
            take = _taker(rows, count)
            args = (take(carry), take(buffers), take(x)[:, :width], take(y)[:, :width])
            mask = None if block.full[step] or rows is not None else take(mask_of[step])
            new, fresh, loss = vmap(one_step, in_dims=(0, 0, 0, 0, None if mask is None else 0, 0, 0, 0))(
                *args, mask, take(dropout[:, step]), take(inputs), take(phase[:, step])
            )
            seen = take(mask_of[step]).sum(1)
            carry, buffers = _put(carry, new, rows, count), _put(buffers, fresh, rows, count)
            loss_sum = _put(loss_sum, take(loss_sum) + tally(loss, seen), rows, count)
    return Trained(carry, buffers, loss_sum)


def finish(
    algorithm: Algorithm,
    objective: Objective,
    shared: Shared,
    mine: State,
    trained: Trained,
    steps: Tensor,
    ctx: Context,
) -> tuple[Payload, State]:
    """What the block's clients send and keep."""
    solver = algorithm.solver

    def end(carry: Carry, buffers: Tree, kept: State, taken: Tensor) -> tuple[Payload, State]:
        carry = solver.conclude(carry, shared, lambda params, x: objective.outputs(params, buffers, x))
        return solver.end(carry, shared, kept, taken, ctx)

    payload, state = vmap(end)(trained.carry, trained.buffers, mine, steps)
    return payload, state


def encode(
    algorithm: Algorithm, shared: Shared, payload: Payload, kept: State, block: Prepared
) -> tuple[Payload, State]:
    """The wire transforms over a block, in order; they do not touch clients whose link failed."""
    if not any(payload.values()):
        return payload, kept
    before, kept = (payload, kept), dict(kept)
    for position, wire in enumerate(algorithm.wire):
        draws = wire.draws(algorithm.exchanged(shared), block.keys.fold("wire", position))
        draws = {name: leaf.to(device_of(shared)) for name, leaf in draws.items()}
        payload, kept[str(position)] = vmap(wire.encode)(payload, kept[str(position)], draws)
    if not algorithm.wire or bool(block.work.active.all()):
        return payload, kept
    active = block.work.active.to(device_of(shared))

    def heard(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(active.reshape(-1, *[1] * (new.dim() - 1)), new, old)

    result: tuple[Payload, State] = tree_map(heard, (payload, kept), before)
    return result


def step_of(algorithm: Algorithm, objective: Objective, ctx: Context) -> Any:
    """The body of one step of one client, as vmap wants it."""

    def one_step(
        carry: Carry,
        buffers: Tree,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        draw: Tensor,
        inputs: Tree,
        phase: Tensor,
    ) -> tuple[Carry, Tree, Tensor]:
        grad_at = BatchGradient(objective, x, y, mask, buffers, draw)
        carry = algorithm.solver.step(carry, grad_at, inputs, phase, ctx)
        loss = grad_at.loss if grad_at.loss is not None else torch.zeros((), device=x.device)
        return carry, grad_at.buffers, loss

    return one_step


def begin(algorithm: Algorithm, shared: Shared, mine: State, clients: int, ctx: Context) -> Carry:
    """Every client's first carry; what does not depend on the client is shared until the first step."""

    def first(kept: State, _: Tensor) -> Carry:
        return algorithm.solver.begin(shared, kept, ctx)

    carry: Carry = vmap(first, in_dims=(0, 0))(mine, torch.zeros(clients))
    return carry


def first_buffers(algorithm: Algorithm, shared: Shared, mine: State, clients: int) -> Tree:
    """Every client's buffers before the first step: the received ones, unless some of them stay at the clients."""
    if not algorithm.solver.stays or not shared["buffers"]:
        return expand(shared["buffers"], clients)
    return first_models(algorithm, shared, mine, clients)[1]


def first_models(algorithm: Algorithm, shared: Shared, mine: State, clients: int) -> tuple[Tree, Tree]:
    """Every client's model before the first step, for solvers whose clients do not all begin with the same one."""

    def first(kept: State, _: Tensor) -> tuple[Tree, Tree]:
        return algorithm.solver.start_model(shared, kept)

    models: tuple[Tree, Tree] = vmap(first, in_dims=(0, 0))(mine, torch.zeros(clients))
    return models


def device_of(shared: Shared) -> torch.device:
    """Where the models are."""
    return next(iter(shared["params"].values())).device


def expand(tree: Tree, clients: int) -> Tree:
    """The same leaves for every client, without a copy."""
    return {name: leaf.expand(clients, *leaf.shape) for name, leaf in tree.items()}


def _even(objective: Objective, block: Prepared, step: int) -> list[tuple[Tensor | None, int]]:
    """The running clients in groups that can share a call: all of them where padding is harmless; by the size of
    their batch where examples see each other (BatchNorm)."""
    width = block.mask.shape[2]
    if block.full[step] or not objective.needs_full_batches:
        return [(None, width)]
    sizes = block.mask[step, : block.running[step]].sum(1)
    return [((sizes == size).nonzero().flatten(), int(size)) for size in sizes.unique().tolist()]


def _taker(rows: Tensor | None, count: int) -> Any:
    """Chooses the clients of a call from anything with a client axis."""
    if rows is None:
        return lambda value: tree_map(lambda leaf: leaf[:count], value)
    return lambda value: tree_map(lambda leaf: leaf[:count].index_select(0, rows), value)


def _put(old: Any, new: Any, rows: Tensor | None, count: int) -> Any:
    """The old values with the called clients' rows replaced; pure, so that gradients flow."""

    def merge(before: Tensor, after: Tensor) -> Tensor:
        if rows is not None:
            return before.index_copy(0, rows, after.to(before.dtype))
        return after if count == before.shape[0] else torch.cat([after.to(before.dtype), before[count:]])

    return tree_map(merge, old, new)
