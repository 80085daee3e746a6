"""The rounds unrolled by hand in one autograd graph: what both gradients are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.blocks import client_keys
from fedalloy.core.keys import Key
from fedalloy.core.layer_names import layer_of
from fedalloy.core.types import Tree
from fedalloy.studies.unfolding.shares import shares_of
from fedalloy.studies.unfolding.unrolled import UnrolledProblem


def unrolled(
    problem: UnrolledProblem, theta: Tensor, params: Tree, key: Key, detach: bool
) -> tuple[float, Tensor, Tree]:
    """The summed loss, its gradient by theta and the final model; ``detach`` cuts the local gradients loose."""
    theta = theta.detach().requires_grad_()
    shares = shares_of(theta, problem.learning.parametrisation)
    w = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    server, memory = problem.algorithm.server, problem.algorithm.server.init(params)
    total = torch.zeros((), dtype=torch.float64)
    for round in range(1, problem.rounds + 1):
        ctx = problem.context(round, key)
        losses, deltas, steps = _clients(problem, w, ctx, detach)
        total = total + losses
        update = _update(problem, shares[round - 1], deltas, steps)
        w, memory, _ = server.apply(update, memory, w, ctx)
    if problem.learning.final:
        total = total + _clients(problem, w, problem.context(problem.rounds + 1, key), detach, moving=False)[0]
    (grad,) = torch.autograd.grad(total, theta)
    return float(total.detach()), grad, {name: leaf.detach() for name, leaf in w.items()}


def _clients(
    problem: UnrolledProblem, w: Tree, ctx: Any, detach: bool, moving: bool = True
) -> tuple[Tensor, list[Tree], Tensor]:
    work, data = problem.work(ctx), problem.task.data("train", problem.ids)
    keys = client_keys(ctx.key, problem.ids)
    plan = problem.algorithm.solver.plan(data.size, work.epochs, keys.fold("plan"))
    total, deltas = torch.zeros((), dtype=torch.float64), []
    for k in range(problem.task.population):
        loss, y = _train(problem, w, data.client(k), plan, k, ctx, detach, moving and bool(work.active[k]))
        total = total + loss
        deltas.append(tree.subtract(y, w))
    return total, deltas, plan.steps.double()


def _train(problem, w, own, plan, k, ctx, detach, moving):
    solver, y, velocity = problem.algorithm.solver, w, tree.zeros_like(w)
    total = torch.zeros((), dtype=torch.float64)
    for step in range(int(plan.steps[k])):
        rows = plan.index[k, step][plan.mask[k, step]]
        outer = problem.outer.loss(y, {}, own.x[rows], own.y[rows], None, None)[0]
        total = total + outer
        if not moving:
            continue
        loss = problem.task.objective.loss(y, {}, own.x[rows], own.y[rows], None, None)[0]
        found = torch.autograd.grad(loss, list(y.values()), create_graph=not detach, retain_graph=True)
        grads = dict(zip(y, [grad.detach() if detach else grad for grad in found], strict=True))
        if getattr(solver, "mu", 0):
            grads = tree.add(grads, tree.subtract(y, w), solver.mu)
        velocity = tree.add(grads, velocity, solver.momentum)
        y = tree.add(y, velocity, -ctx.local_lr)
    return total, y


def _update(problem: UnrolledProblem, row: Tensor, deltas: list[Tree], steps: Tensor) -> Tree:
    if problem.normalise:
        sizes = problem.task.data("train", problem.ids).size.double()
        effective = (sizes / sizes.sum() * steps).sum()
        row = row * (effective / steps if row.dim() == 1 else (effective / steps).unsqueeze(1))
    layers = list(tree.layers(deltas[0]))

    def weight(k: int, name: str) -> Tensor:
        return row[k] if row.dim() == 1 else row[k, layers.index(layer_of(name))]

    return {
        name: sum((weight(k, name) * delta[name] for k, delta in enumerate(deltas)), torch.zeros(()))
        for name in deltas[0]
    }
