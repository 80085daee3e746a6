"""The exact gradient of the summed losses by the shares, through the local steps, checkpointed per round.

The rounds are played once without a graph; only the states between them are kept. On the way back every round is
played again, alone, with one: memory is that of one round. Nothing but the plain vmap kernel is used, because an
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
from fedalloy.engines import mapped
from fedalloy.studies.unfolding.course import Course, known
from fedalloy.studies.unfolding.first_order import Found, check_finite, final_point, silent_point
from fedalloy.studies.unfolding.still import still_loss, still_slope
from fedalloy.studies.unfolding.vjp import floats, no_slope, pull, replaced

assert mapped.DIFFERENTIABLE


def exact(course: Course, shares: Tensor, params: Tree, buffers: Tree, key: Key) -> Found:
    """Unroll the rounds, then walk back playing each again; ``key`` is that of the outer iteration."""
    server, clients = course.begin(course.at(shares[0]), params, buffers, key)
    states: list[State] = [{"server": server, "clients": {str(client): one for client, one in clients.items()}}]
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for round in range(1, course.rounds + 1):
            state, loss = _play(course, states[-1], shares[round - 1], course.context(round, key))
            states.append(state)
            total = total + loss.cpu()
    last = states[-1]["server"]["shared"]
    back = no_slope(states[-1])
    if course.learning.final:
        loss, slope = still_slope(course, final_point(course, last["params"], last["buffers"], key))
        total = total + loss.cpu()
        back |= {f"server/shared/params/{name}": leaf for name, leaf in slope.items()}
    return Found(float(total), _walk_back(course, shares, states, back, key), last["params"], last["buffers"])


def _walk_back(course: Course, shares: Tensor, states: list[State], back: Tree, key: Key) -> Tensor:
    found = torch.zeros_like(shares)
    for round in reversed(range(1, course.rounds + 1)):
        ctx = course.context(round, key)
        before = states.pop(-2)

        def play(leaves: Tree, before: State = before, ctx: Context = ctx) -> Tree:
            row = leaves["shares"]
            state, loss = _play(course, replaced(before, leaves), row, ctx)
            return {**floats(state), "loss": loss}

        slopes = pull(play, {**floats(before), "shares": shares[round - 1]}, {**back, "loss": torch.ones(())})
        found[round - 1] = slopes.pop("shares")
        back = slopes
    return found


def _play(course: Course, state: State, shares: Tensor, ctx: Context) -> tuple[State, Tensor]:
    """One round as a differentiable function of the state before it and the shares; its losses too."""
    algorithm, work = course.at(shares), course.work(ctx)
    server, clients = state["server"], {int(client): one for client, one in state["clients"].items()}
    shared = server["shared"]
    cohort, new = _train(course, work, shared, clients, ctx)
    loss = cohort.stack("tally")["loss"].sum(dtype=torch.float64)
    if not bool(work.active.all()):
        loss = loss + still_loss(course, silent_point(shared["params"], shared["buffers"], work, ctx))
    step = server_step(algorithm, server, cohort, ctx)
    check_finite(step.dropped, loss.detach(), ctx.round)
    kept = known(clients, new, work)
    return {"server": step.state, "clients": {str(client): one for client, one in kept.items()}}, loss


def _train(
    course: Course, work: Work, shared: Shared, clients: dict[int, State], ctx: Context
) -> tuple[Cohort, dict[int, State]]:
    """All clients' local work under vmap, in the order of their ids."""
    algorithm, task = course.at(torch.zeros(0)), course.task
    block = prepare(algorithm, work, task.data("train", work.ids), shared, ctx)
    done = run_block(algorithm, task.objective, shared, clients, block, ctx, mapped.train, vmapped)
    order = done.ids.argsort()
    sent = {
        part: {name: leaf[order.to(leaf.device)] for name, leaf in leaves.items()}
        for part, leaves in done.payload.items()
    }
    stats = {name: values[order] for name, values in done.stats.items()}
    states = dict(zip(done.ids.tolist(), vmapped.unstack(done.states, len(block)), strict=True))
    return Cohort(done.ids[order], sent, stats), states
