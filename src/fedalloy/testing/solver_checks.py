"""Checks of local solvers, mostly of what engines rely on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.applying import Applied, plain, vmapped
from fedalloy.core.blocks import prepare
from fedalloy.core.client import Assignment, run_client, train
from fedalloy.core.keys import Key
from fedalloy.core.program import Finished, Kernel, run_block
from fedalloy.core.protocols import LocalSolver, Shared
from fedalloy.core.screening import misfit
from fedalloy.core.types import Cohort, Context, Contribution, Plan, State, Work
from fedalloy.engines.kernels import vmap_kernel
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.testing.comparing import broken, copied, differences
from fedalloy.testing.handles import Attendance
from fedalloy.testing.problems import EQUAL, SmallTask, model_for, small_task

TOLERANCE = 1e-9


class Bench:
    """A solver with everything that a client needs."""

    def __init__(self, solver: LocalSolver, task: SmallTask) -> None:
        self.algorithm = Algorithm(solver, Uniform(), ServerSgd()).bind(task)
        self.solver, self.task = self.algorithm.solver, task
        params, buffers = task.objective.init(Key.of(1))
        self.server = self.algorithm.init(params, task.population, buffers)
        self.shared: Shared = self.server["shared"]

    def context(self, round: int = 1) -> Context:
        """A round as the solver sees it."""
        key = Key.of(3).fold("round", round)
        return Context(round, self.task.population, key, self.solver.lr_at(round, 10), 10)

    def fresh(self, client: int) -> State:
        """A client's state before its first round."""
        return self.algorithm.init_client(self.shared, Key.of(2).fold(client), self.task.objective.init)

    def run(self, client: int, state: State, round: int = 1, epochs: int = -1) -> Contribution:
        """One client's round."""
        ctx, ids = self.context(round), torch.tensor([client])
        mine = Assignment(self.task.data("train", ids).client(0), epochs)
        with torch.no_grad():
            return run_client(self.algorithm, self.task.objective, self.shared, state, mine, ctx.key.each(ids), ctx)

    def block(self, ids: Iterable[int], states: Mapping[int, State], kernel: Kernel, apply: Applied) -> Finished:
        """The second round of several clients at once."""
        every, ctx = torch.tensor(list(ids)), self.context(2)
        work = Work.of(every, torch.ones_like(every))
        prepared = prepare(self.algorithm, work, self.task.data("train", work.ids), self.shared, ctx)
        with torch.no_grad():
            return run_block(self.algorithm, self.task.objective, self.shared, states, prepared, ctx, kernel, apply)


def parts(solver: LocalSolver) -> Iterator[str]:
    """What is sent has the declared names, and the shapes and dtypes of the parts it is like; all of it finite."""
    bench = Bench(solver, small_task(model_for(solver)))
    for client in range(bench.task.population):
        payload = bench.run(client, bench.fresh(client)).payload
        reason = misfit(payload, bench.algorithm.parts(bench.shared), bench.shared)
        yield from [f"client {client}: {reason}"] if reason else broken(payload)


def no_steps(solver: LocalSolver) -> Iterator[str]:
    """A client that takes no step sends an update of zero, and its state does not change."""
    bench = Bench(solver, small_task(model_for(solver)))
    used = bench.run(2, bench.fresh(2)).state
    for name, state in (("fresh", bench.fresh(2)), ("used", used)):
        found = bench.run(2, state, round=2, epochs=0)
        for leaf, value in found.payload[solver.update].items():
            if bool(value.any()):
                yield f"{name} state: the update of {leaf} is not zero after no steps"
        yield from (f"{name} state changed by no steps: {place}" for place in differences(found.state, state))


def nobody_moved(solver: LocalSolver) -> Iterator[str]:
    """A first round in which no client takes a step does not change any shared part."""
    bench = Bench(solver, small_task(model_for(solver)))
    ids = list(range(bench.task.population))
    cohort = Cohort.gather(ids, [bench.run(client, bench.fresh(client), epochs=0) for client in ids])
    # The server is given step counts above 0: it would ignore idle clients, and nothing would be checked.
    cohort = cohort.with_stats({"num_steps": torch.ones(len(ids), dtype=torch.float64)})
    after = server_step(bench.algorithm, bench.server, cohort, bench.context()).state
    yield from differences(after["shared"], bench.shared, TOLERANCE)


def absorbed(solver: LocalSolver) -> Iterator[str]:
    """``absorb`` only uses ids, statistics and the number of clients: contributions are already combined."""
    bench = Bench(solver, small_task(model_for(solver)))
    ids = list(range(bench.task.population))
    cohort = Cohort.gather(ids, [bench.run(client, bench.fresh(client)) for client in ids])
    even = torch.full((len(ids),), 1.0 / len(ids), dtype=torch.float64)
    aggregate = {part: cohort.combine(part, even) for part in cohort.parts}
    found, expected = (
        bench.solver.absorb(bench.shared, aggregate, one, bench.context()) for one in (Attendance(cohort), cohort)
    )
    yield from differences(found, expected)


def same_again(solver: LocalSolver) -> Iterator[str]:
    """Inputs are not changed, and the same inputs give the same contribution."""
    bench = Bench(solver, small_task(model_for(solver)))
    state = bench.run(3, bench.fresh(3)).state
    before = copied({"state": state, "shared": bench.shared})
    first, second = bench.run(3, state, round=2), bench.run(3, state, round=2)
    yield from differences({"state": state, "shared": bench.shared}, before)
    yield from (f"a second call differs: {place}" for place in differences(vars(second), vars(first)))


def alone_or_in_a_block(solver: LocalSolver) -> Iterator[str]:
    """A client's plan and draws do not depend on the other clients in its block."""
    sizes, epochs = torch.tensor([1, 3, 7, 12, 5]), torch.tensor([2, -1, 3, 1, 0])
    keys, shared = Key.of(4).each(torch.arange(5)), Bench(solver, small_task(model_for(solver))).shared
    block = solver.plan(sizes, epochs, keys)
    draws = solver.draws(block, keys, shared)
    for row in range(len(sizes)):
        key = Key.of(4).each(torch.tensor([row]))
        alone = solver.plan(sizes[row : row + 1], epochs[row : row + 1], key)
        steps = int(alone.steps[0])
        yield from differences(_batches(block, row), _batches(alone, 0), 0.0, f"plan of client {row}")
        expected = {name: leaf[0, :steps] for name, leaf in solver.draws(alone, key, shared).items()}
        found = {name: leaf[row, :steps] for name, leaf in draws.items()}
        yield from differences(found, expected, 0.0, f"draws of client {row}")


def vectorised(solver: LocalSolver) -> Iterator[str]:
    """``begin``, ``step`` and ``end`` work under ``torch.func.vmap`` and give the same results as one by one."""
    bench = Bench(solver, small_task(model_for(solver), sizes=EQUAL))
    clients = range(bench.task.population)
    states = {client: bench.run(client, bench.fresh(client)).state for client in clients}
    apart = [bench.block([client], states, train, plain) for client in clients]
    try:
        together = bench.block(clients, states, vmap_kernel.train, vmapped)
    except Exception as error:
        yield f"fails under vmap: {error}"
        return
    for row, client in enumerate(together.ids.tolist()):
        found = {"payload": _row(together.payload, row), "state": _row(together.states, row)}
        expected = {"payload": apart[client].payload, "state": apart[client].states}
        yield from differences(found, expected, TOLERANCE, f"client {client}")


def statistics(solver: LocalSolver) -> Iterator[str]:
    """``describe`` returns exactly what ``provides`` names, one number per client; the step size is above 0."""
    steps = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
    ctx = Context(1, 3, Key.of(0), solver.lr_at(1, 10), 10)
    if not ctx.local_lr > 0:
        yield f"lr_at(1) is {ctx.local_lr}"
    if not aspects.provides(solver):
        return
    told = aspects.describe(solver, steps, ctx)
    if told.keys() != aspects.provides(solver):
        yield f"describes {', '.join(sorted(told))} but provides {', '.join(sorted(aspects.provides(solver)))}"
    yield from (f"{name} is not [C]" for name, value in told.items() if value.shape != steps.shape)


CHECKS = {
    "parts": parts,
    "absorbed": absorbed,
    "no steps": no_steps,
    "nobody moved": nobody_moved,
    "same again": same_again,
    "alone or in a block": alone_or_in_a_block,
    "vectorised": vectorised,
    "statistics": statistics,
}


def _batches(plan: Plan, row: int) -> dict[str, Any]:
    """The steps one client takes: which examples, in which phase."""
    taken = plan.mask[row].any(-1)
    chosen = {str(step): plan.index[row, step][plan.mask[row, step]] for step in taken.nonzero().flatten().tolist()}
    return {"batches": chosen, "phase": plan.phase[row][taken]}


def _row(value: Any, index: int) -> Any:
    if isinstance(value, dict):
        return {name: _row(inner, index) for name, inner in value.items()}
    return value[index]


def _stacked(states: list[Any]) -> Any:
    if isinstance(states[0], dict):
        return {name: _stacked([state[name] for state in states]) for name in states[0]}
    return torch.stack([state if isinstance(state, Tensor) else torch.tensor(state) for state in states])
