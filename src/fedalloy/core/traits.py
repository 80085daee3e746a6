"""Properties of an algorithm's rules, computed once: rules are frozen, so they never change."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from fedalloy.core import aspects
from fedalloy.core.names import Names
from fedalloy.core.packing import Packings
from fedalloy.core.protocols import ENGINE_STATS, LocalSolver, ServerOptimizer, Weighting, Wire
from fedalloy.core.statistics import STATISTICS, Statistic
from fedalloy.core.types import Part
from fedalloy.core.wiring import packings_of

OF_A_RECEIVED_MODEL = frozenset({"loss_before", "cross_score"})


class Traits:
    """Properties of a solver, a weighting, a server and wires that every round needs."""

    solver: LocalSolver
    weighting: Weighting
    server: ServerOptimizer
    wire: tuple[Wire, ...]

    @cached_property
    def target(self) -> str:
        """The shared part that the server optimizer updates."""
        return self.solver.target

    @cached_property
    def update(self) -> str:
        """The sent part that updates the target."""
        return self.solver.update

    @cached_property
    def requires(self) -> frozenset[str]:
        """Statistics that the weighting needs of every client."""
        return self.weighting.requires

    @cached_property
    def described(self) -> frozenset[str]:
        """Statistics that the solver describes, of those that the weighting needs."""
        return aspects.provides(self.solver) & self.requires

    @cached_property
    def provides(self) -> frozenset[str]:
        """Statistics that a client can send; those of a received model only if clients receive one."""
        known = ENGINE_STATS if self.target == "params" else ENGINE_STATS - OF_A_RECEIVED_MODEL
        return aspects.provides(self.solver) | known

    @cached_property
    def statistics(self) -> Mapping[str, Statistic]:
        """The declarations of all statistics, with those of the solver."""
        return {**STATISTICS, **aspects.statistics(self.solver)}

    @cached_property
    def counts_idle(self) -> bool:
        """Whether a client that took no step counts (see ``Weighting``); never if a part is a plain mean over
        clients."""
        return self.weighting.counts_idle and all(part.reduce != "mean" for part in self.sent.values())

    @cached_property
    def asks(self) -> frozenset[str]:
        """What the contributions must answer: for the weighting, and to reduce the parts."""
        stacked = any(part.reduce == "stack" for part in self.sent.values())
        crossed = "cross_score" in self.requires
        known = {"combine"} | ({"stack"} if stacked else set()) | ({"cross_score", "rows"} if crossed else set())
        return self.weighting.asks | known

    @cached_property
    def exact_norms(self) -> bool:
        """Whether norms are noted in float64: for rules that ask for norms or for rows."""
        return not self.asks.isdisjoint({"norms", "rows"})

    @cached_property
    def stateful(self) -> bool:
        """Whether clients keep state between rounds."""
        return self.solver.stateful or any(wire.stateful for wire in self.wire)

    @cached_property
    def sent(self) -> Mapping[str, Part]:
        """The parts that the solver sends."""
        return self.solver.parts

    @cached_property
    def packings(self) -> Packings:
        """The packed forms of the parts; parts that are not listed are sent as plain tensors."""
        return packings_of(self.wire)

    @cached_property
    def local_leaves(self) -> Names:
        """The leaves of the model that never leave the client."""
        return aspects.local_leaves(self.solver)

    @cached_property
    def receives(self) -> frozenset[str] | None:
        """The shared parts that are sent to the clients; None: all of them."""
        return aspects.receives(self.solver)

    @cached_property
    def needs_fresh(self) -> bool:
        """Whether a client's first state needs a fresh model drawn for this client."""
        return aspects.needs_fresh(self.solver)

    @cached_property
    def is_generative(self) -> bool:
        """Whether the solver can generate examples."""
        return aspects.is_generative(self.solver)

    @cached_property
    def fusing(self) -> aspects.Fusing | None:
        """The solver's description for fused kernels, if it has one."""
        return aspects.fusing(self.solver)
