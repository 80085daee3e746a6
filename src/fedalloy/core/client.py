"""A single client: its program as a block of one, and the plain kernel. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.applying import Applied, plain
from fedalloy.core.blocks import Prepared, prepare
from fedalloy.core.buckets import Buckets
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.core.objective import Objective
from fedalloy.core.program import BlockTraining, Kernel, TrainingResult, run_block
from fedalloy.core.protocols import Shared
from fedalloy.core.types import Block, Context, Contribution, Examples, State, Work

DIFFERENTIABLE = True


@dataclass(frozen=True)
class Assignment:
    """One client's work in a round: its data, its number of epochs, and whether its link works."""

    examples: Examples
    epochs: int = -1
    active: bool = True


def run_client(
    algorithm: Algorithm,
    objective: Objective,
    shared: Shared,
    state: State,
    assignment: Assignment,
    key: Key,
    ctx: Context,
    kernel: Kernel | None = None,
) -> Contribution:
    """The program of a single client: a block of one, with plain calls. An error names the stage it happened in.

    ``key`` is the client's key of this round, as a batch of one; ``kernel`` replaces ``train``.
    """
    only = torch.tensor([0])
    work = Work(only, torch.tensor([assignment.epochs]), torch.tensor([assignment.active]))
    block = prepare(algorithm, work, Block.of(assignment.examples), shared, ctx, key)
    return run_alone(algorithm, objective, shared, state, block, ctx, kernel)


def run_alone(
    algorithm: Algorithm,
    objective: Objective,
    shared: Shared,
    state: State,
    block: Prepared,
    ctx: Context,
    kernel: Kernel | None = None,
    apply: Applied = plain,
) -> Contribution:
    """The same from a block of one; ``kernel`` replaces ``train`` and works on trees of the form that ``apply``
    defines."""
    states = dict.fromkeys(block.work.ids.tolist(), state)
    done = run_block(algorithm, objective, shared, states, block, ctx, kernel or train, apply)
    stats = {name: float(values[0]) for name, values in done.stats.items()}
    (payload,), (kept,) = apply.unstack(done.payload, 1), apply.unstack(done.states, 1)
    return Contribution(payload, stats, kept)


def train(training: BlockTraining) -> TrainingResult:
    """The plain kernel, for a block of one: calls the solver's ``step`` for every planned step."""
    block, objective, solver, ctx = training.block, training.objective, training.algorithm.solver, training.ctx
    carry, buffers, losses = training.carry, training.buffers, []
    dropout, phase = block.dropout_keys()[0], block.plan.phase[0]
    counted = training.counted[:, 0].tolist()
    for step, ((x, y), count) in enumerate(zip(batches_of_one(block, objective.buckets), counted, strict=True)):
        training.at.name = f"step {step + 1} of {len(block.running)}"
        if not count:  # nothing in this batch counts
            continue
        grad_at = objective.gradient(objective, x, y, None, buffers, dropout[step])
        draws = {name: leaf[0, step] for name, leaf in block.draws.items()}
        carry = solver.step(carry, grad_at, draws, phase[step], ctx)
        buffers = grad_at.buffers
        losses.append((count, 0.0 if grad_at.loss is None else float(grad_at.loss)))
    return TrainingResult(carry, buffers, loss_sums(losses))


def batches_of_one(block: Prepared, buckets: Buckets | None = None) -> Iterator[tuple[Inputs, Inputs]]:
    """``x, y`` of every step of the only client, without padding."""
    places = block.rows if block.chosen is None else block.chosen
    chosen = [rows[mask] for rows, mask in zip(places[:, 0], block.mask[:, 0], strict=True)]
    x, y = inputs.take_each(block.data.x, chosen), inputs.take_each(block.data.y, chosen)
    if buckets is None:
        return zip(x, y, strict=True)
    lengths = buckets.of_batches(block)[:, 0].tolist() if chosen else []
    return (buckets.cut(xs, ys, length) for xs, ys, length in zip(x, y, lengths, strict=True))


def loss_sums(losses: list[tuple[int, float]]) -> Tensor:
    """The sums over targets and over batches, ``[1, 2]`` as in ``summed_losses``, from how many targets count in a
    client's batches, and their losses."""
    sums = [sum(count * loss for count, loss in losses), sum(loss for _, loss in losses)]
    return torch.tensor([sums], dtype=torch.float64)
