"""The exact gradient of the summed losses by the shares, through the local steps, checkpointed per round.

The rounds are run once without a graph, and only the states between them are kept. The backward pass runs every round
again with a graph, so memory is that of one round. Only the plain vmap kernel is used, because an
autograd call hidden inside a kernel would silently give the first-order gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core.algorithm import server_step
from fedalloy.core.applying import vmapped
from fedalloy.core.blocks import prepare
from fedalloy.core.keys import Key
from fedalloy.core.program import run_block
from fedalloy.core.protocols import Shared
from fedalloy.core.types import Cohort, Context, State, Tree, Work
from fedalloy.engines.kernels import vmap_kernel
from fedalloy.studies.unfolding.first_order import Found, check_finite, final_point, silent_point
from fedalloy.studies.unfolding.fixed_model import fixed_model_gradient, fixed_model_loss
from fedalloy.studies.unfolding.unrolled import UnrolledProblem, known
from fedalloy.studies.unfolding.vjp import floats, no_gradient, pull, replaced

assert vmap_kernel.DIFFERENTIABLE


def exact(problem: UnrolledProblem, shares: Tensor, params: Tree, buffers: Tree, key: Key) -> Found:
    """Unroll the rounds, then go back and run each again; ``key`` is that of the outer iteration."""
    server, clients = problem.begin(problem.at(shares[0]), params, buffers, key)
    states: list[State] = [{"server": server, "clients": {str(client): one for client, one in clients.items()}}]
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for round in range(1, problem.rounds + 1):
            state, loss = _run_round(problem, states[-1], shares[round - 1], problem.context(round, key))
            states.append(state)
            total = total + loss.cpu()
    last = states[-1]["server"]["shared"]
    back = no_gradient(states[-1])
    if problem.learning.final:
        loss, gradient = fixed_model_gradient(problem, final_point(problem, last["params"], last["buffers"], key))
        total = total + loss.cpu()
        back |= {f"server/shared/params/{name}": leaf for name, leaf in gradient.items()}
    return Found(float(total), _walk_back(problem, shares, states, back, key), last["params"], last["buffers"])


def _walk_back(problem: UnrolledProblem, shares: Tensor, states: list[State], back: Tree, key: Key) -> Tensor:
    found = torch.zeros_like(shares)
    for round in reversed(range(1, problem.rounds + 1)):
        ctx = problem.context(round, key)
        before = states.pop(-2)

        def run_round(leaves: Tree, before: State = before, ctx: Context = ctx) -> Tree:
            row = leaves["shares"]
            state, loss = _run_round(problem, replaced(before, leaves), row, ctx)
            return {**floats(state), "loss": loss}

        gradients = pull(run_round, {**floats(before), "shares": shares[round - 1]}, {**back, "loss": torch.ones(())})
        found[round - 1] = gradients.pop("shares")
        back = gradients
    return found


def _run_round(problem: UnrolledProblem, state: State, shares: Tensor, ctx: Context) -> tuple[State, Tensor]:
    """One round as a differentiable function of the state before it and the shares; its losses too."""
    algorithm, work = problem.at(shares), problem.work(ctx)
    server, clients = state["server"], {int(client): one for client, one in state["clients"].items()}
    shared = server["shared"]
    cohort, new = _train(problem, work, shared, clients, ctx)
    loss = cohort.stack("tally")["loss"].sum(dtype=torch.float64)
    if not bool(work.active.all()):
        loss = loss + fixed_model_loss(problem, silent_point(shared["params"], shared["buffers"], work, ctx))
    step = server_step(algorithm, server, cohort, ctx)
    check_finite(step.dropped, loss.detach(), ctx.round)
    kept = known(clients, new, work)
    return {"server": step.state, "clients": {str(client): one for client, one in kept.items()}}, loss


def _train(
    problem: UnrolledProblem, work: Work, shared: Shared, clients: dict[int, State], ctx: Context
) -> tuple[Cohort, dict[int, State]]:
    """All clients' local work under vmap, in the order of their ids."""
    algorithm, task = problem.at(torch.zeros(0)), problem.task
    block = prepare(algorithm, work, task.data("train", work.ids), shared, ctx)
    done = run_block(algorithm, task.objective, shared, clients, block, ctx, vmap_kernel.train, vmapped)
    order = done.ids.argsort()
    sent = {
        part: {name: leaf[order.to(leaf.device)] for name, leaf in leaves.items()}
        for part, leaves in done.payload.items()
    }
    stats = {name: values[order] for name, values in done.stats.items()}
    states = dict(zip(done.ids.tolist(), vmapped.unstack(done.states, len(block)), strict=True))
    return Cohort(done.ids[order], sent, stats), states
