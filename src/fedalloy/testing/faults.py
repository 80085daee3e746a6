"""Typical mistakes of engines, planted on purpose: every check must catch the fault that it is meant for.

Every fault wraps an engine and returns an engine: ``check_engine(key_by_slot(Loop()))`` must find problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Carry, DataPart, Engine, GradAt, Outcome, Shared, Task
from fedalloy.core.task import TaskWrapper
from fedalloy.core.types import Block, Cohort, Context, Payload, Plan, State, Work
from fedalloy.core.wrappers import SolverWrapper
from fedalloy.testing.handles import Change, WrongAnswer

Fault = Callable[[Engine], Engine]
_Call = tuple[Algorithm, Task, Shared, Mapping[int, State], Work, Context]


@dataclass(frozen=True)
class _Wrapped(Engine):
    """An engine with changed inputs or outputs."""

    call: Callable[[_Call], Outcome]

    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        return self.call((algorithm, task, shared, states, work, ctx))


def key_by_slot(engine: Engine) -> Engine:
    """Client keys come from the position in the cohort instead of the id."""

    def call(given: _Call) -> Outcome:
        algorithm, task, shared, states, work, ctx = given
        slots, ids = torch.arange(len(work)), work.ids.tolist()
        by_slot = {slot: states[client] for slot, client in enumerate(ids)}
        outcome = engine(algorithm, _Relabelled(task, work.ids), shared, by_slot, replace(work, ids=slots), ctx)
        cohort = replace(_cohort(outcome), ids=work.ids[outcome.cohort.ids])
        return Outcome(cohort, {ids[slot]: state for slot, state in outcome.states.items()}, outcome.failures)

    return _Wrapped(call)


def forgotten_mask(engine: Engine) -> Engine:
    """Padding steps are taken: every client takes as many steps as the longest, the last ones without data."""

    def call(given: _Call) -> Outcome:
        algorithm, task, shared, states, work, ctx = given
        sizes = task.data("train", work.ids).size
        longest = int(algorithm.solver.plan(sizes, work.epochs, ctx.key.each(work.ids)).steps.max())
        padded = replace(algorithm, solver=_Padded(algorithm.solver, longest))
        return engine(padded, task, shared, states, work, ctx)

    return _Wrapped(call)


def lost_client_state(engine: Engine) -> Engine:
    """Clients lose their states."""

    def call(given: _Call) -> Outcome:
        algorithm, task, shared, *_, ctx = given
        outcome, draw = engine(*given), task.objective.init
        fresh = {client: algorithm.init_client(shared, ctx.key.fold(client), draw) for client in outcome.states}
        return replace(outcome, states=fresh)

    return _Wrapped(call)


def shuffled_clients(engine: Engine) -> Engine:
    """The rows of contributions do not match their ids."""

    def call(given: _Call) -> Outcome:
        outcome = engine(*given)
        payload = {
            part: tree.map_leaves(lambda leaf: leaf.roll(1, 0), leaves)
            for part, leaves in outcome.cohort.payload.items()
        }
        return replace(outcome, cohort=_cohort(outcome).with_payload(payload))

    return _Wrapped(call)


def ignored_epochs(engine: Engine) -> Engine:
    """All clients train for the solver's epochs, ignoring those of their devices."""

    def call(given: _Call) -> Outcome:
        algorithm, task, shared, states, work, ctx = given
        return engine(algorithm, task, shared, states, replace(work, epochs=torch.full_like(work.epochs, -1)), ctx)

    return _Wrapped(call)


def ignored_links(engine: Engine) -> Engine:
    """Clients whose link failed send what they trained."""

    def call(given: _Call) -> Outcome:
        algorithm, task, shared, states, work, ctx = given
        return engine(algorithm, task, shared, states, replace(work, active=torch.ones_like(work.active)), ctx)

    return _Wrapped(call)


def repeated_draws(engine: Engine) -> Engine:
    """The same shuffles, masks and noise in every round."""

    def call(given: _Call) -> Outcome:
        algorithm, task, shared, states, work, ctx = given
        return engine(algorithm, task, shared, states, work, replace(ctx, key=Key.of(0)))

    return _Wrapped(call)


def kept_plan(engine: Engine) -> Engine:
    """The batches of the first cohort are used for all later ones of the same number of clients."""
    known: dict[int, Plan] = {}

    def call(given: _Call) -> Outcome:
        algorithm, task, shared, states, work, ctx = given
        kept = replace(algorithm, solver=_KeptPlan(algorithm.solver, known))
        return engine(kept, task, shared, states, work, ctx)

    return _Wrapped(call)


def stale_buffers(engine: Engine) -> Engine:
    """The clients' BatchNorm statistics are lost."""

    def call(given: _Call) -> Outcome:
        _, _, shared, *_ = given
        outcome = engine(*given)
        count = len(outcome.cohort)
        buffers = tree.map_leaves(lambda leaf: leaf.expand(count, *leaf.shape), shared["buffers"])
        known = outcome.cohort.payload
        payload = {**known, "buffers": buffers} if "buffers" in known else known
        return replace(outcome, cohort=_cohort(outcome).with_payload(payload))

    return _Wrapped(call)


def call_order(engine: Engine) -> Engine:
    """Randomness depends on the number of earlier calls."""
    calls = 0

    def call(given: _Call) -> Outcome:
        nonlocal calls
        calls += 1
        algorithm, task, shared, states, work, ctx = given
        return engine(algorithm, task, shared, states, work, replace(ctx, key=ctx.key.fold(calls)))

    return _Wrapped(call)


def written_inputs(engine: Engine) -> Engine:
    """The received model is used as scratch memory."""

    def call(given: _Call) -> Outcome:
        _, _, shared, *_ = given
        outcome = engine(*given)
        for leaf in shared["params"].values():
            leaf.mul_(1.5)
        return outcome

    return _Wrapped(call)


def false_statistics(engine: Engine) -> Engine:
    """Clients report more examples and fewer steps than they have."""

    def call(given: _Call) -> Outcome:
        outcome = engine(*given)
        claims = {"num_examples": 2.0, "num_steps": 0.5, "step_norm": 1e-9}
        stats = {name: values * claims.get(name, 1.0) for name, values in outcome.cohort.stats.items()}
        return replace(outcome, cohort=outcome.cohort.with_stats(stats))

    return _Wrapped(call)


def wrong_answer(question: str, change: Change) -> Fault:
    """The handle on the contributions answers one question with changed rows."""

    def fault(engine: Engine) -> Engine:
        def call(given: _Call) -> Outcome:
            outcome = engine(*given)
            return replace(outcome, cohort=WrongAnswer(outcome.cohort, question, change))

        return _Wrapped(call)

    return fault


def _wrong_order(rows: Tensor) -> Tensor:
    return rows.roll(1, 0)


def _missing_client(rows: Tensor) -> Tensor:
    return torch.cat([rows[:-1], torch.zeros_like(rows[-1:])])


ANSWERS = ("norms", "select", "resend", "combine", "chunks", "rows", "stack", "payload")
"""The answers of a handle that can be wrong by the order of its clients or by a missing one."""

FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        key_by_slot, forgotten_mask, lost_client_state, shuffled_clients, ignored_epochs, ignored_links,
        repeated_draws, kept_plan, stale_buffers, call_order, written_inputs, false_statistics,
    )
}  # fmt: skip
"""All planted faults of engines by name."""
HANDLE_FAULTS: dict[str, Fault] = {
    "template": wrong_answer("template", _wrong_order),
    **{f"{question}, wrong order": wrong_answer(question, _wrong_order) for question in ANSWERS},
    **{f"{question}, a client is missing": wrong_answer(question, _missing_client) for question in ANSWERS},
}
"""All planted faults of handles by name; not included: results that are overwritten too early, which needs an engine
that reuses its memory."""


def _cohort(outcome: Outcome) -> Cohort:
    """The cohort of an outcome; faults are only planted in engines that keep contributions in memory."""
    assert isinstance(outcome.cohort, Cohort)
    return outcome.cohort


@dataclass(frozen=True)
class _Relabelled(TaskWrapper):
    """A task whose client ``i`` is really client ``ids[i]``."""

    ids: Tensor

    def data(self, part: DataPart, ids: Tensor) -> Block:
        return self.task.data(part, self.ids[ids])


@dataclass(frozen=True)
class _KeptPlan(SolverWrapper):
    """A solver that keeps its plans by the number of clients."""

    known: dict[int, Plan]

    def plan(self, sizes: Tensor, epochs: Tensor, keys: Key) -> Plan:
        return self.known.setdefault(len(sizes), self.inner.plan(sizes, epochs, keys))


@dataclass(frozen=True)
class _Padded(SolverWrapper):
    """A solver that ends every client's program with steps of zero gradient, up to ``longest`` in all."""

    longest: int

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        nobody = ctx.key.each(torch.zeros(1, dtype=torch.int64))
        one = self.inner.plan(torch.tensor([1]), torch.tensor([1]), nobody)
        draws = {name: torch.zeros_like(leaf[0, 0]) for name, leaf in self.inner.draws(one, nobody, shared).items()}
        for extra in range(self.longest):
            moved = self.inner.step(carry, cast(GradAt, tree.zeros_like), draws, one.phase[0, 0], ctx)
            carry = _chosen(extra < self.longest - steps, moved, carry)
        return self.inner.end(carry, shared, mine, steps, ctx)


def _chosen(condition: Tensor, one: Carry, other: Carry) -> Carry:
    """Leaf by leaf one or the other; works under vmap."""
    return {
        name: _chosen(condition, value, other[name])
        if isinstance(value, dict)
        else torch.where(condition, value, other[name])
        for name, value in one.items()
    }
