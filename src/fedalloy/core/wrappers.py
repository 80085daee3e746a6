"""A solver around another one: what it does not change passes through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from torch import Tensor

from fedalloy.core import aspects, renamed
from fedalloy.core.aspects import BindsToData, CountsSteps, Fusible
from fedalloy.core.declared import declared
from fedalloy.core.keys import Key
from fedalloy.core.objective import GradAt
from fedalloy.core.solver import Kind, LocalSolver
from fedalloy.core.types import Carry, Context, Contributions, DataSpec, Part, Payload, Plan, Shared, State, Tree


class WrapperBase(LocalSolver, BindsToData):
    """What every solver around an ``inner`` one shares. What the inner one is passes too, except that it is fusible: a
    program that the wrapper may have changed."""

    @declared
    def inner(self) -> LocalSolver:
        """The solver inside."""
        raise NotImplementedError(f"{type(self).__name__} does not say which solver is inside")

    def aspect(self, kind: type[Kind]) -> Kind | None:
        if isinstance(self, kind):
            return self
        if issubclass(kind, CountsSteps) and type(self).plan is not WrapperBase.plan:  # another plan, another count
            return None
        return None if issubclass(kind, Fusible) else self.inner.aspect(kind)

    @property
    def needs_data_spec(self) -> bool:
        return aspects.needs_data_spec(self.inner)

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
    def stateful(self) -> bool:
        return self.inner.stateful

    @property
    def uses_length(self) -> str:
        return self.inner.uses_length

    def lr_at(self, round: int, rounds: int | None = None) -> float:
        return self.inner.lr_at(round, rounds)

    def plan(self, sizes: Tensor, epochs: Tensor, keys: Key) -> Plan:
        return self.inner.plan(sizes, epochs, keys)

    def draws(self, plan: Plan, keys: Key, shared: Shared) -> Tree:
        return self.inner.draws(plan, keys, shared)

    def init_shared(self, params: Tree) -> Shared:
        return self.inner.init_shared(params)

    def init_client(self, shared: Shared, key: Key) -> State:
        return self.inner.init_client(shared, key)

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        return self.inner.begin(shared, mine, ctx)

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        return self.inner.step(carry, grad_at, draws, phase, ctx)

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        return self.inner.end(carry, shared, mine, steps, ctx)

    def absorb(self, shared: Shared, aggregate: Payload, cohort: Contributions, ctx: Context) -> Shared:
        return self.inner.absorb(shared, aggregate, cohort, ctx)


@dataclass(frozen=True)
class SolverWrapper(WrapperBase):
    """``inner``, with whatever a subclass does otherwise."""

    inner: LocalSolver

    def bind(self, data_spec: DataSpec) -> Self:
        return replace(self, inner=aspects.bind(self.inner, data_spec))


if not TYPE_CHECKING:  # for one version: what has been renamed here
    __getattr__ = renamed.old_names(__name__, {"SolverAround": "SolverWrapper", "Wrapping": "WrapperBase"})
