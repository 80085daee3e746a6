"""What the rules of an algorithm say about themselves, asked once: rules are frozen, so that it never changes."""

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
    """Of a solver, a weighting, a server and wires: what is asked again in every round."""

    solver: LocalSolver
    weighting: Weighting
    server: ServerOptimizer
    wire: tuple[Wire, ...]

    @cached_property
    def target(self) -> str:
        """The shared part that the server optimizer moves."""
        return self.solver.target

    @cached_property
    def update(self) -> str:
        """The sent part that moves the target."""
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
        """Statistics a client can send; where no model is received there is none to try before training."""
        known = ENGINE_STATS if self.target == "params" else ENGINE_STATS - OF_A_RECEIVED_MODEL
        return aspects.provides(self.solver) | known

    @cached_property
    def statistics(self) -> Mapping[str, Statistic]:
        """The declarations of all statistics, those of the solver's own included."""
        return {**STATISTICS, **aspects.statistics(self.solver)}

    @cached_property
    def counts_idle(self) -> bool:
        """Whether a client that took no step counts (see ``Weighting``): never where a part is averaged over clients
        whoever they are."""
        return self.weighting.counts_idle and all(part.reduce != "mean" for part in self.sent.values())

    @cached_property
    def asks(self) -> frozenset[str]:
        """What is asked of the contributions: by the weighting, and to reduce what is sent."""
        stacked = any(part.reduce == "stack" for part in self.sent.values())
        crossed = "cross_score" in self.requires
        known = {"combine"} | ({"stack"} if stacked else set()) | ({"cross_score", "rows"} if crossed else set())
        return self.weighting.asks | known

    @cached_property
    def exact_norms(self) -> bool:
        """Whether norms are noted in float64: for a rule that asks for them, or for rows and so for anything."""
        return not self.asks.isdisjoint({"norms", "rows"})

    @cached_property
    def stateful(self) -> bool:
        """Whether clients keep something between rounds."""
        return self.solver.stateful or any(wire.stateful for wire in self.wire)

    @cached_property
    def sent(self) -> Mapping[str, Part]:
        """The parts that the solver sends."""
        return self.solver.parts

    @cached_property
    def packings(self) -> Packings:
        """How what is sent lies on the wire, by part; what is not named travels as plain tensors."""
        return packings_of(self.wire)

    @cached_property
    def local_leaves(self) -> Names:
        """Leaves of the model that never leave the client."""
        return aspects.local_leaves(self.solver)

    @cached_property
    def receives(self) -> frozenset[str] | None:
        """The shared parts that travel to the clients; None: all of them."""
        return aspects.receives(self.solver)

    @cached_property
    def needs_fresh(self) -> bool:
        """Whether a client's first state needs a model drawn for it alone."""
        return aspects.needs_fresh(self.solver)

    @cached_property
    def is_generative(self) -> bool:
        """Whether what is learned makes examples."""
        return aspects.is_generative(self.solver)

    @cached_property
    def fusing(self) -> aspects.Fusing | None:
        """What the solver's program is made of, if engines may have a kernel for it."""
        return aspects.fusing(self.solver)
