"""The losses of one fixed model on all planned batches: of the final model, and of clients whose link failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core import inputs, tree
from fedalloy.core.blocks import client_keys, dropout_draws
from fedalloy.core.inputs import Inputs
from fedalloy.core.types import Block, Context, Plan, Tree
from fedalloy.studies.unfolding.unrolled import UnrolledProblem

_CHUNK = 4096


@dataclass(frozen=True)
class Fixed:
    """The model that is scored, and on whose batches: ``rows`` of the problem's clients in the round of ``ctx``."""

    params: Tree
    buffers: Tree
    rows: Tensor
    epochs: Tensor
    ctx: Context


def fixed_model_loss(problem: UnrolledProblem, fixed: Fixed) -> Tensor:
    """``sum_k sum_batches mean loss`` as one differentiable number."""
    device = next(iter(fixed.params.values())).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in _pieces(problem, fixed):
        total = total + part(fixed.params).double()
    return total


def fixed_model_gradient(problem: UnrolledProblem, fixed: Fixed) -> tuple[Tensor, Tree]:
    """The same number and its gradient, piece by piece, so that memory does not grow with the data."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in fixed.params.items()}
    gradient = tree.zeros_like(fixed.params)
    total = torch.zeros((), dtype=torch.float64, device=next(iter(leaves.values())).device)
    for part in _pieces(problem, fixed):
        with torch.enable_grad():
            value = part(leaves)
            grads = torch.autograd.grad(value, list(leaves.values()))
        total += value.detach().double()
        gradient = {name: leaf + grad for (name, leaf), grad in zip(gradient.items(), grads, strict=True)}
    return total, gradient


def _pieces(problem: UnrolledProblem, fixed: Fixed) -> Iterator[_Piece | _Batch]:
    """If examples do not affect each other and nothing is drawn (no BatchNorm, no dropout), each is scored once, times
    the batches it is in; otherwise every batch is scored."""
    if len(fixed.rows) == 0:
        return
    objective = problem.task.objective
    block = problem.task.data("train", fixed.rows)
    keys = client_keys(fixed.ctx.key, fixed.rows)
    plan = problem.algorithm.solver.plan(block.size.cpu(), fixed.epochs, keys.fold("plan"))
    if objective.needs_full_batches or objective.needs_draw:
        yield from _batches(problem, fixed, block, plan, dropout_draws(plan, keys))
        return
    device = next(iter(fixed.params.values())).device
    for row, counts in enumerate(_counts(plan, block.size.cpu())):
        own = block.client(row)
        for some in inputs.pieces(len(own), _CHUNK):
            x, y = (inputs.to(inputs.take(part, some), device) for part in (own.x, own.y))
            yield _Piece(problem, fixed.buffers, x, y, counts[some].to(device))


def _counts(plan: Plan, sizes: Tensor) -> Iterator[Tensor]:
    """``sum 1 / |batch|`` over the batches that every example of every client is in."""
    share = plan.mask.double() / plan.mask.sum(2, keepdim=True).clamp(min=1)
    for row, size in enumerate(sizes.tolist()):
        counts = torch.zeros(max(1, size), dtype=share.dtype)
        yield counts.index_add_(0, plan.index[row].flatten(), share[row].flatten())[:size]


@dataclass(frozen=True)
class _Piece:
    problem: UnrolledProblem
    buffers: Tree
    x: Inputs
    y: Inputs
    counts: Tensor

    def __call__(self, params: Tree) -> Tensor:
        outer = self.problem.outer
        losses = outer.losses(outer.outputs(params, self.buffers, self.x), self.y)
        return (losses * self.counts.to(losses.dtype)).sum()


@dataclass(frozen=True)
class _Batch:
    problem: UnrolledProblem
    buffers: Tree
    x: Inputs
    y: Inputs
    draw: Tensor

    def __call__(self, params: Tree) -> Tensor:
        return self.problem.outer.loss(params, self.buffers, self.x, self.y, None, self.draw)[0]


def _batches(problem: UnrolledProblem, fixed: Fixed, block: Block, plan: Plan, draws: Tensor) -> Iterator[_Batch]:
    device = next(iter(fixed.params.values())).device
    for row in range(len(block.size)):
        own = block.client(row)
        for step in range(int(plan.steps[row])):
            chosen = plan.index[row, step][plan.mask[row, step]].to(inputs.device_of(own.y))
            x, y = (inputs.to(inputs.take(part, chosen), device) for part in (own.x, own.y))
            yield _Batch(problem, fixed.buffers, x, y, draws[row, step].to(device))
