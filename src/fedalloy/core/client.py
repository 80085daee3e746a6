"""One client alone: its program as a block of one, the gradients its steps get, and the plain kernel. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from fedalloy.core import inputs, tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.applying import alone, led, plain
from fedalloy.core.blocks import Prepared, dropout_draws, prepare
from fedalloy.core.errors import stage
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.core.objective import Act, Objective
from fedalloy.core.program import BlockTraining, Kernel, TrainingResult, run_block
from fedalloy.core.protocols import Shared
from fedalloy.core.types import Block, Context, Contribution, Examples, State, Tree, Work

DIFFERENTIABLE = True


@dataclass(frozen=True)
class Assignment:
    """One client's share of a round: its data, how many epochs it has time for, whether its link works."""

    examples: Examples
    epochs: int = -1
    active: bool = True


class BatchGradient:
    """``grad_at`` for one step: gradients of the batch loss, remembering the loss and the buffers.

    A solver that evaluates several models in one step passes ``track=False`` for those whose batch
    statistics should not enter the shared buffers. One that descends on a function of the batch loss passes it
    as ``of``; the loss that is remembered is the plain one. One with a loss of its own passes it as ``by``.
    """

    def __init__(
        self, objective: Objective, x: Inputs, y: Inputs, mask: Tensor | None, buffers: Tree, draw: Tensor | None
    ) -> None:
        self._objective, self._batch, self._draw = objective, (x, y, mask), draw
        self._acts = 0
        self.buffers = buffers
        self.loss: Tensor | None = None

    def __call__(
        self,
        params: Tree,
        *,
        track: bool | Tensor = True,
        of: Callable[[Tensor], Tensor] | None = None,
        by: Callable[[Act, Tensor, Tensor], Tensor] | None = None,
        fixed: Tree | None = None,
    ) -> Tree:
        def loss_of(leaves: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
            whole = {**(fixed or {}), **leaves}
            if by is None:
                loss, buffers = self._objective.loss(whole, self.buffers, *self._batch, self._draw)
            else:
                loss, buffers = self._own_loss(whole, by)
            return (loss if of is None else of(loss)), (loss, buffers)

        grads, (loss, buffers) = grad(loss_of, has_aux=True)(params)
        if isinstance(track, Tensor):
            self.buffers = tree.map_leaves(
                lambda new, old: torch.where(track.to(new.device), new, old), buffers, self.buffers
            )
        elif track:
            self.buffers = buffers
        self.loss = loss if self.loss is None else self.loss
        return dict(grads)

    def outputs(self, params: Tree, x: Tensor) -> Tensor:
        """What the model says about any ``x``, in evaluation mode."""
        return self._objective.outputs(params, self.buffers, x)

    def _own_loss(self, leaves: Tree, by: Callable[[Act, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tree]:
        """The masked mean of a loss that calls the model itself; every call of a step has dropout masks of its own."""
        x, y, mask = self._batch
        buffers = self.buffers

        def act(role: str, *inputs: Tensor) -> Any:
            nonlocal buffers
            draw = None if self._draw is None else torch.as_tensor(Key(self._draw).fold("act", self._acts).state)
            self._acts += 1
            result, buffers = self._objective.act(role, leaves, buffers, inputs, draw, training=True)
            return result

        losses = by(act, x, y)
        if mask is None:
            return losses.mean(), buffers
        return torch.where(mask, losses, torch.zeros_like(losses)).sum() / mask.sum().clamp(min=1), buffers

    def under(self, objective: Objective | None) -> BatchGradient:
        """The same batch asked anew, under another objective where one is given."""
        return BatchGradient(objective or self._objective, *self._batch, self.buffers, self._draw)


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

    ``key`` is the client's own key of this round, as a batch of one; ``kernel`` takes the steps in place of ``train``.
    """
    only = torch.tensor([0])
    work = Work(only, torch.tensor([assignment.epochs]), torch.tensor([assignment.active]))
    block = prepare(algorithm, work, Block.of(assignment.examples), shared, ctx, key)
    done = run_block(algorithm, objective, shared, {0: state}, block, ctx, kernel or train, plain)
    stats = {name: float(values[0]) for name, values in done.stats.items()}
    return Contribution(alone(done.payload), stats, alone(done.states))


def train(training: BlockTraining) -> TrainingResult:
    """The plain kernel, for a block of one: every planned step in turn, each a call of the solver's."""
    block, solver, ctx = training.block, training.algorithm.solver, training.ctx
    carry, buffers = alone((training.carry, training.buffers))
    dropout, losses = dropout_draws(block.plan, block.keys), []
    for step, (x, y) in enumerate(batches_of_one(block)):
        with stage(f"step {step + 1} of {len(block.running)}"):
            grad_at = BatchGradient(training.objective, x, y, None, buffers, dropout[0, step])
            draws = {name: leaf[0, step] for name, leaf in block.draws.items()}
            carry = solver.step(carry, grad_at, draws, block.plan.phase[0, step], ctx)
            buffers = grad_at.buffers
            losses.append((inputs.length(y), float(grad_at.loss) if grad_at.loss is not None else 0.0))
    return TrainingResult(led(carry), led(buffers), loss_sums(losses))


def batches_of_one(block: Prepared) -> Iterator[tuple[Inputs, Inputs]]:
    """``x, y`` of every step of the only client, without padding."""
    for rows, mask in zip(block.rows[:, 0], block.mask[:, 0], strict=True):
        chosen = rows[mask]
        yield inputs.take(block.data.x, chosen), inputs.take(block.data.y, chosen)


def loss_sums(losses: list[tuple[int, float]]) -> Tensor:
    """Of the losses of a client's batches, with their numbers of examples: the sums over examples and over batches, as
    ``tally`` counts them, ``[1, 2]``."""
    sums = [sum(count * loss for count, loss in losses), sum(loss for _, loss in losses)]
    return torch.tensor([sums], dtype=torch.float64)
