"""The node's half of an algorithm, made of what a server said: its solver and its wires; the rest is the server's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import ENGINE_STATS, Weighting
from fedalloy.core.spec import from_spec
from fedalloy.core.types import Context, Contributions, Info, State, Weights
from fedalloy.flower.protocol import AlgorithmSpec
from fedalloy.servers.sgd import ServerSgd


@dataclass(frozen=True)
class WeighedElsewhere(Weighting):
    """A weighting that the server has: a node knows which statistics it needs and no more."""

    weight_bound: ClassVar[float] = 1.0
    """The server has looked at it when it built the algorithm."""

    statistics: frozenset[str] = frozenset()

    @property
    def requires(self) -> frozenset[str]:
        return self.statistics

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        raise SpecError("weights are computed at the server")


def half_of(spec: AlgorithmSpec) -> Algorithm:
    """The algorithm as far as a node has to do with it.

    >>> half_of(AlgorithmSpec(solver={"kind": "sgd", "lr": 0.5}, weighting="Samples")).solver.lr
    0.5
    """
    solver = from_spec("solver", spec.solver.to_spec())
    known = ENGINE_STATS | aspects.provides(solver)
    if unknown := sorted(set(spec.requires) - known):
        raise SpecError(f"statistics {', '.join(unknown)} do not exist here; known: {', '.join(sorted(known))}")
    wire = tuple(from_spec("wire", one.to_spec(), f"wire[{i}]") for i, one in enumerate(spec.wire))
    try:
        return Algorithm(solver, WeighedElsewhere(frozenset(spec.requires)), ServerSgd(), wire)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise SpecError(str(error)) from error
