"""A solver around another one: what it does not change passes through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from fedalloy.core.keys import Key
from fedalloy.core.names import Names
from fedalloy.core.protocols import Carry, GradAt, LocalSolver, Objective, Outputs, Shared
from fedalloy.core.statistics import Statistic
from fedalloy.core.types import Context, Contributions, Facts, Part, Payload, Plan, State, Stats, Tree


@dataclass(frozen=True)
class SolverAround(LocalSolver):
    """``inner``, with whatever a subclass does otherwise.

    Only ``descent`` and ``mixture`` do not pass: they promise engines a program that the wrapper may have changed.
    """

    inner: LocalSolver

    @property
    def parts(self) -> Mapping[str, Part]:
        return self.inner.parts

    @property
    def target(self) -> str:
        return self.inner.target

    @property
    def update(self) -> str:
        return self.inner.update

    @property
    def provides(self) -> frozenset[str]:
        return self.inner.provides

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        return self.inner.statistics

    @property
    def counts_idle(self) -> bool:
        return self.inner.counts_idle

    @property
    def stateful(self) -> bool:
        return self.inner.stateful

    @property
    def personalised(self) -> bool:
        return self.inner.personalised

    @property
    def mixable(self) -> bool:
        return self.inner.mixable

    @property
    def stays(self) -> Names:
        return self.inner.stays

    @property
    def own_start(self) -> bool:
        return self.inner.own_start

    @property
    def receives(self) -> frozenset[str] | None:
        return self.inner.receives

    @property
    def roles(self) -> frozenset[str]:
        return self.inner.roles

    @property
    def uses_length(self) -> str:
        return self.inner.uses_length

    def fitted(self, facts: Facts) -> Self:
        return replace(self, inner=self.inner.fitted(facts))

    def lr_at(self, round: int, rounds: int | None = None) -> float:
        return self.inner.lr_at(round, rounds)

    def plan(self, sizes: Tensor, epochs: Tensor, keys: Key) -> Plan:
        return self.inner.plan(sizes, epochs, keys)

    def count_steps(self, sizes: Tensor, epochs: Tensor) -> Tensor:
        return self.inner.count_steps(sizes, epochs)

    def draws(self, plan: Plan, keys: Key, shared: Shared) -> Tree:
        return self.inner.draws(plan, keys, shared)

    def init_shared(self, params: Tree) -> Shared:
        return self.inner.init_shared(params)

    def init_client(self, shared: Shared, key: Key) -> State:
        return self.inner.init_client(shared, key)

    def start_model(self, shared: Shared, mine: State) -> tuple[Tree, Tree]:
        return self.inner.start_model(shared, mine)

    def personal(self, shared: Shared, mine: State, mix: float | None = None) -> tuple[Tree, Tree]:
        return self.inner.personal(shared, mine, mix)

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        return self.inner.begin(shared, mine, ctx)

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        return self.inner.step(carry, grad_at, draws, phase, ctx)

    def conclude(self, carry: Carry, shared: Shared, outputs: Outputs) -> Carry:
        return self.inner.conclude(carry, shared, outputs)

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        return self.inner.end(carry, shared, mine, steps, ctx)

    def settle(self, mine: State, buffers: Tree) -> State:
        return self.inner.settle(mine, buffers)

    def describe(self, steps: Tensor, ctx: Context) -> Stats:
        return self.inner.describe(steps, ctx)

    def absorb(self, shared: Shared, aggregate: Payload, cohort: Contributions, ctx: Context) -> Shared:
        return self.inner.absorb(shared, aggregate, cohort, ctx)

    def synthesise(
        self, shared: Shared, key: Key, per_class: int, objective: Objective
    ) -> tuple[Tensor, Tensor] | None:
        return self.inner.synthesise(shared, key, per_class, objective)

    def trained(self, carry: Carry) -> Tree:
        return self.inner.trained(carry)
