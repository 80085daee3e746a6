"""The first-order gradient of the summed losses by the shares, without a graph through the rounds.

It treats the clients' updates as constants, so with ``w(t+1) = server(w(t), sum_k Theta[t, k] delta_k(t))``

    lambda(T) = g(T),   lambda(t) = g(t) + (d w(t+1) / d w(t))' lambda(t+1),
    d L / d Theta[t, k] = <d w(t+1) / d update' lambda(t+1), delta_k(t)>

where ``g(t)`` is the sum of all gradients computed in round t. The clients' updates and one such sum per round are
kept, ``O(T K d)``; the only graph is that of one step of an adaptive server.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm, ServerStep, server_step
from fedalloy.core.errors import Diverged
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Engine, Shared
from fedalloy.core.types import Context, Contributions, State, Tree, Weights, Work
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.weightings.unfolded import nova_factor
from fedalloy.studies.unfolding.fixed_model import Fixed, fixed_model_gradient
from fedalloy.studies.unfolding.unrolled import UnrolledProblem, known
from fedalloy.studies.unfolding.vjp import no_gradient, pull_server


@dataclass(frozen=True)
class Found:
    """The summed losses, their gradient by the shares (``[T, K]`` or ``[T, K, layers]``), and the final model."""

    loss: float
    gradient: Tensor
    params: Tree
    buffers: Tree


@dataclass(frozen=True)
class Kept:
    """What the backward pass needs from one round."""

    cohort: Contributions
    weights: Weights
    gradient: Tree
    target: Tree
    server: State
    ctx: Context


@torch.no_grad()
def first_order(
    problem: UnrolledProblem, shares: Tensor, params: Tree, buffers: Tree, key: Key, engine: Engine
) -> Found:
    """Unroll the rounds once and go back; ``key`` is that of the outer iteration."""
    state, clients = problem.begin(problem.clients, params, buffers, key)
    total, kept = torch.zeros((), dtype=torch.float64), []
    for round in range(1, problem.rounds + 1):
        algorithm, ctx = problem.at(shares[round - 1], recorded=not problem.plain), problem.context(round, key)
        work = problem.work(ctx)
        outcome = engine(problem.clients, problem.task, state["shared"], clients, work, ctx)
        step = server_step(algorithm, state, outcome.cohort, ctx)
        loss, gradient = _met(problem, outcome.cohort, step, work, state["shared"], ctx)
        check_finite(step.dropped, loss, round)
        sent = outcome.cohort.alone("delta", "delta").keep()
        kept.append(Kept(sent, step.weights, gradient, state["shared"]["params"], state["server"], ctx))
        state, clients, total = step.state, known(clients, outcome.states, work), total + loss.cpu()
    last, last_buffers = state["shared"]["params"], state["shared"]["buffers"]
    back = tree.zeros_like(last)
    if problem.learning.final:
        loss, back = final_gradient(problem, last, last_buffers, key)
        total = total + loss.cpu()
    return Found(float(total), _walk_back(problem, shares, kept, back, state["server"]), last, last_buffers)


def final_gradient(problem: UnrolledProblem, params: Tree, buffers: Tree, key: Key) -> tuple[Tensor, Tree]:
    """The loss of the model after the last round on one more round's batches, without training, and its gradient."""
    return fixed_model_gradient(problem, final_point(problem, params, buffers, key))


def final_point(problem: UnrolledProblem, params: Tree, buffers: Tree, key: Key) -> Fixed:
    """All clients' batches of the round after the last."""
    ctx = problem.context(problem.rounds + 1, key)
    return Fixed(params, buffers, problem.ids, problem.work(ctx).epochs, ctx)


def silent_point(params: Tree, buffers: Tree, work: Work, ctx: Context) -> Fixed:
    """The batches of clients whose link failed: they score the received model without training it."""
    return Fixed(params, buffers, work.ids[~work.active], work.epochs[~work.active], ctx)


def check_finite(dropped: dict[int, str], loss: Tensor, round: int) -> None:
    """Raise ``Diverged`` if a round has dropped clients or a loss that is not finite."""
    if dropped or not bool(loss.isfinite()):
        why = next((f"client {client}: {reason}" for client, reason in dropped.items()), "the loss is not finite")
        raise Diverged(f"unfold: round {round} diverged ({why}); try a smaller local step size")


def _met(
    problem: UnrolledProblem, cohort: Contributions, step: ServerStep, work: Work, shared: Shared, ctx: Context
) -> tuple[Tensor, Tree]:
    """The losses and gradients of a round, of clients that trained and of those that could not send."""
    if problem.plain:
        loss = cohort.stats["running_loss"].nan_to_num(0.0).sum()
        gradient = cohort.combine("delta", torch.full((len(cohort),), -1.0 / ctx.local_lr, dtype=torch.float64))
    else:
        loss, gradient = cohort.stack("tally")["loss"].sum(dtype=torch.float64), step.sums.get("slope", {})
    if bool(work.active.all()):
        return loss, gradient
    unmoved, more = fixed_model_gradient(problem, silent_point(shared["params"], shared["buffers"], work, ctx))
    return loss.to(unmoved) + unmoved, tree.add(gradient, more)


def _walk_back(problem: UnrolledProblem, shares: Tensor, kept: list[Kept], back: Tree, server: State) -> Tensor:
    """From the last round to the first; ``back`` is the gradient by the model after each."""
    found = torch.zeros_like(shares)
    memory = no_gradient(server)
    for round in reversed(range(problem.rounds)):
        here = kept[round]
        by_update, memory, by_model = _through_server(problem.algorithm, here, back, memory)
        found[round] = _by_shares(problem, here.cohort, by_update).to(found)
        back = tree.add(by_model, here.gradient)
    return found


def _through_server(algorithm: Algorithm, here: Kept, back: Tree, memory: Tree) -> tuple[Tree, Tree, Tree]:
    if isinstance(algorithm.server, ServerSgd):
        lr = algorithm.server.lr
        return ({name: leaf * lr for name, leaf in back.items()} if lr != 1.0 else back), memory, back
    return pull_server(algorithm.server, here.server, here.target, _combined(here), here.ctx, back, memory)


def _combined(here: Kept) -> Tree:
    """The update that the server received, computed again to save memory."""
    return here.cohort.combine("delta", here.weights)


def _by_shares(problem: UnrolledProblem, cohort: Contributions, by_update: Tree) -> Tensor:
    """Inner products of every client's update with the gradient by the combined one."""
    by_leaf = cohort.dots("delta", by_update)
    groups = tree.groups(by_update, "layer" if problem.layers else "client")
    scores = {group: torch.stack([by_leaf[name] for name in leaves]).sum(0) for group, leaves in groups.items()}
    products = torch.stack([scores[layer] for layer in problem.layers], dim=1) if problem.layers else scores[""]
    if problem.normalise:
        factor = nova_factor(cohort.stats)
        products = products * (factor.unsqueeze(1) if products.dim() > 1 else factor)
    return products
