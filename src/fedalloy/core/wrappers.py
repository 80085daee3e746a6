"""Solvers that wrap another one and pass through everything they do not change."""

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
    """Base of all solvers that wrap an ``inner`` one. The inner solver's aspects are passed through too, except
    ``Fusible``, because the wrapper may have changed the program."""

    @declared
    def inner(self) -> LocalSolver:
        """The wrapped solver."""
        raise NotImplementedError(f"{type(self).__name__} must declare 'inner', the solver that it wraps")

    def aspect(self, kind: type[Kind]) -> Kind | None:
        if isinstance(self, kind):
            return self
        if issubclass(kind, CountsSteps) and type(self).plan is not WrapperBase.plan:  # the inner count is for its plan
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
    """``inner``, with the changes of a subclass."""

    inner: LocalSolver

    def bind(self, data_spec: DataSpec) -> Self:
        return replace(self, inner=aspects.bind(self.inner, data_spec))


if not TYPE_CHECKING:  # old names, kept for one version
    __getattr__ = renamed.old_names(__name__, {"SolverAround": "SolverWrapper", "Wrapping": "WrapperBase"})
