"""The exact gradient of the summed losses by the shares, through the local steps, checkpointed per round.

The rounds are played once without a graph; only the states between them are kept. On the way back every round is
played again, alone, with one: memory is that of one round. Nothing but the plain vmap kernel is used, because an
autograd call hidden inside a kernel would silently give the first-order gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.algorithm import server_step
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context, State, Tree
from fedalloy.engines import mapped
from fedalloy.engines.batched import stack_states, unstack_states
from fedalloy.engines.blocks import Prepared, prepare
from fedalloy.unfolding.course import Course, known
from fedalloy.unfolding.first_order import Found, check_finite, final_point, silent_point
from fedalloy.unfolding.still import still_loss, still_slope
from fedalloy.unfolding.vjp import floats, no_slope, pull, replaced

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
    block = prepare(algorithm, work, course.task.data("train", work.ids), shared, ctx)
    cohort, new = _train(course, block, shared, clients, ctx)
    loss = cohort.payload["tally"]["loss"].sum(dtype=torch.float64)
    if not bool(work.active.all()):
        loss = loss + still_loss(course, silent_point(shared["params"], shared["buffers"], work, ctx))
    step = server_step(algorithm, server, cohort, ctx)
    check_finite(step.dropped, loss.detach(), ctx.round)
    kept = known(clients, new, work)
    return {"server": step.state, "clients": {str(client): one for client, one in kept.items()}}, loss


def _train(
    course: Course, block: Prepared, shared: Any, clients: dict[int, State], ctx: Context
) -> tuple[Cohort, dict[int, State]]:
    """All clients' local work under vmap, in the order of their ids."""
    algorithm = course.at(torch.zeros(0))
    mine = stack_states([clients[client] for client in block.work.ids.tolist()])
    trained = mapped.train(algorithm, course.task.objective, shared, mine["solver"], block, ctx)
    steps = torch.where(block.work.active, block.planned, 0).double().to(mapped.device_of(shared))
    payload, kept = mapped.finish(algorithm, course.task.objective, shared, mine["solver"], trained, steps, ctx)
    if shared["buffers"]:
        payload = {**payload, "buffers": trained.buffers}
    order = block.work.ids.argsort()
    sent = {part: tree.rows(leaves, order.to(mapped.device_of(shared))) for part, leaves in payload.items()}
    stats = {name: values[order] for name, values in _stats(course, block, ctx).items()}
    states = unstack_states({"solver": kept, "wire": mine["wire"]}, len(block))
    return Cohort(block.work.ids[order], sent, stats), dict(zip(block.work.ids.tolist(), states, strict=True))


def _stats(course: Course, block: Prepared, ctx: Context) -> dict[str, Tensor]:
    planned = block.planned.double()
    described = course.algorithm.solver.describe(planned, ctx) if course.normalise else {}
    return {"num_examples": block.data.size.cpu().double(), "num_steps": planned, **described}
